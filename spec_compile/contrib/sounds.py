"""Places of sounds in prompts, counted before the model runs, for classes of which transformers does not count them.

Qwen2Audio fails inside a layer if a prompt has no place for its sounds. The thinkers of Qwen2.5-Omni and Qwen3-Omni
leave out the end of the sounds without a word if there are too few places.
"""

import sys
from typing import Any

from torch import Tensor

from ..compat import CACHE
from ..runtime.prompt import SOUND_CHECKS


def check_places(model: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """ValueError unless the prompts have as many places as their sounds need.

    input_ids: [B, W], counted if nothing is cached and no embeddings replace them. model_kwargs: may have
        input_features and the feature_attention_mask [sounds, frames].
    """
    mask, cache = model_kwargs.get("feature_attention_mask"), model_kwargs.get(CACHE)
    is_whole = input_ids.numel() and (cache is None or cache.get_seq_length() == 0)
    if not is_whole or mask is None or model_kwargs.get("input_features") is None:
        return
    is_place = input_ids == getattr(model.config, "audio_token_id", getattr(model.config, "audio_token_index", None))
    given, needed = int(is_place.sum()), int(places_of(model, mask.sum(dim=-1)).sum())
    # A processor of old checkpoints leaves one place for each sound, which Qwen2Audio widens.
    is_narrow = type(model).__name__.startswith("Qwen2Audio") and not (is_place[:, 1:] & is_place[:, :-1]).any()
    wanted = len(mask) if is_narrow and given else needed
    if given != wanted:
        raise ValueError(
            f"input_ids: the prompts have {given} places for audio, {len(mask)} sounds in input_features need {wanted}"
            "; let the processor make both together"
        )


def places_of(model: Any, frames: Tensor) -> Tensor:
    """The places of sounds [n] with these numbers of frames [n]."""
    tower = next(part for path, part in model.named_modules() if path.endswith("audio_tower"))
    count = getattr(tower, "_get_feat_extract_output_lengths", None)
    if count is None:
        count = vars(sys.modules[type(model).__module__])["_get_feat_extract_output_lengths"]
    lengths = count(frames)
    return lengths[1] if isinstance(lengths, tuple) else lengths


for name in ("Qwen2Audio", "Qwen2_5OmniThinker", "Qwen3OmniMoeThinker"):
    SOUND_CHECKS[f"{name}ForConditionalGeneration"] = check_places
