"""Attention backends: what runs the attention layers of a graph, one file each. A new one is one entry in `BACKENDS`.

All write the same cache, so that prefill, verification and drafts may each have their own.
"""

from ...errors import UnsupportedModelError, did_you_mean
from ...graph import ModelGraph
from . import flashinfer, flex, sdpa, triton
from .base import Backend, Use
from .call import attention_calls
from .measure import fastest

BACKENDS = {each.name: each for each in (triton.BACKEND, sdpa.BACKEND, flex.BACKEND, flashinfer.BACKEND)}
ROLES = ("prefill", "verify", "draft")
__all__ = ["BACKENDS", "ROLES", "Backend", "Use", "attention_calls", "choose", "parse", "prepare"]


def parse(option) -> dict[str, str]:
    """The option ``attention_backend`` as the name of a backend for each of `ROLES`, whatever the case.

    option: "auto", a name, or a dict of names by role ("auto" where it has none). Raises TypeError or ValueError.
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
    """The backend that `graph` is to be used with.

    "auto" is the first of `BACKENDS` that is able: on a GPU ours, which was the fastest with trees wherever it was
    measured (benchmarks/attention_kernel.py), on a CPU sdpa. For prompts on a GPU it is the fastest of those whose
    kernels are compiled already, ours and FlashInfer's, measured once (`measure.fastest`).

    Raises ValueError if it does not run on the graph's device, UnsupportedModelError if a layer needs what it lacks.
    """
    device = graph.device.type
    able = _able(use, graph)
    if use.name == "auto" and able:
        return fastest(able, graph) if use.role == "prefill" and device == "cuda" else able[0]
    here = [each for each in BACKENDS.values() if device in each.devices]
    backend = here[0] if use.name == "auto" else BACKENDS[use.name]
    if device not in backend.devices:
        others = ", ".join(other.name for other in here)
        raise ValueError(
            f"attention_backend: {backend.name!r} runs on {' and '.join(sorted(backend.devices))}, the model is on "
            f"{device}; there is {others} (or 'auto')"
        )
    for number, layer in enumerate(graph.layers):
        lack = backend.lack(layer, graph.dtype, use)
        if lack:
            raise UnsupportedModelError(
                f"attention_backend: {backend.name!r} cannot run layer {number} of the {use.role} graph: it does not "
                f"have {lack}. {_advice(use, able)}"
            )
    return backend


def prepare(graph: ModelGraph) -> str:
    """Compute once what the attention calls of `graph` share, after they were edited; what to say of it."""
    backend = BACKENDS.get(graph.backend)
    return backend.prepare(graph) if backend and backend.prepare else ""


def _able(use: Use, graph: ModelGraph) -> list[Backend]:
    """The backends that `graph` could be used with."""
    return [
        backend
        for backend in BACKENDS.values()
        if graph.device.type in backend.devices
        and not any(backend.lack(layer, graph.dtype, use) for layer in graph.layers)
    ]


def _advice(use: Use, able: list[Backend]) -> str:
    names = ", ".join(backend.name for backend in able)
    return f"Pass {{{use.role!r}: name}} with one of {names}" if able else "No backend can"
