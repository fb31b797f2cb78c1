"""The answer of one ``generate()``: columns of tokens in the order of plain decoding."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

NOTHING: Mapping[int, Tensor] = {}
FIRST_COLUMNS = 1024  # new tokens of a row that an answer has room for at first


class Answer:
    """Takes tokens as the rows of a batch gain them, and handles them in the order of plain decoding.

    Plain decoding gives every row one token a step; here rows run ahead of each other. A *column* is one token of every
    row. Once all rows that need a token of the next column have it, the stopping criteria see the ids up to this
    column, and the streamer gets it. Rows [[5, 8, 3], [6]] have one column, (5, 6), until row 1 gains a token or ends.
    Tokens beyond a row's end are dropped.

    input_ids: [B, W] integers, the prompts, padded on the left to their width W.
    longest: the width at which every row ends.
    eos: ids of the tokens that end a row.
    pad: continues a row that has ended; None continues it with its own tokens, as transformers does without `eos`.
    criteria: stopping criteria; None compares with `longest` and `eos`.
    streamer: as in ``generate()``.
    keep_scores, keep_logits: True keeps `scores` (processed), `logits` (unprocessed) of every column.
    device: gets the results; None: the device of `input_ids`.
    keep_logprobs: True keeps in `logprobs` the log-probability of each token by its processed scores.
    """

    def __init__(
        self, input_ids: Tensor, longest: int, eos: list[int], pad: int | None,
        criteria: Callable[..., Tensor] | None = None, streamer: BaseStreamer | None = None, keep_scores: bool = False,
        keep_logits: bool = False, device: torch.device | None = None, keep_logprobs: bool = False,
    ):  # fmt: skip
        self.batch, self.prompt_width = input_ids.shape
        self.longest, self.eos, self.pad = longest, frozenset(eos), pad
        self.criteria, self.streamer = criteria, streamer
        self._room = max(longest, self.prompt_width + 1)
        # [B, L] on the CPU: each row's prompt and what it has gained so far. L grows up to `longest`.
        self.ids = torch.zeros(self.batch, min(self._room, self.prompt_width + FIRST_COLUMNS), dtype=torch.int64)
        self.ids[:, : self.prompt_width] = input_ids
        self._numbers = self.ids.numpy()  # the same memory, where writing a few numbers is quick
        self.rows: list[list[int]] = [[] for _ in range(self.batch)]
        self.ended = [False] * self.batch
        self.columns = 0
        self.scores: tuple[Tensor, ...] | None = () if keep_scores else None
        self.logits: tuple[Tensor, ...] | None = () if keep_logits else None
        # The log-probabilities of the tokens in `rows`: logarithms of float32 probabilities, as in transformers'
        # batches.
        self.logprobs: list[list[float]] | None = [[] for _ in range(self.batch)] if keep_logprobs else None
        # Logits and scores [V] of the tokens of each row, by column, until the column is complete.
        self._outputs: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(self.batch)]
        self._dtype, self._device = torch.int64, device or input_ids.device

    @property
    def keeps_scores(self) -> bool:
        """True if scores or logits of every token are wanted."""
        return self.scores is not None or self.logits is not None

    @property
    def needs_scores(self) -> bool:
        """True if `take` needs the processed scores of every token."""
        return self.keeps_scores or self.logprobs is not None

    @property
    def done(self) -> bool:
        return all(self.ended)

    def needs(self, row: int) -> bool:
        """True if the row needs more tokens: it has not ended, or no padding continues it."""
        return not self.ended[row] or (self.pad is None and not self.done)

    def full(self, row: int) -> bool:
        """True if the last token that the row has gained is its last by `eos` or `longest`."""
        tokens = self.rows[row]
        return self.prompt_width + len(tokens) >= self.longest or (bool(tokens) and tokens[-1] in self.eos)

    def take(
        self, gained: list[list[int]], logits: Mapping[int, Tensor] = NOTHING, scores: Mapping[int, Tensor] = NOTHING
    ) -> None:  # fmt: skip
        """Add the tokens that each row has gained.

        gained: the tokens of each row [B lists].
        logits, scores: [V] float of each row that gains a token, if `keeps_scores`, the second if `needs_scores`; then
            a row gains at most one token at a time.
        """
        for row, tokens in enumerate(gained):
            if tokens:
                begin = self.prompt_width + len(self.rows[row])
                self._make_room(begin + len(tokens))
                self._numbers[row, begin : begin + len(tokens)] = tokens
                self.rows[row].extend(tokens)
                if self.keeps_scores:
                    self._outputs[row][len(self.rows[row]) - 1] = logits[row], scores[row]
                if self.logprobs is not None:
                    self.logprobs[row].append(float(scores[row].float().softmax(dim=-1)[tokens[0]].log()))
        while not self.done and all(
            len(tokens) > self.columns for tokens, ended in zip(self.rows, self.ended) if not ended or self.pad is None
        ):
            self._add_column()

    def sequences(self) -> Tensor:
        """Prompts and answers [B, W + columns], of the dtype and on the device of `input_ids`."""
        return self.ids[:, : self.prompt_width + self.columns].to(device=self._device, dtype=self._dtype, copy=True)

    def gained(self, row: int) -> int:
        """Gained tokens of the row that are in the answer."""
        return min(len(self.rows[row]), self.columns)

    def _make_room(self, width: int) -> None:
        if width > self.ids.shape[1]:
            before = self.ids.shape[1]
            longer = torch.zeros(self.batch, min(self._room, max(width, 2 * before)), dtype=torch.int64)
            longer[:, :before] = self.ids
            if self.pad is not None:
                longer[self.ended, before:] = self.pad
            self.ids, self._numbers = longer, longer.numpy()

    def _add_column(self) -> None:
        """Complete the next column, which all rows that need it have."""
        column, self.columns = self.columns, self.columns + 1
        width = self.prompt_width + self.columns
        if self.keeps_scores:
            self._add_scores(column)
        if self.criteria is not None:
            ids = self.ids[:, :width].contiguous().to(device=self._device, dtype=self._dtype)
            ended = self.criteria(ids, self.scores).tolist()
        else:
            ended = [
                width >= self.longest or (len(tokens) > column and tokens[column] in self.eos) for tokens in self.rows
            ]
        for row, ends_here in enumerate(ended):
            if ends_here and not self.ended[row]:
                self.ended[row] = True
                if self.pad is not None:
                    del self.rows[row][self.columns :]
                    self.ids[row, width:] = self.pad  # guard: ended-rows
        if self.streamer is not None:
            self.streamer.put(self.ids[:, width - 1].to(dtype=self._dtype, copy=True))

    def _add_scores(self, column: int) -> None:
        """Add a column of logits and scores, of zeros for rows that have ended before it."""
        zeros = torch.zeros_like(next(outputs[column][0] for outputs in self._outputs if column in outputs))
        pairs = [outputs[column] if self.needs(row) else (zeros, zeros) for row, outputs in enumerate(self._outputs)]
        logits, scores = (torch.stack(tensors).to(self._device) for tensors in zip(*pairs))
        self.logits = None if self.logits is None else (*self.logits, logits)
        self.scores = None if self.scores is None else (*self.scores, scores)
        for outputs in self._outputs:
            outputs.pop(column, None)
