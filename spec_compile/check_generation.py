"""The check of generation: the captured graph at our positions must give the logits of the model's own `generate`."""

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from . import adapters
from .checks import LONGEST, _announced_window, _compare, _random_ids
from .errors import UnsupportedModelError
from .graph import ModelGraph
from .runtime import hooks

STEPS = 4
"""Tokens that are generated: the first from the prompt, the others over the cache."""
PADDING = 7
"""On the left of the second of two rows."""


@torch.no_grad()
def check_generation(model: PreTrainedModel, graph: ModelGraph) -> bool:
    """Compare a few steps of transformers' own `generate` with the captured graph; whether padded batches are equal.

    A forward over a whole text cannot show what a model does with its cache, or with the mask of a batch that is padded
    on the left. Raises UnsupportedModelError if rows without padding differ. True without a comparison for a model
    whose own methods a round does not call: transformers' loop runs for it.
    """
    if hooks.overridden(model):
        return True
    windows = [layer.window for layer in graph.layers if layer.window is not None]
    limit = LONGEST if graph.position_limit is None else min(LONGEST, graph.position_limit - STEPS)
    length = min(max([24, _announced_window(model), *windows]) + PADDING + 2, limit)
    ids = _random_ids(graph, 2, length).to(model.device)
    if length > PADDING + 1:
        try:
            _compare_steps(model, graph, ids, [0, PADDING])
            return True
        except UnsupportedModelError:
            pass  # it may be for the padding alone
    _compare_steps(model, graph, ids, [0, 0])
    return False


def _compare_steps(model: PreTrainedModel, graph: ModelGraph, ids: Tensor, padding: list[int]) -> None:
    """UnsupportedModelError if `generate` fails or differs. ids [B, T]: the first `padding[b]` of row b are masked."""
    name, length, pads = type(model).__name__, ids.shape[1], torch.tensor(padding, device=ids.device)[:, None]
    mask = (torch.arange(length, device=ids.device) >= pads).long()
    try:
        output = _generate(model, ids, mask)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModelError(
            f"model: {name} fails in transformers' own generate() ({type(error).__name__}: {reason})"
        ) from error
    own = torch.stack(output.logits, dim=1)
    steps = own.shape[1]
    texts = output.sequences[:, : length + steps - 1]
    texts = torch.stack([row.roll(-pad) for row, pad in zip(texts, padding)])  # what is rolled to the end is not seen
    positions = torch.arange(texts.shape[1], device=ids.device).expand_as(texts)
    logits = graph.gm(texts, positions)[0]
    rows = torch.arange(len(ids), device=ids.device)
    expected = logits[rows[:, None], torch.arange(length - 1, length - 1 + steps, device=ids.device) - pads]
    # of each row its median step: in 16 bits a single token may be sent to another expert
    errors = (own - expected.float()).square().mean(dim=2)
    median = errors.argsort(dim=1)[:, steps // 2]
    _compare(name, "the model's own generate(), which uses a cache,", own[rows, median], expected[rows, median])


def _generate(model: PreTrainedModel, ids: Tensor, mask: Tensor):
    """Greedy tokens by transformers' `generate`, with the raw logits of each; no settings of the model's take part."""
    other = adapters.shallow(model)
    other.generation_config = GenerationConfig(pad_token_id=0)
    return GenerationMixin.generate(
        other, ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, num_beams=1, use_cache=True,
        return_dict_in_generate=True, output_logits=True, disable_compile=True,
    )  # fmt: skip
