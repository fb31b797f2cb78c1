"""Mistral's own format of EAGLE heads: ``params.json`` and ``consolidated.safetensors``.

Sources: vLLM's ``transformers_utils/configs/mistral.py``, ``models/mistral_eagle.py`` and
``LlamaForCausalLM.maybe_remap_mistral``.
"""

from functools import cached_property

from torch import Tensor

from ..drafters.checkpoints.draft_files import LAYOUTS, DraftFiles
from ..drafters.checkpoints.files import Fetch, read_json

KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
}
"""Keys of ``params.json`` -> keys of transformers; others have the same name."""
YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
RENAMES = [
    (r"^eagle_linear\.", "fc."),
    (r"^norm\.", "pre_lm_head_layernorm."),
    (r"^tok_embeddings\.", "embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"\.attention\.w([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
]
"""Names of tensors -> names of published EAGLE heads."""


def as_config(params: dict) -> dict:
    """The keys of ``params.json`` as transformers names them; ValueError if YaRN has a key that is not known."""
    config = {KEYS.get(name, name): value for name, value in params.items() if name not in ("yarn", "model_type")}
    window, yarn = config.get("sliding_window"), dict(params.get("yarn") or {})
    if isinstance(window, list):  # one for each layer, repeated
        windows = window * (config.get("num_hidden_layers", 1) // len(window))
        config["layer_types"] = ["full_attention" if one is None else "sliding_attention" for one in windows]
        config["sliding_window"] = next(filter(None, window), None)
    elif window is not None:
        config["use_sliding_window"] = True
    if yarn:
        scaling = {theirs: yarn.pop(name) for name, theirs in YARN.items() if name in yarn}
        unscaled = {"attention_factor": 1.0} if yarn.pop("apply_scale", True) is False else {}
        if yarn:
            raise ValueError(f"draft: its params.json has yarn.{next(iter(yarn))}, which is not known here")
        config["rope_scaling"] = {"rope_type": "yarn", **scaling, **unscaled}
    config.setdefault("head_dim", config.get("hidden_size", 0) // config.get("num_attention_heads", 1))
    return {**config, "architectures": ["EagleMistralForCausalLM"], "model_type": "mistral"}


def by_halves(weight: Tensor, head_dim: int) -> Tensor:
    """The rows of queries or keys [heads * head_dim, inputs] in the order of transformers.

    RoPE turns rows 2i and 2i + 1 of a head here, and rows i and i + head_dim / 2 there: the rows [a, b, c, d] of a
    head come out as [a, c, b, d].
    """
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


class MistralFiles(DraftFiles):
    """The files of a head that Mistral has published."""

    origin, renames = " (Mistral)", RENAMES
    flags = {"recycle_normed": True, "input_norm": True, "output_norm": True}

    @staticmethod
    def fits(fetch: Fetch) -> bool:
        """True if there are Mistral's files, and none of transformers."""
        return fetch("config.json") is None and fetch("params.json") is not None

    @cached_property
    def config(self) -> dict:
        return as_config(read_json(self.fetch("params.json")))

    def as_ours(self, name: str, tensor: Tensor) -> Tensor:
        turns = name.endswith(("q_proj.weight", "k_proj.weight"))
        return by_halves(tensor, self.config["head_dim"]) if turns else tensor


LAYOUTS.append(MistralFiles)
