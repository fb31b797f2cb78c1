"""`Source`: a folder or repository that may hold a draft, as formats look at it."""

from functools import cached_property
from pathlib import Path

from .files import Checkpoint, Fetch, fetcher, indexed_names, read_json
from .names import our_names


class Source:
    """What a draft's format is told by: its config and the names and shapes of its tensors, read when they are needed.

    draft: a folder, or a repository of the hub. fetch: where its files are (default: see `fetcher`).
    """

    def __init__(self, draft: str | Path, fetch: Fetch | None = None):
        self.draft, self.fetch = draft, fetch or fetcher(draft)

    @cached_property
    def names(self) -> list[str]:
        """Names of all tensors; of a checkpoint of several files only the index is read."""
        names = indexed_names(self.fetch)
        return list(self.checkpoint.shapes) if names is None else names

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """All tensors; ValueError if none can be read."""
        return Checkpoint(self.draft, self.fetch)

    @cached_property
    def config(self) -> dict:
        """The object in ``config.json``; ValueError if there is none."""
        path = self.fetch("config.json")
        if path is None:
            raise ValueError(f"draft: {self.draft} has no config.json")
        return read_json(path)

    @cached_property
    def our_names(self) -> dict[str, str]:
        """See `names.our_names`."""
        return our_names(self.checkpoint.shapes)

    @property
    def architectures(self) -> str:
        """Those that the config names, comma-separated."""
        return ", ".join(self.config.get("architectures") or [])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor by our name; (0, 0) if there is none."""
        return self.checkpoint.shapes[self.our_names[name]] if name in self.our_names else (0, 0)
