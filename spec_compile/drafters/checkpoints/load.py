"""`load_head`: the draft head in a folder or on the hub, whoever published it, read strictly."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import did_you_mean
from ..modules.head import Head
from . import dflash, eagle, eagle3, mtp, p_eagle
from .config_keys import SPECULATORS, check_rope_theta
from .files import fetcher
from .source import Source
from .target import Target
from .token_map import read_token_map

FORMATS = {"mtp": mtp, "dflash": dflash, "p_eagle": p_eagle, "eagle3": eagle3, "eagle": eagle}
"""The format of each algorithm's drafts, in the order in which they are tried: a module with ``detect(source)``,
``read(source, target, overrides)`` and OVERRIDES, what may be read otherwise than a checkpoint says."""


def load_head(
    draft: str | Path | nn.Module | None,
    model: PreTrainedModel,
    algorithm: str | None = None,
    token_map: str | Path | Sequence[int] | Tensor | None = None,
    **overrides,
) -> Head:
    """The draft head that `draft` holds, on the device and in the dtype of `model`, its target.

    draft: a folder, a repository of the hub, a `Head`, or None: the block of multi-token prediction in the target's own
    checkpoint. algorithm: "eagle", "eagle3", "p_eagle" or "mtp", which the head must be (None: any). token_map: the
    only tokens that the head may draft (FR-Spec, arXiv:2502.14856): ids, or a file of ``torch.save``, local or on the
    hub. overrides: see OVERRIDES of each format.

    ValueError or TypeError if the head is of another kind or for another target, or if a tensor is missing, unknown or
    of another shape, all before weights are read; and then if one holds NaN or infinity.
    """
    target = Target.of(model)
    if "rope_theta" in overrides:
        overrides["rope_theta"] = check_rope_theta("rope_theta", overrides["rope_theta"])
    ids = None if token_map is None else read_token_map(token_map, target.vocab_size)
    if isinstance(draft, nn.Module):
        head = _check_loaded(draft, target, overrides)
    else:
        source = _own_checkpoint(target, algorithm) if draft is None else _open(draft)
        detected = _detect(source)
        if algorithm is not None and detected != algorithm:
            where = "the model's own checkpoint" if draft is None else draft
            raise ValueError(f"draft: {where} holds a head for algo={detected!r}, not for algo={algorithm!r}")
        known = FORMATS[detected].OVERRIDES
        for name in overrides:
            if name not in known:
                raise TypeError(
                    f"unknown override {name!r}.{did_you_mean(name, known)} {detected} heads have {', '.join(known)}"
                )
        head = FORMATS[detected].read(source, target, overrides)
    return head if ids is None else _restrict(head, ids)


def _check_loaded(head: nn.Module, target: Target, overrides: dict) -> Head:
    """A head made elsewhere, if it fits the target."""
    if not isinstance(head, Head):
        raise TypeError(f"draft: expected a path, a repository of the hub or a draft head, got {type(head).__name__}")
    if overrides:
        raise TypeError(f"{next(iter(overrides))}: a head that is already loaded is read as it is")
    size = target.vocab_size
    rows = head.head_weight.shape[0] if head.draft_to_target is None else size
    if rows != size or (head.draft_to_target is not None and int(head.draft_to_target.max()) >= size):
        raise ValueError(f"draft: it drafts tokens that are not the {size} of {type(target.model).__name__}")
    ours, theirs = ((weight.device, weight.dtype) for weight in (target.embedding, head.head_weight))
    if ours != theirs:
        raise ValueError(f"draft: it is on {theirs[0]} in {theirs[1]}, the model on {ours[0]} in {ours[1]}")
    return head.eval()


def _open(draft: str | Path) -> Source:
    if not isinstance(draft, (str, Path)):
        raise TypeError(f"draft: expected a path, a repository of the hub or a draft head, got {type(draft).__name__}")
    if str(draft).endswith((".pt", ".pth")):
        raise ValueError(f"draft: {draft} is a file; if it lists token ids (FR-Spec), pass it as token_map")
    return Source(draft)


def _own_checkpoint(target: Target, algorithm: str | None) -> Source:
    """The target's own checkpoint, which holds a block of multi-token prediction; ValueError if it does not."""
    name = target.model.config.name_or_path or target.model.name_or_path
    advice = (
        f"so pass draft= the folder or repository of a head, as in speculate(model, algo={algorithm or 'naive_eagle'!r}"
        ", draft='FOLDER'), or use another algo"
    )
    if not name:
        raise ValueError(
            f"draft: {type(target.model).__name__} was not loaded from a checkpoint with a block of multi-token "
            f"prediction, {advice}"
        )
    source = Source(name, fetcher(name, getattr(target.model.config, "_commit_hash", None), local=True))
    if not mtp.detect(source):
        raise ValueError(f"draft: {name} holds no block of multi-token prediction (MTP, NextN), {advice}")
    return source


def _detect(source: Source) -> str:
    """The algorithm whose head `source` holds; ValueError, saying what is there, if it is none of these heads."""
    for name, checkpoint_format in FORMATS.items():
        if checkpoint_format.detect(source):
            if name == "dflash":
                raise ValueError(f"draft: {source.draft} holds a DFlash head; use algo='dflash'")
            return name
    config, architectures = source.config, source.architectures
    is_whole = "norm.weight" in source.our_names and any(source.shape("blocks.0.self_attn.o_proj.weight"))
    if is_whole and "fc.weight" not in source.our_names:
        raise ValueError(f"draft: {source.draft} is a whole language model ({architectures}); use algo='draft_model'")
    raise ValueError(
        f"draft: {source.draft} is no EAGLE, EAGLE-3 or MTP head that is known here: architectures "
        f"{architectures or 'none'}, model_type {config.get('model_type')!r}, {SPECULATORS} "
        f"{config.get(SPECULATORS)!r}, tensors {', '.join(source.names[:8])}, ..."
    )


def _restrict(head: Head, ids: Tensor) -> Head:
    """`head` with the rows `ids` of its output matrix alone."""
    if head.draft_to_target is not None:
        raise ValueError(
            f"token_map: this head drafts {len(head.draft_to_target)} tokens of its own choice already; leave "
            "token_map out"
        )
    return head.restrict(ids.to(head.head_weight.device))
