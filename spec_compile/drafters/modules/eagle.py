"""The heads of EAGLE-1 and EAGLE-2 (arXiv:2401.15077, arXiv:2406.16858) and of EAGLE-3 (arXiv:2503.01840), and `Head`,
which is also the base of multi-token prediction.

A head continues a text from the target's states. Slot t of its sequence holds the pair (f_t, x_{t+1}): the target's
state at token t and the embedding of the token after it; the slot has RoPE position t and predicts x_{t+2}. Further
tokens are drafted by feeding the head its own output in place of a state (Li et al., EAGLE, arXiv:2401.15077, section
4.1; EAGLE-3, arXiv:2503.01840, section 3.1).

Shapes: B rows, T slots, h the target's hidden size, H the head's, V the vocabulary, Vd the words a head can draft.
"""

import itertools
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...capture.copies import shallow
from ...passes.outputs import FINAL
from ..checkpoints.config import SPECULATORS, DraftConfig, comma_separated, describe_layers, find_taps, override_taps
from ..checkpoints.draft_files import DraftFiles
from ..checkpoints.files import Target, likeness
from .layers import ONE_LAYER, JoinedLayer, Layer, LayerKnobs, rotary


class Head(nn.Module):
    """A draft head: ``project`` target states once, then ``forward`` for each drafted token.

    embedding [V, H], head_weight [Vd, H]: may be the target's own parameters; moving or casting the head would then
    move or cast the target.
    draft_to_target [Vd] int64: the target's id of each row of head_weight (None: row i is token i).
    """

    flavour = ""
    """The name of the format, for reports."""
    taps: tuple[int, ...]
    """States the head reads: 0 the embeddings, i the residual stream after layer i, `FINAL` after the final norm."""
    layers: int
    """Attention layers, which call ``spec_compile::attention`` once each, numbered from 0."""
    hidden_size: int
    all_rows: tuple[Tensor, ...] = ()
    """The output matrix that the rows of `head_weight` were taken from, if `restrict` was called."""
    report: list[str]
    """Lines on the tensors that were loaded, how they were read, and those that were left out."""

    def __init__(self, embedding: Tensor, head_weight: Tensor, hidden_size: int, taps: tuple[int, ...], layers: int):
        super().__init__()
        self.embedding, self.head_weight = embedding, head_weight
        self.register_buffer("draft_to_target", None, persistent=False)
        self.hidden_size, self.taps, self.layers = hidden_size, tuple(taps), layers
        self.report: list[str] = []
        self.open_knobs: dict[str, tuple[str, dict]] = {}

    def restrict(self, ids: Tensor) -> "Head":
        """Another head of the same weights that drafts only the tokens `ids` [Vd]."""
        head = shallow(self)
        head.all_rows, head.draft_to_target = (self.head_weight,), ids
        head.head_weight = nn.Parameter(self.head_weight.detach()[ids], requires_grad=False)
        head.report = [*self.report, f"token_map: drafts {len(ids)} tokens"]
        return head

    def refresh(self) -> None:
        """Copy the rows of a restricted output matrix again."""
        for weight in self.all_rows:
            self.head_weight.data.copy_(weight.detach()[self.draft_to_target])

    def project(self, features: list[Tensor]) -> Tensor:
        """The tapped states, each [B, T, h], in the order of `taps` -> the state [B, T, H] of `forward`."""
        return features[0]

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids, positions [B, T] int64, state [B, T, H] -> (recycled, normed), each [B, T, H].

        recycled: the state for the next draft token.
        normed: the factor of ``head_weight``.
        """
        raise NotImplementedError

    def readings(self) -> list["Head"]:
        """This head, and the same weights under every other meaning that its checkpoint leaves open.

        `open_knobs` maps a knob to its other meaning: a name, and the attributes that it changes.
        """
        readings = []
        for choice in itertools.product(*([("", {}), other] for other in self.open_knobs.values())):
            reading = shallow(self)
            reading.report = [*self.report, *(f"read as: {name}" for name, _ in choice if name)]
            for _, attributes in choice:
                for name, value in attributes.items():
                    setattr(reading, name, value)
            readings.append(reading)
        return readings


class EagleHead(Head):
    """EAGLE-1 and EAGLE-2 (one set of weights): u = fc [embedding; state], then decoder layers.

    The state is the target's after its final norm. The output of the last layer is recycled.

    embedding_norm, state_norm: RMSNorms before fc (HASS).
    input_norm: the first layer has an input norm, too.
    output_norm: an RMSNorm before the output matrix.
    recycle_normed: the output after that norm is recycled (Mistral).
    """

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        head_weight: Tensor,
        layer: LayerKnobs = ONE_LAYER,
        fc_bias: bool = True,
        embedding_norm: bool = False,
        state_norm: bool = False,
        input_norm: bool = False,
        output_norm: bool = False,
        recycle_normed: bool = False,
    ):
        super().__init__(embedding, head_weight, config.hidden_size, (FINAL,), layer.num_layers)
        self.recycle_normed = recycle_normed
        self.embedding_norm, self.state_norm, self.output_norm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if wanted else nn.Identity()
            for wanted in (embedding_norm, state_norm, output_norm)
        )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.blocks = nn.ModuleList(
            Layer(config, i, layer, input_norm=input_norm or i > 0) for i in range(layer.num_layers)
        )
        self.rotary_emb = rotary(config, embedding.device)

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embedding_norm(F.embedding(input_ids, self.embedding))
        x = self.fc(torch.cat([embedding, self.state_norm(state)], dim=-1))
        rope = self.rotary_emb(x, positions)
        for block in self.blocks:
            x = block(x, rope)
        normed = self.output_norm(x)
        return (normed if self.recycle_normed else x), normed


class Eagle3Head(Head):
    """EAGLE-3: fc joins several of the target's states; the first layer reads [embedding; state], 2H wide.

    feature_size: h.
    fc: False: the one tapped state is the head's state (``use_aux_hidden_state: false``).
    fc_norm: an RMSNorm for each tapped state.
    norm_before_fc: one over all of them.
    recycle_normed: the output after the final norm is recycled (EAGLE-3.1).
    norm_before_residual: see `JoinedLayer`.
    """

    flavour = "EAGLE-3"

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        taps: tuple[int, ...],
        feature_size: int,
        head_weight: Tensor,
        layer: LayerKnobs = ONE_LAYER,
        fc: bool = True,
        fc_bias: bool = False,
        fc_norm: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        recycle_normed: bool = False,
    ):
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(embedding, head_weight, size, taps, layer.num_layers)
        self.recycle_normed = recycle_normed
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(feature_size, eps) for _ in taps) if fc_norm else None
        self.input_norm = LlamaRMSNorm(feature_size * len(taps), eps) if norm_before_fc else nn.Identity()
        self.fc = nn.Linear(feature_size * len(taps), size, bias=fc_bias) if fc else nn.Identity()
        first = JoinedLayer(config, 0, layer, norm_before_residual)
        self.blocks = nn.ModuleList([first, *(Layer(config, i, layer) for i in range(1, layer.num_layers))])
        self.norm = LlamaRMSNorm(size, eps)
        self.rotary_emb = rotary(config, embedding.device)

    def project(self, features: list[Tensor]) -> Tensor:
        if self.fc_norm is not None:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features)]
        return self.fc(self.input_norm(torch.cat(features, dim=-1)))

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rope = self.rotary_emb(state, positions)
        first, *others = self.blocks
        x = first(F.embedding(input_ids, self.embedding), state, rope)
        for block in others:
            x = block(x, rope)
        normed = self.norm(x)
        return (normed if self.recycle_normed else x), normed


# Its formats: EAGLE-1, EAGLE-2 and EAGLE-3, by whoever published them.

EAGLE = {
    "bias", "qkv_bias", "eagle_fc_bias", "fusion_bias", "layernorms", "add_para_norm", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output", "return_hidden_post_norm", "embed_requires_grad",
    "use_aux_hidden_state", "target_layer_ids", "eagle_aux_hidden_state_layer_ids", "use_aux_norm",
}  # fmt: skip
"""Keys of the family besides the keys of layers, at the top or in eagle_config."""
EAGLE3_OVERRIDES = ("rope_theta", "taps", "norm_before_residual", "recycle_normed")

REFERENCE_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
"""The RoPE of EAGLE-3's reference trainer, which does not read it from the config."""


def _config(files: DraftFiles, overrides: dict, keys: Collection[str], latent: bool = False) -> DraftConfig:
    config = DraftConfig(files.config, keys, latent)
    config.refuse_unknown_keys()
    return config.overridden(overrides)


def is_eagle(files: DraftFiles) -> bool:
    """True if the config says EAGLE, or if it is silent and fc joins two states of the head's own size."""
    if (said := files.config.get(SPECULATORS)) is not None:
        return said == "eagle"
    fc = files.shape("fc.weight")
    return fc[0] > 0 and fc[-1] == 2 * fc[0]


def read_eagle(files: DraftFiles, target: Target, overrides: dict) -> EagleHead:
    """An EAGLE-1 or EAGLE-2 head. overrides: see `DraftFormat`. ValueError if anything does not fit."""
    config, names = _config(files, overrides, EAGLE), files.names
    target.check(config.layer.get("hidden_size"), config.layer.get("vocab_size"))
    wants_bias = config.get("bias") or config.get("eagle_fc_bias") or config.get("fusion_bias")
    normed, flags = bool(config.get("layernorms")), files.flags
    llama, knobs = config.llama(), config.layer_knobs(names)
    with torch.device("meta"):
        head = EagleHead(
            llama, target.embedding, target.head_weight, knobs,
            fc_bias=bool(wants_bias) or "fc.bias" in names, recycle_normed=flags.get("recycle_normed", False),
            embedding_norm=normed or "embedding_norm.weight" in names,
            state_norm=bool(config.get("add_para_norm")) or "state_norm.weight" in names,
            input_norm=normed or flags.get("input_norm", False),
            output_norm=normed or flags.get("output_norm", False),
        )  # fmt: skip
    origin = " (speculators)" if config.speculators else " (vLLM)" if config.nested else ""
    head.flavour = "EAGLE" + (files.origin or origin)
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
    if (said := files.config.get(SPECULATORS)) is not None:
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

    overrides: by names in EAGLE3_OVERRIDES.
    also: further keys of the config that are known.
    """
    # Read the config.
    latent = any(name.startswith("blocks.0.self_attn.kv_") for name in files.names)
    config = _config(files, overrides, {*EAGLE, *also, "rope_interleave"} if latent else {*EAGLE, *also}, latent)
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
    with torch.device("meta"):
        output = target.head_weight if rows is None else nn.Parameter(torch.zeros(rows, llama.hidden_size))
        head = head_class(llama, embedding, taps, feature_size, output, knobs, **flags)
    head.draft_to_target = files.draft_to_target(head.head_weight.shape[0], target)
    files.fill(head, target)
    others = _other_readings(config, reading.other, flags["recycle_normed"], embedding.device)
    head.open_knobs = {knob: other for knob, other in others.items() if knob not in overrides}
    head.flavour = head_class.flavour
    head.flavour += " (speculators)" if config.speculators else " (DeepSpec)" if config.deepspec else ""
    whose = "the target's" if rows is None else f"its own, {rows} of {target.vocab_size} tokens"
    head.report = [
        f"{head.flavour} head from {files.draft}",
        f"reads states {comma_separated(taps)} ({'as told' if 'taps' in overrides else reading.why})",
        ", ".join(f"{name}={value}" for name, value in flags.items()),
        describe_layers(llama, knobs),
        *config.notes,
        "embedding: " + ("the target's" if embedding is target.embedding else "its own"),
        f"output matrix: {whose}",
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
    trained = (
        name in checkpoint.shapes and config.get("embed_requires_grad") and likeness(checkpoint, name, shared) > 0.5
    )
    if not trained and size == target.hidden_size:
        target.skip_copy(checkpoint, name, shared)
        return shared
    values = checkpoint.take_weight(name, (len(shared), size))
    return nn.Parameter(values.to(shared.device, shared.dtype), requires_grad=False)


def _other_readings(
    config: DraftConfig, taps: tuple[int, ...] | None, recycle_normed: bool, device: torch.device
) -> dict[str, tuple[str, dict]]:
    """Each knob of the head that a config leaves open -> its other meaning, and the attributes that it changes.

    taps: by the other meaning of the config's list (None: it has one).
    """
    others: dict[str, tuple[str, dict]] = {}
    if taps is not None:
        others["taps"] = f"taps {comma_separated(taps)}", {"taps": taps}
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
