"""`score`: the log-probabilities of given texts, by requests that ask for those of their prompts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig


def score(model: Any, ids: Any, temperature: float, adapter_names: Sequence[str | None] | None) -> list[Tensor]:
    """See `Speculation.score`. model: has our ``generate_batch()``."""
    texts = ids.tolist() if isinstance(ids, Tensor) else [*ids]
    if texts and isinstance(texts[0], int):
        texts = [texts]
    # A request has an answer of at least one token, which nobody reads.
    config = GenerationConfig(do_sample=False, max_new_tokens=1, num_return_sequences=1)
    named = {} if adapter_names is None else {"adapter_names": adapter_names}
    outputs = model.generate_batch(
        texts, config, warmup=False, prompt_logprobs=0, logprobs_temperature=temperature, speculation=False, **named
    )
    for number, output in enumerate(outputs.values()):
        if output.error is not None:
            raise ValueError(f"ids[{number}]: {output.error}")
    return [torch.tensor([each.logprob for each in output.prompt_scores]) for output in outputs.values()]
