"""The table of multi-token prediction: the names of each family's tensors, and what its modules compute.

All of them compute u = fc [norm(embedding); norm(state)], y = layer(u), and the target's output matrix times norm(y).
The state is the target's after its final norm, and norm(y) goes on, unless the family says otherwise. The layer is one
of the target's own classes. So its attention, its RoPE and the form of its norms (w or 1 + w) are the target's; the
tensors show if it has a mixture of experts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field


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
    layer_type: of the attention, if the config has no ``mtp_layer_types``.
    own_embedding: the modules have an embedding of their own, not a copy of the target's.
    own_output: each module has an output matrix of its own, not a copy of the target's.
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
COPIES = {"shared_head.head.weight": "head_weight", "embed_tokens.weight": "embedding"}
PRE_FC = {
    "pre_fc_norm_embedding.": "embedding_norm.",
    "pre_fc_norm_hidden.": "state_norm.",
    "fc.": "fc.",
    "norm.": "norm.",
}
MTP_LAYERS = {
    "token_layernorm.": "embedding_norm.",
    "hidden_layernorm.": "state_norm.",
    "input_proj.": "fc.",
    "final_layernorm.": "norm.",
}

FAMILIES = (
    MtpFamily(
        "Nemotron-H",
        "vLLM nemotron_h_mtp.py",
        r"((?:.*\.)?mtp\.)layers\.0\.mixer\.",
        {**{f"layers.0.{theirs}": ours for theirs, ours in NEXTN.items()}, "layers.1.final_layernorm.": "norm."},
        inner="layers.",
    ),
    MtpFamily(
        "LongCat-Flash",
        "vLLM longcat_flash_mtp.py",
        r"(.*\bmtp\.)layers\.\d+\.enorm\.m\.weight$",
        {
            "layers.{}.enorm.m.": "embedding_norm.",
            "layers.{}.hnorm.m.": "state_norm.",
            "layers.{}.eh_proj.": "fc.",
            "norm.": "norm.",
            "embed_tokens.weight": "embedding",
        },
        inner="layers.{}.",
        inside={"transformer_layer.mlp.": "mlp."},
        own_embedding=True,
    ),
    MtpFamily(
        "MiMo-V2",
        "SGLang mimo_v2_flash_nextn.py, multi_layer_eagle_worker_v2.py",
        r"(.*\bmtp\.layers\.\d+\.)eh_proj\.weight$",
        {**NEXTN, "final_layernorm.": "norm."},
        inside={"pre_mlp_layernorm.": "post_attention_layernorm.", "attention_sink_bias": "sinks"},
        recycle_state=True,
        normed=False,
        layer_type="sliding_attention",
    ),
    MtpFamily(
        "Step",
        "SGLang step3p5_mtp.py, multi_layer_eagle_worker_v2.py, vLLM step3p5_mtp.py",
        r"(.*\blayers\.\d+\.)transformer\.shared_head\.norm\.weight$",
        {**NEXTN, "transformer.shared_head.norm.": "norm.", "transformer.shared_head.output.weight": "head_weight"},
        normed=False,
        own_output=True,
    ),
    MtpFamily(
        "ERNIE 4.5",
        "SGLang ernie4_eagle.py, vLLM ernie_mtp.py",
        r"((?:.*\.)?mtp_)linear_proj\.\d+\.weight$",
        {"emb_norm.{}.": "embedding_norm.", "hidden_norm.{}.": "state_norm.", "linear_proj.{}.": "fc."},
        inner="block.{}.",
        zero_first=True,
    ),
    MtpFamily(
        "MiMo",
        "vLLM mimo_mtp.py",
        r"(.*\bmtp_layers\.\d+\.)input_proj\.weight$",
        MTP_LAYERS,
        embedding_first=False,
        zero_first=True,
    ),
    MtpFamily(
        "HunYuan 3",
        "SGLang hunyuan_v3_nextn.py",
        r"(.*\blayers\.\d+\.)final_layernorm\.weight$",
        {**NEXTN, "final_layernorm.": "norm.", **COPIES},
        sign="mlp.router.gate.",
        inside={
            "mlp.router.gate.": "mlp.gate.",
            "mlp.expert_bias": "mlp.e_score_correction_bias",
            "mlp.shared_mlp.": "mlp.shared_experts.",
        },
    ),
    MtpFamily(
        "Ling",
        "vLLM bailing_moe_mtp.py",
        r"(.*\blayers\.\d+\.)final_layernorm\.weight$",
        {**NEXTN, "final_layernorm.": "norm.", **COPIES},
        inside={
            "attention.dense.": "self_attn.o_proj.",
            "attention.": "self_attn.",
            "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
        },
        zero_first=True,
    ),
    MtpFamily(
        "DeepSeek, GLM",
        "vLLM deepseek_mtp.py (with an indexer, too), glm4_moe_mtp.py, glm_ocr_mtp.py",
        r"(.*\blayers\.\d+\.)eh_proj\.weight$",
        {**NEXTN, "shared_head.norm.": "norm.", **COPIES},
        zero_first=True,
    ),
    MtpFamily(
        "EXAONE 4.5",
        "vLLM exaone4_5_mtp.py",
        r"((?:.*\.)?mtp\.)fc\.weight$",
        PRE_FC,
        sign="post_feedforward_layernorm.",
        inner="layers.{}.",
        layer_type="sliding_attention",
    ),
    MtpFamily(
        "Qwen",
        "vLLM qwen3_next_mtp.py, exaone_moe_mtp.py; transformers MtpModel for Mellum",
        r"((?:.*\.)?mtp\.)fc\.weight$",
        PRE_FC,
        inner="layers.{}.",
    ),
)
"""The first whose pattern is found among the names is the checkpoint's."""
FINETUNED = MtpFamily(
    "speculators",
    "speculators mtp/model_definitions.py",
    r"(.*\bmtp_layers\.\d+\.)input_proj\.weight$",
    MTP_LAYERS,
)
"""Modules that speculators has trained on: the names of MiMo, and the embedding first, as Qwen's modules have it."""


@dataclass(frozen=True)
class MtpBlock:
    """One module of multi-token prediction in a checkpoint.

    prefix: of the names of its tensors.
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

    def holds(self, name: str) -> bool:
        """True if a tensor belongs to this module."""
        rest = name[len(self.prefix) :]
        known = any(rest.startswith(theirs) for theirs in self.outer)
        return name.startswith(self.prefix) and (known or rest.startswith(self.inner))

    def ours(self, name: str) -> str:
        """Our name of a tensor of the module."""
        rest = name[len(self.prefix) :]
        for theirs, ours in self.outer.items():
            if rest.startswith(theirs):
                return ours + rest[len(theirs) :]
        rest = rest.removeprefix(self.inner)
        for theirs, ours in self.family.inside.items():
            rest = rest.replace(theirs, ours)
        return "block." + rest

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
        prefixes = sorted({match[1] for name in names if (match := re.match(family.pattern, name))}, key=_numbers)
        if prefixes and not any(name.startswith(prefixes[0]) and family.sign in name for name in names):
            continue
        if prefixes and "{}" not in family.inner:
            return [MtpBlock(family, prefix, number) for number, prefix in enumerate(prefixes)]
        for prefix in prefixes:
            inside = re.compile(re.escape(prefix) + re.escape(family.inner).replace(r"\{\}", r"(\d+)"))
            numbers = {int(match[1]) for name in names if (match := inside.match(name))}
            return [MtpBlock(family, prefix, number) for number in sorted(numbers)]
    return []


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
