"""Prompts that the model's own forward processes: embeddings and pictures."""

from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..capture.adapters import twin
from ..capture.pictures import placeholders
from ..capture.taps import tapped
from ..compat import CACHE
from ..passes.tap_hidden_states import FINAL
from .past import cache_among
from .prompt import Prompt
from .steps.build import StepKind

PICTURES = {
    "pixel_values", "pixel_values_videos", "image_sizes", "image_grid_thw", "video_grid_thw", "second_per_grid_ts",
    "mm_encoder_outputs",
}  # fmt: skip
"""Arguments of a model's forward that hold pictures and videos."""
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Arguments that say which tokens stand for pictures."""


@dataclass
class OwnPrefill:
    """Results of the model's own forward over B prompts.

    cache: keys and values of the prompts.
    first_logits: [B, V] float32, after the prompts; None if the first round processes the last token of each row.
    features: the hidden states [B, L, C] at each tap of the draft; None if embeddings or a cache replace tokens.
    """

    cache: Cache
    first_logits: Tensor | None
    features: list[Tensor] | None


def run(
    model, prompt: Prompt, input_ids: Tensor, generation_config, model_kwargs: dict, taps: tuple[int, ...]
) -> OwnPrefill:
    """Process prompts by the forward of `model`, which speculates, with the arguments of ``_sample``.

    The last tokens are left to the first round, unless one stands for a picture, or there are embeddings or a cache.
    """
    kwargs, original = model_kwargs | {"use_cache": True}, model.speculation.engine.original
    cache = cache_among(kwargs)
    is_first = cache is None or cache.get_seq_length() == 0
    pictures = placeholders(original)
    has_all_tokens = is_first and not prompt.is_embedded
    leaves_last = has_all_tokens and all(row[-1] not in pictures for row in prompt.tokens)
    if leaves_last:
        input_ids = input_ids[:, :-1]
        for name in {"attention_mask", "position_ids", *TOKEN_TYPES} & kwargs.keys():
            kwargs[name] = None if kwargs[name] is None else kwargs[name][..., :-1]
    if FINAL in taps and "logits_to_keep" in kwargs:
        kwargs["logits_to_keep"] = 0  # the tap of the last layer needs every token
    is_tapped = has_all_tokens and bool(taps)
    runner = twin(original) if is_tapped else model
    with tapped(runner, taps) if is_tapped else nullcontext([]) as features:
        output = runner._prefill(input_ids, generation_config, kwargs)
    first_logits = None if leaves_last else output.logits[:, -1].float()
    return OwnPrefill(getattr(output, CACHE), first_logits, features if has_all_tokens else None)


def prefill_draft(
    session, features: list[Tensor], padding: list[int], begins: list[int], sizes: list[int]
) -> None:  # fmt: skip
    """Let only the draft process the first `begins` [B] tokens of each prompt, which the target has processed.

    features: see `OwnPrefill`. padding: of each row [B], on the left. sizes: tokens of each step.
    """
    rows = [
        nn.utils.rnn.pad_sequence(
            [values[pad : pad + begin] for values, pad, begin in zip(feature, padding, begins)], batch_first=True
        )
        for feature in features
    ]  # without padding on the left
    rows = [nn.functional.pad(row, (0, 0, 0, sum(sizes) - row.shape[1])) for row in rows]
    session.state.lengths.zero_()
    done = 0
    for size in sizes:
        chunk = [row[:, done : done + size].contiguous() for row in rows]
        session.steps.get(StepKind.PREFILL)(size, session.max_kv_len(done + size), chunk)
        done += size
