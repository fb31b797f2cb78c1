"""Blocks of multi-token prediction inside checkpoints: transformers does not load them, so they are read here."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...errors import UnsupportedModelError
from ...passes.tap_hidden_states import FINAL
from ..modules.mtp import MtpHead, block_config
from .config import override_taps
from .draft_files import DraftFiles
from .files import Checkpoint, Part
from .target import Target

OVERRIDES = ("taps", "recycle_normed")


@dataclass(frozen=True)
class MtpFamily:
    """The names of a block's tensors in a family of models, and the differences of its forward.

    pattern: matches a name that every block has; its group is the prefix of the block's names.
    outer: beginnings of names after the prefix -> ours, for the tensors around the decoder layer.
    inner: stands between the prefix and the names of the decoder layer.
    embedding_first, zero_first: see `MtpHead`.
    """

    name: str
    pattern: str
    outer: dict[str, str]
    inner: str = ""
    embedding_first: bool = True
    zero_first: bool = True


FAMILIES = (
    MtpFamily(
        "DeepSeek, GLM",
        r"(.*\blayers\.\d+\.)eh_proj\.weight$",
        {
            "enorm.": "embedding_norm.",
            "hnorm.": "state_norm.",
            "eh_proj.": "fc.",
            "shared_head.norm.": "norm.",
            "shared_head.head.weight": "head_weight",
            "embed_tokens.weight": "embedding",
        },
    ),
    MtpFamily(
        "MiMo",
        r"(.*\bmtp_layers\.\d+\.)input_proj\.weight$",
        {
            "token_layernorm.": "embedding_norm.",
            "hidden_layernorm.": "state_norm.",
            "input_proj.": "fc.",
            "final_layernorm.": "norm.",
        },
        embedding_first=False,
    ),
    MtpFamily(
        "Qwen",
        r"((?:.*\.)?mtp\.)fc\.weight$",
        {
            "pre_fc_norm_embedding.": "embedding_norm.",
            "pre_fc_norm_hidden.": "state_norm.",
            "fc.": "fc.",
            "norm.": "norm.",
        },
        inner="layers.0.",
        zero_first=False,
    ),
)


@dataclass(frozen=True)
class MtpBlock:
    """The first block of multi-token prediction in a checkpoint.

    prefix: of the names of its tensors.
    further: number of blocks after it.
    """

    family: MtpFamily
    prefix: str
    further: int

    def holds(self, name: str) -> bool:
        """True if a tensor belongs to this block."""
        inner = self.family.inner and re.match(r"layers\.(\d+)\.", name[len(self.prefix) :])
        return name.startswith(self.prefix) and not (inner and inner[1] != "0")

    def ours(self, name: str) -> str:
        """Our name of a tensor of the block."""
        rest = name[len(self.prefix) :]
        for theirs, ours in self.family.outer.items():
            if rest.startswith(theirs):
                return ours + rest[len(theirs) :]
        return "block." + rest.removeprefix(self.family.inner)

    def theirs(self, name: str) -> str:
        """The checkpoint's name of one of ours."""
        for theirs, ours in self.family.outer.items():
            if name.startswith(ours):
                return self.prefix + theirs + name[len(ours) :]
        return self.prefix + self.family.inner + name.removeprefix("block.")


def find_block(names: Iterable[str]) -> MtpBlock | None:
    """The first block of multi-token prediction among the tensors of a checkpoint."""
    names = list(names)
    for family in FAMILIES:
        prefixes = {match[1] for name in names if (match := re.match(family.pattern, name))}
        if prefixes:
            first = min(prefixes, key=_numbers)
            inside = re.compile(re.escape(first) + r"layers\.(\d+)\.")
            layers = {layer[1] for name in names if (layer := inside.match(name))}
            return MtpBlock(family, first, len(layers if family.inner else prefixes) - 1)
    return None


def is_mtp(files: DraftFiles) -> bool:
    """True if there is a block of multi-token prediction among the tensors."""
    return find_block(files.tensor_names) is not None


def read_mtp(files: DraftFiles, target: Target, overrides: dict) -> MtpHead:
    """The head that is the first block. overrides: of OVERRIDES.

    ValueError if anything does not fit, UnsupportedModelError if no layer like the target's can be built.
    """
    block = find_block(files.tensor_names)
    checkpoint = Checkpoint(files.draft, files.fetch, block.holds)
    names = {block.ours(name): name for name in checkpoint.shapes}
    taps = override_taps(overrides, (FINAL,), target.num_layers)
    decoder = target.model.get_decoder()
    if not hasattr(decoder, "layers") or not hasattr(decoder, "rotary_emb"):
        raise UnsupportedModelError(
            f"draft: {type(decoder).__name__} is not built of decoder layers and one rotary embedding, so no block of "
            "multi-token prediction can be made like it"
        )
    sparse = any(name.startswith("block.mlp.experts.") for name in names)
    with torch.device("meta"):
        head = MtpHead(
            decoder, block_config(target.config, sparse), target.embedding, target.head_weight, taps[0],
            embedding_first=block.family.embedding_first,
            zero_first=block.family.zero_first,
            recycle_normed=overrides.get("recycle_normed", True),
        )  # fmt: skip
    head.flavour = f"MTP ({block.family.name})"
    target.skip_copies(checkpoint, names)
    checkpoint.fill(head, lambda name, shape: _part(name, shape, names, block), target.embedding)
    if "taps" not in overrides:
        last = (target.num_layers,)
        head.open_knobs["taps"] = [(f"taps {last[0]}, the state before the final norm", {"taps": last})]
    order = "[embedding; state]" if head.embedding_first else "[state; embedding]"
    where = "after the target's final norm" if taps == (FINAL,) else f"number {taps[0]}"
    head.report = [
        f"{head.flavour} head from {files.draft}, {block.prefix}*",
        f"reads the state {where}; fc of {order}; zero_first={head.zero_first}, recycle_normed={head.recycle_normed}",
        f"one {type(head.block).__name__}, {'with a mixture of experts' if sparse else 'dense'}",
        "embedding and output matrix: the target's",
        *checkpoint.ignored,
        *([f"not read: {block.further} further block(s); the first drafts every token"] if block.further else []),
    ]
    return head.eval()


def _part(ours: str, shape: tuple[int, ...], names: dict[str, str], block: MtpBlock) -> Part:
    """The tensors of a parameter: experts are stored one by one, and joined in transformers' layers."""
    stem, _, projection = ours.rpartition(".")
    if ours in names or not stem.endswith(".experts"):
        return Part([names.get(ours) or block.theirs(ours)], shape)
    projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    sources = [block.theirs(f"{stem}.{expert}.{one}.weight") for expert in range(shape[0]) for one in projections]
    return Part(sources, (shape[1] // len(projections), shape[2]), lambda tensors: torch.cat(tensors).view(shape))


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
