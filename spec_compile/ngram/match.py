"""N-gram drafts on the device: continuations of the same words in a row's own text, its reference and a corpus.

`propose` gives the trees of a fresh `trie.NgramTrie` that holds the documents of the corpus, then the row's reference
and then the row's own text, except that it weighs no more than `match_limit` matches: the longest, and the most recent
among equals. It keeps nothing between calls and reads the tokens once, in place. On a CPU it is plain Python. On a GPU
it is two kernels that read nothing back, so that they can be captured in a CUDA graph; call it once with the same
`match_limit` before capturing, because the first call compiles them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tree import MAX_NODES
from .match_gpu import propose_on_gpu
from .match_options import MatchOptions, empty_outputs
from .match_plain import propose_plainly


def join_documents(documents: Sequence[Tensor | Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Documents as one corpus: int32, with -1 between them. No match and no continuation crosses a -1."""
    end = torch.tensor([-1], dtype=torch.int32)
    parts = [part for ids in documents for part in (torch.as_tensor(ids).to("cpu", torch.int32), end)]
    return torch.cat(parts[:-1] or [end[:0]]).to(device)


def propose(
    tokens: Tensor, committed: Tensor, corpus: Tensor, corpus_length: Tensor, references: Tensor,
    reference_lengths: Tensor, num_nodes: int, options: MatchOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A draft tree that continues each row's end.

    tokens [B, S] int64: the first committed[b] of row b are text.
    committed [B] int64: 1 or more.
    corpus [C] int32 or int64: the first corpus_length[b] are text for row b, with -1 between documents (see
        `join_documents`).
    corpus_length [B] int64, or [1] if it is the same for all rows.
    references [B, R] int32: the first reference_lengths[b] of row b are a text that only this row drafts from, with -1
        between documents.
    reference_lengths [B] int64: 0 for a row without one.
    num_nodes: 1 to 64.

    Returns tokens, parents [B, num_nodes], count [B] and match [B], all int64. Node 0 is the row's last token with
    parent -1, parents come before children, siblings differ; slots from count on hold token 0 and parent 0. The match
    is the length of the longest match that goes on, 0 if none.

    The text [5, 7, 8, 5], no reference and an empty corpus give the chain 5, 7, 8, 5 with parents [-1, 0, 1, 2] and
    match 1.
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes must be from 1 to {MAX_NODES}, not {num_nodes}")
    if any(each.dtype != torch.int64 for each in (tokens, committed, corpus_length, reference_lengths)):
        raise TypeError("tokens, committed, corpus_length and reference_lengths must be int64")
    if corpus.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"corpus must be int32 or int64, not {str(corpus.dtype).removeprefix('torch.')}")
    if references.dtype != torch.int32:
        raise TypeError(f"references must be int32, not {str(references.dtype).removeprefix('torch.')}")
    rows = tokens.shape[:1]
    if references.dim() != 2 or references.shape[:1] != rows or reference_lengths.shape != rows:
        raise ValueError("the shapes must be references [B, R], reference_lengths [B], as many rows as tokens")
    if tokens.dim() != 2 or committed.shape != tokens.shape[:1] or corpus.dim() != 1:
        raise ValueError("the shapes must be tokens [B, S], committed [B], corpus [C]")
    if corpus_length.shape != rows and corpus_length.numel() != 1:
        raise ValueError("corpus_length must have the shape [B] or [1]")
    return torch.ops.spec_compile.ngram_match(
        tokens,
        committed,
        corpus,
        corpus_length.expand(rows).contiguous(),
        references,
        reference_lengths,
        num_nodes,
        options.branch_length,
        options.min_match_window_size,
        options.max_match_window_size,
        options.min_bfs_breadth,
        options.max_bfs_breadth,
        options.match_type == "PROB",
        options.match_limit,
    )


@torch.library.custom_op("spec_compile::ngram_match", mutates_args=())
def _ngram_match(
    tokens: Tensor,
    committed: Tensor,
    corpus: Tensor,
    corpus_length: Tensor,
    references: Tensor,
    reference_lengths: Tensor,
    num_nodes: int,
    branch_length: int,
    min_window: int,
    max_window: int,
    min_breadth: int,
    max_breadth: int,
    by_frequency: bool,
    match_limit: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = MatchOptions(
        branch_length,
        min_window,
        max_window,
        min_breadth,
        max_breadth,
        "PROB" if by_frequency else "BFS",
        match_limit,
    )
    run = propose_on_gpu if tokens.is_cuda else propose_plainly
    return run(tokens, committed, corpus, corpus_length, references, reference_lengths, num_nodes, options)


@_ngram_match.register_fake
def _(tokens, committed, corpus, corpus_length, references, reference_lengths, num_nodes, *options):
    return empty_outputs(tokens, num_nodes)
