"""The format of EAGLE-3 heads: SafeAILab's, SpecForge's, vLLM's, speculators' and DeepSpec's become an `Eagle3Head`."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..modules.eagle import Eagle3Head
from ..modules.layers import rotary
from .config_keys import SPECULATORS, refuse_unknown_keys
from .describe import comma_separated, describe_layers
from .eagle_config import DraftConfig, find_taps, override_taps, with_rope_theta
from .files import Checkpoint
from .fill import fill_module, read_draft_to_target
from .source import Source
from .target import Target, likeness

OVERRIDES = ("rope_theta", "taps", "norm_before_residual", "recycle_normed")

REFERENCE_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""What the reference trainer of EAGLE-3 rotates by, whatever its config says."""


def detect(source: Source) -> bool:
    """Whether the config says so, or the first layer reads an embedding beside a state."""
    said = source.config.get(SPECULATORS)
    if said is not None:
        return said == "eagle3"
    reads = source.shape("blocks.0.self_attn.q_proj.weight")[-1]
    writes = source.shape("blocks.0.self_attn.o_proj.weight")[0]
    return "blocks.0.hidden_norm.weight" in source.our_names or 0 < reads == 2 * writes


def read(
    source: Source, target: Target, overrides: dict, kind: type[Eagle3Head] = Eagle3Head, also: Collection[str] = ()
) -> Eagle3Head:
    """An EAGLE-3 head. overrides: rope_theta, taps, norm_before_residual, recycle_normed.

    kind: its class. also: keys of the config that are known besides. ValueError if anything does not fit.
    """
    refuse_unknown_keys(source.config, also=also)
    checkpoint, names = source.checkpoint, source.our_names
    config = with_rope_theta(DraftConfig(source.config), overrides)
    feature_size = config.get("target_hidden_size", config.layer.get("hidden_size"))
    target.check(feature_size, config.layer.get("vocab_size"))
    llama, knobs, flags = config.llama(), config.layer_knobs(names), _flags(config, names)
    count = _count_states(checkpoint, names, feature_size) if flags["fc"] else 1
    reading = find_taps(config, target.num_layers, count)
    taps = override_taps(overrides, reading.taps, target.num_layers)
    flags.update({name: bool(overrides[name]) for name in flags if name in overrides})
    embedding = _embedding(checkpoint, config, names, target)
    head_weight, rows = _output(checkpoint, config, names, target)
    with torch.device("meta"):
        head = kind(llama, embedding, taps, feature_size, head_weight, rows, knobs, **flags)
    draft_to_target = read_draft_to_target(checkpoint, names, head.head_weight.shape[0], target.vocab_size)
    fill_module(head, checkpoint, names, target)
    head.draft_to_target = None if draft_to_target is None else draft_to_target.to(embedding.device)
    head.open_knobs = {
        "taps": [(f"taps {comma_separated(other)}", {"taps": other}) for other in reading.others],
        "recycle_normed": _other_recycling(config, flags["recycle_normed"]),
        "rope_theta": _other_rope(config, embedding.device),
    }
    head.open_knobs = {knob: others for knob, others in head.open_knobs.items() if knob not in overrides}
    head.flavour = kind.flavour + (" (speculators)" if config.speculators else " (DeepSpec)" if config.deepspec else "")
    own = "the target's" if rows is None else f"its own, {rows} of {target.vocab_size} tokens"
    head.report = [
        f"{head.flavour} head from {checkpoint.source}",
        f"reads states {comma_separated(taps)} ({'as told' if 'taps' in overrides else reading.why})",
        ", ".join(f"{name}={value}" for name, value in flags.items()),
        describe_layers(llama, knobs),
        "embedding: " + ("the target's" if embedding is target.embedding else "its own"),
        f"output matrix: {own}",
        *checkpoint.ignored,
    ]
    return head.eval()


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


def _other_rope(config: DraftConfig, device: torch.device) -> list[tuple[str, dict]]:
    """The other meaning of the RoPE in the config of an EAGLE-3 head: that its trainer did not look at it."""
    reference = config.with_rope(REFERENCE_ROPE).llama()
    if config.speculators or config.deepspec or reference.rope_parameters == config.llama().rope_parameters:
        return []
    return [(f"rope_theta={REFERENCE_ROPE['rope_theta']:g}", {"rotary_emb": rotary(reference, device)})]
