"""Likeliest tokens, trees of recycled ones and unions on a CPU in C++: one launch on a GPU is one call here.

As plain PyTorch they are sorts and a dozen small loops, whose calls take a CPU ten times as long as their arithmetic.
Without the compiled module they stay plain PyTorch. Recycled tokens are equal to these bit for bit. The eight
likeliest of 49,152 logits of bfloat16 take 40 in place of 240 microseconds, and the likeliest 17 in place of 63, with
AVX2 on an Intel Xeon.
"""

import torch
from torch import Tensor

from ... import extensions
from ...drafters import recycle
from ...drafters.trees import merge as trees
from ...kernels import top_logits as of_logits
from ...kernels.cpu import HIGHEST
from ...kernels.launching import CPU_KERNELS, LIBRARY

_native = extensions.load_if_built("contrib.kernels._cpu_trees", "drafts on a CPU are slower")
NUMBERS = (
    trees.WEIGHT, trees.LEAST, trees.MOST, trees.DEPTHS, trees.BINS, trees.LOWEST, trees.RANKS, trees.FIRST_OF_TRIE,
    trees.FIRST_OF_BOTH,
)  # fmt: skip


def top_logits(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """See `kernels.top_logits.top_logits`."""
    results = of_logits.empty_results(logits, k, temperature)
    _read(logits, k, temperature, *results)
    return results


def likeliest(logits: Tensor, banned: Tensor, applies: Tensor) -> Tensor:
    """See `kernels.top_logits.likeliest`; infinite and undefined logits count as in `top_logits`."""
    ids, bans = torch.empty_like(applies, dtype=torch.int64), (banned.contiguous(), applies.contiguous())
    _read(logits.flatten(0, 1), 1, 1.0, None, ids, bans)
    return ids


def _read(
    logits: Tensor, k: int, temperature: float, logprobs: Tensor | None, ids: Tensor, bans: tuple[Tensor, ...] = ()
) -> None:  # fmt: skip
    """Write the k first ids of each row of logits [R, V], and their log-probabilities. bans: see `likeliest`."""
    is_short = logits.dtype is torch.bfloat16
    rows = (logits if is_short else logits.float()).contiguous()
    out = 0 if logprobs is None else logprobs.data_ptr()
    memory = (*map(Tensor.data_ptr, bans), bans[1].shape[1]) if bans else (0, 0, 0)
    kernel = k, temperature, HIGHEST, torch.get_num_threads()
    _native.read_logits((rows.data_ptr(), is_short, *rows.shape, *kernel, out, ids.data_ptr(), *memory))


def unroll(table: Tensor, root: Tensor, reads: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `drafters.recycle.unrolled`."""
    batch, (vocab, count), reads = len(root), table.shape, reads.contiguous()
    ids, parents, scores, used = recycle.empty_trees(table, root, reads, nodes)
    _native.unroll((
        table.data_ptr(), vocab, count, root.data_ptr(), root.stride(0), reads.data_ptr(), batch, nodes, recycle.LEVELS,
        ids.data_ptr(), parents.data_ptr(), scores.data_ptr(), used.data_ptr(),
    ))  # fmt: skip
    return ids, parents, scores, used


def merge(
    lengths: Tensor, head: list[Tensor], scores: Tensor, trie: list[Tensor], longest: Tensor, counts: Tensor,
    begins: Tensor, drafts: list[Tensor], nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `drafters.trees.merge.merge_into`."""
    results = trees.empty_trees(lengths, head, scores, trie, longest, counts, begins, drafts, nodes)
    read = [each.contiguous() for each in (*head, scores, *trie, longest)]
    sizes = *head[0].shape, trie[0].shape[1], nodes, trees.CELLS
    memory = map(Tensor.data_ptr, (*read, counts, *results, begins, *drafts))
    _native.merge((lengths.data_ptr(), *sizes, *memory), NUMBERS, trees.MATCHES, trees.STAGES)
    return results


def learn(
    counts: Tensor, drafts: list[Tensor], begins: Tensor, begin: Tensor, lengths: Tensor, text: Tensor, size: int
) -> None:
    """See `drafters.trees.merge.learn_from`."""
    sizes = counts.shape[1], len(begin), size, drafts[0].shape[1]
    memory = map(Tensor.data_ptr, (*drafts, begins, begin, lengths, text))
    _native.learn((counts.data_ptr(), *sizes, *memory, text.stride(0), text.shape[1]), trees.KEPT)


def _define(name: str, function, fake, writes: tuple[str, ...] = ()) -> None:
    """Let a function on a CPU be the kernel of the `one_launch` of this name."""
    LIBRARY.define(f"{name}_on_cpu{torch.library.infer_schema(function, mutates_args=writes)}")
    LIBRARY.impl(f"{name}_on_cpu", function, "CPU")
    torch.library.register_fake(f"spec_compile::{name}_on_cpu", fake, lib=LIBRARY)
    CPU_KERNELS[name] = getattr(torch.ops.spec_compile, f"{name}_on_cpu").default


if _native is not None:
    _define("top_logits", top_logits, of_logits.empty_results)
    _define("likeliest", likeliest, lambda logits, banned, applies: torch.empty_like(applies, dtype=torch.int64))
    _define("recycle_unroll", unroll, recycle.empty_trees)
    _define("merge_into", merge, trees.empty_trees, ("begins", "drafts"))
    _define("learn_from", learn, lambda *arguments: None, ("counts",))
