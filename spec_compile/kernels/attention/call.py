"""The attention call: its arguments, their defaults and meaning, stated once for every backend, pass and test."""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ...graph import ModelGraph, calls

CACHES = ("key_cache", "value_cache")
"""The arguments that a call writes to."""
ROTATION = ("cos", "sin", "q_norm", "k_norm", "eps", "offset", "tiles")
SPECIAL = frozenset({*ROTATION, "scales"})
"""The arguments that an op has only if its backend names them in `base.Backend.takes`."""


class AttentionCall(NamedTuple):
    """Append a block of N keys and values to the cache, attend from its queries to the cache and to the block itself.

    A tree of N = 5 nodes with parents [-1, 0, 0, 1, 1] has ancestors [0b00001, 0b00011, 0b00101, 0b01011, 0b10011]: bit
    j of node i is set if i sees j. With lengths = [300] its keys go to the slots 300 .. 304, its positions are
    [300, 301, 301, 302, 302], and node 3 sees the slots 0 .. 299 and those of nodes 0, 1 and 3: 300, 301 and 303.

    q: [B, H, N, Dk], any strides; queries.
    k: [B, Hkv, N, Dk], any strides; keys. None (with v): the block is in the cache already and q is rotated; only a
        backend that `takes` all of `ROTATION` takes this.
    v: [B, Hkv, N, Dv], any strides; values.
    key_cache: [B, Hkv, S, Dk], contiguous; written at the slots lengths[b] .. lengths[b] + N. It has q's dtype, or
        float8_e4m3fn, to which keys and values are rounded before any query sees them (`ops.stored`).
    value_cache: [B, Hkv, S, Dv]; likewise.
    lengths: [B] int64; committed slots of each row, all of which a node sees that has no window.
    ancestors: [B, N] int64, N <= 64; bit j of node i: i sees node j, and all nodes that j sees. Parents first, the node
        itself included; or all bits of all nodes. None: a causal chunk of any N.
    positions: [B, N] int64; at least lengths[b], ascending in a causal chunk.
    sinks: [H]; a logit for each head that takes probability and gives no value (gpt-oss).
    scale: positive factor of the scores.
    softcap: c in c * tanh(score / c).
    window: how many positions a token sees, its own included.
    scales: [B, Hkv, S, 2] float32; factors of a slot's keys and of its values when they are read; written with the
        slots (`ops.over_scale`).
    cos, sin: [B, N, Dk] of q's dtype; q and k are first rotated by them (`ops.rotated`).
    q_norm, k_norm: [Dk]; weights of the `rms_norm` of every query and key head before the rotation; they need cos.
    eps, offset: of these norms.
    tiles: [B, N * (5 + N)] int32; the `tail_tiles.tail_tiles` of `ancestors`, if they were computed before.
    chunk: a token sees only tokens with the same position // chunk (Llama 4).
    slopes: [H]; `ops.alibi` by these is added to the scores.
    chosen: [B, N, K] int32; the slots that a node sees, ascending and then -1, of those that it would see without them.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    key_cache: Tensor
    value_cache: Tensor
    lengths: Tensor
    ancestors: Tensor | None
    positions: Tensor
    sinks: Tensor | None
    scale: float
    softcap: float | None
    window: int | None
    scales: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    offset: float | None = None
    tiles: Tensor | None = None
    chunk: int | None = None
    slopes: Tensor | None = None
    chosen: Tensor | None = None

    def empty_output(self) -> Tensor:
        """Memory for the result [B, N, H, Dv], of q's dtype."""
        return self.q.new_empty(self.q.shape[0], self.q.shape[2], self.q.shape[1], self.value_cache.shape[3])


LAUNCHES: dict[str, Callable[[AttentionCall, Tensor], Tensor]] = {}
"""By arguments that kernels of `tree_attention` do not read: the function that launches a call that has one, with its
queries rotated and its block in the cache, on a GPU. `contrib` adds some."""
TARGETS: set[Callable] = set()
"""The functions and ops that are attention calls in a graph."""


def from_arguments(
    function: Callable[[AttentionCall], Tensor], takes: frozenset[str] = SPECIAL
) -> Callable[..., Tensor]:  # fmt: skip
    """``function(call)`` as a function of the arguments of an op that takes these of `SPECIAL`, in their order."""
    first = next((place for place, name in enumerate(AttentionCall._fields) if name in SPECIAL - takes), None)
    others = _fields_of(takes)[first:] if first is not None else []

    @functools.wraps(function)
    def attention(*arguments, **named):
        return function(AttentionCall(*arguments[:first], **dict(zip(others, arguments[first or 0 :])), **named))

    return attention


def _fields_of(takes: frozenset[str]) -> list[str]:
    """The call's arguments that an op has, in their order."""
    return [field for field in AttentionCall._fields if field not in SPECIAL - takes]


def attention_function(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function(call)`` as a plain function of the call's arguments, which is traced as its operators.

    It refuses the arguments `ROTATION`. Keywords that are no field of the call, which the backend's `prepare` has
    computed before, are passed on to `function`.
    """

    @torch.fx.node.has_side_effect
    @functools.wraps(function)
    def attention(*arguments, **named):
        hoisted = {name: named.pop(name) for name in list(named) if name not in AttentionCall._fields}
        call = AttentionCall(*arguments, **named)
        if call.cos is not None or call.k is None:
            raise TypeError(f"{function.__module__} does not rotate: expected cos=None, and k and v")
        return function(call, **hoisted)

    TARGETS.add(attention)
    return attention


def schema_of(takes: frozenset[str] = frozenset()) -> str:
    """The schema of an op of the call's arguments. takes: those of `SPECIAL` that it has.

    "scales" has no default in the op: PyTorch 2.11 looks up every argument that an op writes among those that the
    dispatcher hands over, and the dispatcher leaves out last arguments that equal their defaults.
    """

    def prototype() -> Tensor: ...

    defaults = {field: value for field, value in AttentionCall._field_defaults.items() if field != "scales"}
    prototype.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                field, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=AttentionCall.__annotations__[field],
                default=defaults.get(field, inspect.Parameter.empty),
            )
            for field in _fields_of(takes)
        ],
        return_annotation=Tensor,
    )  # fmt: skip
    return torch.library.infer_schema(prototype, mutates_args=_mutated(takes))


def _mutated(takes: frozenset[str]) -> tuple[str, ...]:
    """The arguments that an op writes to."""
    return (*CACHES, "scales") if "scales" in takes else CACHES


def attention_op(name: str, takes: frozenset[str] = frozenset(), **options) -> Callable:
    """Decorate ``function(call)``: it becomes the custom op `name` of the call's arguments, with its schema and fake.

    takes: as of `schema_of`.
    options: of `torch.library.custom_op`.
    """

    def define(function: Callable[[AttentionCall], Tensor]) -> torch.library.CustomOpDef:
        named = {"mutates_args": _mutated(takes), "schema": schema_of(takes), **options}
        op = torch.library.custom_op(name, from_arguments(function, takes), **named)
        op.register_fake(from_arguments(AttentionCall.empty_output, takes))
        TARGETS.add(getattr(torch.ops.spec_compile, name.removeprefix("spec_compile::")).default)
        return op

    return define


def attention_calls(graph: ModelGraph) -> list[fx.Node]:
    """The attention calls of a graph, in the order of its layers; ``node.kwargs`` has the fields of `AttentionCall`."""
    return [node for node in calls(graph.gm) if node.target in TARGETS]
