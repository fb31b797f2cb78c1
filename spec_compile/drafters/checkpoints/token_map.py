"""`read_token_map`: the token ids that a head is restricted to (FR-Spec, arXiv:2502.14856)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .files import fetcher, load_pickled


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
