"""Attention backends: ways to run the attention layers of a graph. A new one is a file and an entry in `BACKENDS`.

All write the same cache, so prefill, verification and drafts may each use another. Our own is read in this order:
`call` (the arguments), `tree_attention` (meaning and launch), `append_kernel`, `tail_tiles`, `partial_softmax`,
`spans`, `tree_kernel`, and for prompts `prompt_kernel`.
"""

import functools
import logging

from ...errors import UnsupportedModelError, did_you_mean
from ...graph import ModelGraph
from . import cpu_attention, flashinfer, flex, sdpa, triton
from .base import Backend, Use
from .call import attention_calls

log = logging.getLogger("spec_compile")
_ON_CPU = () if cpu_attention.BEST is None else (cpu_attention.BACKEND,)
BACKENDS = {each.name: each for each in (triton.BACKEND, *_ON_CPU, sdpa.BACKEND, flex.BACKEND, flashinfer.BACKEND)}
ROLES = ("prefill", "verify", "draft")
__all__ = ["BACKENDS", "ROLES", "Backend", "Use", "attention_calls", "choose", "parse", "prepare"]


def parse(option) -> dict[str, str]:
    """The name of a backend, in lower case, for each of `ROLES`, from the option ``attention_backend``.

    option: "auto", a name, or a dict of names by role, where a missing role is "auto". Raises TypeError or ValueError.
    """
    if isinstance(option, str):
        option = dict.fromkeys(ROLES, option)
    if not isinstance(option, dict) or not all(isinstance(part, str) for pair in option.items() for part in pair):
        raise TypeError(
            f"attention_backend: expected a name, or a dict of names for {', '.join(ROLES)}, got {option!r}"
        )
    for role in option:
        if role not in ROLES:
            raise ValueError(
                f"attention_backend: expected a name for {', '.join(ROLES)}, got one for {role!r}."
                + did_you_mean(role, ROLES)
            )
    known = ["auto", *BACKENDS]
    names = {role: option.get(role, "auto").lower() for role in ROLES}
    for name in names.values():
        if name not in known:
            raise ValueError(
                f"attention_backend: expected one of {', '.join(known)}, got {name!r}." + did_you_mean(name, known)
            )
    return names


def choose(use: Use, graph: ModelGraph) -> Backend:
    """The backend of `graph` for this use.

    "auto" is the first of `BACKENDS` that can run every layer: ours on a GPU, which was the fastest with trees in every
    measurement (benchmarks/kernels/attention.py), and sums prompts in the same order; and ours on a CPU likewise.

    Raises ValueError if the backend does not run on the graph's device, and UnsupportedModelError if it lacks a feature
    that a layer needs.
    """
    device = graph.device.type
    able = _able(use, graph)
    if use.name == "auto" and able:
        for layer in graph.layers:
            for passed in [each for each in BACKENDS.values() if each.room and device in each.devices]:
                lack = passed.room(layer, graph.dtype, graph.device)
                if lack is not None:
                    _tell(f"attention by {able[0].name}, because {passed.name!r} does not have {lack}")
        return able[0]
    here = [each for each in BACKENDS.values() if device in each.devices]
    backend = here[0] if use.name == "auto" else BACKENDS[use.name]
    if device not in backend.devices:
        others = ", ".join(other.name for other in here)
        raise ValueError(
            f"attention_backend: {backend.name!r} runs on {' and '.join(sorted(backend.devices))}, the model is on "
            f"{device}; there is {others} (or 'auto')"
        )
    for number, layer in enumerate(graph.layers):
        lack = backend.lack(layer, graph.dtype, use, graph.device)
        if lack:
            raise UnsupportedModelError(
                f"attention_backend: {backend.name!r} cannot run layer {number} of the {use.role} graph: it does not "
                f"have {lack}. {_advice(use, able)}"
            )
    return backend


@functools.cache
def _tell(text: str) -> None:
    log.warning(text)


def prepare(graph: ModelGraph) -> str:
    """Compute once what the attention calls of `graph` share, after they were edited. -> a text for the report."""
    backend = BACKENDS.get(graph.backend)
    return backend.prepare(graph) if backend and backend.prepare else ""


def _able(use: Use, graph: ModelGraph) -> list[Backend]:
    """The backends that can run every layer of `graph` for this use."""
    return [
        backend
        for backend in BACKENDS.values()
        if graph.device.type in backend.devices
        and not any(backend.lack(layer, graph.dtype, use, graph.device) for layer in graph.layers)
    ]


def _advice(use: Use, able: list[Backend]) -> str:
    names = ", ".join(backend.name for backend in able)
    return f"Pass {{{use.role!r}: name}} with one of {names}" if able else "No backend can"
