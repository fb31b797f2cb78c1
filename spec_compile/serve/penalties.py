"""OpenAI's frequency_penalty and presence_penalty, as a logits processor."""

import torch
from torch import Tensor
from transformers import LogitsProcessor


class CountPenalties(LogitsProcessor):
    """Lowers the scores of tokens that the answer has already.

    A token that occurs c > 0 times in the answer so far loses ``frequency * c + presence``. The prompt does not count.

    prompt_length: tokens of the prompt
    frequency, presence: from -2 to 2; negative values raise the scores
    """

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [B, V] of the token after each row of `input_ids` [B, L]."""
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.prompt_length :]):
            tokens, counts = torch.unique(ids, return_counts=True)
            scores[row, tokens] -= self.frequency * counts.to(scores.dtype) + self.presence
        return scores
