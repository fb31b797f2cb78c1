"""`Cache`: the keys, values and states of a batch of sequences, at fixed addresses."""

import mmap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .graph import ModelGraph

PAGE = 64
"""Slots of a page. Attention sums in chunks of 16, 32 or 64 keys, each of which lies in one page."""
ROUNDED = 128
"""The slots of a row come in multiples of this many."""


class States(nn.Module):
    """The states of B sequences in every recurrence of a graph, and the stash of their trees' inputs.

    A state is that after the committed tokens. It changes when a chunk of a prompt is processed and when nodes of a
    tree are committed; the verification of a tree only reads it.
    """

    valid: Tensor
    prompt_lengths: Tensor

    def __init__(self, graph: ModelGraph, batch: int):
        super().__init__()
        self.kinds = [spec.kind for spec in graph.recurrences]
        for number, spec in enumerate(graph.recurrences):
            is_shared = [False, *(shared for _, shared in spec.stash)]
            for part, (shape, dtype, shared) in enumerate(zip(spec.shapes, spec.dtypes, is_shared)):
                rows = () if shared else (batch,)
                empty = torch.zeros(*rows, *shape, dtype=dtype or graph.dtype, device=graph.device)
                self.register_buffer(f"part_{number}_{part}", empty, persistent=False)
        self.parts = [1 + len(spec.stash) for spec in graph.recurrences]
        for name in ("valid", "prompt_lengths") if self.kinds else ():
            counts = torch.zeros(batch, dtype=torch.int64, device=graph.device)
            self.register_buffer(name, counts, persistent=False)

    def __getitem__(self, number: int) -> tuple[Tensor, list[Tensor]]:
        """State and stash of a recurrence."""
        state, *stash = (getattr(self, f"part_{number}_{part}") for part in range(self.parts[number]))
        return state, stash

    @property
    def tensors(self) -> list[Tensor]:
        """The tokens of a chunk that count [B], the lengths of the prompts [B], and the parts of each recurrence."""
        parts = [tensor for number in range(len(self.kinds)) for tensor in (self[number][0], *self[number][1])]
        return [*self.counts, *parts]

    @property
    def counts(self) -> list[Tensor]:
        """The first two of `tensors`."""
        return [self.valid, self.prompt_lengths] if self.kinds else []

    def reset(self, prompt_lengths: Tensor) -> None:
        """Begin B new sequences, whose prompts have these lengths [B]."""
        if self.kinds:
            self.prompt_lengths.copy_(prompt_lengths)
            for number in range(len(self.kinds)):
                self[number][0].zero_()

    def fill(self, states: list[Tensor]) -> None:
        """Take over the state of each recurrence [B, ...]."""
        for number, state in enumerate(states):
            self[number][0].copy_(state)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context that leaves no trace in any state."""
        before = [self[number][0].clone() for number in range(len(self.kinds))]
        yield
        self.fill(before)

    def enter(self, row: int, prompt_length: int) -> None:
        """Begin a new sequence in one row, while the others go on."""
        if self.kinds:
            self.prompt_lengths[row].fill_(prompt_length)
            for number in range(len(self.kinds)):
                self[number][0][row].zero_()  # guard: states-of-a-row

    def share(self, other: "States") -> None:
        """Take the first rows of `other`, and give up its rows."""
        for name, tensor in list(self.named_buffers()):
            setattr(self, name, getattr(other, name)[: len(tensor)])

    def commit(self, path: Tensor, gained: Tensor) -> None:
        """Lead every state over the first gained[b] nodes of the path [B, N] of the tree that was verified last."""
        alike: dict[tuple, list[int]] = defaultdict(list)
        for number, kind in enumerate(self.kinds):
            state, stash = self[number]
            if stash:  # else no token changes it
                alike[kind, *(part.shape for part in (state, *stash))].append(number)
        for (kind, *_), numbers in alike.items():
            states, stashes = zip(*(self[number] for number in numbers))
            parts = [part for stash in stashes for part in stash]
            torch.ops.spec_compile.recurrence_commit(kind, list(states), parts, path, gained)


class Cache(nn.Module):
    """Keys and values of B sequences of up to `slots` tokens, in every attention layer of a graph, and their states.

    The keys and values of a layer are P pages [P, Hkv, S, D] of S slots. Slot s of row b is slot s % S of the page
    ``table[b, s // S]``. First each row is one page. After `use_pages` pages have `PAGE` slots and rows several of
    them: with table = [[3, 7], [3, 5]] slot 65 of row 1 is slot 1 of page 5, and the rows share their first 64 slots.
    Page 0 is scratch, which several rows write to: of their slots there nobody sees any.

    table: [B, n] int32; several caches with the same pages may share one.
    """

    def __init__(self, graph: ModelGraph, batch: int, slots: int):
        super().__init__()
        self.layers, self.layer_tensors = len(graph.layers), graph.layer_tensors
        for number, layer in enumerate(graph.layers):
            kept = graph.cache_dtype or graph.dtype
            parts = ("keys", layer.key_dim, kept), ("values", layer.value_dim, kept), ("scales", 2, torch.float32)
            for name, size, dtype in parts[: graph.layer_tensors]:
                empty = zero_pages((batch, layer.kv_heads, slots, size), dtype, layer.device or graph.device)
                self.register_buffer(f"{name}_{number}", empty, persistent=False)
        for number, spec in enumerate(graph.indexes):
            empty = zero_pages((batch, 1, slots, spec.size), spec.dtype or graph.dtype, graph.device)
            self.register_buffer(f"index_{number}", empty, persistent=False)
        self.table = torch.arange(batch, dtype=torch.int32, device=graph.device)[:, None]
        self.states = States(graph, batch)
        self.adapters = [torch.zeros(batch, dtype=torch.int64, device=graph.device)] if graph.has_adapters else []
        """The adapter of each row [B], an entry of every `kernels.linear.low_rank.LowRank`; [] if rows choose none."""

    @property
    def argument(self) -> list[Tensor]:
        """The argument ``cache`` of a rewritten graph."""
        return [*self.tensors, *self.states.tensors, *self.adapters, self.table]

    @property
    def tensors(self) -> list[Tensor]:
        """For each layer its keys and values [P, Hkv, S, D], and its scales [P, Hkv, S, 2] if it has any; then the keys
        [P, 1, S, D] of each indexer."""
        return list(self.buffers(recurse=False))

    def layer(self, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values and scales of a layer."""
        first = number * self.layer_tensors
        keys, values, *scales = self.tensors[first : first + self.layer_tensors]
        return keys, values, scales[0] if scales else None

    @property
    def slots(self) -> int:
        """Tokens for which each row has room."""
        return self.tensors[0].shape[2] * self.table.shape[1]

    @property
    def is_paged(self) -> bool:
        """True if a row may have several pages."""
        return self.table.shape[1] > 1

    def use_pages(self, pool: list[Tensor] | int, table: Tensor) -> None:
        """Replace `tensors` by a pool, or by a new one of this number of pages; the table has several a row."""
        if isinstance(pool, int):
            self.resize(PAGE, pool)
        else:
            for (name, _), pages in zip(list(self.named_buffers(recurse=False)), pool):
                setattr(self, name, pages)
        self.table = table

    def share(self, other: "Cache") -> None:
        """Take the first rows of `other`, and give up its rows."""
        rows = len(self.table)
        self.use_pages(other.tensors if other.is_paged else [x[:rows] for x in other.tensors], other.table[:rows])
        self.states.share(other.states)
        self.adapters = [larger[: len(own)] for own, larger in zip(self.adapters, other.adapters)]

    def resize(self, slots: int, pages: int | None = None) -> None:
        """Replace `tensors` by empty ones, pages of `slots` slots. pages: None: one a row."""
        for name, tensor in list(self.named_buffers(recurse=False)):
            _, heads, _, size = tensor.shape
            shape = pages or len(self.table), heads, slots, size
            setattr(self, name, zero_pages(shape, tensor.dtype, tensor.device))


def zero_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros. On a CPU they are anonymous pages, which take memory when written and which a fork does not share."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
