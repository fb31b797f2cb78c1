"""Attention backends: what runs the attention layers of a graph, one file each. A new one is one entry in `BACKENDS`.

All write the same cache, so that prefill, verification and drafts may each have their own.
"""

from ...errors import UnsupportedModelError, did_you_mean
from ...graph import ModelGraph
from . import flashinfer, flex, sdpa, triton
from .base import Backend, Use

BACKENDS = {each.name: each for each in (triton.BACKEND, sdpa.BACKEND, flex.BACKEND, flashinfer.BACKEND)}
AUTO = {"cuda": "triton", "cpu": "sdpa"}
"""What "auto" is on a kind of device."""
ROLES = ("prefill", "verify", "draft")


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


def named(name: str, device: str) -> Backend:
    """The backend of that name, or for "auto" that of the kind of device."""
    return BACKENDS[AUTO[device] if name == "auto" else name]


def choose(use: Use, graph: ModelGraph) -> Backend:
    """The backend that `graph` is to be used with.

    Raises ValueError if it does not run on the graph's device, UnsupportedModelError if a layer needs what it lacks.
    """
    device = graph.device.type
    backend = named(use.name, device)
    if device not in backend.devices:
        others = ", ".join(other.name for other in BACKENDS.values() if device in other.devices)
        raise ValueError(
            f"attention_backend: {backend.name!r} runs on {' and '.join(sorted(backend.devices))}, the model is on "
            f"{device}; there is {others} (or 'auto')"
        )
    for number, layer in enumerate(graph.layers):
        lack = backend.lack(layer, graph.dtype, use)
        if lack:
            raise UnsupportedModelError(
                f"attention_backend: {backend.name!r} cannot run layer {number} of the {use.role} graph: it does not "
                f"have {lack}. {_able(use, graph)}"
            )
    return backend


def _able(use: Use, graph: ModelGraph) -> str:
    """A sentence that names the backends that could be used."""
    able = [
        backend.name
        for backend in BACKENDS.values()
        if graph.device.type in backend.devices
        and not any(backend.lack(layer, graph.dtype, use) for layer in graph.layers)
    ]
    return f"Pass {{{use.role!r}: name}} with one of {', '.join(able)}" if able else "No backend can"
