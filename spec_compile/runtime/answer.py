"""The answer of one generate(): columns of tokens, as plain decoding would make them one after the other."""

import torch
from torch import Tensor


class Answer:
    """Takes tokens as the rows of a batch gain them, and deals with them in the order of plain decoding.

    Plain decoding gives every row one token a step. Here rows run ahead of each other; a *column*, one token a row, is
    dealt with as soon as all rows that need one have it: the stopping criteria are called with the ids up to it, just
    as plain decoding calls them, and the streamer is given it. What a row gained beyond its end is dropped.

    input_ids [B, W]; longest: the width at which every row ends; eos: tokens that end a row; pad: what a row that has
    ended goes on with (None: its own tokens, as transformers does without end-of-sequence tokens). criteria: called
    instead of comparing with `longest` and `eos`, if given.
    """

    def __init__(
        self, input_ids: Tensor, longest: int, eos: list[int], pad: int | None, criteria=None, streamer=None,
        keep_scores: bool = False, keep_logits: bool = False,
    ):  # fmt: skip
        self.batch, self.prompt_width = input_ids.shape
        self.longest, self.eos, self.pad = longest, frozenset(eos), pad
        self.criteria, self.streamer = criteria, streamer
        self.ids = torch.zeros(self.batch, max(longest, self.prompt_width + 1), dtype=torch.int64)
        """[B, longest] on the CPU: each row's prompt and what it has gained so far."""
        self.ids[:, : self.prompt_width] = input_ids
        self._numbers = self.ids.numpy()  # the same memory, where writing a few numbers is quick
        self.rows: list[list[int]] = [[] for _ in range(self.batch)]
        self.ended = [False] * self.batch
        self.columns = 0
        self.scores = () if keep_scores else None
        self.logits = () if keep_logits else None
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.batch)]
        self._dtype, self._device = torch.int64, input_ids.device

    @property
    def keeps(self) -> bool:
        """Scores or logits of every token are wanted."""
        return self.scores is not None or self.logits is not None

    @property
    def done(self) -> bool:
        """Every row has ended."""
        return all(self.ended)

    def needs(self, row: int) -> bool:
        """Whether the row goes on: it has not ended, or it goes on with its own tokens until all have."""
        return not self.ended[row] or (self.pad is None and not self.done)

    def full(self, row: int) -> bool:
        """Whether the last token that the row has gained is its last by `eos` or `longest`."""
        own = self.rows[row]
        return self.prompt_width + len(own) >= self.longest or (bool(own) and own[-1] in self.eos)

    def take(self, gained: list[list[int]], logits: list[Tensor] = (), scores: list[Tensor] = ()) -> None:
        """Tokens that each row has gained; with at most one a row, also its logits and scores [V] (if `keeps`)."""
        for row, tokens in enumerate(gained):
            if tokens:
                begin = self.prompt_width + len(self.rows[row])
                self._numbers[row, begin : begin + len(tokens)] = tokens
                self.rows[row].extend(tokens)
                if self.keeps:
                    self._kept[row].append((logits[row], scores[row]))
        while not self.done and all(
            len(own) > self.columns for own, ended in zip(self.rows, self.ended) if not ended or self.pad is None
        ):
            self._column()

    def sequences(self) -> Tensor:
        """[B, W + columns], of the type and on the device of the prompt."""
        return self.ids[:, : self.prompt_width + self.columns].to(device=self._device, dtype=self._dtype, copy=True)

    def gained(self, row: int) -> int:
        """Tokens of its own that the row has in the answer."""
        return min(len(self.rows[row]), self.columns)

    def _column(self) -> None:
        place, self.columns = self.columns, self.columns + 1
        width = self.prompt_width + self.columns
        if self.keeps:
            self._keep(place)
        if self.criteria is not None:
            ids = self.ids[:, :width].contiguous().to(device=self._device, dtype=self._dtype)
            ended = self.criteria(ids, self.scores).tolist()
        else:
            ended = [width >= self.longest or (len(own) > place and own[place] in self.eos) for own in self.rows]
        for row, now in enumerate(ended):
            if now and not self.ended[row]:
                self.ended[row] = True
                if self.pad is not None:
                    del self.rows[row][self.columns :]
                    self.ids[row, width:] = self.pad
        if self.streamer is not None:
            self.streamer.put(self.ids[:, width - 1].to(dtype=self._dtype, copy=True))

    def _keep(self, place: int) -> None:
        """Add a column of logits and scores, of zeros for rows that have ended before it."""
        blank = torch.zeros_like(next(kept[place][0] for kept in self._kept if len(kept) > place))
        pairs = [kept[place] if self.needs(row) else (blank, blank) for row, kept in enumerate(self._kept)]
        logits, scores = (torch.stack(part).to(self._device) for part in zip(*pairs))
        self.logits = None if self.logits is None else (*self.logits, logits)
        self.scores = None if self.scores is None else (*self.scores, scores)
        for kept in self._kept:
            if len(kept) > place:
                kept[place] = None
