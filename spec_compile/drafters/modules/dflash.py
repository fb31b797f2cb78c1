"""The draft of DFlash (block diffusion for flash speculative decoding, arXiv:2602.06036): a block of tokens at once.

A block is the last committed token and masks after it. Its layers attend to the block itself and to a context: keys
and values that each layer makes of the target's states at the committed tokens, which nothing ever changes. So only the
last token of the text is fed to the draft, and a block is drafted in one forward.

Shapes: B rows, T slots, h the target's hidden size, which is the draft's, V the vocabulary, Vd the words it can draft.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

from ...runtime.state import State
from ..checkpoints.config import SLIDING, SPECULATORS, DraftConfig, check_taps, comma_separated, describe_layers, valid
from ..checkpoints.draft_files import DraftFiles
from ..checkpoints.files import Target, likeness, load_pickled
from ..shared_draft import DraftWeights
from ..trees.propose import BlockProposer
from .layers import LayerKnobs, rotary


class DFlashDraft(nn.Module):
    """A DFlash draft: ``project`` the target's states for the context, then ``forward`` over a block.

    embedding [V, h], head_weight [Vd, h], draft_to_target [Vd]: see `eagle.Head`.
    mask_embedding [h]: of the mask (None: its row of the embedding).

    taps: the target's states that it reads, numbered as in `eagle.Head`.
    block_size: slots of a block it was trained with.
    sample_from_anchor: slot j of a block at position p drafts the token at p + j + 1, so that there are as many drafts
    as slots (DSpark, DeepSpec); else it drafts the token at p + j, and the first slot drafts none.
    causal: True for each layer whose slots see only the slots before them in the block.
    embedding_scale: factor of the block's embeddings.
    output_scale, softcap: logits become ``softcap * tanh(output_scale * logits / softcap)``.
    """

    flavour = "DFlash"

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        head_weight: Tensor,
        taps: tuple[int, ...],
        block_size: int,
        mask_token_id: int,
        layer: LayerKnobs,
        sample_from_anchor: bool = False,
        causal: tuple[bool, ...] = (),
        embedding_scale: float = 1.0,
        output_scale: float = 1.0,
        softcap: float | None = None,
    ):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_size, self.taps, self.block_size, self.mask_token_id = size, tuple(taps), block_size, mask_token_id
        self.sample_from_anchor, self.causal = sample_from_anchor, causal or (False,) * layer.num_layers
        self.embedding_scale, self.output_scale, self.softcap = embedding_scale, output_scale, softcap
        self.embedding, self.head_weight = embedding, head_weight
        self.register_parameter("mask_embedding", None)
        self.register_buffer("draft_to_target", None, persistent=False)
        self.fc = nn.Linear(len(taps) * size, size, bias=False)
        self.hidden_norm, self.norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.blocks = nn.ModuleList(layer.make(config, number) for number in range(layer.num_layers))
        self.rotary_emb = rotary(config, embedding.device)
        self.report: list[str] = []

    @property
    def first(self) -> int:
        """The first slot of a block that drafts."""
        return 0 if self.sample_from_anchor else 1

    def project(self, features: list[Tensor]) -> Tensor:
        """The tapped states, each [B, T, h], in the order of `taps` -> the context [B, T, h]."""
        return self.hidden_norm(self.fc(torch.cat(features, dim=-1)))

    def forward(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """input_ids, positions [B, T] int64 of blocks -> (logits [B, T, Vd],), also for a slot that drafts nothing."""
        return (self.logits(self.states(input_ids, positions)),)

    def states(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The normed states [B, T, h] that the logits come from."""
        x = F.embedding(input_ids, self.embedding)
        if self.mask_embedding is not None:
            x = torch.where((input_ids == self.mask_token_id)[:, :, None], self.mask_embedding, x)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        rope = self.rotary_emb(x, positions)
        for block in self.blocks:
            x = block(x, rope)
        return self.norm(x)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [B, T, Vd] of normed states."""
        logits = F.linear(normed, self.head_weight) * self.output_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def describe(self) -> list[str]:
        """Lines about its further parts, for its report."""
        return []

    def proposer(self, *how) -> BlockProposer:
        """Proposes trees by the output of `forward`. how: the arguments of `BlockProposer`."""
        return BlockProposer(*how)

    def propose(self, proposer: BlockProposer, state: State, logits: Tensor) -> None:
        """Propose trees below the last committed tokens. logits: the output of `forward`."""
        proposer.propose(state, logits, self.first, self.draft_to_target)


class ContextProjection(nn.Module):
    """Makes the keys and values of the context of all layers in one product.

    It holds the layers' key and value projections a second time, stacked.

    weights: the copies of the draft's matrices; the stacked matrix may have one, too.
    parts: equal stretches that the key-value heads are cut into.
    part: the stretch that it holds.
    """

    def __init__(self, draft: DFlashDraft, weights: DraftWeights, parts: int = 1, part: int = 0):
        super().__init__()
        self.parts, self.part = parts, part
        first = draft.blocks[0].self_attn
        self.draft, self.head_dim, self.eps = draft, first.head_dim, first.k_norm.variance_epsilon
        for name, value in self._stacked().items():
            self.register_buffer(name, value, persistent=False)
        self.copy = weights.linear(self.weight, self.bias)

    def _stacked(self) -> dict[str, Tensor | None]:
        layers = [block.self_attn for block in self.draft.blocks]
        linears = [linear for layer in layers for linear in (layer.k_proj, layer.v_proj)]
        biased = linears[0].bias is not None
        return {
            "weight": torch.cat([self._rows(linear.weight) for linear in linears]),
            "bias": torch.cat([self._rows(linear.bias) for linear in linears]) if biased else None,
            "key_norm": torch.stack([layer.k_norm.weight.detach() for layer in layers])[:, None],
        }

    def _rows(self, tensor: Tensor) -> Tensor:
        """The rows of a projection for the stretch of heads."""
        return tensor.detach().chunk(self.parts)[self.part]

    def refresh(self) -> None:
        """The draft's projections have changed: stack them again."""
        for name, value in self._stacked().items():
            if value is not None:
                getattr(self, name).copy_(value)

    def forward(self, features: list[Tensor], positions: Tensor) -> list[Tensor]:
        """The tapped states [B, T, h] of tokens at positions [B, T] -> key, value, key, ... of each layer in turn,
        [B, Hkv, T, D]."""
        x = self.draft.project(features)
        out = F.linear(x, self.weight, self.bias) if self.copy is None else self.copy(x)
        parts = out.unflatten(2, (len(self.key_norm), 2, -1, self.head_dim))
        keys, values = parts.unbind(dim=3)  # [B, T, layers, Hkv, D]
        wide = keys.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        keys = self.key_norm * normed.to(keys.dtype)
        cos, sin = (angle[:, :, None, None] for angle in self.draft.rotary_emb(x, positions))
        keys = keys * cos + rotate_half(keys) * sin
        return [part[:, :, i].transpose(1, 2) for i in range(keys.shape[2]) for part in (keys, values)]


# Its format, by whoever published it; `contrib` adds the formats of its kin.

MUSE = "muse_glimmer_assistant"
"""The ``model_type`` of the drafts that transformers defines: ``MuseGlimmerAssistantModel``."""
FULL = "full_attention"
NAMES = {"dflash": "DFlash"}
"""speculators' name of a kind of draft -> a part of the names of its architectures."""
KIN: list[type["DFlashConfig"]] = []
"""Configs of drafts like DFlash; the first whose ``fits(files)`` is true is taken. `contrib` adds some."""


DFLASH = {
    "block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids",
    "num_target_layers", "sample_from_anchor", "shift_label", "is_causal", "causal", "sliding_window_non_causal",
    "use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier", "final_logit_softcapping",
}  # fmt: skip
"""Keys besides the keys of the layers, at the top or in dflash_config."""


class DFlashConfig(DraftConfig):
    """The ``config.json`` of a draft, whose flags may lie in dflash_config.

    drafts_first: True if the first slot of a block drafts, too, unless the config says otherwise.
    """

    only = DraftConfig.only | {
        "projector_type": ("dflash",),
        "attention_sink_bias": (False,),
        "add_swa_attention_sink_bias": (False,),
        "attention_value_scale": (1,),
        "attention_mode": ("gqa", "mha"),
        "use_aux_hidden_state": (True,),
    }
    inner = "dflash_config"
    partial_rope = False
    drafts_first = False

    def __init__(self, raw: dict, keys: Collection[str] = DFLASH):
        super().__init__(of_transformers(raw) if raw.get("model_type") == MUSE else raw, keys)
        self.sections = (self.flags, self.raw, self.layer)

    def integer(self, name: str, least: int) -> int:
        """A flag that must be there; ValueError unless it is an integer of at least `least`."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"draft: its config must have a {name} of {least} or more, it has {value!r}")
        return value

    @property
    def sample_from_anchor(self) -> bool:
        """True if the first slot of a block drafts, too."""
        return bool(self.get("sample_from_anchor", self.get("shift_label", self.drafts_first)))

    def refuse_unknown_keys(self) -> None:
        if any(name.startswith("Gemma4") for name in self.architectures):
            raise ValueError(
                f"draft: {self.architectures[0]} has layers of Gemma 4, which drafts are not built with here"
            )
        super().refuse_unknown_keys()

    def layer_knobs(self, names: dict[str, str]) -> LayerKnobs:
        knobs = replace(super().layer_knobs(names), qk_norm=True)
        return replace(knobs, qkv_bias=True, output_bias=True) if self.get("attention_bias") else knobs

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
        """The draft without weights. rows: tokens that it can draft. Other arguments: see `DFlashDraft`."""
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
    with valid():
        config = AutoConfig.for_model(**raw).to_dict()
        return config | {"sliding_window": config["sliding_window"] + 1, "sliding_window_non_causal": True}


MASK_FILE = "mask_embedding.pt"


def is_dflash(files: DraftFiles) -> bool:
    """True if the config says DFlash, or one of its variants."""
    config = files.config
    said = config.get(SPECULATORS) in NAMES or config.get("model_type") == MUSE or "dflash_config" in config
    return said or any(name in files.architectures for name in NAMES.values())


def is_loaded_dflash(draft: object) -> bool:
    """True for a DFlash draft of transformers that is loaded already."""
    return isinstance(draft, PreTrainedModel) and draft.config.model_type == MUSE


def read_dflash(files: DraftFiles, target: Target, overrides: dict) -> DFlashDraft:
    """A DFlash draft. overrides: see `DraftFormat`. ValueError if anything does not fit."""
    # Read the config, which must fit the target.
    kind = next((kind for kind in KIN if kind.fits(files)), DFlashConfig)
    config = kind(files.config)
    config.refuse_unknown_keys()
    target.check(config.layer.get("hidden_size"), config.layer.get("vocab_size"))
    target.check(config.get("target_hidden_size"), None)
    taps, why = _taps(config, target, files.count_states(target.hidden_size))
    block_size, mask_token_id = config.integer("block_size", 2), config.integer("mask_token_id", 0)
    if mask_token_id >= len(target.embedding):
        raise ValueError(
            f"draft: its mask token {mask_token_id} is outside the {len(target.embedding)} rows of the model's "
            "embedding; take the draft of this model"
        )
    knobs, causal = config.layer_knobs(files.names), config.causal
    for window, sees_before in zip(knobs.windows, causal):
        if window is not None and window < block_size and not sees_before:
            raise ValueError(f"draft: its window of {window} is shorter than its blocks of {block_size}, both ways")
    # Make the draft without weights, and fill it.
    llama = config.overridden(overrides).llama()
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
    if "mask_embedding" in files.checkpoint.shapes:
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
