"""Filling a draft with the tensors of a checkpoint, by our names."""

import torch
from torch import Tensor, nn

from .files import Checkpoint, Part
from .names import published_name
from .target import Target


def fill_module(draft: nn.Module, checkpoint: Checkpoint, names: dict[str, str], target: Target) -> None:
    """Give `draft` the parameters that it has on the meta device, in the target's dtype and on its device.

    names: see `our_names`. ValueError: see `Checkpoint.fill`.
    """
    for name in checkpoint.shapes:
        if name.endswith("rotary_emb.inv_freq"):
            checkpoint.ignore(name, "computed from the config")
    empty = {name: tuple(value.shape) for name, value in draft.state_dict().items() if value.is_meta}
    plan = {name: Part([names.get(name) or published_name(name, names)], shape) for name, shape in empty.items()}
    checkpoint.fill(draft, plan, target.embedding.dtype, target.embedding.device)


def read_draft_to_target(checkpoint: Checkpoint, names: dict[str, str], rows: int, vocab_size: int) -> Tensor | None:
    """The target's id of each row of the output matrix: row + d2t[row], and where the mask t2d is set."""
    ids = torch.arange(rows)
    if "d2t" in names:
        ids = ids + checkpoint.take(names["d2t"], (rows,)).long()
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size or len(ids.unique()) < rows:
            raise ValueError(
                f"draft: d2t in {checkpoint.source} must lead each of {rows} rows to a token of its own below "
                f"{vocab_size} when the row's number is added; it leads to {int(ids.min())} to {int(ids.max())}, "
                f"{len(ids.unique())} of them distinct"
            )
    if "t2d" in names:
        kept = checkpoint.take(names["t2d"], (vocab_size,)).nonzero()[:, 0]
        ids = kept if "d2t" not in names and len(kept) == rows else ids
        if len(kept) and not torch.equal(kept, ids.sort().values):
            raise ValueError(f"draft: t2d in {checkpoint.source} keeps other tokens than its d2t and lm_head say")
    if rows == vocab_size and torch.equal(ids, torch.arange(rows)):
        return None
    if "d2t" not in names and "t2d" not in names:
        raise ValueError(
            f"draft: its output matrix has {rows} rows, the target {vocab_size} tokens, and {checkpoint.source} has no "
            "d2t to say which row is which token"
        )
    return ids
