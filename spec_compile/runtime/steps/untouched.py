"""Warm-up that leaves no trace."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...drafting import Drafter
from ..state import State
from .capture import OutcomeRing


@contextmanager
def untouched(state: State, drafter: Drafter, ring: OutcomeRing | None = None) -> Iterator[None]:
    """Restore small buffers after steps run inside, which write caches and texts only after the committed slots."""
    buffers = [*state.small_buffers(), *drafter.small_buffers()]
    buffers += [ring.turn] if ring else []
    held = {buffer: buffer.clone() for buffer in buffers}
    try:
        drafter.mute()
        state.finished.fill_(True)  # so that no state is led over what these steps verify
        state.prompt_lengths.zero_()
        if ring:
            ring.turn.fill_(-1)
        yield
    finally:
        for buffer, value in held.items():
            buffer.copy_(value)
