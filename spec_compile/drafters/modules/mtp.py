"""Multi-token prediction: a decoder layer of the target's own class, which reads [norm(embedding); norm(state)].

DeepSeek-V3 (arXiv:2412.19437, section 2.2), and after it all families in `FAMILIES`: u = fc [norm_e(embedding);
norm_h(state)], y = layer(u), and the target's output matrix multiplies norm(y).
"""

import copy
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig

from ...capture.copies import shallow
from ...capture.modules import connect
from ...capture.trace import HARMLESS
from ...errors import UnsupportedModelError
from ...kernels import ops
from ...passes.outputs import FINAL
from ..checkpoints.config import SPECULATORS, override_taps
from ..checkpoints.draft_files import DraftFiles
from ..checkpoints.files import Checkpoint, Target, TensorSources
from .eagle import Head

IMPLEMENTATION = "spec_compile_draft"
"""The name of `_attend` among transformers' attention functions; only configs made here use it."""


class MtpHead(Head):
    """One module of multi-token prediction, which drafts all tokens if there is no other.

    decoder: the target's (``model.get_decoder()``), whose layer, norm and rotary classes are built from `config`.
    config: see `block_config`.
    embedding_first: the order of fc's input (MiMo has the state first).
    zero_first: the slot at position 0 has an embedding of zeros.
    recycle_normed: the output after the final norm is recycled.
    recycle_state: the state itself is recycled, so that each module reads the target's (MiMo-V2).
    fc_bias, output_norm: True if there are such tensors.
    """

    def __init__(
        self,
        decoder: nn.Module,
        config: PreTrainedConfig,
        embedding: Tensor,
        head_weight: Tensor,
        tap: int = FINAL,
        embedding_first: bool = True,
        zero_first: bool = True,
        recycle_normed: bool = True,
        recycle_state: bool = False,
        fc_bias: bool = False,
        output_norm: bool = True,
    ):
        super().__init__(embedding, head_weight, config.hidden_size, (tap,), layers=1)
        self.embedding_first, self.zero_first = embedding_first, zero_first
        self.recycle_normed, self.recycle_state = recycle_normed, recycle_state
        self.further = nn.ModuleList()
        """The modules for the second draft token and later ones, of this class."""
        self.block = make_block(decoder.layers[-1], config)
        connect(self.block, _attend)
        make_norm = norm_class(decoder.layers[-1])
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.embedding_norm, self.state_norm, self.norm = (make_norm(config.hidden_size, eps=eps) for _ in range(3))
        if not output_norm:
            self.norm = nn.Identity()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.rotary_emb, self.rotary_arguments = None, ()
        if hasattr(decoder, "rotary_emb"):
            with torch.device(next(decoder.parameters()).device):
                self.rotary_emb = type(decoder.rotary_emb)(config)
            by_type = "layer_type" in inspect.signature(self.rotary_emb.forward).parameters
            self.rotary_arguments = (config.layer_types[0],) if by_type else ()
        self.axes = len(getattr(self.rotary_emb, "mrope_section", ()))
        """Axes of multimodal positions, which are all equal in a text (0: positions have one axis)."""

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedding = F.embedding(input_ids, self.embedding)
        if self.zero_first:
            embedding = embedding * (positions != 0)[:, :, None]
        parts = [self.embedding_norm(embedding), self.state_norm(state)]
        x = self.fc(torch.cat(parts if self.embedding_first else parts[::-1], dim=-1))
        if self.rotary_emb is not None:
            positions = positions.expand(self.axes, -1, -1) if self.axes else positions
            turns = self.rotary_emb(x, positions, *self.rotary_arguments)
            x = self.block(x, attention_mask=None, position_embeddings=turns)
        else:
            x = self.block(x)
        x = x[0] if isinstance(x, tuple) else x  # GLM-5's layers also give the choice of their indexer
        normed = self.norm(x)
        return (state if self.recycle_state else normed if self.recycle_normed else x), normed

    def restrict(self, ids: Tensor) -> "MtpHead":
        head = super().restrict(ids)
        head.further = nn.ModuleList(self._restricted(module, head, ids) for module in self.further)
        return head

    def _restricted(self, module: "MtpHead", head: "MtpHead", ids: Tensor) -> "MtpHead":
        """One of the `further` modules with the output matrix of `head`, or if it has another, with its rows `ids`."""
        if module.head_weight is not self.head_weight:
            return module.restrict(ids)
        module = shallow(module)
        module.head_weight, module.draft_to_target = head.head_weight, ids
        return module

    def refresh(self) -> None:
        super().refresh()
        for module in self.further:
            module.refresh()


class HalfLayers(nn.Sequential):
    """The halves of a layer, as Nemotron-H builds them: attention, then a mixture of experts."""


class SingleLayer(nn.Module):
    """Attention and an MLP, made of the parts of LongCat-Flash's layers, which have two of each and a mixture."""

    def __init__(self, like: nn.Module, config: PreTrainedConfig):
        super().__init__()
        self.self_attn, self.mlp = type(like.self_attn[0])(config, 0), type(like.mlps[0])(config)
        self.input_layernorm, self.post_attention_layernorm = (
            norm_class(like)(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, **kwargs) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def make_block(like: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """A decoder layer of the kind of `like` with the config of `block_config`."""
    if isinstance(getattr(like, "mlps", None), nn.ModuleList):
        return SingleLayer(like, config)
    if getattr(config, "mtp_layers_block_type", None):
        return HalfLayers(*(type(like)(config, number) for number in range(len(config.layers_block_type))))
    return type(like)(config, 0)


def norm_class(layer: nn.Module) -> type[nn.Module]:
    """The class of a decoder layer's norms."""
    names = ("input_layernorm", "norm", "post_attention_layernorm")  # EXAONE 4 has norms after its parts only
    norm = next(getattr(layer, name) for name in names if hasattr(layer, name))
    return type(norm[0] if isinstance(norm, nn.ModuleList) else norm)


def block_config(config: PreTrainedConfig, sparse: bool, layer_type: str = "full_attention") -> PreTrainedConfig:
    """A copy of the target's text config in which layer 0 is a module of multi-token prediction.

    It attends through ``spec_compile::attention`` as `layer_type` says, and has a mixture of experts if `sparse`.
    """
    if getattr(config, "is_heterogeneous", False) and layer_type in config.layer_types:
        config = config.per_layer_config[layer_type]  # in Step, layers with a window have more heads
    config = copy.deepcopy(config)
    changes = {
        "layer_types": getattr(config, "mtp_layers_block_type", None) or [layer_type],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "indexer_types": ["full"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "moe_layer_start_index": 0 if sparse else 1,
        "moe_layer_interval": 1,
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config.num_hidden_layers = 1
    config._attn_implementation = IMPLEMENTATION
    return config


def _attend(
    module, query, key, value, attention_mask,
    scaling=None, dropout=0.0, sliding_window=None, softcap=None, s_aux=None, indices=None, **extra,
):  # fmt: skip
    """``spec_compile::attention`` with the signature of transformers' attention functions."""
    unknown = sorted(name for name, value in extra.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise UnsupportedModelError(
            f"draft: {type(module).__name__} passes {', '.join(unknown)} to attention, which is unknown here"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    inputs = query, key, value, s_aux, scale, sliding_window, softcap, module.layer_idx
    return ops.attention(*inputs, chosen=indices), None


AttentionInterface.register(IMPLEMENTATION, _attend)


# Modules inside checkpoints: transformers' models leave them out, so they are read here.
#
# `FAMILIES` has the names of each family's tensors, and what its modules compute. The state is the target's after its
# final norm, and norm(y) goes on, unless the family says otherwise. Attention, RoPE and the form of norms (w or 1 + w)
# are the target's, because the layer is; the tensors show if it has a mixture of experts.


@dataclass(frozen=True)
class MtpFamily:
    """The names of a module's tensors in a family of models, and the differences of its forward.

    definition: the code that says so.
    pattern: matches a name that every module has; its group is the prefix of the module's names, and of no others.
    outer: beginnings of names after the prefix -> ours, for the tensors around the decoder layer; "{}" is the number of
        the module.
    sign: a part of the name of some tensor of the first module, if another family has the same pattern.
    inner: stands between the prefix and the names of the decoder layer. If it has a "{}", all modules have one prefix.
    inside: parts of names in the decoder layer -> ours.
    embedding_first, zero_first, recycle_state: see `MtpHead`.
    normed: the state is the target's after its final norm, and norm(y) goes on; else it is the one before that norm,
        and y goes on.
    layer_type: the type of its attention, if the config has no ``mtp_layer_types``.
    own_embedding: the modules have another embedding than the target.
    own_output: each module has another output matrix than the target.
    """

    name: str
    definition: str
    pattern: str
    outer: dict[str, str]
    sign: str = ""
    inner: str = ""
    inside: dict[str, str] = field(default_factory=dict)
    embedding_first: bool = True
    zero_first: bool = False
    recycle_state: bool = False
    normed: bool = True
    layer_type: str = "full_attention"
    own_embedding: bool = False
    own_output: bool = False


NEXTN = {"enorm.": "embedding_norm.", "hnorm.": "state_norm.", "eh_proj.": "fc."}
NEXTN_NORMED = {**NEXTN, "final_layernorm.": "norm."}
COPIES = {"shared_head.head.weight": "head_weight", "embed_tokens.weight": "embedding"}
PRE_FC = {
    "pre_fc_norm_embedding.": "embedding_norm.", "pre_fc_norm_hidden.": "state_norm.", "fc.": "fc.", "norm.": "norm.",
}  # fmt: skip
MTP_LAYERS = {
    "token_layernorm.": "embedding_norm.", "hidden_layernorm.": "state_norm.", "input_proj.": "fc.",
    "final_layernorm.": "norm.",
}  # fmt: skip

FAMILIES = (
    MtpFamily(
        "Nemotron-H", "vLLM nemotron_h_mtp.py", r"((?:.*\.)?mtp\.)layers\.0\.mixer\.",
        {**{f"layers.0.{theirs}": ours for theirs, ours in NEXTN.items()}, "layers.1.final_layernorm.": "norm."},
        inner="layers.",
    ),
    MtpFamily(
        "LongCat-Flash", "vLLM longcat_flash_mtp.py", r"(.*\bmtp\.)layers\.\d+\.enorm\.m\.weight$",
        {
            "layers.{}.enorm.m.": "embedding_norm.", "layers.{}.hnorm.m.": "state_norm.", "layers.{}.eh_proj.": "fc.",
            "norm.": "norm.", "embed_tokens.weight": "embedding",
        },
        inner="layers.{}.", inside={"transformer_layer.mlp.": "mlp."}, own_embedding=True,
    ),
    MtpFamily(
        "MiMo-V2", "SGLang mimo_v2_flash_nextn.py, multi_layer_eagle_worker_v2.py",
        r"(.*\bmtp\.layers\.\d+\.)eh_proj\.weight$", NEXTN_NORMED,
        inside={"pre_mlp_layernorm.": "post_attention_layernorm.", "attention_sink_bias": "sinks"},
        recycle_state=True, normed=False, layer_type="sliding_attention",
    ),
    MtpFamily(
        "Step", "SGLang step3p5_mtp.py, multi_layer_eagle_worker_v2.py, vLLM step3p5_mtp.py",
        r"(.*\blayers\.\d+\.)transformer\.shared_head\.norm\.weight$",
        {**NEXTN, "transformer.shared_head.norm.": "norm.", "transformer.shared_head.output.weight": "head_weight"},
        normed=False, own_output=True,
    ),
    MtpFamily(
        "ERNIE 4.5", "SGLang ernie4_eagle.py, vLLM ernie_mtp.py", r"((?:.*\.)?mtp_)linear_proj\.\d+\.weight$",
        {"emb_norm.{}.": "embedding_norm.", "hidden_norm.{}.": "state_norm.", "linear_proj.{}.": "fc."},
        inner="block.{}.", zero_first=True,
    ),
    MtpFamily(
        "MiMo", "vLLM mimo_mtp.py", r"(.*\bmtp_layers\.\d+\.)input_proj\.weight$", MTP_LAYERS,
        embedding_first=False, zero_first=True,
    ),
    MtpFamily(
        "HunYuan 3", "SGLang hunyuan_v3_nextn.py", r"(.*\blayers\.\d+\.)final_layernorm\.weight$",
        {**NEXTN_NORMED, **COPIES}, sign="mlp.router.gate.",
        inside={
            "mlp.router.gate.": "mlp.gate.", "mlp.expert_bias": "mlp.e_score_correction_bias",
            "mlp.shared_mlp.": "mlp.shared_experts.",
        },
    ),
    MtpFamily(
        "Ling", "vLLM bailing_moe_mtp.py", r"(.*\blayers\.\d+\.)final_layernorm\.weight$",
        {**NEXTN_NORMED, **COPIES}, zero_first=True,
        inside={
            "attention.dense.": "self_attn.o_proj.", "attention.": "self_attn.",
            "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
        },
    ),
    MtpFamily(
        "DeepSeek, GLM", "vLLM deepseek_mtp.py (with an indexer, too), glm4_moe_mtp.py, glm_ocr_mtp.py",
        r"(.*\blayers\.\d+\.)eh_proj\.weight$", {**NEXTN, "shared_head.norm.": "norm.", **COPIES}, zero_first=True,
    ),
    MtpFamily(
        "EXAONE 4.5", "vLLM exaone4_5_mtp.py", r"((?:.*\.)?mtp\.)fc\.weight$", PRE_FC,
        sign="post_feedforward_layernorm.", inner="layers.{}.", layer_type="sliding_attention",
    ),
    MtpFamily(
        "Qwen", "vLLM qwen3_next_mtp.py, exaone_moe_mtp.py; transformers MtpModel for Mellum",
        r"((?:.*\.)?mtp\.)fc\.weight$", PRE_FC, inner="layers.{}.",
    ),
)  # fmt: skip
"""The first whose pattern is found among the names is the checkpoint's."""
FINETUNED = MtpFamily(
    "speculators", "speculators mtp/model_definitions.py", r"(.*\bmtp_layers\.\d+\.)input_proj\.weight$", MTP_LAYERS
)
"""Modules that speculators has trained on: the names of MiMo, and the embedding first, as Qwen's modules have it."""


@dataclass(frozen=True)
class MtpBlock:
    """One module of multi-token prediction in a checkpoint.

    prefix: begins the names of its tensors.
    number: from 0.
    """

    family: MtpFamily
    prefix: str
    number: int = 0

    @property
    def inner(self) -> str:
        """Stands between the prefix and the names of the decoder layer."""
        return self.family.inner.format(self.number)

    @property
    def outer(self) -> dict[str, str]:
        """Beginnings of names after the prefix -> ours."""
        return {theirs.format(self.number): ours for theirs, ours in self.family.outer.items()}

    def names(self, published: Iterable[str]) -> dict[str, str]:
        """Our name of each tensor that belongs to this module -> its published one."""
        found = {}
        for name in (name for name in published if name.startswith(self.prefix)):
            rest = name[len(self.prefix) :]
            theirs = next(filter(rest.startswith, self.outer), None)
            if theirs is not None:
                found[self.outer[theirs] + rest[len(theirs) :]] = name
            elif rest.startswith(self.inner):
                rest = rest.removeprefix(self.inner)
                for theirs, ours in self.family.inside.items():
                    rest = rest.replace(theirs, ours)
                found["block." + rest] = name
        return found

    def theirs(self, name: str) -> str:
        """The checkpoint's name of one of ours that it lacks."""
        for theirs, ours in self.outer.items():
            if name.startswith(ours):
                return self.prefix + theirs + name[len(ours) :]
        rest = name.removeprefix("block.")
        for theirs, ours in self.family.inside.items():
            rest = rest.replace(ours, theirs)
        return self.prefix + self.inner + rest


def find_blocks(names: Iterable[str], finetuned: bool = False) -> list[MtpBlock]:
    """The modules of multi-token prediction among the tensors of a checkpoint, in their order.

    finetuned: speculators has written the checkpoint.
    """
    names = list(names)
    for family in (FINETUNED,) if finetuned else FAMILIES:
        found = {match[1] for name in names if (match := re.match(family.pattern, name))}
        prefixes = sorted(found, key=lambda prefix: [int(number) for number in re.findall(r"\d+", prefix)])
        if prefixes and not any(name.startswith(prefixes[0]) and family.sign in name for name in names):
            continue
        if prefixes and "{}" not in family.inner:
            return [MtpBlock(family, prefix, number) for number, prefix in enumerate(prefixes)]
        for prefix in prefixes:
            inside = re.compile(re.escape(prefix) + re.escape(family.inner).replace(r"\{\}", r"(\d+)"))
            numbers = {int(match[1]) for name in names if (match := inside.match(name))}
            return [MtpBlock(family, prefix, number) for number in sorted(numbers)]
    return []


def is_mtp(files: DraftFiles) -> bool:
    """True if there is a module of multi-token prediction among the tensors."""
    return bool(find_blocks(files.tensor_names))


def read_mtp(files: DraftFiles, target: Target, overrides: dict) -> MtpHead:
    """The head that is the first module, with the others as its `further` ones. overrides: see `DraftFormat`.

    ValueError if anything does not fit, UnsupportedModelError if no layer like the target's can be built.
    """
    blocks = find_blocks(files.tensor_names, files.config.get(SPECULATORS) == "mtp")
    family, prefixes = blocks[0].family, tuple(block.prefix for block in blocks)
    checkpoint = Checkpoint(files.draft, files.fetch, lambda name: name.startswith(prefixes), files.quantisation)
    last, final = (target.num_layers,), (FINAL,)
    taps = override_taps(overrides, final if family.normed else last, target.num_layers)
    decoder = target.model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise UnsupportedModelError(
            f"draft: {type(decoder).__name__} is not built of decoder layers, so no module of multi-token prediction "
            "can be made like them"
        )
    # Make the modules without weights, as the names of their tensors say.
    names = [block.names(checkpoint.shapes) for block in blocks]
    with torch.device("meta"):
        head, *further = (
            _module(target, decoder, block, own, taps[0], overrides.get("recycle_normed", family.normed))
            for block, own in zip(blocks, names)
        )
    head.further = nn.ModuleList(further)
    head.flavour = f"MTP ({family.name})"
    # Fill them.
    for own in names:
        if not family.own_embedding:
            target.skip_copy(checkpoint, own.get("embedding"), target.embedding)
        if not family.own_output:
            target.skip_copy(checkpoint, own.get("head_weight"), target.head_weight)
    checkpoint.fill(head, lambda name, shape: _part(name, shape, names, blocks), target.embedding)
    # The checkpoint does not say which state is read, so the other one may be tried (see `self_check`).
    if "taps" not in overrides:
        other, kind = (last, "before") if taps == final else (final, "after")
        head.open_knobs["taps"] = f"taps {other[0]}, the state {kind} the final norm", {"taps": other}
    order = "[embedding; state]" if head.embedding_first else "[state; embedding]"
    where = "after the target's final norm" if taps == final else f"number {taps[0]}"
    modules = f"; {len(blocks)} modules, each of which drafts one token" if len(blocks) > 1 else ""
    shared = {"embedding": not family.own_embedding, "output matrix": not family.own_output}
    head.report = [
        f"{head.flavour} head from {files.draft}, {blocks[0].prefix}*, as in {family.definition}{modules}",
        f"reads the state {where}; fc of {order}; zero_first={head.zero_first}, recycle_normed={head.recycle_normed}",
        f"one {type(head.block).__name__}, {'with a mixture of experts' if _is_sparse(names[0]) else 'dense'}",
        " and ".join(name for name, is_shared in shared.items() if is_shared) + ": the target's",
        *checkpoint.ignored,
    ]
    return head.eval()


def _module(
    target: Target, decoder: nn.Module, block: MtpBlock, names: dict[str, str], tap: int, recycle_normed: bool
) -> MtpHead:
    """One module on the meta device. names: ours -> the checkpoint's."""
    family, types = block.family, getattr(target.config, "mtp_layer_types", None)
    layer_type = types[block.number] if types else family.layer_type
    embedding = nn.Parameter(target.embedding.detach().to("meta")) if family.own_embedding else target.embedding
    output = nn.Parameter(target.head_weight.detach().to("meta")) if family.own_output else target.head_weight
    return MtpHead(
        decoder, block_config(target.config, _is_sparse(names), layer_type), embedding, output, tap,
        embedding_first=family.embedding_first, zero_first=family.zero_first, recycle_normed=recycle_normed,
        recycle_state=family.recycle_state, fc_bias="fc.bias" in names, output_norm="norm." in family.outer.values(),
    )  # fmt: skip


def _is_sparse(names: dict[str, str]) -> bool:
    return any(".experts." in name for name in names)


def _part(ours: str, shape: tuple[int, ...], names: list[dict[str, str]], blocks: list[MtpBlock]) -> TensorSources:
    """The tensors of a parameter of the head or of one of its `further` modules. Experts are stored one by one, and
    joined in transformers' layers."""
    number = 0
    if ours.startswith("further."):
        _, place, ours = ours.split(".", 2)
        number = 1 + int(place)
    own, block = names[number], blocks[number]
    stem, _, projection = ours.rpartition(".")
    if ours in own or not stem.endswith(".experts"):
        return TensorSources([own.get(ours) or block.theirs(ours)], shape)
    projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    sources = [block.theirs(f"{stem}.{expert}.{one}.weight") for expert in range(shape[0]) for one in projections]
    return TensorSources(
        sources, (shape[1] // len(projections), shape[2]), lambda tensors: torch.cat(tensors).view(shape)
    )
