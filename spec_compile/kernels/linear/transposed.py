"""Form "transposed": products of few rows of bfloat16 on a CPU with AMX."""

import torch
from torch import Tensor

from ..cpu_level import AMX, HIGHEST, PRESENT

SUPPORTED = PRESENT[AMX] and HIGHEST >= AMX


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` (x [..., I], weight [O, I], bias [O] -> [..., O]) of 1 to 64 rows.

    oneDNN reads the weights up to twice as fast for ``weight @ x.T`` as for ``x @ weight.T``, which it packs first.
    One row is multiplied as two, because one takes the slower way again.
    """
    rows = x.numel() // x.shape[-1]
    columns = x.reshape(rows, x.shape[-1])
    columns = torch.cat([columns, columns]) if rows == 1 else columns
    out = (weight @ columns.t())[:, :rows].t().reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias
