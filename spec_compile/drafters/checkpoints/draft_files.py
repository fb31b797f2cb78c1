"""`DraftFiles`: the config of a published draft, its tensors by our names, and the draft module filled with them."""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...quantised.formats import Quantisation, quantisation_of
from .files import Checkpoint, Fetch, Target, TensorSources, fetcher, find_weights, read_json

RENAMES = [
    (r"^(?:model\.){1,2}", ""),
    (r"^midlayer\.|^transformer\.", "blocks.0."),
    (r"^layers\.", "blocks."),
    (r"^additional_layers\.(\d+)\.", lambda match: f"blocks.{int(match[1]) + 1}."),
    (r"^(blocks\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm."),
    (r"^hidden_layernorm\.", "blocks.0.input_layernorm."),
    (r"^fusion_fc\.|^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    (r"^(?:embed|embedding)_layernorm\.|^enorm\.", "embedding_norm."),
    (r"^hidden_states_layernorm\.|^hnorm\.", "state_norm."),
    (r"^(?:pre_lm_head|lm_head)_layernorm\.", "output_norm."),
    (r"^lm_head\.weight$", "head_weight"),
    (r"^embed_tokens\.weight$", "embedding"),
]
"""Applied in turn, they lead from the names of SafeAILab, HASS, vLLM, SGLang, speculators, DeepSpec and transformers to
ours: "model.layers.0.mlp.up_proj.weight" gives "blocks.0.mlp.up_proj.weight"."""

PUBLISHED = {
    "head_weight": "lm_head.weight",
    "embedding_norm.weight": "embedding_layernorm.weight",
    "state_norm.weight": "hidden_states_layernorm.weight",
    "output_norm.weight": "pre_lm_head_layernorm.weight",
}
"""The published names of tensors that have no neighbours to tell them by."""


class DraftFiles:
    """The files of a draft, read when they are needed.

    draft: a folder, or a repository of the hub.
    fetch: finds its files (default: `fetcher(draft)`).

    For another layout of files `contrib` adds a subclass to `LAYOUTS`, whose ``fits(fetch)`` is true of it.
    """

    origin = ""
    """Names the layout in reports."""
    renames: Sequence[tuple[str, str]] = ()
    """Applied before `RENAMES`."""
    flags: dict[str, bool] = {}
    """Flags of `EagleHead` that heads of this layout have."""

    def __init__(self, draft: str | Path, fetch: Fetch | None = None):
        self.draft, self.fetch = draft, fetch or fetcher(draft)

    @cached_property
    def tensor_names(self) -> list[str]:
        """Published names of all tensors; only the index is read if the checkpoint has one."""
        path, names = find_weights(self.draft, self.fetch)
        if path is not None:
            return list(self.checkpoint.shapes)
        return [*names] if self.quantisation is None else [*names, *self.quantisation.matrices(names)]

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """All tensors; ValueError if none can be read."""
        return Checkpoint(self.draft, self.fetch, quantisation=self.quantisation)

    @cached_property
    def quantisation(self) -> Quantisation | None:
        """The method by which matrices are quantised; ValueError if it is not read."""
        config, modelopt = (
            {} if path is None else read_json(path) for path in map(self.fetch, ("config.json", "hf_quant_config.json"))
        )
        return quantisation_of(config, modelopt)

    @cached_property
    def config(self) -> dict:
        """The object in ``config.json``; ValueError if there is none."""
        path = self.fetch("config.json")
        if path is None:
            raise ValueError(f"draft: {self.draft} has no config.json")
        return read_json(path)

    @cached_property
    def names(self) -> dict[str, str]:
        """Our name of each tensor -> its published one."""
        found = {}
        for published in self.checkpoint.shapes:
            ours = published
            for pattern, replacement in (*self.renames, *RENAMES):
                ours = re.sub(pattern, replacement, ours)
            found[ours] = published
        return found

    @property
    def architectures(self) -> str:
        """Architectures that the config names, comma-separated."""
        return ", ".join(self.config.get("architectures") or [])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor by our name; (0, 0) if there is none."""
        return self.checkpoint.shapes[self.names[name]] if name in self.names else (0, 0)

    def count_states(self, size: int, unless: str = "") -> int:
        """How many states of `size` numbers fc joins. unless: ends the error if there is no fc."""
        if "fc.weight" not in self.names:
            raise ValueError(f"draft: {self.draft} has no fc.weight{unless}")
        width = self.shape("fc.weight")[-1]
        if width % size:
            raise ValueError(
                f"draft: {self.names['fc.weight']} reads {width} numbers, which is no multiple of the target's hidden "
                f"size {size}; take the draft of this model"
            )
        return width // size

    def output_rows(self, said: int | None, hidden_size: int, target: Target) -> int | None:
        """Rows of the draft's own output matrix; None if it has none and uses the target's.

        said: ``draft_vocab_size`` of the config. hidden_size: of the draft.
        """
        name = self.names.get("head_weight")
        if name is None:
            if said not in (None, target.vocab_size) or hidden_size != target.hidden_size:
                raise ValueError(
                    f"draft: {self.draft} has no lm_head.weight for its {said or target.vocab_size} tokens; only a "
                    "draft of the target's hidden size and whole vocabulary can use the target's"
                )
            return None
        rows = self.shape("head_weight")[0]
        if said is not None and rows != said:
            raise ValueError(f"draft: {name} has {rows} rows, its config says draft_vocab_size {said}")
        return rows

    def draft_to_target(self, rows: int, target: Target) -> Tensor | None:
        """The target's id of each row of the output matrix, from the tensors d2t and t2d; None if row i is token i.

        d2t holds differences, t2d marks the tokens that are drafted: d2t = [0, 1, 2] and t2d = [1, 0, 1, 0, 1] both
        give the ids [0, 2, 4].
        """
        checkpoint, names, size = self.checkpoint, self.names, target.vocab_size
        # Row by row from d2t, then from t2d; both must say the same.
        ids = torch.arange(rows)
        if "d2t" in names:
            ids = ids + checkpoint.take(names["d2t"], (rows,)).long()
            if not 0 <= int(ids.min()) <= int(ids.max()) < size or len(ids.unique()) < rows:
                raise ValueError(
                    f"draft: d2t in {self.draft} must lead each of {rows} rows to a token of its own below {size} when "
                    f"the row's number is added; it leads to {int(ids.min())} to {int(ids.max())}, "
                    f"{len(ids.unique())} of them distinct"
                )
        if "t2d" in names:
            kept = checkpoint.take(names["t2d"], (size,)).nonzero()[:, 0]
            ids = kept if "d2t" not in names and len(kept) == rows else ids
            if len(kept) and not torch.equal(kept, ids.sort().values):
                raise ValueError(f"draft: t2d in {self.draft} keeps other tokens than its d2t and lm_head say")
        if rows == size and torch.equal(ids, torch.arange(rows)):
            return None
        if "d2t" not in names and "t2d" not in names:
            raise ValueError(
                f"draft: its output matrix has {rows} rows, the target {size} tokens, and {self.draft} has no d2t to "
                "say which row is which token"
            )
        return ids.to(target.embedding.device)

    def fill(self, draft: nn.Module, target: Target) -> None:
        """Give `draft` its parameters, as `Checkpoint.fill` does."""
        for name in self.checkpoint.shapes:
            if name.endswith("rotary_emb.inv_freq"):
                self.checkpoint.ignore(name, "computed from the config")

        def sources_of(name: str, shape: tuple[int, ...]) -> TensorSources:
            sources = [self.names.get(name) or published_name(name, self.names)]
            return TensorSources(sources, shape, lambda tensors: self.as_ours(name, tensors[0]))

        self.checkpoint.fill(draft, sources_of, target.embedding)

    def as_ours(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in our layout. name: ours."""
        return tensor


LAYOUTS: list[type[DraftFiles]] = []


def open_files(draft: str | Path) -> DraftFiles:
    """The files of a draft, in the layout that fits them."""
    fetch = fetcher(draft)
    return next((layout for layout in LAYOUTS if layout.fits(fetch)), DraftFiles)(draft, fetch)


class LoadedDraft(DraftFiles):
    """A draft that transformers has loaded, read as its files would be. Its tensors are shared."""

    def __init__(self, draft: PreTrainedModel):
        super().__init__(type(draft).__name__, lambda name: None)
        self.config = draft.config.to_dict()
        self.checkpoint = Checkpoint(self.draft, draft.state_dict())


def published_name(ours: str, names: dict[str, str]) -> str:
    """The name that a missing tensor would have, judged by its neighbours in `names` (ours -> published)."""
    parts = ours.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        stem = ".".join(parts[:depth]) + "."
        for known, theirs in names.items():
            rest = known.removeprefix(stem)
            if known.startswith(stem) and theirs.endswith(rest):
                name = theirs.removesuffix(rest) + ours.removeprefix(stem)
                return name.replace("input_layernorm", "hidden_norm") if "additional_layers." in name else name
    return PUBLISHED.get(ours, ours)
