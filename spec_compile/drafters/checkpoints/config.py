"""`DraftConfig`: the config of a published draft, whoever wrote it: sizes, RoPE, layer knobs and taps.

The tables have the keys that are read here, and those that cannot change a draft's output. Every other key with a value
that switches something on is an error that names it (`DraftConfig.refuse_unknown_keys`). Tensors are read as strictly
(see `Checkpoint.fill`), so a key that only asks for further tensors needs no further meaning here.
"""

import copy
import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, LlamaConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from ...capture.admit import GROWING_ROPE
from ...passes.outputs import FINAL
from ..modules.layers import LatentSizes, LayerKnobs, rotary

SPECULATORS = "speculators_model_type"
FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Keys of the layers that transformers reads."""
LATENT_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Further keys of layers with multi-head latent attention; ``q_lora_rank`` may be null."""
LAYERS = {
    *FIELDS, *LATENT_FIELDS, "num_hidden_layers", "vocab_size", "draft_vocab_size", "target_hidden_size",
    "attention_bias", "partial_rotary_factor", "is_neox_style", "rope_is_neox_style", "sliding_window",
    "use_sliding_window", "layer_types", "q_lora_rank", "qk_head_dim",
}  # fmt: skip
"""All keys of the layers."""
BOOKKEEPING = {
    *PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(),
    "architectures", "auto_map", "custom_pipelines", "name_or_path", "torch_dtype", "tokenizer_class",
    "attn_implementation", "_attn_implementation_autoset", "transformers_weights", "quantization_config",
    "compression_config", "pretraining_tp", "initializer_range",
    "target_model_type", "target_model_name", "target_model_path", "target_vocab_size", "num_target_layers",
    "finetuning_task", "is_decoder", "prefix", "torchscript", "tf_legacy_loss", "use_bfloat16", "max_window_layers",
    "sep_token_id", "task_specific_params", "tie_encoder_decoder", "num_beam_groups", "tie_word_embeddings", "dtype",
    SPECULATORS, "speculators_version", "speculators_config", "has_no_defaults_at_init", "speculator_config",
    "transformer_layer_config", "transformer_layer_architecture", "model", "eagle_config", "dflash_config",
    "max_seq_len", "model_max_length", "num_nextn_predict_layers", "num_lookahead_tokens",
    "method", "draft_arch", "draft_layer_init_from_target",
}  # fmt: skip
"""Names, ids, formats of numbers, provenance, and options of generation with a whole model."""
TENSORS_DECIDE = {
    "num_local_experts", "num_experts_per_tok", "experts_per_token", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "use_qk_norm", "truncated_vocab_size", "has_lm_head", "use_last_layernorm",
    "use_input_layernorm_in_first_layer", "parallel_draft_heads_num_layers", "num_eagle_features", "fc_input_size",
    "num_aux_hidden_states", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_layer_freq",
    "first_k_dense_replace", "n_group", "topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor",
    "scoring_func", "seq_aux", "aux_loss_alpha", "ep_size",
}  # fmt: skip
"""Mixtures, norms and matrices, which the checkpoint's tensors show."""
TRAINING = re.compile("(^|_)(loss|train|training|optimizer|lr|seed|dropout|anchors)(_|$)")
"""Names that only a training reads."""
FACTOR = re.compile("(scale|scaling|multiplier|factor)$")
ONLY = {
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (0, 1),
    "next_layer_regular": (False, True),
    "position_embedding_type": ("", "rope"),
}
"""Keys that are known with these values, or without any."""
INNER = ("eagle_config", "dflash_config", "transformer_layer_config", "model")
"""Objects within a config whose keys are looked at, too."""
MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""Keys of RoPE with positions of several axes, which are equal in a text: RoPE of one axis is the same there."""
SLIDING = "sliding_attention"


class DraftConfig:
    """A draft's ``config.json``: flat, or with the layers' keys in an inner object (speculators, vLLM).

    keys: which a family of drafts has, besides the keys of their layers.
    latent: its tensors are the ones of multi-head latent attention. Its keys do not tell: heads with grouped
        queries may carry the keys of a target with MLA.
    """

    only = ONLY
    inner = "eagle_config"
    """The object with further flags."""
    partial_rope = True
    """RoPE may turn a part of each head."""

    def __init__(self, raw: dict, keys: Collection[str], latent: bool = False):
        self.raw, self.keys, self.latent = raw, keys, latent
        self.speculators = SPECULATORS in raw
        nested = raw.get("transformer_layer_config") if self.speculators else raw.get("model")
        self.nested = isinstance(nested, dict)
        self.layer = dict(nested) if self.nested else dict(raw)
        self.notes = self._flatten_rope()
        self.flags = raw[self.inner] if isinstance(raw.get(self.inner), dict) else {}
        self.sections: tuple[dict, ...] = (raw, self.flags)
        self.count = self.layer.get("num_hidden_layers") or 1
        self.architectures = raw.get("architectures") or []
        self.deepspec = "Qwen3Eagle3Model" in self.architectures

    def _flatten_rope(self) -> list[str]:
        """Leave the RoPE of one axis that a draft was trained with; what was left out, for the report.

        Where RoPE is said for each type of layer, speculators' drafts have the RoPE of sliding layers
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
                notes = ["multimodal RoPE: the positions are as in a text, equal on all axes"]
            self.layer[name] = flat
        return notes

    def get(self, name: str, default=None):
        """A flag, from the first of the sections that has it."""
        return next((section[name] for section in self.sections if section.get(name) is not None), default)

    def refuse_unknown_keys(self) -> None:
        """ValueError, naming the key, if it asks for anything that is not known."""
        known = LAYERS | BOOKKEEPING | TENSORS_DECIDE | {*self.keys}
        for section in ("", *INNER):
            keys = self.raw.get(section) if section else self.raw
            for name, value in keys.items() if isinstance(keys, dict) else ():
                path = f"{section}.{name}" if section else name
                if name in self.only:
                    if value is not None and value not in self.only[name]:
                        raise ValueError(f"draft: its config has {path} {value!r}, which is not built here")
                elif name not in known and not TRAINING.search(name) and not _neutral(name, value):
                    raise ValueError(
                        f"draft: its config has {path} {value!r}, which is not known here and may change what the "
                        "draft computes; if it does not, take it out of config.json"
                    )

    def with_rope(self, parameters: dict) -> "DraftConfig":
        """The same with other `parameters` of RoPE, as transformers names them."""
        other = copy.copy(self)
        other.layer = {**self.layer, "rope_theta": None, "rope_scaling": None, "rope_parameters": parameters}
        return other

    def overridden(self, overrides: dict) -> "DraftConfig":
        """The same with the rope_theta that `overrides` ask for, if they do."""
        if "rope_theta" not in overrides:
            return self
        return self.with_rope({**self.llama().rope_parameters, "rope_theta": overrides["rope_theta"]})

    def llama(self) -> LlamaConfig:
        """Sizes, activation and RoPE of the draft's layers; ValueError if they cannot be built from it."""
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", *(LATENT_FIELDS if self.latent else ()))
        missing = [name for name in needed if self.layer.get(name) is None]
        if missing:
            raise ValueError(f"draft: its config has no {', '.join(missing)}; it has {', '.join(sorted(self.layer))}")
        fields = {name: self.layer[name] for name in FIELDS if self.layer.get(name) is not None}
        if self.latent:
            fields["head_dim"] = self.layer["qk_rope_head_dim"]  # the part of a head that RoPE turns
        with valid():
            config = LlamaConfig(**fields)
            rope = config.rope_parameters
            check_rope_theta("rope_theta", rope["rope_theta"])
            partial = self.layer.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
            rope["partial_rotary_factor"] = partial
            rotary(config, torch.device("cpu"))
            ACT2FN[config.hidden_act]
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

        def has(*parts: str) -> bool:
            return any(f"blocks.0.self_attn.{part}" in names for part in parts)

        qwen3 = self.deepspec or (self.nested and self.layer.get("model_type") == "qwen3")
        return LayerKnobs(
            num_layers=self.count,
            qkv_bias=bool(self.get("qkv_bias") or self.layer.get("qkv_bias"))
            or has("q_proj.bias", "k_proj.bias", "v_proj.bias"),
            output_bias=has("o_proj.bias"),
            qk_norm=qwen3 or has("q_norm.weight", "k_norm.weight"),
            windows=self.windows,
            latent=self._latent_sizes() if self.latent else None,
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; () if none has one."""
        types = self.layer.get("layer_types") or []
        if not types and self.layer.get("use_sliding_window"):
            types = [SLIDING] * self.count
        window = self.layer.get("sliding_window")
        return tuple(window if layer_type == SLIDING else None for layer_type in types[: self.count])

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


class Taps(NamedTuple):
    """The states that an EAGLE-3 head reads.

    why: how they follow from the config, for the report.
    other: another meaning that the config's list may have.
    """

    taps: tuple[int, ...]
    why: str
    other: tuple[int, ...] | None = None


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
    else:
        inputs, outputs = tuple(before), tuple(i + 1 for i in before)
        listed = f"eagle_aux_hidden_state_layer_ids {before}"
        if config.speculators:
            reading = Taps(inputs, f"{listed}, inputs of layers")
        elif before[:1] == [1]:
            reading = Taps(outputs, f"{listed}, which starts with 1, as outputs of layers: one more", inputs)
        else:
            reading = Taps(inputs, f"{listed}, which does not start with 1, as inputs of layers", outputs)
    check_taps(reading.taps, count, num_layers)
    return reading if _has(reading.other or (), num_layers) else reading._replace(other=None)


def override_taps(overrides: dict, default: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The taps that `overrides` ask for, or else `default`; ValueError if the target has no such states."""
    taps = tuple(overrides.get("taps", default))
    if len(taps) != len(default):
        raise ValueError(f"taps: this head reads {len(default)} state(s), got {len(taps)}")
    numbered = tuple(tap for tap in taps if tap != FINAL)
    check_taps(numbered, len(numbered), num_layers)
    return taps


def check_taps(taps: tuple[int, ...], count: int, num_layers: int, noun: str = "head") -> None:
    """ValueError unless these are the `count` states that fc joins, of a target with `num_layers` layers."""
    if len(taps) != count:
        raise ValueError(f"draft: its fc reads {count} states of the target, its config names {len(taps)}")
    if not _has(taps, num_layers):
        raise ValueError(
            f"draft: it reads states {comma_separated(taps)} of its target (0: the embeddings), this model has "
            f"{num_layers} layers; take the {noun} of this model"
        )


def _has(taps: Iterable[int], num_layers: int) -> bool:
    return all(0 <= tap <= num_layers for tap in taps)


@contextmanager
def valid() -> Iterator[None]:
    """A context in which an error of transformers about a value of a config becomes a ValueError about the draft."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"draft: its config is not valid: {' '.join(str(error).split())}") from error


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


def check_rope_theta(name: str, value) -> float:
    """`value` as a float; TypeError or ValueError unless it is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a positive number, not {type(value).__name__}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive, finite number, not {value}")
    return float(value)


def _neutral(name: str, value) -> bool:
    """True if `value` switches nothing on."""
    if isinstance(value, (int, float)):
        return value == 0 or (value == 1 and FACTOR.search(name) is not None and not isinstance(value, bool))
    return value is None or value in ("", [], {})
