"""`DraftConfig`: the config of a published draft, whoever wrote it: sizes, RoPE, layer knobs and taps."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.activations import ACT2FN

from ...capture.admit import GROWING_ROPE
from ...passes.tap_hidden_states import FINAL
from ..modules.latent import LatentSizes
from ..modules.layers import LayerKnobs, rotary
from .config_keys import SPECULATORS, check_rope_theta

FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Keys of a config that a draft's layers are built from."""
INVALID = AttributeError, KeyError, TypeError, ValueError, StrictDataclassError
"""The errors of transformers about values of a config."""
MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""Keys of RoPE with positions of several axes, which are equal in a text: RoPE of one axis is the same there."""
LATENT_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Further keys of layers with multi-head latent attention; ``q_lora_rank`` may be null."""


class DraftConfig:
    """A draft's ``config.json``: flat, or with the layers' keys in an object of their own (speculators, vLLM).

    latent: its tensors are those of multi-head latent attention. Its keys do not tell: heads with grouped
    queries may carry the keys of a target with MLA.
    """

    partial_rope = True
    """RoPE may turn a part of each head."""

    def __init__(self, raw: dict, latent: bool = False):
        self.speculators = SPECULATORS in raw
        nested = raw.get("transformer_layer_config") if self.speculators else raw.get("model")
        self.nested = isinstance(nested, dict)
        self.layer = dict(nested) if self.nested else dict(raw)
        self.notes = self._flatten_rope()
        self.raw, self.latent = raw, latent
        self.architectures = raw.get("architectures") or []
        self.deepspec = "Qwen3Eagle3Model" in self.architectures

    def _flatten_rope(self) -> list[str]:
        """Leave the RoPE of one axis that a draft was trained with; what was left out, for the report.

        Where RoPE is said for each type of layer, speculators' drafts have that of sliding layers
        (``flatten_rope_parameters``).
        """
        notes = []
        for name in ("rope_scaling", "rope_parameters"):
            rope = self.layer.get(name)
            if not isinstance(rope, dict):
                continue
            if self.speculators and isinstance(rope.get("sliding_attention"), dict):
                rope = rope["sliding_attention"]
            flat = {key: value for key, value in rope.items() if key not in MULTIMODAL}
            flat = {key: "default" if value == "mrope" else value for key, value in flat.items()}
            if flat != rope:
                notes = ["multimodal RoPE: the positions are those of a text, equal on all axes"]
            self.layer[name] = flat
        return notes

    def get(self, name: str, default=None):
        """A flag, from the config itself or its eagle_config."""
        inner = self.raw.get("eagle_config")
        for place in (self.raw, inner if isinstance(inner, dict) else {}):
            if place.get(name) is not None:
                return place[name]
        return default

    def with_rope(self, parameters: dict) -> "DraftConfig":
        """The same with other `parameters` of RoPE, as transformers names them."""
        other = DraftConfig(self.raw, self.latent)
        rope = {"rope_theta": None, "rope_scaling": None, "rope_parameters": parameters}
        other.layer = {**self.layer, **rope}
        return other

    def llama(self) -> LlamaConfig:
        """Sizes, activation and RoPE of the draft's layers; ValueError if they cannot be built from it."""
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", *(LATENT_FIELDS if self.latent else ()))
        missing = [name for name in needed if self.layer.get(name) is None]
        if missing:
            raise ValueError(f"draft: its config has no {', '.join(missing)}; it has {', '.join(sorted(self.layer))}")
        fields = {name: self.layer[name] for name in FIELDS if self.layer.get(name) is not None}
        if self.latent:
            fields["head_dim"] = self.layer["qk_rope_head_dim"]  # the part of a head that RoPE turns
        try:
            config = LlamaConfig(**fields)
            check_rope_theta("rope_theta", config.rope_parameters["rope_theta"])
            rotary(config, torch.device("cpu"))
            ACT2FN[config.hidden_act]
        except INVALID as error:
            raise invalid(error) from error
        rope = config.rope_parameters
        partial = self.layer.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            rope["partial_rotary_factor"] = partial
        interleaved = not self.latent and False in (self.get("is_neox_style"), self.get("rope_is_neox_style"))
        for problem, has_it in (
            (f"RoPE of type {rope['rope_type']!r}, which changes with the length", rope["rope_type"] in GROWING_ROPE),
            (f"RoPE of a part of each head ({partial})", partial != 1.0 and not self.partial_rope),
            ("interleaved RoPE", interleaved),
        ):
            if has_it:
                raise ValueError(f"draft: its config asks for {problem}, which draft heads are not built with here")
        return config

    def layer_knobs(self, names: dict[str, str]) -> LayerKnobs:
        """Knobs of the layers, as the tensors show them; the config may ask for more."""
        count, window = self.layer.get("num_hidden_layers") or 1, self.layer.get("sliding_window")
        types = self.layer.get("layer_types") or []
        if not types and self.layer.get("use_sliding_window"):
            types = ["sliding_attention"] * count
        qwen3 = self.deepspec or (self.nested and self.layer.get("model_type") == "qwen3")
        return LayerKnobs(
            num_layers=count,
            qkv_bias=bool(self.get("qkv_bias") or self.layer.get("qkv_bias"))
            or any(f"blocks.0.self_attn.{part}_proj.bias" in names for part in "qkv"),
            output_bias="blocks.0.self_attn.o_proj.bias" in names,
            qk_norm=qwen3 or any(f"blocks.0.self_attn.{part}_norm.weight" in names for part in "qk"),
            windows=tuple(window if layer_type == "sliding_attention" else None for layer_type in types[:count]),
            latent=self._latent_sizes() if self.latent else None,
        )

    def _latent_sizes(self) -> LatentSizes:
        """The sizes of MLA. YaRN with a factor f multiplies scores by (0.1 * mscale_all_dim * ln f + 1)^2.

        Source: ``DeepseekV2MLAAttention`` of vLLM, ``yarn_apply_mscale`` of transformers.
        """
        sizes, rope = {name: self.layer[name] for name in LATENT_FIELDS}, self.llama().rope_parameters
        scale = (sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]) ** -0.5
        factor, all_dims = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
        if factor > 1:  # guard: yarn
            scale *= (0.1 * all_dims * math.log(factor) + 1) ** 2
        pairs = self.layer.get("rope_interleave") is not False
        return LatentSizes(self.layer.get("q_lora_rank"), **sizes, scale=scale, pairs=pairs)


def with_rope_theta(config: DraftConfig, overrides: dict) -> DraftConfig:
    """`config` with the rope_theta that `overrides` ask for, if they do."""
    if "rope_theta" not in overrides:
        return config
    return config.with_rope({**config.llama().rope_parameters, "rope_theta": overrides["rope_theta"]})


@dataclass(frozen=True)
class Taps:
    """The states that an EAGLE-3 head reads.

    why: how they follow from the config, for the report.
    others: other meanings that the config's list may have.
    """

    taps: tuple[int, ...]
    why: str
    others: list[tuple[int, ...]] = field(default_factory=list)


def find_taps(config: DraftConfig, num_layers: int, count: int) -> Taps:
    """The `count` states that a draft of a target with `num_layers` layers reads.

    Published lists number states in two ways: by the layer whose output it is (SpecForge, DeepSpec: tap = id + 1) or
    by the layer whose input it is (speculators, vLLM: tap = id). SGLang reads a list that starts with 1 the first way:
    [1, 15, 28] gives the taps (2, 16, 29), [2, 16, 29] gives (2, 16, 29).
    ValueError if the list does not fit the target or the head.
    """
    if config.get("use_aux_hidden_state", True) is False:
        return Taps((FINAL,), "the state after the final norm (use_aux_hidden_state: false)")
    after, before = config.get("target_layer_ids"), config.get("eagle_aux_hidden_state_layer_ids")
    if after is not None:
        reading = Taps(tuple(i + 1 for i in after), f"target_layer_ids {after}, outputs of layers: one more")
    elif before is None:
        reading = Taps((2, num_layers // 2, num_layers - 3), "the default")
    elif config.speculators:
        reading = Taps(tuple(before), f"eagle_aux_hidden_state_layer_ids {before}, inputs of layers")
    else:
        inputs, outputs = tuple(before), tuple(i + 1 for i in before)
        listed = f"eagle_aux_hidden_state_layer_ids {before}"
        if before[:1] == [1]:
            reading = Taps(outputs, f"{listed}, which starts with 1, as outputs of layers: one more", [inputs])
        else:
            reading = Taps(inputs, f"{listed}, which does not start with 1, as inputs of layers", [outputs])
    check_taps(reading.taps, count, num_layers, "head")
    return Taps(reading.taps, reading.why, [other for other in reading.others if _has(other, num_layers)])


def override_taps(overrides: dict, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The taps that `overrides` ask for, or else `default`; ValueError if the target has no such states."""
    taps = tuple(overrides.get("taps", default))
    if len(taps) != len(default):
        raise ValueError(f"taps: this head reads {len(default)} state(s), got {len(taps)}")
    if not _has([tap for tap in taps if tap != FINAL], num_layers):
        raise _foreign(taps, num_layers, "head")
    return taps


def check_taps(taps: tuple[int, ...], count: int, num_layers: int, noun: str) -> None:
    """ValueError unless these are the `count` states that fc joins, of a target with `num_layers` layers."""
    if len(taps) != count:
        raise ValueError(f"draft: its fc reads {count} states of the target, its config names {len(taps)}")
    if not _has(taps, num_layers):
        raise _foreign(taps, num_layers, noun)


def _has(taps: Iterable[int], num_layers: int) -> bool:
    return all(0 <= tap <= num_layers for tap in taps)


def _foreign(taps: tuple[int, ...], num_layers: int, noun: str) -> ValueError:
    return ValueError(
        f"draft: it reads states {comma_separated(taps)} of its target (0: the embeddings), this model has "
        f"{num_layers} layers; take the {noun} of this model"
    )


def invalid(error: Exception) -> ValueError:
    """The error about a config from which transformers raised one of INVALID."""
    return ValueError(f"draft: its config is not valid: {' '.join(str(error).split())}")


def describe_layers(llama: LlamaConfig, knobs: LayerKnobs) -> str:
    """The RoPE and the layers of a draft, in a line."""
    rope = dict(llama.rope_parameters)
    theta, rope_type = rope.pop("rope_theta"), rope.pop("rope_type")
    windows = "" if not any(knobs.windows) else f", sliding windows {comma_separated(knobs.windows)}"
    attention = f"qkv_bias={knobs.qkv_bias}, qk_norm={knobs.qk_norm}"
    if knobs.latent is not None:
        attention = f"latent attention of rank {knobs.latent.kv_lora_rank}"
    return f"{knobs.num_layers} layer(s): rope_theta={theta:g} ({rope_type}), {attention}{windows}"


def comma_separated(values: Iterable) -> str:
    """[1, 2, 3] -> "1, 2, 3"."""
    return ", ".join(map(str, values))
