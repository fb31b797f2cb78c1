"""Launches of the kernel that sums the parts of all ranks. Import this module only where Triton is installed."""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import dependent_launch
from .all_reduce_kernel import all_reduce_kernel

if TYPE_CHECKING:
    from .all_reduce_memory import Exchange

MAX_LAUNCHES = 8
"""A sum that takes more launches than this is one of a prompt, which a library sums faster."""
SMALLEST_BLOCK, LARGEST_BLOCK = 128, 4096
"""Numbers of a row that a program takes at a time."""


def takes(exchange: "Exchange", part: Tensor) -> bool:
    """Whether the kernel sums parts of this size and dtype."""
    return 0 < part.numel() <= MAX_LAUNCHES * exchange.words and part.dtype.itemsize <= 4


def all_reduce(exchange: "Exchange", part: Tensor) -> Tensor:
    """The sum of the ranks' parts of any shape, added in float32 in the order of the ranks and rounded once."""
    flat = part.contiguous().view(1, -1)
    out = torch.empty_like(flat)
    for begin in range(0, part.numel(), exchange.words):
        columns = slice(begin, begin + exchange.words)
        launch(exchange, flat[:, columns], out[:, columns])
    return out.view(part.shape)


def all_reduce_add(exchange: "Exchange | None", part: Tensor | None, out: Tensor, stream, squared: int) -> None:
    """The residual stream behind the sum of the ranks' parts [R, C] to out [R, C], and the first half of its next norm.

    stream: a `linear.small_m.Stream`. squared: columns whose squares are added up together. Without an exchange `part`
    is the sum already; without a part the product before this launch sends it.
    """
    step = len(out) if exchange is None or part is None else exchange.words // out.shape[1]
    for begin in range(0, len(out), max(step, 1)):
        rows = slice(begin, begin + step)
        residual, weight, offset, scaled, squares = stream
        behind = residual[rows], weight, offset, scaled[rows], squares[rows]
        launch(exchange, part if part is None else part[rows], out[rows], behind, squared)


def launch(
    exchange: "Exchange | None", part: Tensor | None, out: Tensor, stream=None, squared: int = 1, *, send: bool = True,
    receive: bool = True, block: int | None = None,
) -> None:  # fmt: skip
    """Run the kernel on parts [R, C] of at most ``exchange.words`` numbers; arguments as of `all_reduce_add`.

    send, receive: each rank does both, but one process that plays all ranks first sends as each. block: a power of two,
    at least `squared`, which changes no bit.
    """
    (rows, size), early = out.shape, dependent_launch.available(out)
    processors = _processors(out.device)
    block = max(block or block_for(rows, size, processors), squared)
    rank, ranks, slots, peers, state, late, words = 0, 1, None, None, None, None, 0
    if exchange is not None:
        rank, ranks, slots, peers, state, late = exchange.tensors
        words = exchange.words
    residual, norm, offset, scaled, squares = stream or (None, None, 0.0, None, None)
    all_reduce_kernel[(min(rows * -(-size // block), processors),)](
        part, slots, peers, state, late, residual, norm, out, scaled, squares,
        rank, rows, size, 0 if residual is None else residual.stride(0), offset, words,
        RANKS=ranks, BLOCK=block, SQUARED=squared, SEND=send and ranks > 1 and part is not None, RECEIVE=receive,
        PDL=early, ON_GPU=out.is_cuda, num_warps=min(max(block // 128, 1), 16),
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def block_for(rows: int, size: int, processors: int) -> int:
    """The smallest block for which each multiprocessor gets at most one, if there is one."""
    block = SMALLEST_BLOCK
    while block < LARGEST_BLOCK and rows * -(-size // block) > processors:
        block *= 2
    return block


@functools.cache
def _processors(device: torch.device) -> int:
    """How many programs surely run at the same time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
