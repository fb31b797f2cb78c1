"""EAGLE checkpoints: the tensors of each publisher, by our names, become an `EagleHead` or an `Eagle3Head`."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ..modules.heads import Eagle3Head, EagleHead, Head, LayerKnobs, rotary
from .config_keys import refuse_unknown_keys
from .eagle_config import DraftConfig, find_taps, override_taps
from .files import Checkpoint, Part
from .target import Target, likeness

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
]
"""From the names of SafeAILab, HASS, vLLM, SGLang, speculators and DeepSpec, in turn, to ours."""

PUBLISHED = {
    "head_weight": "lm_head.weight",
    "embedding_norm.weight": "embedding_layernorm.weight",
    "state_norm.weight": "hidden_states_layernorm.weight",
    "output_norm.weight": "pre_lm_head_layernorm.weight",
}
"""Names that stand by themselves, as they would be published."""

REFERENCE_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""What the reference trainer of EAGLE-3 rotates by, whatever its config says."""


def our_names(names: Iterable[str]) -> dict[str, str]:
    """Our name of each tensor of an EAGLE checkpoint -> its own."""
    found = {}
    for name in names:
        ours = name
        for pattern, replacement in RENAMES:
            ours = re.sub(pattern, replacement, ours)
        found[ours] = name
    return found


def read_eagle(checkpoint: Checkpoint, raw: dict, target: Target, overrides: dict) -> EagleHead:
    """An EAGLE-1 or EAGLE-2 head. overrides: rope_theta. ValueError if anything does not fit."""
    refuse_unknown_keys(raw)
    config = _override_rope(DraftConfig(raw), overrides)
    names = our_names(checkpoint.shapes)
    target.check(config.layer.get("hidden_size"), config.layer.get("vocab_size"))
    wants_bias = config.get("bias") or config.get("eagle_fc_bias") or config.get("fusion_bias")
    normed = bool(config.get("layernorms"))
    llama, knobs = config.llama(), config.layer_knobs(names)
    with torch.device("meta"):
        head = EagleHead(
            llama, target.embedding, target.head_weight, knobs,
            fc_bias=bool(wants_bias) or "fc.bias" in names,
            embedding_norm=normed or "embedding_norm.weight" in names,
            state_norm=bool(config.get("add_para_norm")) or "state_norm.weight" in names,
            input_norm=normed,
            output_norm=normed,
        )  # fmt: skip
    head.flavour = "EAGLE" + (" (speculators)" if config.speculators else " (vLLM)" if config.nested else "")
    target.skip_copy(checkpoint, names.get("embedding", ""), target.embedding)
    target.skip_copy(checkpoint, names.get("head_weight", ""), target.head_weight)
    _fill(head, checkpoint, names, target)
    fc = f"fc of [embedding; state] {'with' if head.fc.bias is not None else 'without'} a bias"
    head.report += ["reads the state after the target's final norm", fc, _rope_line(llama, knobs)]
    return _done(head, checkpoint, "embedding and output matrix: the target's")


def read_eagle3(checkpoint: Checkpoint, raw: dict, target: Target, overrides: dict) -> Eagle3Head:
    """An EAGLE-3 head. overrides: rope_theta, taps, norm_before_residual, recycle_normed.

    ValueError if anything does not fit.
    """
    refuse_unknown_keys(raw)
    config = _override_rope(DraftConfig(raw), overrides)
    names = our_names(checkpoint.shapes)
    feature_size = config.get("target_hidden_size", config.layer.get("hidden_size"))
    target.check(feature_size, config.layer.get("vocab_size"))
    llama, knobs, flags = config.llama(), config.layer_knobs(names), _flags(config, names)
    count = _count_states(checkpoint, names, feature_size) if flags["fc"] else 1
    found = find_taps(config, target.num_layers, count)
    taps = override_taps(overrides, found.taps, target.num_layers)
    flags.update({name: bool(overrides[name]) for name in flags if name in overrides})
    embedding = _embedding(checkpoint, config, names, target)
    head_weight, rows = _output(checkpoint, config, names, target)
    with torch.device("meta"):
        head = Eagle3Head(llama, embedding, taps, feature_size, head_weight, rows, knobs, **flags)
    draft_to_target = _draft_to_target(checkpoint, names, head.head_weight.shape[0], target.vocab_size)
    _fill(head, checkpoint, names, target)
    head.draft_to_target = None if draft_to_target is None else draft_to_target.to(embedding.device)
    head.open_knobs = {
        "taps": [(f"taps {_listed(other)}", {"taps": other}) for other in found.others],
        "recycle_normed": _other_recycling(config, flags["recycle_normed"]),
        "rope_theta": _other_rope(config, embedding.device),
    }
    head.open_knobs = {knob: others for knob, others in head.open_knobs.items() if knob not in overrides}
    head.flavour = "EAGLE-3" + (" (speculators)" if config.speculators else " (DeepSpec)" if config.deepspec else "")
    head.report = [
        f"reads states {_listed(taps)} ({'as told' if 'taps' in overrides else found.why})",
        ", ".join(f"{name}={value}" for name, value in flags.items()),
        _rope_line(llama, knobs),
        "embedding: " + ("the target's" if embedding is target.embedding else "its own"),
    ]
    own = "the target's" if rows is None else f"its own, {rows} of {target.vocab_size} tokens"
    return _done(head, checkpoint, f"output matrix: {own}")


def _flags(config: DraftConfig, names: dict[str, str]) -> dict[str, bool]:
    """The flags of `Eagle3Head`. Where a config is silent, the tensors that are there decide.

    ``norm_output: true`` means that the normed output goes round in speculators and its readers; in SpecForge it means
    the norm before the output matrix, which every EAGLE-3 head has.
    """
    flags = {
        "fc": config.get("use_aux_hidden_state", True) is not False,
        "fc_bias": "fc.bias" in names,
        "fc_norm": bool(config.get("fc_norm")) or "fc_norm.0.weight" in names,
        "norm_before_fc": bool(config.get("norm_before_fc")) or "input_norm.weight" in names,
        "norm_before_residual": bool(config.get("norm_before_residual", config.speculators)),
    }
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise ValueError("draft: fc_norm and norm_before_fc exclude each other, and it has both")
    specforge = "LlamaForCausalLMEagle3" in config.architectures and not (flags["fc_norm"] or flags["norm_before_fc"])
    recycle = config.get("return_hidden_post_norm") or (config.get("norm_output") and not specforge)
    return {**flags, "recycle_normed": bool(recycle)}


def _other_recycling(config: DraftConfig, recycle_normed: bool) -> list[tuple[str, dict]]:
    """The other meaning of ``norm_output``, unless its publisher is known (see `_flags`)."""
    if config.speculators or not config.get("norm_output"):
        return []
    return [(f"recycle_normed={not recycle_normed}", {"recycle_normed": not recycle_normed})]


def _count_states(checkpoint: Checkpoint, names: dict[str, str], feature_size: int) -> int:
    """How many states fc joins."""
    if "fc.weight" not in names:
        raise ValueError(
            f"draft: {checkpoint.source} has no fc.weight, and its config does not say use_aux_hidden_state: false"
        )
    width = checkpoint.shapes[names["fc.weight"]][-1]
    if width % feature_size:
        raise ValueError(
            f"draft: {names['fc.weight']} reads {width} numbers, which is no multiple of the target's hidden size "
            f"{feature_size}; take the head of this model"
        )
    return width // feature_size


def _embedding(checkpoint: Checkpoint, config: DraftConfig, names: dict[str, str], target: Target) -> Tensor:
    """The embedding a head uses: the target's, unless the head has another hidden size, or speculators trained it.

    A trained copy resembles the target's; one that does not was never filled by whoever exported it.
    """
    name, size, shared = names.get("embedding", "embed_tokens.weight"), config.layer["hidden_size"], target.embedding
    trained = name in checkpoint and config.get("embed_requires_grad") and likeness(checkpoint, name, shared) > 0.5
    if not trained and size == target.hidden_size:
        target.skip_copy(checkpoint, name, shared)
        return shared
    values = checkpoint.take_weight(name, (target.vocab_size, size))
    return nn.Parameter(values.to(shared.device, shared.dtype), requires_grad=False)


def _output(
    checkpoint: Checkpoint, config: DraftConfig, names: dict[str, str], target: Target
) -> tuple[Tensor | None, int | None]:
    """The output matrix, if it is the target's, or else the number of rows of the head's own."""
    said = config.get("draft_vocab_size")
    if "head_weight" in names:
        rows = checkpoint.shapes[names["head_weight"]][0]
        if said is not None and rows != said:
            raise ValueError(f"draft: {names['head_weight']} has {rows} rows, its config says draft_vocab_size {said}")
        return None, rows
    if said not in (None, target.vocab_size) or config.layer["hidden_size"] != target.hidden_size:
        raise ValueError(
            f"draft: {checkpoint.source} has no lm_head.weight; only a head of the target's hidden size and whole "
            "vocabulary can use the target's"
        )
    return target.head_weight, None


def _draft_to_target(checkpoint: Checkpoint, names: dict[str, str], rows: int, vocab_size: int) -> Tensor | None:
    """The target's id of each row of the output matrix: row + d2t[row], and where the mask t2d is set."""
    ids = torch.arange(rows)
    if "d2t" in names:
        ids = ids + checkpoint.take(names["d2t"], (rows,)).long()
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size or len(ids.unique()) < rows:
            raise ValueError(
                f"draft: d2t in {checkpoint.source} must lead each of {rows} rows to a token of its own below "
                f"{vocab_size} when the row's number is added; it leads to {int(ids.min())} to {int(ids.max())}, "
                f"{len(ids.unique())} of them distinct"
            )
    if "t2d" in names:
        kept = checkpoint.take(names["t2d"], (vocab_size,)).nonzero()[:, 0]
        ids = kept if "d2t" not in names and len(kept) == rows else ids
        if len(kept) and not torch.equal(kept, ids.sort().values):
            raise ValueError(f"draft: t2d in {checkpoint.source} keeps other tokens than its d2t and lm_head say")
    if rows == vocab_size and torch.equal(ids, torch.arange(rows)):
        return None
    if "d2t" not in names and "t2d" not in names:
        raise ValueError(
            f"draft: its output matrix has {rows} rows, the target {vocab_size} tokens, and {checkpoint.source} has no "
            "d2t to say which row is which token"
        )
    return ids


def _other_rope(config: DraftConfig, device: torch.device) -> list[tuple[str, dict]]:
    """The other meaning of the RoPE in the config of an EAGLE-3 head: that its trainer did not look at it."""
    reference = config.with_rope(REFERENCE_ROPE).llama()
    if config.speculators or config.deepspec or reference.rope_parameters == config.llama().rope_parameters:
        return []
    return [(f"rope_theta={REFERENCE_ROPE['rope_theta']:g}", {"rotary_emb": rotary(reference, device)})]


def _override_rope(config: DraftConfig, overrides: dict) -> DraftConfig:
    if "rope_theta" not in overrides:
        return config
    return config.with_rope({**config.llama().rope_parameters, "rope_theta": overrides["rope_theta"]})


def _fill(head: Head, checkpoint: Checkpoint, names: dict[str, str], target: Target) -> None:
    for name in checkpoint.shapes:
        if name.endswith("rotary_emb.inv_freq"):
            checkpoint.ignore(name, "computed from the config")
    empty = {name: tuple(value.shape) for name, value in head.state_dict().items() if value.is_meta}
    plan = {name: Part([names.get(name) or _published(name, names)], shape) for name, shape in empty.items()}
    checkpoint.fill(head, plan, target.embedding.dtype, target.embedding.device)


def _published(ours: str, names: dict[str, str]) -> str:
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


def _rope_line(llama: LlamaConfig, knobs: LayerKnobs) -> str:
    rope = dict(llama.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    windows = "" if not any(knobs.windows) else f", sliding windows {_listed(knobs.windows)}"
    return (
        f"{knobs.num_layers} layer(s): rope_theta={theta:g} ({kind}), qkv_bias={knobs.qkv_bias}, "
        f"qk_norm={knobs.qk_norm}{windows}"
    )


def _done(head: Head, checkpoint: Checkpoint, last: str) -> Head:
    head.report = [f"{head.flavour} head from {checkpoint.source}", *head.report, last, *checkpoint.ignored]
    return head.eval()


def _listed(values: Iterable) -> str:
    return ", ".join(map(str, values))
