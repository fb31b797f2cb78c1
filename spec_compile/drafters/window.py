"""Attention of a draft over the first and the last slots of its context, and nothing between them.

After long texts a draft that was trained on short ones drafts worse, and its attention takes longer. Neither happens if
it sees a few slots of the beginning ("sinks"), which get much of the attention, and a window at the end. Positions stay
those of the text. StreamingLLM (Xiao et al., arXiv:2309.17453), section 3.2, except for the positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..capture.admit import Inventory
from ..config import Options
from ..errors import check_int
from ..graph import ModelGraph
from ..kernels import ops

SINKS = 4
"""First slots that are seen by default."""
LARGEST = 1 << 31
"""Bound of both options."""


@dataclass(frozen=True)
class WindowOptions(Options):
    """Options of the drafts that can attend to a part of their context.

    draft_window_size: tokens of the text's end that the draft's attention sees, if the text is longer (default: all).
    draft_sink_size: tokens of the text's beginning that it sees besides (default: 4).
    """

    draft_window_size: int | None = None
    draft_sink_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        size, sinks = self.draft_window_size, self.draft_sink_size
        if size is None:
            if sinks is not None:
                raise ValueError("draft_sink_size: it is of the window in draft_window_size; give that, too")
            return
        check_int("draft_window_size", size, 1, LARGEST, "tokens of the text's end")
        if sinks is not None:
            check_int("draft_sink_size", sinks, 0, LARGEST, "tokens of the text's beginning")
        self._check_room(self.max_cache_len, "max_cache_len")

    @property
    def window(self) -> "Window | None":
        """The part of a text that the draft's attention sees, or None for everything."""
        if self.draft_window_size is None:
            return None
        return Window(self.draft_window_size, SINKS if self.draft_sink_size is None else self.draft_sink_size)

    def check_window(self, graph: ModelGraph, target: Inventory) -> None:
        """ValueError if the draft's graph has its own windows, or if no text of `target` is as long as the window."""
        if self.window is None:
            return
        positions = getattr(target.config, "max_position_embeddings", None)
        self._check_room(positions, f"the tokens that {target.name} holds")
        windows = sorted({layer.window for layer in graph.layers if layer.window is not None})
        if windows:
            raise ValueError(
                f"draft_window_size: this draft's checkpoint has layers with windows of their own, of "
                f"{', '.join(map(str, windows))} tokens; leave the option out"
            )

    def _check_room(self, tokens: int | None, name: str) -> None:
        if self.window is not None and tokens is not None and self.window.slots > tokens:
            raise ValueError(
                f"draft_window_size: a window of {self.window.size} and {self.window.sinks} sinks are more than "
                f"{name}, {tokens}, so that no text would be longer; lower it, or leave it out"
            )


@dataclass(frozen=True)
class Window:
    """The first `sinks` slots of a cache and the last `size` committed ones."""

    size: int
    sinks: int

    @property
    def slots(self) -> int:
        """Most committed slots that are seen."""
        return self.sinks + self.size

    def describe(self) -> str:
        """A line for reports."""
        return f"attention sees the first {self.sinks} tokens of a text and its last {self.size}"

    def view(self, tensors: list[Tensor], lengths: Tensor, rows: int) -> tuple[list[Tensor], Tensor]:
        """A copy of the slots that are seen, as a cache of its own: (its tensors, its committed slots [B]).

        tensors: of a cache, each [B, Hkv, S, D].
        lengths [B] int64: its committed slots.
        rows: slots of the copy after the committed ones, for a block to be written.

        sinks = 1, size = 2 and lengths = 5 copy the slots [0, 3, 4] and have 3 committed slots.
        """
        slot = torch.arange(self.slots + rows, device=lengths.device)
        first = (lengths - self.size).clamp(min=self.sinks)  # of the window
        source = torch.where(slot < self.sinks, slot, slot - self.sinks + first[:, None])
        return [_gather(each, source) for each in tensors], lengths.clamp(max=self.slots)


def write_back(tensors: list[Tensor], begin: Tensor, view: list[Tensor], lengths: Tensor, rows: int) -> None:
    """Put the block of `rows` slots that lies at slots lengths [B] of a view into the cache, at slots begin [B]."""
    source = lengths[:, None] + torch.arange(rows, device=lengths.device)
    for each, copy in zip(tensors, view):
        ops.append(each, _gather(copy, source), begin)


def _gather(tensor: Tensor, slots: Tensor) -> Tensor:
    """[B, Hkv, S, D], slots [B, R] -> [B, Hkv, R, D]; a slot beyond the last is the last."""
    batch, heads, size, width = tensor.shape
    slots = slots.clamp(max=size - 1)[:, None, :, None]
    return tensor.gather(2, slots.expand(batch, heads, slots.shape[2], width))
