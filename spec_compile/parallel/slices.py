"""`Slices`: the parts of parameters that one rank of tensor parallelism holds."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Cut(NamedTuple):
    """How a tensor is divided: dimension `dim` is `blocks` equal stretches, each of them in `parts` equal parts.

    There may be fewer parts than ranks; then neighbours share one.
    """

    dim: int
    parts: int
    blocks: int = 1


ONCE = Cut(0, 0)
"""Of a tensor that the first rank has, and the others have zeros of."""


class Slices:
    """The parts of rank `rank` of `size`, made once for each parameter, so that all graphs of a model share them."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._made: dict[tuple[int, Cut], tuple[Tensor, Cut, nn.Parameter]] = {}

    def part(self, parameter: Tensor, cut: Cut) -> nn.Parameter:
        """This rank's part of a parameter, contiguous; a view where the part lies in one piece."""
        key = id(parameter), cut
        if key not in self._made:
            part = nn.Parameter(self._take(parameter, cut).contiguous(), requires_grad=False)
            self._made[key] = parameter, cut, part
        return self._made[key][2]

    def refresh(self) -> None:
        """Copy the parts anew, because the parameters have changed."""
        for parameter, cut, part in self._made.values():
            part.data.copy_(self._take(parameter, cut))

    def _take(self, parameter: Tensor, cut: Cut) -> Tensor:
        """Where the parts do not divide a block, the last one ends with zeros."""
        taken, weight = [], parameter.detach()
        if cut is ONCE:
            return weight if self.rank == 0 else torch.zeros_like(weight)
        for block in weight.chunk(cut.blocks, cut.dim):
            each = -(-block.shape[cut.dim] // cut.parts)
            begin = min(self.rank * cut.parts // self.size * each, block.shape[cut.dim])
            piece = block.narrow(cut.dim, begin, min(each, block.shape[cut.dim] - begin))
            missing = each - piece.shape[cut.dim]
            if missing:
                piece = F.pad(piece, [0, 0] * (weight.dim() - 1 - cut.dim) + [0, missing])
            taken.append(piece)
        return taken[0] if len(taken) == 1 else torch.cat(taken, dim=cut.dim)
