"""The format of DFlash drafts, by whoever published them; `contrib` adds those of its kin."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from ..modules.dflash import DFlashDraft
from ..modules.layers import LayerKnobs
from .config import (
    DFLASH,
    INVALID,
    SPECULATORS,
    VARIANTS,
    DraftConfig,
    check_taps,
    comma_separated,
    describe_layers,
    invalid,
    refuse_unknown_keys,
    with_rope_theta,
)
from .draft_files import DraftFiles
from .files import Target, likeness, load_pickled

MUSE = "muse_glimmer_assistant"
"""The ``model_type`` of the drafts that transformers defines: ``MuseGlimmerAssistantModel``."""
SLIDING, FULL = "sliding_attention", "full_attention"
NAMES = {"dflash": "DFlash"}
"""speculators' name of a kind of draft -> a part of the names of its architectures."""
KIN: list[type["DFlashConfig"]] = []
"""Configs of drafts like those of DFlash; the first whose ``fits(files)`` is true is taken. `contrib` adds some."""


class DFlashConfig(DraftConfig):
    """The ``config.json`` of a draft, whose flags may lie in dflash_config.

    keys: further keys that it may have.
    variants: further values of keys in VARIANTS.
    drafts_first: True if the first slot of a block drafts, too, unless the config says otherwise.
    """

    partial_rope = False
    keys: Collection[str] = ()
    variants: dict[str, tuple[str, ...]] = {}
    drafts_first = False

    def __init__(self, raw: dict):
        raw = of_transformers(raw) if raw.get("model_type") == MUSE else raw
        super().__init__(raw)
        inner = raw.get("dflash_config")
        self.flags = inner if isinstance(inner, dict) else {}
        self.count = self.layer.get("num_hidden_layers") or 1

    def get(self, name: str, default=None):
        """A flag, from dflash_config, the config itself, or that of its layers."""
        sections = (self.flags, self.raw, self.layer)
        return next((section[name] for section in sections if section.get(name) is not None), default)

    def integer(self, name: str, least: int) -> int:
        """A flag that must be there; ValueError unless it is an integer of at least `least`."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"draft: its config must have a {name} of {least} or more, it has {value!r}")
        return value

    @property
    def sample_from_anchor(self) -> bool:
        """True if the first slot of a block drafts, too."""
        for name in ("sample_from_anchor", "shift_label"):
            if self.get(name) is not None:
                return bool(self.get(name))
        return self.drafts_first

    def refuse_variants(self) -> None:
        """ValueError, naming the field, if a block computes something that is not built here."""
        for name, values in VARIANTS.items():
            value = self.get(name)
            if value is not None and value not in (*values, *self.variants.get(name, ())):
                raise ValueError(f"draft: its config has {name} {value!r}, a variant of DFlash that is not built here")
        if any(name.startswith("Gemma4") for name in self.architectures):
            raise ValueError(
                f"draft: {self.architectures[0]} has layers of Gemma 4, which drafts are not built with here"
            )
        refuse_unknown_keys(self.raw, {*DFLASH, *VARIANTS, *self.keys})

    def layer_knobs(self, names: dict[str, str]) -> LayerKnobs:
        """Knobs of the layers. The tensors show which biases there are; the config may ask for more."""
        biased = bool(self.get("attention_bias"))
        return LayerKnobs(
            num_layers=self.count,
            qkv_bias=biased or "blocks.0.self_attn.q_proj.bias" in names,
            output_bias=biased or "blocks.0.self_attn.o_proj.bias" in names,
            qk_norm=True,
            windows=self.windows,
        )

    @property
    def types(self) -> list[str]:
        """``layer_types``, an entry a layer; ValueError if it has another length."""
        types = self.get("layer_types")
        if types is None and self.get("use_sliding_window") and not self.get("use_swa"):
            raise ValueError("draft: its config has use_sliding_window, and no layer_types to say which layers slide")
        types = types or [FULL] * self.count
        if len(types) != self.count or not set(types) <= {SLIDING, FULL}:
            raise ValueError(f"draft: its config must name {SLIDING} or {FULL} for each layer, it has {types}")
        return types

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer. With use_swa and no sliding layers (MiMo) all have one."""
        sliding = [layer_type == SLIDING for layer_type in self.types]
        if self.get("use_swa") and not any(sliding):
            sliding = [True] * self.count
        window = self.get("swa_window_size", self.get("sliding_window"))
        if any(sliding) and not window:
            raise ValueError("draft: its config has sliding layers, and neither sliding_window nor swa_window_size")
        return tuple(window if slides else None for slides in sliding)

    @property
    def causal(self) -> tuple[bool, ...]:
        """True for each layer that sees its block causally; if the config is silent, these are its sliding layers."""
        told = self.raw.get("is_causal")
        told = self.get("causal") if told is None else told
        if told is not None:
            return (bool(told),) * self.count
        return tuple(name == SLIDING and not self.get("sliding_window_non_causal") for name in self.types)

    def make(self, target: Target, rows: int, *arguments: Any, **named: Any) -> DFlashDraft:
        """The draft without weights. rows: tokens that it can draft. Other arguments are those of `DFlashDraft`."""
        return DFlashDraft(*arguments, **named)

    def ignore(self, files: DraftFiles, draft: DFlashDraft) -> None:
        """Leave out tensors of parts that the config does not enable."""

    def flavour(self, draft: DFlashDraft) -> str:
        """The name of the format, for reports."""
        return draft.flavour + (" (speculators)" if self.speculators else "")


def of_transformers(raw: dict) -> dict:
    """The config of a draft of transformers in the keys of the other formats. ValueError if transformers refuses it.

    transformers fills in what `raw` leaves out. Its sliding layers see both sides of a slot, ``sliding_window`` slots
    each (``create_bidirectional_sliding_window_mask``): a window of 8 here is one of 9 that counts the slot itself.
    """
    try:
        config = AutoConfig.for_model(**raw).to_dict()
        return config | {"sliding_window": config["sliding_window"] + 1, "sliding_window_non_causal": True}
    except INVALID as error:
        raise invalid(error) from error


OVERRIDES = ("rope_theta",)
MASK_FILE = "mask_embedding.pt"


def is_dflash(files: DraftFiles) -> bool:
    """True if the config is that of a DFlash draft, or of one of its variants."""
    config = files.config
    said = config.get(SPECULATORS) in NAMES or config.get("model_type") == MUSE or "dflash_config" in config
    return said or any(name in files.architectures for name in NAMES.values())


def is_loaded_dflash(draft: object) -> bool:
    """True for a DFlash draft of transformers that is loaded already."""
    return isinstance(draft, PreTrainedModel) and draft.config.model_type == MUSE


def drafts_blocks(assistant: object) -> bool:
    """True if what transformers calls an assistant, a module or a folder or a name on the hub, is a DFlash draft."""
    return is_dflash(DraftFiles(assistant)) if isinstance(assistant, (str, Path)) else is_loaded_dflash(assistant)


def read_dflash(files: DraftFiles, target: Target, overrides: dict) -> DFlashDraft:
    """A DFlash draft. overrides: of OVERRIDES. ValueError if anything does not fit."""
    # Read the config, which must fit the target.
    kind = next((kind for kind in KIN if kind.fits(files)), DFlashConfig)
    config = kind(files.config)
    config.refuse_variants()
    target.check(config.layer.get("hidden_size"), config.layer.get("vocab_size"))
    target.check(config.get("target_hidden_size"), None)
    taps, why = _taps(config, target, files.count_states(target.hidden_size))
    block_size, mask_token_id = config.integer("block_size", 2), _mask_token(config, target)
    knobs, causal = config.layer_knobs(files.names), config.causal
    for window, sees_before in zip(knobs.windows, causal):
        if window is not None and window < block_size and not sees_before:
            raise ValueError(f"draft: its window of {window} is shorter than its blocks of {block_size}, both ways")
    # Make the draft without weights, and fill it.
    llama = with_rope_theta(config, overrides).llama()
    output, rows = _output(files, config, target)
    with torch.device("meta"):
        draft = config.make(
            target, rows, llama, target.embedding,
            nn.Parameter(torch.zeros(rows, llama.hidden_size)) if output is None else output,
            taps, block_size, mask_token_id, knobs, config.sample_from_anchor, causal,
            embedding_scale=float(config.get("input_embedding_scale", 1)),
            output_scale=float(config.get("output_multiplier", 1)),
            softcap=float(config.get("final_logit_softcapping", 0)) or None,
        )  # fmt: skip
    target.skip_copy(files.checkpoint, files.names.get("embedding"), target.embedding)
    config.ignore(files, draft)
    for name in files.checkpoint.shapes:
        if name.startswith("verifier_"):
            files.checkpoint.ignore(name, "a copy of the target's")
    draft.draft_to_target = files.draft_to_target(rows, target)
    mask = _mask_embedding(files, draft)
    files.fill(draft, target)
    draft.mask_embedding = None if mask is None else nn.Parameter(mask.to(target.embedding), requires_grad=False)
    draft.flavour = config.flavour(draft)
    draft.report = [
        f"{draft.flavour} draft from {files.draft}",
        f"reads states {comma_separated(taps)} ({why})",
        f"blocks of {block_size}, masked by token {mask_token_id}{'' if mask is None else ', embedded on its own'}; "
        f"slot j drafts the token {'behind' if draft.sample_from_anchor else 'of'} its own place",
        f"{describe_layers(llama, knobs)}, {sum(causal)} of them causal{knobs.extras}",
        *config.notes,
        *draft.describe(),
        "embedding: the target's; output matrix: "
        + ("the target's" if output is not None else f"its own, {rows} of {target.vocab_size} tokens"),
        *files.checkpoint.ignored,
    ]
    return draft.eval()


def _mask_token(config: DFlashConfig, target: Target) -> int:
    token, rows = config.integer("mask_token_id", 0), target.embedding.shape[0]
    if token >= rows:
        raise ValueError(
            f"draft: its mask token {token} is outside the {rows} rows of the model's embedding; take the draft of "
            "this model"
        )
    return token


def _taps(config: DFlashConfig, target: Target, count: int) -> tuple[tuple[int, ...], str]:
    """The `count` states that a draft reads, and how they follow from the config, for the report.

    It reads the outputs of target_layer_ids (-1: the embeddings), or the inputs of aux_hidden_state_layer_ids; a config
    with neither means `spread_layers`.
    """
    layers = config.get("num_target_layers", target.num_layers)
    if layers != target.num_layers:
        raise ValueError(
            f"draft: it was made for a model of {layers} layers, {type(target.model).__name__} has "
            f"{target.num_layers}; take the draft of this model"
        )
    name = next((n for n in ("target_layer_ids", "aux_hidden_state_layer_ids") if config.get(n) is not None), None)
    ids = spread_layers(layers, config.count) if name is None else config.get(name)
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ValueError(f"draft: its config must have a list of layers as {name}, it has {ids!r}")
    inputs = name == "aux_hidden_state_layer_ids"
    taps = tuple(i if inputs else i + 1 for i in ids)
    check_taps(taps, count, layers, "draft")
    said = config.get("eagle_aux_hidden_state_layer_ids", list(taps))
    if said != list(taps):
        raise ValueError(
            f"draft: its config has eagle_aux_hidden_state_layer_ids {said}, inputs of layers, and names the states "
            f"{comma_separated(taps)} otherwise"
        )
    return taps, f"{name or 'the default'} {ids}, {'inputs of layers' if inputs else 'outputs of layers: one more'}"


def spread_layers(target_layers: int, layers: int) -> list[int]:
    """The layers whose outputs a draft of `layers` layers reads if its config does not say: as many as it has, evenly
    spread from the second to the last but two; a single one is in the middle.

    spread_layers(12, 3) gives [1, 5, 9].
    """
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def _output(files: DraftFiles, config: DFlashConfig, target: Target) -> tuple[Tensor | None, int]:
    """The output matrix, if it is the target's, and its rows. A draft has its own unless that is a copy."""
    rows = files.output_rows(config.get("draft_vocab_size"), config.layer["hidden_size"], target)
    if rows is None:
        return target.head_weight, target.vocab_size
    if likeness(files.checkpoint, files.names["head_weight"], target.head_weight) > 0.99:
        target.skip_copy(files.checkpoint, files.names["head_weight"], target.head_weight)
        return target.head_weight, rows
    return None, rows


def _mask_embedding(files: DraftFiles, draft: DFlashDraft) -> Tensor | None:
    """The embedding [h] of the mask, if it does not lie in the target's embedding (MiMo)."""
    if "mask_embedding" in files.checkpoint:
        value = files.checkpoint.take_weight("mask_embedding")
    else:
        path = files.fetch(MASK_FILE)
        if path is None:
            return None
        value = load_pickled(path)
        if isinstance(value, dict):
            if value.get("mask_token_id", draft.mask_token_id) != draft.mask_token_id:
                raise ValueError(
                    f"draft: {MASK_FILE} is for token {value['mask_token_id']}, its config says mask_token_id "
                    f"{draft.mask_token_id}"
                )
            value = value.get("embedding")
    if not isinstance(value, Tensor) or value.numel() != draft.hidden_size or not value.isfinite().all():
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"draft: the mask's embedding must be {draft.hidden_size} finite numbers, it is {got}")
    return value.reshape(-1)
