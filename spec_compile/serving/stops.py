"""`StopTexts`: transformers' stop strings, prepared in no time.

transformers' own criterion goes through the whole vocabulary for every stop string, which takes seconds of Python.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import StopStringCriteria

PREFIX = "abcdef"
"""A text before a token, because some tokenizers decode the first token of a text otherwise."""


class Pieces:
    """The bytes that each token of a tokenizer stands for, as `StopStringCriteria` reads them.

    tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        self._letters = StopStringCriteria._byte_level_decoder() if self._mode == "byte_level" else None
        ids = tokenizer(PREFIX, add_special_tokens=False)["input_ids"]
        self._base = tokenizer.convert_ids_to_tokens(ids)
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def _of(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # an id that the tokenizer does not know
            return b""
        piece = StopStringCriteria._token_to_bytes(name, self._mode, self._letters)
        if piece is not None:
            return piece
        text = self._tokenizer.convert_tokens_to_string([*self._base, name])
        return text[text.index(PREFIX) + len(PREFIX) :].encode()


class StopTexts(StoppingCriteria):
    """Ends a row once a stop string ends in its last token; the prompt counts as text, too.

    pieces: of the tokenizer. texts: the stop strings.
    """

    def __init__(self, pieces: Pieces, texts: list[str]):
        self._pieces = pieces
        self._stops = [text.encode() for text in texts]
        self._longest = max(map(len, self._stops))

    def __call__(self, input_ids: Tensor, scores: Any = None, **kwargs: Any) -> Tensor:
        """Which rows of `input_ids` [B, L] end, as bools [B]."""
        return torch.tensor([self._ends(row) for row in input_ids], device=input_ids.device)

    def _ends(self, row: Tensor) -> bool:
        tokens = row[-2 * self._longest :].tolist()  # most have a byte or more
        if not tokens:
            return False
        last, parts, size = self._pieces.of(tokens[-1]), [], 0
        for token in reversed(tokens[:-1]):
            if size >= self._longest:
                break
            parts.append(self._pieces.of(token))
            size += len(parts[-1])
        before = b"".join(reversed(parts))
        text = before + last
        # The end of a match lies in the last token: it begins at most the stop's length before it.
        return any(text.find(stop, max(0, len(before) + 1 - len(stop))) >= 0 for stop in self._stops) and bool(last)
