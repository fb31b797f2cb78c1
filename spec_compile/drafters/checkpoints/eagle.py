"""The formats of the EAGLE family: EAGLE-1, EAGLE-2 and EAGLE-3, by whoever published them."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..modules.eagle import Eagle3Head, EagleHead
from ..modules.layers import rotary
from .config import (
    EAGLE,
    SPECULATORS,
    DraftConfig,
    Taps,
    comma_separated,
    describe_layers,
    find_taps,
    override_taps,
    refuse_unknown_keys,
    with_rope_theta,
)
from .draft_files import DraftFiles
from .files import Target, likeness

EAGLE_OVERRIDES = ("rope_theta",)
EAGLE3_OVERRIDES = ("rope_theta", "taps", "norm_before_residual", "recycle_normed")

REFERENCE_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""The RoPE of EAGLE-3's reference trainer, which does not read it from the config."""
LATENT = "blocks.0.self_attn.kv_"
"""How names of tensors of multi-head latent attention begin."""


def is_eagle(files: DraftFiles) -> bool:
    """True if the config says EAGLE, or if it is silent and fc joins two states of the head's own size."""
    said = files.config.get(SPECULATORS)
    if said is not None:
        return said == "eagle"
    fc = files.shape("fc.weight")
    return fc[0] > 0 and fc[-1] == 2 * fc[0]


def read_eagle(files: DraftFiles, target: Target, overrides: dict) -> EagleHead:
    """An EAGLE-1 or EAGLE-2 head. overrides: of EAGLE_OVERRIDES. ValueError if anything does not fit."""
    refuse_unknown_keys(files.config, EAGLE)
    names = files.names
    config = with_rope_theta(DraftConfig(files.config), overrides)
    target.check(config.layer.get("hidden_size"), config.layer.get("vocab_size"))
    wants_bias = config.get("bias") or config.get("eagle_fc_bias") or config.get("fusion_bias")
    normed, mistral = bool(config.get("layernorms")), files.is_mistral
    llama, knobs = config.llama(), config.layer_knobs(names)
    with torch.device("meta"):
        head = EagleHead(
            llama, target.embedding, target.head_weight, knobs,
            fc_bias=bool(wants_bias) or "fc.bias" in names, recycle_normed=mistral,
            embedding_norm=normed or "embedding_norm.weight" in names,
            state_norm=bool(config.get("add_para_norm")) or "state_norm.weight" in names,
            input_norm=normed or mistral,
            output_norm=normed or mistral,
        )  # fmt: skip
    origin = {" (Mistral)": mistral, " (speculators)": config.speculators, " (vLLM)": config.nested}
    head.flavour = "EAGLE" + next((name for name, is_it in origin.items() if is_it), "")
    target.skip_copy(files.checkpoint, names.get("embedding"), target.embedding)
    target.skip_copy(files.checkpoint, names.get("head_weight"), target.head_weight)
    files.fill(head, target)
    head.report = [
        f"{head.flavour} head from {files.draft}",
        "reads the state after the target's final norm",
        f"fc of [embedding; state] {'with' if head.fc.bias is not None else 'without'} a bias",
        describe_layers(llama, knobs),
        *config.notes,
        "embedding and output matrix: the target's",
        *files.checkpoint.ignored,
    ]
    return head.eval()


def is_eagle3(files: DraftFiles) -> bool:
    """True if the config says EAGLE-3, or if it is silent and the first layer reads an embedding next to a state."""
    said = files.config.get(SPECULATORS)
    if said is not None:
        return said == "eagle3"
    reads = max(files.shape(f"blocks.0.self_attn.{name}.weight")[-1] for name in ("q_proj", "kv_a_proj_with_mqa"))
    writes = files.shape("blocks.0.self_attn.o_proj.weight")[0]
    return "blocks.0.hidden_norm.weight" in files.names or 0 < reads == 2 * writes


def read_eagle3(
    files: DraftFiles,
    target: Target,
    overrides: dict,
    head_class: type[Eagle3Head] = Eagle3Head,
    also: Collection[str] = (),
) -> Eagle3Head:
    """An EAGLE-3 head. ValueError if anything does not fit.

    overrides: of EAGLE3_OVERRIDES.
    also: further keys of the config that are known.
    """
    # Read the config.
    latent = any(name.startswith(LATENT) for name in files.names)
    refuse_unknown_keys(files.config, {*EAGLE, *also, "rope_interleave"} if latent else {*EAGLE, *also})
    config = with_rope_theta(DraftConfig(files.config, latent), overrides)
    feature_size = config.get("target_hidden_size", config.layer.get("hidden_size"))
    target.check(feature_size, config.layer.get("vocab_size"))
    llama, knobs, flags = config.llama(), config.layer_knobs(files.names), _flags(config, files.names)
    unless = ", and its config does not say use_aux_hidden_state: false"
    count = files.count_states(feature_size, unless) if flags["fc"] else 1
    reading = find_taps(config, target.num_layers, count)
    taps = override_taps(overrides, reading.taps, target.num_layers)
    flags.update({name: bool(overrides[name]) for name in flags if name in overrides})
    # Make the head without weights, and fill it.
    embedding = _embedding(files, config, target)
    rows = files.output_rows(config.get("draft_vocab_size"), llama.hidden_size, target)
    head_weight = target.head_weight if rows is None else None
    with torch.device("meta"):
        head = head_class(llama, embedding, taps, feature_size, head_weight, rows, knobs, **flags)
    head.draft_to_target = files.draft_to_target(head.head_weight.shape[0], target)
    files.fill(head, target)
    others = _other_readings(config, reading, flags["recycle_normed"], embedding.device)
    head.open_knobs = {knob: [other] for knob, other in others.items() if knob not in overrides}
    head.flavour = head_class.flavour
    head.flavour += " (speculators)" if config.speculators else " (DeepSpec)" if config.deepspec else ""
    output = "the target's" if rows is None else f"its own, {rows} of {target.vocab_size} tokens"
    head.report = [
        f"{head.flavour} head from {files.draft}",
        f"reads states {comma_separated(taps)} ({'as told' if 'taps' in overrides else reading.why})",
        ", ".join(f"{name}={value}" for name, value in flags.items()),
        describe_layers(llama, knobs),
        *config.notes,
        "embedding: " + ("the target's" if embedding is target.embedding else "its own"),
        f"output matrix: {output}",
        *files.checkpoint.ignored,
    ]
    return head.eval()


def _flags(config: DraftConfig, names: dict[str, str]) -> dict[str, bool]:
    """The flags of `Eagle3Head`. Where a config is silent, the tensors that are there decide.

    In speculators and its readers ``norm_output: true`` means that the normed output is recycled; in SpecForge it means
    the norm before the output matrix, which every EAGLE-3 head has.
    """
    flags = {
        "fc": config.get("use_aux_hidden_state", True) is not False,
        "fc_bias": "fc.bias" in names,
        "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm")) or "fc_norm.0.weight" in names,
        "norm_before_fc": bool(config.get("norm_before_fc")) or "input_norm.weight" in names,
        "norm_before_residual": bool(config.get("norm_before_residual", config.speculators)),
    }
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise ValueError("draft: fc_norm and norm_before_fc exclude each other, and it has both")
    specforge = "LlamaForCausalLMEagle3" in config.architectures and not (flags["fc_norm"] or flags["norm_before_fc"])
    recycle = config.get("return_hidden_post_norm") or (config.get("norm_output") and not specforge)
    return {**flags, "recycle_normed": bool(recycle)}


def _embedding(files: DraftFiles, config: DraftConfig, target: Target) -> Tensor:
    """The embedding a head uses: the target's, unless the head has another hidden size, or speculators trained it.

    A trained copy resembles the target's; an exporter that did not fill it leaves noise.
    """
    checkpoint, name = files.checkpoint, files.names.get("embedding", "embed_tokens.weight")
    size, shared = config.layer["hidden_size"], target.embedding
    trained = name in checkpoint and config.get("embed_requires_grad") and likeness(checkpoint, name, shared) > 0.5
    if not trained and size == target.hidden_size:
        target.skip_copy(checkpoint, name, shared)
        return shared
    values = checkpoint.take_weight(name, (len(shared), size))
    return nn.Parameter(values.to(shared.device, shared.dtype), requires_grad=False)


def _other_readings(
    config: DraftConfig, reading: Taps, recycle_normed: bool, device: torch.device
) -> dict[str, tuple[str, dict]]:
    """Each knob of the head that a config leaves open -> its other meaning, and the attributes that it changes."""
    others: dict[str, tuple[str, dict]] = {}
    if reading.others:
        others["taps"] = f"taps {comma_separated(reading.others[0])}", {"taps": reading.others[0]}
    if config.get("norm_output") and not config.speculators:  # its meaning depends on the publisher, see `_flags`
        others["recycle_normed"] = f"recycle_normed={not recycle_normed}", {"recycle_normed": not recycle_normed}
    if "LlamaForCausalLMEagle3" in config.architectures and config.get("norm_output") is False:
        # SpecForge trains without the norm before the output matrix then; the engines have it in every head.
        others["norm"] = "no norm before the output matrix", {"norm": nn.Identity()}
    if not (config.speculators or config.deepspec):
        # Trainers may have used REFERENCE_ROPE in place of the RoPE here. With latent attention they (SpecForge,
        # TorchSpec) read how YaRN scales it, and replaced only the base.
        said = config.llama().rope_parameters
        kept = said if config.latent else {name: said[name] for name in said if name == "partial_rotary_factor"}
        changed = {"rope_theta": REFERENCE_ROPE["rope_theta"]} if config.latent else REFERENCE_ROPE
        reference = config.with_rope({**kept, **changed}).llama()
        if reference.rope_parameters != said:
            attributes = {"rotary_emb": rotary(reference, device)}
            others["rope_theta"] = f"rope_theta={REFERENCE_ROPE['rope_theta']:g}", attributes
    return others
