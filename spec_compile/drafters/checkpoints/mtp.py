"""Modules of multi-token prediction inside checkpoints: transformers' models leave them out, so they are read here."""

import torch
from torch import nn

from ...errors import UnsupportedModelError
from ...passes.tap_hidden_states import FINAL
from ..modules.mtp import MtpHead, block_config
from .config import override_taps
from .config_keys import SPECULATORS
from .draft_files import DraftFiles
from .files import Checkpoint, Part
from .mtp_families import MtpBlock, MtpFamily, find_blocks
from .target import Target

OVERRIDES = ("taps", "recycle_normed")


def is_mtp(files: DraftFiles) -> bool:
    """True if there is a module of multi-token prediction among the tensors."""
    return bool(find_blocks(files.tensor_names))


def read_mtp(files: DraftFiles, target: Target, overrides: dict) -> MtpHead:
    """The head that is the first module, with the others as its `further` ones. overrides: of OVERRIDES.

    ValueError if anything does not fit, UnsupportedModelError if no layer like the target's can be built.
    """
    blocks = find_blocks(files.tensor_names, files.config.get(SPECULATORS) == "mtp")
    family, prefixes = blocks[0].family, tuple(block.prefix for block in blocks)
    checkpoint = Checkpoint(files.draft, files.fetch, lambda name: name.startswith(prefixes), files.quantisation)
    default = (FINAL,) if family.normed else (target.num_layers,)
    taps = override_taps(overrides, default, target.num_layers)
    decoder = target.model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise UnsupportedModelError(
            f"draft: {type(decoder).__name__} is not built of decoder layers, so no module of multi-token prediction "
            "can be made like them"
        )
    names = [{block.ours(name): name for name in checkpoint.shapes if block.holds(name)} for block in blocks]
    with torch.device("meta"):
        head, *further = (
            _module(target, decoder, block, own, taps[0], overrides.get("recycle_normed", family.normed))
            for block, own in zip(blocks, names)
        )
    head.further = nn.ModuleList(further)
    head.flavour = f"MTP ({family.name})"
    for own in names:
        if not family.own_embedding:
            target.skip_copy(checkpoint, own.get("embedding"), target.embedding)
        if not family.own_output:
            target.skip_copy(checkpoint, own.get("head_weight"), target.head_weight)
    checkpoint.fill(head, lambda name, shape: _part_of_module(name, shape, names, blocks), target.embedding)
    if "taps" not in overrides:
        last, final = (target.num_layers,), (FINAL,)
        other = last if taps == final else final
        head.open_knobs["taps"] = [(f"taps {other[0]}, {_state(other)}", {"taps": other})]
    head.report = [*_report(head, files, blocks, names, taps), *checkpoint.ignored]
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


def _state(taps: tuple[int, ...]) -> str:
    return "the state after the final norm" if taps == (FINAL,) else "the state before the final norm"


def _report(
    head: MtpHead, files: DraftFiles, blocks: list[MtpBlock], names: list[dict[str, str]], taps: tuple[int, ...]
) -> list[str]:
    order = "[embedding; state]" if head.embedding_first else "[state; embedding]"
    where = "after the target's final norm" if taps == (FINAL,) else f"number {taps[0]}"
    modules = f"; {len(blocks)} modules, each of which drafts one token" if len(blocks) > 1 else ""
    return [
        f"{head.flavour} head from {files.draft}, {blocks[0].prefix}*, as in {blocks[0].family.definition}{modules}",
        f"reads the state {where}; fc of {order}; zero_first={head.zero_first}, recycle_normed={head.recycle_normed}",
        f"one {type(head.block).__name__}, {'with a mixture of experts' if _is_sparse(names[0]) else 'dense'}",
        _shared(blocks[0].family),
    ]


def _shared(family: MtpFamily) -> str:
    if family.own_output:
        return "embedding: the target's"
    return "output matrix: the target's" if family.own_embedding else "embedding and output matrix: the target's"


def _part_of_module(ours: str, shape: tuple[int, ...], names: list[dict[str, str]], blocks: list[MtpBlock]) -> Part:
    """The tensors of a parameter of the head or of one of its `further` modules."""
    number = 0
    if ours.startswith("further."):
        _, place, ours = ours.split(".", 2)
        number = 1 + int(place)
    return _part(ours, shape, names[number], blocks[number])


def _part(ours: str, shape: tuple[int, ...], names: dict[str, str], block: MtpBlock) -> Part:
    """The tensors of a parameter: experts are stored one by one, and joined in transformers' layers."""
    stem, _, projection = ours.rpartition(".")
    if ours in names or not stem.endswith(".experts"):
        return Part([names.get(ours) or block.theirs(ours)], shape)
    projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    sources = [block.theirs(f"{stem}.{expert}.{one}.weight") for expert in range(shape[0]) for one in projections]
    return Part(sources, (shape[1] // len(projections), shape[2]), lambda tensors: torch.cat(tensors).view(shape))
