"""`load_dflash`: the DFlash draft in a folder or on the hub, whoever published it, read strictly."""

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..modules.dflash import DFlashDraft
from .config_keys import SPECULATORS, check_rope_theta
from .describe import comma_separated, describe_layers
from .dflash_config import DFlashConfig
from .eagle_config import with_rope_theta
from .files import Checkpoint, Fetch, load_pickled
from .fill import fill_module, read_draft_to_target
from .source import Source
from .target import Target, likeness
from .transitions import read_transition

OVERRIDES = ("rope_theta",)
MASK_FILE = "mask_embedding.pt"


def detect(source: Source) -> bool:
    """Whether the config is that of a DFlash draft, or of one of its variants."""
    said = source.config.get(SPECULATORS) in ("dflash", "dflash2", "dspark", "domino")
    return "dflash_config" in source.config or said or bool(re.search("DFlash|DSpark|Domino", source.architectures))


def load_dflash(draft, model: PreTrainedModel, rope_theta: float | None = None) -> DFlashDraft:
    """The DFlash draft that `draft` holds, on the device and in the dtype of `model`, its target.

    draft: a folder, a repository of the hub, or a `DFlashDraft`. rope_theta: in place of the config's.

    ValueError or TypeError if it is none, a variant that is not built here, or for another target, or if a tensor is
    missing, unknown or of another shape, all before weights are read; and then if one holds NaN or infinity.
    """
    target = Target.of(model)
    if rope_theta is not None:
        rope_theta = check_rope_theta("rope_theta", rope_theta)
    if isinstance(draft, nn.Module):
        return _check_loaded(draft, target, rope_theta)
    if not isinstance(draft, (str, Path)):
        raise TypeError(f"draft: expected a path, a repository of the hub or a DFlashDraft, got {type(draft).__name__}")
    source = Source(draft)
    if not detect(source):
        raise ValueError(
            f"draft: {draft} holds no DFlash draft: architectures {source.architectures or 'none'}, "
            f"model_type {source.config.get('model_type')!r}; heads of the EAGLE family go with algo='eagle' or "
            "'eagle3', whole models with algo='draft_model'"
        )
    return read(source, target, {} if rope_theta is None else {"rope_theta": rope_theta})


def _check_loaded(draft: nn.Module, target: Target, rope_theta: float | None) -> DFlashDraft:
    """A draft made elsewhere, if it fits the target."""
    if not isinstance(draft, DFlashDraft):
        raise TypeError(f"draft: expected a path, a repository of the hub or a DFlashDraft, got {type(draft).__name__}")
    if rope_theta is not None:
        raise TypeError("rope_theta: a draft that is already loaded is read as it is")
    target.check(draft.hidden_size, draft.head_weight.shape[0] if draft.draft_to_target is None else None)
    ours, theirs = ((weight.device, weight.dtype) for weight in (target.embedding, draft.fc.weight))
    if ours != theirs:
        raise ValueError(f"draft: it is on {theirs[0]} in {theirs[1]}, the model on {ours[0]} in {ours[1]}")
    return draft.eval()


def read(source: Source, target: Target, overrides: dict) -> DFlashDraft:
    """A DFlash draft. overrides: rope_theta. ValueError if anything does not fit."""
    config = DFlashConfig(source.config)
    config.refuse_variants()
    checkpoint, names = source.checkpoint, source.our_names
    target.check(config.layer.get("hidden_size"), config.layer.get("vocab_size"))
    target.check(config.get("target_hidden_size"), None)
    taps, why = _taps(config, target, _count_states(checkpoint, names, target.hidden_size))
    block_size, mask_token_id = config.whole("block_size", 2), _mask_token(config, target)
    knobs, causal = config.layer_knobs(names), config.causal
    for window, sees_before in zip(knobs.windows, causal):
        if window is not None and window < block_size and not sees_before:
            raise ValueError(f"draft: its window of {window} is shorter than its blocks of {block_size}, both ways")
    llama = with_rope_theta(config, overrides).llama()
    output, rows = _output(checkpoint, config, names, target)
    with torch.device("meta"):
        draft = DFlashDraft(
            llama, target.embedding, nn.Parameter(torch.zeros(rows, llama.hidden_size)) if output is None else output,
            taps, block_size, mask_token_id, knobs, config.sample_from_anchor, causal,
            embedding_scale=float(config.get("input_embedding_scale", 1)),
            output_scale=float(config.get("output_multiplier", 1)),
            softcap=float(config.get("final_logit_softcapping", 0)) or None,
            transition=read_transition(config, llama.hidden_size, target.vocab_size, rows),
        )  # fmt: skip
    _ignore_others(checkpoint, names, target)
    draft_to_target = read_draft_to_target(checkpoint, names, rows, target.vocab_size)
    mask = _mask_embedding(checkpoint, source.fetch, draft)
    fill_module(draft, checkpoint, names, target)
    ours = target.embedding
    draft.draft_to_target = None if draft_to_target is None else draft_to_target.to(ours.device)
    draft.mask_embedding = None if mask is None else nn.Parameter(mask.to(ours.device, ours.dtype), requires_grad=False)
    draft.flavour = _flavour(config, draft)
    draft.report = [
        f"{draft.flavour} draft from {checkpoint.source}",
        f"reads states {comma_separated(taps)} ({why})",
        f"blocks of {block_size}, masked by token {mask_token_id}{'' if mask is None else ', embedded on its own'}; "
        f"slot j drafts the token {'behind' if draft.sample_from_anchor else 'of'} its own place",
        f"{describe_layers(llama, knobs)}, {sum(causal)} of them causal"
        + (f", convolutions of {knobs.conv_taps} slots around both parts" if knobs.conv_taps else ""),
        *([] if draft.transition is None else [draft.transition.describe()]),
        "embedding: the target's; output matrix: "
        + ("the target's" if output is not None else f"its own, {rows} of {target.vocab_size} tokens"),
        *checkpoint.ignored,
    ]
    return draft.eval()


def _flavour(config: DFlashConfig, draft: DFlashDraft) -> str:
    """Whose format this is, for the report."""
    name = "JetSpec" if config.get("causal_head") else draft.flavour
    name = name if draft.transition is None else draft.transition.flavour
    return name + (" (speculators)" if config.speculators else " (DeepSpec)" if config.deepspec else "")


def _mask_token(config: DFlashConfig, target: Target) -> int:
    token, rows = config.whole("mask_token_id", 0), target.embedding.shape[0]
    if token >= rows:
        raise ValueError(
            f"draft: its mask token {token} is outside the {rows} rows of the model's embedding; take the draft of "
            "this model"
        )
    return token


def _ignore_others(checkpoint: Checkpoint, names: dict[str, str], target: Target) -> None:
    """Leave out what changes no draft: copies of the target's tensors, and foretelling of acceptance."""
    target.skip_copy(checkpoint, names.get("embedding", ""), target.embedding)
    for name in checkpoint.shapes:
        if name.startswith("confidence_head."):
            checkpoint.ignore(name, "it foretells acceptance")
        elif name.startswith("verifier_"):
            checkpoint.ignore(name, "a copy of the target's")


def _count_states(checkpoint: Checkpoint, names: dict[str, str], size: int) -> int:
    """How many states of `size` numbers fc joins."""
    if "fc.weight" not in names:
        raise ValueError(f"draft: {checkpoint.source} has no fc.weight")
    width = checkpoint.shapes[names["fc.weight"]][-1]
    if width % size:
        raise ValueError(
            f"draft: fc.weight reads {width} numbers, which is no multiple of the target's hidden size {size}; take "
            "the draft of this model"
        )
    return width // size


def _taps(config: DFlashConfig, target: Target, count: int) -> tuple[tuple[int, ...], str]:
    """The `count` states that a draft reads, and how that was found out.

    target_layer_ids are layers whose outputs it reads (-1: the embeddings), aux_hidden_state_layer_ids layers whose
    inputs; without either see `spread_layers`.
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
    if len(taps) != count:
        raise ValueError(f"draft: its fc reads {count} states of the target, its config names {len(taps)}")
    if not all(0 <= tap <= layers for tap in taps):
        raise ValueError(
            f"draft: it reads states {comma_separated(taps)} of its target (0: the embeddings), this model has "
            f"{layers} layers; take the draft of this model"
        )
    said = config.get("eagle_aux_hidden_state_layer_ids", list(taps))
    if said != list(taps):
        raise ValueError(
            f"draft: its config has eagle_aux_hidden_state_layer_ids {said}, inputs of layers, and names the states "
            f"{comma_separated(taps)} otherwise"
        )
    return taps, f"{name or 'the default'} {ids}, {'inputs of layers' if inputs else 'outputs of layers: one more'}"


def spread_layers(target_layers: int, layers: int) -> list[int]:
    """The layers whose outputs a draft of `layers` layers reads if its config does not say: as many, evenly from the
    second to the last but two; a single one in the middle."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def _output(
    checkpoint: Checkpoint, config: DFlashConfig, names: dict[str, str], target: Target
) -> tuple[Tensor | None, int]:
    """The output matrix, if it is the target's, and its rows. A draft has its own unless that is a copy."""
    said, name = config.get("draft_vocab_size"), names.get("head_weight")
    if name is None:
        if said not in (None, target.vocab_size):
            raise ValueError(f"draft: {checkpoint.source} has no lm_head.weight for its {said} tokens")
        return target.head_weight, target.vocab_size
    rows = checkpoint.shapes[name][0]
    if said is not None and rows != said:
        raise ValueError(f"draft: {name} has {rows} rows, its config says draft_vocab_size {said}")
    if likeness(checkpoint, name, target.head_weight) > 0.99:
        target.skip_copy(checkpoint, name, target.head_weight)
        return target.head_weight, rows
    return None, rows


def _mask_embedding(checkpoint: Checkpoint, fetch: Fetch, draft: DFlashDraft) -> Tensor | None:
    """The embedding [h] that stands for the mask, if it lies beside the target's embedding (MiMo)."""
    if "mask_embedding" in checkpoint:
        value = checkpoint.take_weight("mask_embedding")
    else:
        path = fetch(MASK_FILE)
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
