"""The kernel that copies a round's experts from pinned memory of the host to the GPU, which reads them by the link.

    out[e] = held[e]  for each expert e in ids

The other experts of `out` are not written, and the kernels of experts do not read them. So the products have the bits
that experts in the GPU's memory give. An expert is copied once, however many tokens have chosen it.

Import this module only where Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 64
"""Programs that share an expert. The link needs some 128 KB under way at any time: 50 GB/s times 2.5 us. With 8 experts
512 programs have 8 KB each."""
WORDS = 1024
"""Words that a program copies at a time, of up to 8 bytes."""
FEW, MANY = 256, 4096
"""Choices that a program looks through at a time."""


def fetch(held: Tensor, ids: Tensor, out: Tensor) -> None:
    """Copy the experts ids [T, k] int64 of held [E, ...] to out [E, ...]; both are contiguous and of one dtype."""
    source, target = in_words(held), in_words(out)
    fetch_kernel[(PROGRAMS, len(source))](
        source, target, ids.contiguous(), ids.numel(), source.shape[1], CHUNK=FEW if ids.numel() <= FEW else MANY,
        WORDS=WORDS,
    )  # fmt: skip


def in_words(experts: Tensor) -> Tensor:
    """Contiguous experts [E, ...] as [E, words], in the widest words that divide an expert's bytes."""
    rows = experts.detach().view(len(experts), -1)
    size = rows.shape[1] * rows.element_size()
    widths = torch.int64, torch.int32, torch.int16, torch.uint8
    dtype = next(each for each in widths if size % each.itemsize == 0 == experts.data_ptr() % each.itemsize)
    return rows.view(torch.uint8).view(dtype)


@triton.jit(do_not_specialize=["pairs"])
def fetch_kernel(
    held_ptr, out_ptr,  # [E, size], the first in the host's memory
    ids_ptr, pairs, size, CHUNK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copy an expert if one of ids [pairs] is its number. Grid (programs that share it, E)."""
    expert = tl.program_id(1).to(tl.int64)
    pair, chosen = tl.arange(0, CHUNK), tl.zeros([CHUNK], tl.int32)
    for begin in range(0, pairs, CHUNK):
        chosen |= (tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=-1) == expert).to(tl.int32)
    if tl.max(chosen, 0) > 0:
        held_ptr, out_ptr = held_ptr + expert * size, out_ptr + expert * size
        # With 3 programs and 10 stretches of words, program 1 copies the stretches 1, 4 and 7.
        for begin in range(tl.program_id(0) * WORDS, size, tl.num_programs(0) * WORDS):
            word = begin + tl.arange(0, WORDS)
            tl.store(out_ptr + word, tl.load(held_ptr + word, mask=word < size), mask=word < size)
