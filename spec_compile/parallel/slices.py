"""`Slices`: the parts of parameters that one rank of tensor parallelism holds."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary


class Cut(NamedTuple):
    """How a tensor is divided: dimension `dim` has `blocks` equal blocks, each of them in `parts` equal parts.

    A rank takes its part of every block: of 8 rows, ``Cut(0, 2, blocks=2)`` gives rows 0, 1, 4, 5 to the first of two
    ranks. With fewer parts than ranks, neighbours share one.
    """

    dim: int
    parts: int
    blocks: int = 1


FP8 = torch.float8_e4m3fn, torch.float8_e5m2
ONCE = Cut(0, 0)
"""The first rank has the whole tensor, the others have zeros."""


class Slices:
    """The parts of rank `rank` of `size`, made once for each parameter, so that all graphs of a model share them."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self._made: dict[tuple, tuple[Sequence[Tensor], Callable, tuple[Any, list[Tensor]]]] = {}

    def part(self, parameter: Tensor, cut: Cut) -> Tensor:
        """This rank's part of a parameter, contiguous; a view if the part lies in one piece.

        For a DTensor that is cut in the same way, it is the DTensor's local tensor, which takes no more memory.
        """

        def make() -> tuple[None, list[Tensor]]:
            part = local_part(parameter, cut)
            if part is None:
                part = nn.Parameter(self.take(parameter, cut).contiguous(), requires_grad=False)
            return None, [part]

        return self.made((id(parameter), cut), [parameter], make)[1][0]

    def made(
        self, key: tuple, sources: Sequence[Tensor], make: Callable[[], tuple[Any, list[Tensor]]]
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        """The result of ``make()``, a layout and tensors, made once for a key; `refresh` copies what it makes anew.

        sources: the tensors that it reads. They are kept, so that their ids in the key are of no others.
        """
        if key not in self._made:
            self._made[key] = sources, make, make()
        return self._made[key][2]

    def refresh(self) -> None:
        """Copy the parts anew, because the parameters have changed. ValueError if they would have another layout."""
        for _, make, (layout, tensors) in self._made.values():
            other, fresh = make()
            if other != layout:
                raise ValueError(
                    "quantised weights were changed, and a rank's share would be laid out otherwise, because of other "
                    "zero points, larger scales or another table; load the model again, then speculate()"
                )
            for old, new in zip(tensors, fresh):
                if new.data_ptr() != old.data_ptr():
                    old.data.copy_(new)

    def take(self, parameter: Tensor, cut: Cut) -> Tensor:
        """This rank's part of each block. Zeros fill up the last part of a block that `cut.parts` does not divide."""
        taken, weight = [], whole(parameter).detach()
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


_whole = WeakIdKeyDictionary()
"""DTensors and the whole tensors that were gathered of them."""


def whole(parameter: Tensor, keep: bool = False) -> Tensor:
    """All of a parameter. If it is a DTensor, every rank calls this. keep: hold the result for later calls."""
    if not isinstance(parameter, DTensor):
        return parameter
    if parameter in _whole:
        return _whole[parameter]
    gathered = nn.Parameter(_gathered(parameter.detach()), requires_grad=False)
    if keep:
        _whole[parameter] = gathered
    return gathered


def _gathered(tensor: DTensor) -> Tensor:
    """All of a DTensor; FP8 as bytes, because gloo does not know it."""
    if tensor.dtype not in FP8:
        return tensor.full_tensor()
    local, shape = tensor.to_local().view(torch.uint8), {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, **shape).full_tensor().view(tensor.dtype)


def local_part(parameter: Tensor, cut: Cut) -> Tensor | None:
    """The local tensor of a DTensor, if it is the part by `cut`; otherwise None."""
    if not isinstance(parameter, DTensor) or cut is ONCE:
        return None
    (placement,), local = parameter.placements, parameter._local_tensor
    if parameter.device_mesh.size() != cut.parts or getattr(placement, "dim", None) != cut.dim % parameter.dim():
        return None
    is_alike = getattr(placement, "split_factor", 1) == cut.blocks and local.is_contiguous()
    return local if is_alike and local.shape[cut.dim] * cut.parts == parameter.shape[cut.dim] else None
