"""The check of generation: the graphs must give the logits of the model's `generate`."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ..errors import UnsupportedModelError
from ..graph import ModelGraph
from ..kernels.together import compile_together
from ..quantised import unrounded_activations
from ..tree import ancestry
from . import copies, replaced
from .checks import (
    LONGEST,
    PARENTS,
    SHORTEST,
    TREE,
    cached,
    compare_tree,
    on_some_text,
    own_forward,
    random_ids,
    reaches,
    tree_logits,
)
from .quantised import embedded_tokens, output_matrix, with_plain_meaning
from .yardstick import compare_logits, compare_rounding, exact_logits, full_precision, has_half, in_float32_if_possible

log = logging.getLogger("spec_compile")

STEPS = 4
"""Tokens that are generated, the first from the prompt and the others from the cache."""
PADDING = 7
"""Tokens of padding on the left of the second of two rows."""
PATH = [0, 2, 5, 8]
"""Nodes of a path from the root of `PARENTS`, as many as `STEPS`."""
GENERATE = "the model's own generate(), over its cache,"
ANY, UNPADDED, SINGLE = "any", "without padding", "of one row"
"""Batches in which `generate` gives every row the answer of its text."""


@torch.no_grad()
def check_generation(
    model: PreTrainedModel, graph: ModelGraph, prefill: ModelGraph, verify: ModelGraph
) -> str:  # fmt: skip
    """Compare a few steps of transformers' `generate` with the graphs; return the batches that agree.

    A forward over a whole text does not use the model's cache, nor the mask of a batch that is padded on the left. On a
    short text `generate` is compared with the captured graph. On a text that is longer than any window, where a forward
    takes seconds, it is compared with the graphs that were rewritten to prefill and to verify. If the model overrides
    methods of transformers' loop, that loop serves it: only its forward is compared, and `ANY` is returned.
    Raises UnsupportedModelError if a single row differs.
    """
    model, overridden = with_plain_meaning(model), replaced.overridden(model)
    limit = LONGEST if graph.position_limit is None else min(LONGEST, graph.position_limit - STEPS)
    short = min(SHORTEST + PADDING + 2, limit)
    far_reaches = reaches(graph)
    long = min(max(far_reaches, default=0) + PADDING + 2, limit - len(PARENTS))
    generates = _forward_logits if overridden else _generated_logits

    def check(*padding: int) -> None:
        with own_forward(graph) as ties:
            if not overridden:
                short_text = partial(random_ids, graph, len(padding), short)
                on_some_text(graph, lambda seed: _compare_steps(model, graph, short_text(seed), padding))
            if far_reaches and long > PADDING + STEPS:  # guard: windows-are-crossed
                far = partial(_compare_far, model, graph, (prefill, verify), generates, long, padding[-1])
                on_some_text(graph, far)
        for warning in (tie.warning for tie in ties if tie.warning):
            log.warning("%s %s", type(model).__name__, warning)

    for batches, padding in ((ANY, (0, PADDING)), (UNPADDED, (0, 0))):
        if short > max(padding) + 1:
            try:
                check(*padding)
                return batches
            except UnsupportedModelError:
                pass  # perhaps only the padding differs, or the rows of a batch (RWKV), so compare without
    check(0)
    return SINGLE


def _compare_steps(model: PreTrainedModel, graph: ModelGraph, ids: Tensor, padding: tuple[int, ...]) -> None:
    """UnsupportedModelError if `generate` fails or differs. ids [B, T]: the first `padding[b]` of row b are masked."""
    name, ids = type(model).__name__, ids.to(model.device)

    # The captured graph clamps time steps everywhere, the model clamps them only in prompts.
    tokens = 1 if graph.clamps_prompts else STEPS

    def steps() -> tuple[Tensor, Tensor]:
        return _generated_logits(model, ids, padding, tokens)

    if not has_half(graph):
        with unrounded_activations():  # another order of sums would move their codes
            generated, texts = steps()
            expected = _captured_logits(graph, texts, padding, generated.shape[1])
        return compare_logits(name, GENERATE, generated.to(expected.dtype), expected)
    wide = in_float32_if_possible(GENERATE, steps, model)
    generated, texts = wide or steps()
    exact = exact_logits(name, lambda: _captured_logits(graph, texts, padding, generated.shape[1]))
    if wide:
        compare_logits(name, GENERATE, generated, exact)
    else:
        compare_rounding(name, GENERATE, generated, _captured_logits(graph, texts, padding, generated.shape[1]), exact)


def _compare_far(
    model: PreTrainedModel, graph: ModelGraph, rewritten: tuple[ModelGraph, ModelGraph], generates: Callable,
    length: int, padding: int, seed: int,
) -> None:  # fmt: skip
    """UnsupportedModelError if the path of a tree after a long text has other logits than `generates` gives its tokens.

    rewritten: the graphs that prefill and verify.
    generates: as `_generated_logits`.
    length: tokens of the text, of which the first `padding` are masked.
    """
    name = type(model).__name__
    drawn = random_ids(graph, 1, length + len(PARENTS), seed).to(model.device)
    ancestors, depth = ancestry(torch.tensor([PARENTS], device=graph.device))
    prefix = length - padding - 1

    def steps() -> tuple[Tensor, Tensor]:
        return generates(model, drawn[:, :length], (padding,), STEPS)

    def tree(dtype: torch.dtype) -> Tensor:
        """The logits of the path, whose root is the last token of the prompt."""
        ids = drawn[:, : prefix + len(PARENTS)].clone()
        ids[:, :prefix] = texts[:, :prefix]
        ids[:, prefix:][:, PATH] = texts[:, prefix : prefix + STEPS]
        return tree_logits(rewritten, cached(graph, rewritten[1], dtype), ids, prefix, ancestors, depth, [])[None, PATH]

    def captured() -> Tensor:
        return _captured_logits(graph, texts, (padding,), STEPS)

    if not has_half(graph):
        with full_precision(), unrounded_activations():
            generated, texts = steps()
            compile_together(partial(tree, graph.dtype))
            return compare_logits(name, TREE, tree(graph.dtype), generated.to(graph.dtype))
    wide = in_float32_if_possible(GENERATE, steps, model)
    generated, texts = wide or steps()
    compile_together(partial(tree, graph.dtype))
    compare_tree(name, graph.dtype, tree, captured, generated if wide else exact_logits(name, captured))


def _forward_logits(
    model: PreTrainedModel, ids: Tensor, padding: tuple[int, ...], tokens: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `_generated_logits`, of one forward over a text that is drawn to its end."""
    texts = torch.cat([ids[:, padding[0] :], ids[:, 1:tokens]], dim=1)
    return model(input_ids=texts, use_cache=False).logits[:, -tokens:], texts


def _generated_logits(
    model: PreTrainedModel, ids: Tensor, padding: tuple[int, ...], tokens: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Logits [B, steps, V] of `generate`, and the texts [B, T + steps - 1] that they follow, padded on the right."""
    pads = torch.tensor(padding, device=ids.device)[:, None]
    mask = (torch.arange(ids.shape[1], device=ids.device) >= pads).long()
    try:
        output = _generate(model, ids, mask, tokens)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModelError(
            f"model: {type(model).__name__} fails in transformers' own generate() ({type(error).__name__}: {reason})"
        ) from error
    texts = torch.stack([row.roll(-pad) for row, pad in zip(output.sequences[:, :-1], padding)])
    return torch.stack(output.logits, dim=1), texts


def _captured_logits(graph: ModelGraph, texts: Tensor, padding: tuple[int, ...], steps: int) -> Tensor:
    """Logits [B, steps, V] of the captured graph at the positions where `generate` chose tokens."""
    rows = torch.arange(len(texts), device=texts.device)[:, None]
    last = texts.shape[1] - 1 - torch.tensor(padding, device=texts.device)[:, None]
    logits = graph.gm(texts, torch.arange(texts.shape[1], device=texts.device).expand_as(texts))[0]
    return logits[rows, last + torch.arange(1 - steps, 1, device=texts.device)]


def _generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, tokens: int):
    """Generate `tokens` greedy tokens by transformers' `generate`, with raw logits and without the model's settings.

    On a GPU attention with padding is made of its plain ops: with a mask of one column for all keys, as of MiniMax's
    steps, torch 2.11's kernel reads a misaligned address, after which nothing runs.
    """
    plain = sdpa_kernel(SDPBackend.MATH) if ids.is_cuda and not mask.all() else nullcontext()
    other = copies.shallow(model)
    other.generation_config = GenerationConfig(pad_token_id=0)
    unreadable = [*range(embedded_tokens(model), output_matrix(model).shape[0])] or None
    with plain:
        return GenerationMixin.generate(
            other, ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, num_beams=1, use_cache=True,
            return_dict_in_generate=True, output_logits=True, disable_compile=True, suppress_tokens=unreadable,
        )  # fmt: skip
