"""Trees of recycled tokens and unions on a CPU in C++: what one launch is on a GPU is one call here.

As plain PyTorch they are sorts and a dozen small loops, whose calls take a CPU ten times as long as their arithmetic.
Without the compiled module they stay plain PyTorch. Recycled tokens are equal to these bit for bit.
"""

import torch
from torch import Tensor

from ... import extensions
from ...drafters import recycle
from ...drafters.trees import merge as trees
from ...kernels.launching import CPU_KERNELS, LIBRARY

_native = extensions.load_if_built("contrib.kernels._cpu_trees", "drafts on a CPU are slower")
NUMBERS = (
    trees.WEIGHT, trees.LEAST, trees.MOST, trees.DEPTHS, trees.BINS, trees.LOWEST, trees.RANKS, trees.FIRST_OF_TRIE,
    trees.FIRST_OF_BOTH,
)  # fmt: skip


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
    _define("recycle_unroll", unroll, recycle.empty_trees)
    _define("merge_into", merge, trees.empty_trees, ("begins", "drafts"))
    _define("learn_from", learn, lambda *arguments: None, ("counts",))
