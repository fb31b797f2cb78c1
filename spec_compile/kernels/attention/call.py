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
"""The arguments that only a backend which `rotates` takes: ours. Of custom ops, these alone take "scales", too."""


class Call(NamedTuple):
    """Append a block of keys and values to the cache, attend from its queries to the cache and to the block itself.

    q [B, H, N, Dk], k [B, Hkv, N, Dk], v [B, Hkv, N, Dv]: the block, of any strides. k and v are None if the block
    lies in the cache already, and q is rotated; only a backend that `rotates` takes this.
    key_cache, value_cache [B, Hkv, S, D*]: contiguous, written at the slots lengths[b] .. lengths[b] + N; of q's dtype,
    or of float8_e4m3fn, to which keys and values are then rounded before any query sees them (`ops.stored`).
    lengths [B] int64: committed slots of each row; every node sees all of them but for the window.
    ancestors [B, N] int64: bit j of node i says that i sees node j, and with it all that j sees, N <= 64. They are
    those of a tree, parents first, the node itself included, or all ones. None is a causal chunk of any N.
    positions [B, N] int64: of the block's tokens, none below lengths[b]; they ascend in a causal chunk.
    sinks [H]: a logit a head that takes probability and gives no value (gpt-oss).
    scale: positive, of the scores. softcap: c in c * tanh(score / c). window: how many positions back a token sees,
    itself included.
    cos, sin [B, N, Dk] of q's dtype: q and k are `ops.rotated` by them first.
    q_norm, k_norm [Dk]: weights of an `rms_norm` of every query and key head before the rotation, which they need;
    eps, offset: of these norms.
    scales [B, Hkv, S, 2] float32: by which the keys and the values in a slot are multiplied when they are read. They
    are written with these, see `ops.over_scale`.
    tiles [B, N, 5 + N] int32: the `tail_tiles.tail_tiles` of `ancestors`, if they were computed before.
    chunk: a token sees only those with the same position // chunk (Llama 4).
    slopes [H]: `ops.alibi` by these is added to the scores.
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

    def empty_output(self) -> Tensor:
        """Memory for what the call returns [B, N, H, Dv], of q's dtype."""
        return self.q.new_empty(self.q.shape[0], self.q.shape[2], self.q.shape[1], self.value_cache.shape[3])


TARGETS: set[Callable] = set()
"""What an attention call of a graph may call."""


def from_arguments(function: Callable[[Call], Tensor]) -> Callable[..., Tensor]:
    """``function(call)`` as a function of the call's arguments."""

    @functools.wraps(function)
    def attention(*arguments, **named):
        return function(Call(*arguments, **named))

    return attention


def attention_function(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function(call)`` as a plain function of the call's arguments but for `ROTATION`, through which Dynamo traces.
    Other arguments by name, which the backend's `prepare` has hoisted out of the calls, go to `function` as they are.
    """

    @torch.fx.node.has_side_effect
    @functools.wraps(function)
    def attention(*arguments, **named):
        hoisted = {name: named.pop(name) for name in list(named) if name not in Call._fields}
        call = Call(*arguments, **named)
        if call.cos is not None or call.k is None:
            raise TypeError(f"{function.__module__} does not rotate: expected cos=None, and k and v")
        return function(call, **hoisted)

    TARGETS.add(attention)
    return attention


def attention_op(name: str, rotates: bool = False, **options) -> Callable:
    """Make ``function(call)`` the custom op `name` of the call's arguments (those of `ROTATION` only if it `rotates`),
    with their schema and fake. options: of `torch.library.custom_op`.

    The op has no default of "scales": PyTorch 2.11 looks for each argument that an op writes to among those that the
    dispatcher hands over, and that leaves out the last ones that equal their defaults.
    """

    def prototype() -> Tensor: ...

    defaults = {field: value for field, value in Call._field_defaults.items() if field != "scales"}
    prototype.__signature__ = inspect.Signature(
        [
            inspect.Parameter(
                field, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=annotation,
                default=defaults.get(field, inspect.Parameter.empty),
            )
            for field, annotation in Call.__annotations__.items()
            if rotates or field not in (*ROTATION, "scales")
        ],
        return_annotation=Tensor,
    )  # fmt: skip

    def define(function: Callable[[Call], Tensor]) -> torch.library.CustomOpDef:
        mutated = (*CACHES, "scales") if rotates else CACHES
        schema = torch.library.infer_schema(prototype, mutates_args=mutated)
        op = torch.library.custom_op(name, from_arguments(function), mutates_args=mutated, schema=schema, **options)
        op.register_fake(from_arguments(Call.empty_output))
        TARGETS.add(getattr(torch.ops.spec_compile, name.removeprefix("spec_compile::")).default)
        return op

    return define


def attention_calls(graph: ModelGraph) -> list[fx.Node]:
    """The attention calls of a graph over a static cache, in the order of its layers; ``node.kwargs`` has the arguments
    of `Call` by name."""
    return [node for node in calls(graph.gm) if node.target in TARGETS]
