"""`load_head`: the draft head in a folder or on the hub, whoever published it, read strictly."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import did_you_mean
from ..modules.heads import Head
from .config_keys import check_rope_theta
from .dflash import is_dflash
from .eagle import our_names, read_eagle, read_eagle3
from .files import Checkpoint, fetcher, indexed_names, load_pickled, read_json
from .mtp import find_block, read_mtp
from .target import Target

OVERRIDES = {
    "eagle": ("rope_theta",),
    "eagle3": ("rope_theta", "taps", "norm_before_residual", "recycle_normed"),
    "mtp": ("taps", "recycle_normed"),
}
"""What may be read otherwise than a checkpoint says, for each kind of head."""

Read = Callable[[dict], Head]


def load_head(
    draft: str | Path | nn.Module | None,
    model: PreTrainedModel,
    algorithm: str | None = None,
    token_map: str | Path | Sequence[int] | Tensor | None = None,
    **overrides,
) -> Head:
    """The draft head that `draft` holds, on the device and in the dtype of `model`, its target.

    draft: a folder, a repository of the hub, a `Head`, or None: the block of multi-token prediction in the target's own
    checkpoint. algorithm: "eagle", "eagle3" or "mtp", which the head must be (None: any). token_map: the only tokens
    that the head may draft (FR-Spec, arXiv:2502.14856): ids, or a file of ``torch.save``, local or on the hub.
    overrides: see `OVERRIDES`.

    ValueError or TypeError if the head is of another kind or for another target, or if a tensor is missing, unknown or
    of another shape, all before weights are read; and then if one holds NaN or infinity.
    """
    target = Target.of(model)
    if "rope_theta" in overrides:
        overrides["rope_theta"] = check_rope_theta("rope_theta", overrides["rope_theta"])
    ids = None if token_map is None else read_token_map(token_map, target.vocab_size)
    if isinstance(draft, nn.Module):
        head = _given(draft, target, overrides)
    else:
        kind, read = _find(draft, target)
        if algorithm is not None and kind != algorithm:
            source = "the model's own checkpoint" if draft is None else draft
            raise ValueError(f"draft: {source} holds a head for algo={kind!r}, not for algo={algorithm!r}")
        for name in overrides:
            if name not in OVERRIDES[kind]:
                hint = did_you_mean(name, OVERRIDES[kind])
                raise TypeError(f"unknown override {name!r}.{hint} {kind} heads have {', '.join(OVERRIDES[kind])}")
        head = read(overrides)
    return head if ids is None else _restrict(head, ids)


def _given(head: nn.Module, target: Target, overrides: dict) -> Head:
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


def _find(draft, target: Target) -> tuple[str, Read]:
    """What kind of head is there, and what reads it."""
    if draft is None:
        return "mtp", _own_block(target)
    if not isinstance(draft, (str, Path)):
        raise TypeError(f"draft: expected a path, a repository of the hub or a draft head, got {type(draft).__name__}")
    if str(draft).endswith((".pt", ".pth")):
        raise ValueError(f"draft: {draft} is a file; if it lists token ids (FR-Spec), pass it as token_map")
    fetch = fetcher(draft)
    names = indexed_names(fetch)
    checkpoint = Checkpoint(draft, fetch) if names is None else None
    block = find_block(checkpoint.shapes if names is None else names)
    if block is not None:
        return "mtp", lambda overrides: read_mtp(draft, fetch, block, target, overrides)
    path = fetch("config.json")
    if path is None:
        raise ValueError(f"draft: {draft} has no config.json")
    raw, checkpoint = read_json(path), checkpoint or Checkpoint(draft, fetch)
    kind = _sniff(draft, raw, checkpoint)
    reader = read_eagle if kind == "eagle" else read_eagle3
    return kind, lambda overrides: reader(checkpoint, raw, target, overrides)


def _own_block(target: Target) -> Read:
    """What reads the block of multi-token prediction in the target's own checkpoint."""
    name = target.model.config.name_or_path or target.model.name_or_path
    kind = type(target.model).__name__
    advice = "pass draft= the folder or repository that holds its weights, or use another algo"
    if not name:
        raise ValueError(
            f"draft: {kind} was not loaded from a checkpoint, so it has no multi-token prediction; {advice}"
        )
    fetch = fetcher(name, getattr(target.model.config, "_commit_hash", None), local=True)
    names = indexed_names(fetch)
    block = find_block(Checkpoint(name, fetch).shapes if names is None else names)
    if block is None:
        raise ValueError(f"draft: {name} holds no block of multi-token prediction (MTP, NextN); {advice}")
    return lambda overrides: read_mtp(name, fetch, block, target, overrides)


def _sniff(draft, raw: dict, checkpoint: Checkpoint) -> str:
    """The kind of a head of the EAGLE family; ValueError, saying what was found, if it is none."""
    names, said = our_names(checkpoint.shapes), raw.get("speculators_model_type")
    architectures = ", ".join(raw.get("architectures") or [])
    if is_dflash(raw):
        raise ValueError(f"draft: {draft} holds a DFlash head; use algo='dflash'")
    if said in ("eagle", "eagle3"):
        return said
    shapes = {ours: checkpoint.shapes[theirs] for ours, theirs in names.items()}
    reads = shapes.get("blocks.0.self_attn.q_proj.weight", (0, 0))[-1]
    writes = shapes.get("blocks.0.self_attn.o_proj.weight", (0, 0))[0]
    fc = shapes.get("fc.weight", (0, 0))
    if said is None and ("blocks.0.hidden_norm.weight" in names or (reads and reads == 2 * writes)):
        return "eagle3"
    if said is None and fc[0] and fc[-1] == 2 * fc[0]:
        return "eagle"
    if not any(fc) and "norm.weight" in names and writes:
        raise ValueError(f"draft: {draft} is a whole language model ({architectures}); use algo='draft_model'")
    tensors = ", ".join(list(checkpoint.shapes)[:8])
    raise ValueError(
        f"draft: {draft} is no EAGLE, EAGLE-3 or MTP head that is known here: architectures {architectures or 'none'}, "
        f"model_type {raw.get('model_type')!r}, speculators_model_type {said!r}, tensors {tensors}, ..."
    )


def read_token_map(token_map: str | Path | Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    """Token ids [Vd] int64, each once, in the order given (FR-Spec lists the most frequent first).

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


def _restrict(head: Head, ids: Tensor) -> Head:
    """`head` with the rows `ids` of its output matrix alone."""
    if head.draft_to_target is not None:
        raise ValueError(
            f"token_map: this head drafts {len(head.draft_to_target)} tokens of its own choice already; leave "
            "token_map out"
        )
    return head.restrict(ids.to(head.head_weight.device))
