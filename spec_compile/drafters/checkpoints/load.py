"""`load_head`: the draft head in a folder or on the hub, whoever published it, read strictly."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...capture.copies import shallow
from ...errors import did_you_mean
from ...quantised.formats import Published
from ...quantised.pack_cpu import some_rows
from ..modules import dflash, eagle, mtp
from ..modules.dflash import DFlashDraft
from ..modules.eagle import Head
from .config import SPECULATORS, check_rope_theta
from .draft_files import DraftFiles, LoadedDraft, open_files
from .files import Target, fetcher, load_pickled


class DraftFormat(NamedTuple):
    """How the heads of one algorithm are published.

    detect: True if these files hold such a head.
    read: makes it, for a target and with overrides, or raises ValueError.
    overrides: arguments of `load_head` that replace something that the files say.
    wrap: makes it of a module that is loaded already (None: such a module is the head).
    """

    detect: Callable[[DraftFiles], bool]
    read: Callable[[DraftFiles, Target, dict], nn.Module]
    overrides: tuple[str, ...] = ()
    wrap: Callable[[nn.Module, Target], nn.Module] | None = None


FORMATS = {
    "mtp": DraftFormat(mtp.is_mtp, mtp.read_mtp, ("taps", "recycle_normed")),
    "dflash": DraftFormat(dflash.is_dflash, dflash.read_dflash, ("rope_theta",)),
    "eagle3": DraftFormat(eagle.is_eagle3, eagle.read_eagle3, eagle.EAGLE3_OVERRIDES),
    "eagle": DraftFormat(eagle.is_eagle, eagle.read_eagle, ("rope_theta",)),
}
"""The format of each algorithm's heads, in the order in which they are tried."""


def register_format(name: str, draft_format: DraftFormat, before: str | None = None) -> None:
    """Add a format. before: the format whose `detect` may be true of its files, too, so that it is tried first."""
    place = len(FORMATS) if before is None else [*FORMATS].index(before)
    later = {each: FORMATS.pop(each) for each in [*FORMATS][place:]}
    FORMATS.update({name: draft_format, **later})


def load_head(
    draft: str | Path | nn.Module | None,
    model: PreTrainedModel,
    algorithm: str | None = None,
    token_map: str | Path | Sequence[int] | Tensor | None = None,
    **overrides,
) -> Any:
    """The draft head that `draft` holds, on the device and in the dtype of `model`, its target.

    draft: a folder, a repository of the hub, a head, or None: the block of multi-token prediction in the target's own
    checkpoint.
    algorithm: a name in FORMATS, which the head must be for (None: any but "dflash").
    token_map: the only tokens that the head may draft (FR-Spec, arXiv:2502.14856): ids, or a file of ``torch.save``,
    local or on the hub.
    overrides: see `DraftFormat`; None: as the files say.

    ValueError or TypeError if the head is for another algorithm or target, or if a tensor is missing, unknown or of
    another shape, all before weights are read; and then if one holds NaN or infinity.
    """
    # Check the arguments.
    target = Target.of(model)
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if "rope_theta" in overrides:
        overrides["rope_theta"] = check_rope_theta("rope_theta", overrides["rope_theta"])
    ids = None if token_map is None else read_token_map(token_map, target.vocab_size)
    # Take the module, or find the format of the files and read them.
    if isinstance(draft, nn.Module):
        head = _check_loaded(draft, target, algorithm, overrides)
    else:
        files = _own_checkpoint(target, algorithm) if draft is None and algorithm != "dflash" else _open(draft)
        detected = _detect(files, algorithm)
        if algorithm is not None and detected != algorithm:
            where = "the model's own checkpoint" if draft is None else draft
            raise ValueError(f"draft: {where} holds a head for algo={detected!r}, not for algo={algorithm!r}")
        known = FORMATS[detected].overrides
        for name in overrides:
            if name not in known:
                raise TypeError(
                    f"unknown override {name!r}.{did_you_mean(name, known)} {detected} heads have {', '.join(known)}"
                )
        head = FORMATS[detected].read(files, target, overrides)
    # Restrict it to the listed tokens.
    if ids is not None:
        if head.draft_to_target is not None:
            raise ValueError(
                f"token_map: this head drafts {len(head.draft_to_target)} tokens of its own choice already; leave "
                "token_map out"
            )
        head = head.restrict(ids.to(head.head_weight.device))
    return _with_codes(head, target)


def _with_codes(head: Any, target: Target) -> Any:
    """`head`, or if it shares an output matrix that the target reads in 8 bits, another that reads these, too."""
    source, *rest = *getattr(head, "all_rows", ()), head.head_weight
    if target.codes is None or source is not target.head_weight:
        return head
    codes = some_rows(target.codes, head.draft_to_target) if rest else target.codes
    matrices = getattr(getattr(head, "published", None), "matrices", {})
    other = shallow(head)
    other.published = Published({**matrices, head.head_weight.data_ptr(): codes})
    return other


def _check_loaded(head: nn.Module, target: Target, algorithm: str | None, overrides: dict) -> nn.Module:
    """A head made elsewhere, if it fits the target."""
    wrap = FORMATS[algorithm].wrap if algorithm in FORMATS else None
    if wrap is not None:
        return wrap(head, target)
    if algorithm == "dflash" and dflash.is_loaded_dflash(head):
        _check_placed(next(head.parameters()), target)
        return dflash.read_dflash(LoadedDraft(head), target, overrides)
    if not isinstance(head, DFlashDraft if algorithm == "dflash" else Head):
        raise _no_draft(head)
    is_block = isinstance(head, DFlashDraft)
    if overrides:
        noun = "draft" if is_block else "head"
        raise TypeError(f"{next(iter(overrides))}: a {noun} that is already loaded is read as it is")
    rows, mapped, size = head.head_weight.shape[0], head.draft_to_target, target.vocab_size
    if is_block:
        target.check(head.hidden_size, rows if mapped is None else None)
    if (rows != size) if mapped is None else int(mapped.max()) >= size:
        raise ValueError(f"draft: it drafts tokens that are not the {size} of {type(target.model).__name__}")
    _check_placed(head.fc.weight if is_block else head.head_weight, target)
    return head.eval()


def _check_placed(weight: Tensor, target: Target) -> None:
    """ValueError unless a weight of a draft has the device and the dtype of the target."""
    ours, theirs = ((tensor.device, tensor.dtype) for tensor in (target.embedding, weight))
    if ours != theirs:
        raise ValueError(f"draft: it is on {theirs[0]} in {theirs[1]}, the model on {ours[0]} in {ours[1]}")


def _open(draft: str | Path) -> DraftFiles:
    if not isinstance(draft, (str, Path)):
        raise _no_draft(draft)
    if str(draft).endswith((".pt", ".pth")):
        raise ValueError(f"draft: {draft} is a file; if it lists token ids (FR-Spec), pass it as token_map")
    return open_files(draft)


def _no_draft(draft: object) -> TypeError:
    return TypeError(f"draft: expected a path, a repository of the hub or a draft head, got {type(draft).__name__}")


def _own_checkpoint(target: Target, algorithm: str | None) -> DraftFiles:
    """The target's own checkpoint; ValueError if it holds no block of multi-token prediction."""
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
    files = DraftFiles(name, fetcher(name, getattr(target.model.config, "_commit_hash", None), local=True))
    if not mtp.is_mtp(files):
        raise ValueError(f"draft: {name} holds no block of multi-token prediction (MTP, NextN), {advice}")
    return files


def _detect(files: DraftFiles, algorithm: str | None) -> str:
    """The algorithm whose head `files` hold; ValueError, saying what is there, if it is none of these heads."""
    if algorithm == "dflash":
        if dflash.is_dflash(files):
            return algorithm
        raise ValueError(
            f"draft: {files.draft} holds no DFlash draft: architectures {files.architectures or 'none'}, "
            f"model_type {files.config.get('model_type')!r}; heads of the EAGLE family go with algo='eagle' or "
            "'eagle3', whole models with algo='draft_model'"
        )
    for name, draft_format in FORMATS.items():
        if draft_format.detect(files):
            if name == "dflash":
                raise ValueError(f"draft: {files.draft} holds a DFlash head; use algo='dflash'")
            return name
    is_model = "norm.weight" in files.names and any(files.shape("blocks.0.self_attn.o_proj.weight"))
    if is_model and "fc.weight" not in files.names:
        raise ValueError(
            f"draft: {files.draft} is a whole language model ({files.architectures}); use algo='draft_model'"
        )
    raise ValueError(
        f"draft: {files.draft} is no EAGLE, EAGLE-3 or MTP head that is known here: architectures "
        f"{files.architectures or 'none'}, model_type {files.config.get('model_type')!r}, {SPECULATORS} "
        f"{files.config.get(SPECULATORS)!r}, tensors {', '.join(files.tensor_names[:8])}, ..."
    )


def read_token_map(token_map: str | Path | Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    """The token ids [Vd] int64 that a head is restricted to, each once and in order (FR-Spec lists the most frequent
    first): [7, 3, 7] gives [7, 3].

    ValueError or TypeError if they are no ids of a vocabulary of `vocab_size`.
    """
    listed = _load_token_map(token_map) if isinstance(token_map, (str, Path)) else token_map
    if isinstance(listed, Tensor):
        listed = listed.flatten().tolist()
    if not isinstance(listed, Sequence) or any(not isinstance(i, int) or isinstance(i, bool) for i in listed):
        raise TypeError(f"token_map: expected token ids or a file with a list of them, got {type(listed).__name__}")
    foreign = next((i for i in listed if not 0 <= i < vocab_size), None)
    if not listed or foreign is not None:
        problem = "no ids" if not listed else f"{foreign}; take the map of this model"
        raise ValueError(f"token_map: expected token ids below {vocab_size}, got {problem}")
    return torch.tensor(list(dict.fromkeys(listed)))


def _load_token_map(name: str | Path):
    """A local file, or "owner/repository/file" on the hub."""
    path = Path(name).expanduser()
    if not path.is_file():
        repository, _, file = str(name).rpartition("/")
        path = fetcher(repository)(file) if repository.count("/") == 1 and not path.is_absolute() else None
    if path is None:
        raise ValueError(f"token_map: {str(name)!r} is neither a file nor owner/repository/file on the hub")
    return load_pickled(path)
