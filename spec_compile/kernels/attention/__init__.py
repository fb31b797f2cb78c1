"""Attention backends: ways to run the attention layers of a graph. A new one is an entry in `BACKENDS`.

All write the same cache, so prefill, verification and drafts may each use another. Our own is read in this order:
`base` (the arguments and their meaning), `tree_attention` (launches), `block_kernels` (appending, and prompts),
`tail_tiles`, `partial_softmax` and `tree_kernel`.
"""

import functools

from ...errors import UnsupportedModelError, did_you_mean, log
from ...graph import ModelGraph
from . import cpu_attention, flashinfer
from .backends import SDPA, TRITON
from .base import Backend, Use, attention_calls

_tell = functools.cache(log.warning)  # each text once
_ON_CPU = () if cpu_attention.BEST is None else (cpu_attention.BACKEND,)
BACKENDS = {each.name: each for each in (TRITON, *_ON_CPU, SDPA, flashinfer.BACKEND)}
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
    here = [each for each in BACKENDS.values() if device in each.devices]
    able = [each for each in here if not any(each.why_not(x, graph.dtype, use, graph.device) for x in graph.layers)]
    if use.name == "auto" and able:
        # Say once if heads are too large for the kernels of a backend that would come before.
        for layer in graph.layers:
            for passed in [each for each in here if each.room]:
                reason = passed.room(layer, graph.dtype, graph.device)
                if reason is not None:
                    _tell(f"attention by {able[0].name}, because {passed.name!r} does not have {reason}")
        return able[0]

    # A named backend, or none that can: the first layer that it cannot run is told.
    backend = here[0] if use.name == "auto" else BACKENDS[use.name]
    if device not in backend.devices:
        others = ", ".join(other.name for other in here)
        raise ValueError(
            f"attention_backend: {backend.name!r} runs on {' and '.join(sorted(backend.devices))}, the model is on "
            f"{device}; there is {others} (or 'auto')"
        )
    for number, layer in enumerate(graph.layers):
        reason = backend.why_not(layer, graph.dtype, use, graph.device)
        if reason:
            names = ", ".join(each.name for each in able)
            advice = f"Pass {{{use.role!r}: name}} with one of {names}" if able else "No backend can"
            raise UnsupportedModelError(
                f"attention_backend: {backend.name!r} cannot run layer {number} of the {use.role} graph: it does not "
                f"have {reason}. {advice}"
            )
    return backend


def prepare(graph: ModelGraph) -> str:
    """Compute once what the attention calls of `graph` share, after they were edited. -> a text for the report."""
    backend = BACKENDS.get(graph.backend)
    return backend.prepare(graph) if backend and backend.prepare else ""
