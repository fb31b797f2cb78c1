"""The names of tensors in published checkpoints of the EAGLE family and DFlash, and ours."""

import re
from collections.abc import Iterable

RENAMES = [
    (r"^(?:model\.){1,2}", ""),
    (r"^midlayer\.|^transformer\.", "blocks.0."),
    (r"^layers\.", "blocks."),
    (r"^additional_layers\.(\d+)\.", lambda found: f"blocks.{int(found[1]) + 1}."),
    (r"^(blocks\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),
    (r"^hidden_layernorm\.", "blocks.0.input_layernorm."),
    (r"^fusion_fc\.", "fc."),
    (r"^(?:embed|embedding)_layernorm\.|^enorm\.", "embedding_norm."),
    (r"^hidden_states_layernorm\.|^hnorm\.", "state_norm."),
    (r"^(?:pre_lm_head|lm_head)_layernorm\.", "output_norm."),
    (r"^lm_head\.weight$", "head_weight"),
    (r"^embed_tokens\.weight$", "embedding"),
    (r"^(?:markov_head|candidate_selector)\.", "transition."),
    (r"^(prefix_gru|embed_proj)\.", r"transition.\1."),
]
"""From the names of SafeAILab, HASS, vLLM, SGLang, speculators and DeepSpec, in turn, to ours."""

PUBLISHED = {
    "head_weight": "lm_head.weight",
    "embedding_norm.weight": "embedding_layernorm.weight",
    "state_norm.weight": "hidden_states_layernorm.weight",
    "output_norm.weight": "pre_lm_head_layernorm.weight",
    **{f"transition.{name}": f"markov_head.{name}" for name in ("markov_w1.weight", "markov_w2.weight")},
    "transition.hidden_projection.weight": "candidate_selector.hidden_projection.weight",
}
"""Names that stand by themselves, as they would be published."""


def our_names(names: Iterable[str]) -> dict[str, str]:
    """Our name of each tensor of an EAGLE checkpoint -> its own."""
    renamed = {}
    for name in names:
        ours = name
        for pattern, replacement in RENAMES:
            ours = re.sub(pattern, replacement, ours)
        renamed[ours] = name
    return renamed


def published_name(ours: str, names: dict[str, str]) -> str:
    """What a tensor that is missing would be called, going by its neighbours."""
    parts = ours.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        stem = ".".join(parts[:depth]) + "."
        for known, theirs in names.items():
            rest = known.removeprefix(stem)
            if known.startswith(stem) and theirs.endswith(rest):
                name = theirs.removesuffix(rest) + ours.removeprefix(stem)
                return name.replace("input_layernorm", "hidden_norm") if "additional_layers." in name else name
    return PUBLISHED.get(ours, ours)
