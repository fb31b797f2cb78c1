"""transformers' logits processors on rows of different lengths."""

import copy

import torch
from torch import Tensor

OF_SCORES = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor",
    "LogitNormalization", "SuppressTokensLogitsProcessor",
}  # fmt: skip
"""transformers' processors that look at nothing but the scores."""
WAITING = {"TopHLogitsWarper", "EtaLogitsWarper"}
"""Those of them that make the host wait for a GPU (torch.distributions checks its arguments)."""
MINIMA = {"MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"}
"""Those that a round applies by itself (see `State.forbid_early_eos`)."""
ROWWISE = OF_SCORES | MINIMA | {
    # at the length
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    # at the prefix
    "RepetitionPenaltyLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor", "WatermarkLogitsProcessor",
}  # fmt: skip
"""transformers' processors that remember nothing and treat every row by itself."""
OF_ROWS = ("prompt_ignore_length", "encoder_input_ids")
"""Attributes of those that may hold something for each row of the batch."""


class Processors:
    """A list of logits processors, applied to some rows of a batch whose prefixes may have different lengths.

    `rowwise`: all of them are known to treat each row by itself and to remember nothing. Others must be called as
    plain decoding calls them: with all rows of the batch, at one length, once for each token.
    """

    def __init__(self, processors: list, batch: int):
        self.processors, self.batch = processors, batch
        self.rowwise = all(is_known(processor, ROWWISE) for processor in processors)

    def __call__(self, ids: Tensor, rows: Tensor, lengths: list[int], scores: Tensor) -> Tensor:
        """Process scores [R, V] of rows [R] of the batch, whose prefixes are ``ids[row, :length]``; -> [R, V]."""
        if not self.processors:
            return scores
        if len(set(lengths)) == 1:
            return self._apply(ids, rows, lengths[0], scores)
        out = torch.empty_like(scores)
        for length in set(lengths):
            some = torch.tensor([place for place, other in enumerate(lengths) if other == length])
            out[some] = self._apply(ids, rows[some], length, scores[some])
        return out

    def _apply(self, ids: Tensor, rows: Tensor, length: int, scores: Tensor) -> Tensor:
        every = len(rows) == self.batch
        ids = (ids if every else ids[rows])[:, :length].contiguous().to(scores.device)
        processors = self.processors if every else [_for_rows(processor, rows) for processor in self.processors]
        return type(self.processors)(processors)(ids, scores)


def is_known(processor, names: set[str]) -> bool:
    """Whether `processor` is one of transformers' own of these names."""
    kind = type(processor)
    return kind.__name__ in names and kind.__module__.startswith("transformers.generation.")


def _for_rows(processor, rows: Tensor):
    """The processor, or if it holds something for every row of the batch, a copy that holds that of `rows`."""
    held = {name: getattr(processor, name, None) for name in OF_ROWS}
    held = {name: value[rows] for name, value in held.items() if isinstance(value, Tensor) and value.dim() > 0}
    if held:
        processor = copy.copy(processor)
        processor.__dict__.update(held)
    return processor
