"""The format of DFlash drafts and their kin, by whoever published them."""

import re
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..modules.dflash import DFlashDraft
from .config import check_taps, comma_separated, describe_layers, with_rope_theta
from .config_keys import SPECULATORS
from .dflash_config import MUSE, DFlashConfig
from .draft_files import DraftFiles
from .files import load_pickled
from .target import Target, likeness

OVERRIDES = ("rope_theta",)
MASK_FILE = "mask_embedding.pt"


def is_dflash(files: DraftFiles) -> bool:
    """True if the config is that of a DFlash draft, or of one of its variants."""
    config, kin = files.config, ("dflash", "dflash2", "dspark", "domino")
    said = config.get(SPECULATORS) in kin or config.get("model_type") == MUSE or "dflash_config" in config
    return said or bool(re.search("DFlash|DSpark|Domino", files.architectures))


def is_loaded_dflash(draft: object) -> bool:
    """True for a DFlash draft of transformers that is loaded already."""
    return isinstance(draft, PreTrainedModel) and draft.config.model_type == MUSE


def drafts_blocks(assistant: object) -> bool:
    """True if what transformers calls an assistant, a module or a folder or a name on the hub, is a DFlash draft."""
    return is_dflash(DraftFiles(assistant)) if isinstance(assistant, (str, Path)) else is_loaded_dflash(assistant)


def read_dflash(files: DraftFiles, target: Target, overrides: dict) -> DFlashDraft:
    """A DFlash draft. overrides: of OVERRIDES. ValueError if anything does not fit."""
    config = DFlashConfig(files.config)
    config.refuse_variants()
    target.check(config.layer.get("hidden_size"), config.layer.get("vocab_size"))
    target.check(config.get("target_hidden_size"), None)
    taps, why = _taps(config, target, files.count_states(target.hidden_size))
    block_size, mask_token_id = config.integer("block_size", 2), _mask_token(config, target)
    knobs, causal = config.layer_knobs(files.names), config.causal
    for window, sees_before in zip(knobs.windows, causal):
        if window is not None and window < block_size and not sees_before:
            raise ValueError(f"draft: its window of {window} is shorter than its blocks of {block_size}, both ways")
    llama = with_rope_theta(config, overrides).llama()
    output, rows = _output(files, config, target)
    with torch.device("meta"):
        transition = config.transition(llama.hidden_size, target.vocab_size, rows)
        draft = DFlashDraft(
            llama, target.embedding, nn.Parameter(torch.zeros(rows, llama.hidden_size)) if output is None else output,
            taps, block_size, mask_token_id, knobs, config.sample_from_anchor, causal,
            embedding_scale=float(config.get("input_embedding_scale", 1)),
            output_scale=float(config.get("output_multiplier", 1)),
            softcap=float(config.get("final_logit_softcapping", 0)) or None,
            transition=transition, confidence=config.confidence(llama.hidden_size, transition),
        )  # fmt: skip
    _ignore_others(files, target, draft)
    draft.draft_to_target = files.draft_to_target(rows, target)
    mask = _mask_embedding(files, draft)
    files.fill(draft, target)
    draft.mask_embedding = None if mask is None else nn.Parameter(mask.to(target.embedding), requires_grad=False)
    draft.flavour = _flavour(config, draft)
    draft.report = [
        f"{draft.flavour} draft from {files.draft}",
        f"reads states {comma_separated(taps)} ({why})",
        f"blocks of {block_size}, masked by token {mask_token_id}{'' if mask is None else ', embedded on its own'}; "
        f"slot j drafts the token {'behind' if draft.sample_from_anchor else 'of'} its own place",
        f"{describe_layers(llama, knobs)}, {sum(causal)} of them causal"
        + (f", convolutions of {knobs.conv_taps} slots around both parts" if knobs.conv_taps else ""),
        *config.notes,
        *(part.describe() for part in (draft.transition, draft.confidence) if part is not None),
        "embedding: the target's; output matrix: "
        + ("the target's" if output is not None else f"its own, {rows} of {target.vocab_size} tokens"),
        *files.checkpoint.ignored,
    ]
    return draft.eval()


def _flavour(config: DFlashConfig, draft: DFlashDraft) -> str:
    """The name of the format, for the report."""
    name = "JetSpec" if config.get("causal_head") else draft.flavour
    name = name if draft.transition is None else draft.transition.flavour
    return name + (" (speculators)" if config.speculators else " (DeepSpec)" if config.deepspec else "")


def _mask_token(config: DFlashConfig, target: Target) -> int:
    token, rows = config.integer("mask_token_id", 0), target.embedding.shape[0]
    if token >= rows:
        raise ValueError(
            f"draft: its mask token {token} is outside the {rows} rows of the model's embedding; take the draft of "
            "this model"
        )
    return token


def _ignore_others(files: DraftFiles, target: Target, draft: DFlashDraft) -> None:
    """Leave out copies of the target's tensors, and a prediction of acceptance that the config does not enable."""
    checkpoint = files.checkpoint
    target.skip_copy(checkpoint, files.names.get("embedding"), target.embedding)
    for name in checkpoint.shapes:
        if name.startswith("confidence_head.") and draft.confidence is None:
            checkpoint.ignore(name, "it predicts acceptance, and the config has no enable_confidence_head")
        elif name.startswith("verifier_"):
            checkpoint.ignore(name, "a copy of the target's")


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
