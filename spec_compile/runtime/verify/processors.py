"""transformers' logits processors: the known ones, and sums in them that do not depend on other rows."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# transformers' processors that read only the scores.
OF_SCORES = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor",
    "LogitNormalization", "SuppressTokensLogitsProcessor",
}  # fmt: skip
# Processors of `OF_SCORES` that make the host wait for a GPU, because torch.distributions checks its arguments.
WAITING = {"TopHLogitsWarper", "EtaLogitsWarper"}
# Processors that set a minimum length, which a round applies by itself (see `State.forbid_early_eos`).
MINIMA = {"MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"}
# Processors that remember nothing and treat every row by itself.
ROWWISE = OF_SCORES | MINIMA | {
    # at the length
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    # at the prefix
    "RepetitionPenaltyLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor", "WatermarkLogitsProcessor",
}  # fmt: skip


def is_known(processor: Any, names: set[str]) -> bool:
    """True if `processor` is one of transformers' own of these names."""
    cls = type(processor)
    return cls.__name__ in names and cls.__module__.startswith("transformers.generation.")


# A round processes all nodes of its trees together, the host some of them, and plain decoding one. On a GPU the order
# of torch's sums over a vocabulary depends on the number of rows, in softmax also on the address of a row, in cumsum
# on which programs finish first. This can change a token at the edge of top-p, or of a draw. `row_invariant` replaces
# these sums by `kernels.row_scan`. The processors in `OF_SCORES` call:
#
# ============================ ======================================================================
# TopPLogitsWarper             sort, softmax, cumsum: replaced
# TypicalLogitsWarper          log_softmax, nansum, sort, softmax, cumsum: replaced; sum of bool: exact
# MinPLogitsWarper             softmax: replaced; amax: exact; indices of topk: see `BY_RANK`
# TopHLogitsWarper             logsumexp, softmax, sum, cumsum: replaced; indices of topk: see `BY_RANK`
# EpsilonLogitsWarper          softmax: replaced; values of topk: exact
# EtaLogitsWarper              softmax, logsumexp, sum: replaced; values of topk: exact
# LogitNormalization           log_softmax: replaced
# TopKLogitsWarper             values of topk: exact
# Temperature, InfNanRemove,   nothing but operations on single elements
# SuppressTokens
# ============================ ======================================================================


# Processors that keep tokens by the indices of a topk, which has to rank equal scores alike.
BY_RANK = {"MinPLogitsWarper", "TopHLogitsWarper"}

aten, ops = torch.ops.aten, torch.ops.spec_compile


def row_invariant(device: torch.device, processors: list) -> AbstractContextManager:
    """A context in which sums over the last dimension are row-invariant on a GPU; on a CPU it changes nothing.

    device: where the scores are. processors: run inside. It never makes the host wait, and a CUDA graph may capture it.
    """
    if device.type != "cuda":
        return nullcontext()
    return RowInvariant(any(is_known(processor, BY_RANK) for processor in processors))


class RowInvariant(TorchDispatchMode):
    """Replaces sums over the last dimension of floating tensors by ops of `kernels.row_scan`, and makes sort stable.

    ranks: True makes topk list equal values by ascending index, which costs a sort of the row.
    """

    def __init__(self, ranks: bool):
        super().__init__()
        self.replaced: dict[Any, Callable[..., Any]] = REPLACED | ({aten.topk.default: _topk} if ranks else {})

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, result = kwargs or {}, NotImplemented
        if func in self.replaced:
            result = self.replaced[func](*args, **kwargs)
        elif torch.is_inference_mode_enabled():  # here softmax and others are not decomposed yet
            with self:
                result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _by_rows(x: Tensor, dim: int | list[int] | None, dtype: torch.dtype | None = None) -> bool:
    """True if an operation over `dim` (None or []: over all) runs along the last dimension, in floating point."""
    dims = dim if isinstance(dim, list) else [dim] if dim is not None else []
    is_last = [d % x.dim() for d in dims] == [x.dim() - 1] if dims else x.dim() == 1
    return is_last and x.numel() > 0 and x.is_floating_point() and (dtype is None or dtype.is_floating_point)


Dims = int | list[int] | None


def _sum(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    if not _by_rows(x, dim, dtype):
        return NotImplemented
    sums = ops.row_sum(x, dtype)
    return sums.unsqueeze(-1) if keepdim else sums


def _nansum(x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return _sum(x.nan_to_num(0.0, float("inf"), float("-inf")), dim, keepdim, dtype=dtype)


def _logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Any:
    if not _by_rows(x, dim):
        return NotImplemented
    peak = x.amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak.isinf(), 0.0)
    result = ops.row_sum((x - peak).exp())[..., None].log() + peak
    return result if keepdim else result.squeeze(-1)


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    return ops.row_cumsum(x, dtype) if _by_rows(x, dim, dtype) else NotImplemented


def _softmax(x: Tensor, dim: int, half_to_float: bool, log: bool = False) -> Any:
    return ops.row_softmax(x, torch.float32 if half_to_float else None, log) if _by_rows(x, dim) else NotImplemented


def _sort(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Any:
    """Always stable, because torch's sort of short rows permutes equal values."""
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """By a stable sort. k = 1 is left to torch, because MinPLogitsWarper keeps all of the largest."""
    if k == 1 or not _by_rows(x, dim):
        return NotImplemented
    values, indices = aten.sort.stable(x, stable=True, dim=dim, descending=largest)
    return values[..., :k], indices[..., :k]


# Replacements of torch's operations; they return NotImplemented for arguments left to torch.
REPLACED: dict[Any, Callable[..., Any]] = {
    aten.sum.default: _sum, aten.sum.dim_IntList: _sum, aten.nansum.default: _nansum, aten.cumsum.default: _cumsum,
    aten._softmax.default: _softmax, aten._log_softmax.default: partial(_softmax, log=True),
    aten.logsumexp.default: _logsumexp, aten.sort.default: _sort, aten.sort.stable: _sort,
}  # fmt: skip
