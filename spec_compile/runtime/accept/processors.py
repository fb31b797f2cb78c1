"""transformers' logits processors on rows of different lengths."""

import copy

import torch
from torch import Tensor

from .grammars import Grammars

OF_SCORES = {
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor",
    "LogitNormalization", "SuppressTokensLogitsProcessor",
}  # fmt: skip
"""transformers' processors that read only the scores."""
WAITING = {"TopHLogitsWarper", "EtaLogitsWarper"}
"""Processors of `OF_SCORES` that make the host wait for a GPU, because torch.distributions checks its arguments."""
MINIMA = {"MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"}
"""Processors that set a minimum length, which a round applies by itself (see `State.forbid_early_eos`)."""
ROWWISE = OF_SCORES | MINIMA | {
    # at the length
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    # at the prefix
    "RepetitionPenaltyLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor", "WatermarkLogitsProcessor",
}  # fmt: skip
"""Processors that remember nothing and treat every row by itself."""
OF_ROWS = ("prompt_ignore_length", "encoder_input_ids", "rows")
"""Attributes of `ROWWISE` processors and of `Grammars` that may hold a value for each row of the batch."""


class Processors:
    """Applies logits processors to rows of a batch whose prefixes may have different lengths.

    processors: transformers' LogitsProcessorList.
    batch: rows of the batch.
    rowwise: True if all are known to treat each row by itself, and to remember nothing or to follow the answer as
        `Grammars` do. Others need the calls of plain decoding: with all rows, at one length, once for each token.
    """

    def __init__(self, processors: list, batch: int):
        self.processors, self.batch = processors, batch
        self.grammars = [processor for processor in processors if isinstance(processor, Grammars)]
        self.rowwise = all(is_known(processor, ROWWISE) or isinstance(processor, Grammars) for processor in processors)

    def __call__(self, ids: Tensor, rows: Tensor, lengths: list[int], scores: Tensor) -> Tensor:
        """The processed scores [R, V].

        ids: [B, L] int64 on the CPU; the prefix of a row is ``ids[row, :length]``.
        rows: [R] int64, rows of the batch. lengths: of their prefixes [R].
        scores: [R, V] float of the token after each prefix.
        """
        if not self.processors:
            return scores
        if len(set(lengths)) == 1:
            return self._apply(ids, rows, lengths[0], scores)
        out = torch.empty_like(scores)
        for length in set(lengths):
            alike = torch.tensor([index for index, other in enumerate(lengths) if other == length])
            out[alike] = self._apply(ids, rows[alike], length, scores[alike])
        return out

    def follow(self, rows: list[int]) -> None:
        """Make grammars accept what rows have gained; see `Grammars.follow` for the error."""
        for grammars in self.grammars:
            for row in rows:
                grammars.follow(row)

    def look_ahead(self, row: int, token: int) -> bool:
        """Make grammars follow a draft that the row has not gained, until `come_back`. False if it is illegal."""
        return all([grammars.look_ahead(row, token) for grammars in self.grammars])

    def come_back(self, rows: list[int]) -> None:
        """Undo `look_ahead`."""
        for grammars in self.grammars:
            for row in rows:
                grammars.come_back(row)

    def _apply(self, ids: Tensor, rows: Tensor, length: int, scores: Tensor) -> Tensor:
        has_all_rows = len(rows) == self.batch
        ids = (ids if has_all_rows else ids[rows])[:, :length].contiguous().to(scores.device)
        processors = self.processors if has_all_rows else [_for_rows(processor, rows) for processor in self.processors]
        return type(self.processors)(processors)(ids, scores)


def is_known(processor, names: set[str]) -> bool:
    """True if `processor` is one of transformers' own of these names."""
    cls = type(processor)
    return cls.__name__ in names and cls.__module__.startswith("transformers.generation.")


def _for_rows(processor, rows: Tensor):
    """The processor; if it has values for every row, a copy with those of `rows`."""
    values = {name: getattr(processor, name, None) for name in OF_ROWS}
    values = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor) and value.dim() > 0}
    if values:
        processor = copy.copy(processor)
        processor.__dict__.update(values)
    return processor
