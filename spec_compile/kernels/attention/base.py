"""The interface of attention backends: the arguments of a call, its meaning in plain PyTorch, and features.

`AttentionCall` is the one list of arguments; ops, passes and tests take it from here. A `Backend` names the op that it
puts into a graph, and the features of attention that this op has.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from ...graph import LayerSpec, ModelGraph, calls
from .. import ops

WRITTEN = ("key_cache", "value_cache", "scales")
"""The arguments that a call writes to."""
ROTATION = ("cos", "sin", "q_norm", "k_norm", "eps", "offset", "tiles")
"""The arguments that a call has only if its backend takes them."""
TAKEN = frozenset({*ROTATION, "scales"})


class AttentionCall(NamedTuple):
    """Append a block of N keys and values to the cache, attend from its queries to the cache and to the block itself.

    A tree of N = 5 nodes with parents [-1, 0, 0, 1, 1] has ancestors [0b00001, 0b00011, 0b00101, 0b01011, 0b10011]: bit
    j of node i is set if i sees j. With lengths = [300] its keys go to the slots 300 .. 304, its positions are
    [300, 301, 301, 302, 302], and node 3 sees the slots 0 .. 299 and, of nodes 0, 1 and 3, the slots 300, 301 and 303.

    q: [B, H, N, Dk], any strides; queries.
    k: [B, Hkv, N, Dk], any strides; keys. None (with v): the block is in the cache already and q is rotated; only a
        backend that takes all of `ROTATION` takes this.
    v: [B, Hkv, N, Dv], any strides; values.
    key_cache: [P, Hkv, S, Dk], contiguous; written at the slots lengths[b] .. lengths[b] + N. It has q's dtype, or
        float8_e4m3fn, to which keys and values are rounded before any query sees them (`ops.stored`).
    value_cache: [P, Hkv, S, Dv]; likewise.
    lengths: [B] int64; committed slots of each row, all of which a node sees that has no window.
    ancestors: [B, N] int64, N <= 64; bit j of node i: i sees node j, and all nodes that j sees. Parents first, the node
        itself included; or all bits of all nodes. None: a causal chunk of any N.
    positions: [B, N] int64; at least lengths[b], ascending in a causal chunk.
    sinks: [H]; a logit for each head that takes probability and gives no value (gpt-oss).
    scale: positive factor of the scores.
    softcap: c in c * tanh(score / c).
    window: how many positions a token sees, its own included.
    scales: [P, Hkv, S, 2] float32; factors of a slot's keys and of its values when they are read; written with the
        slots (`ops.over_scale`).
    cos, sin: [B, N, Dk] of q's dtype; q and k are first rotated by them (`ops.rotated`).
    q_norm, k_norm: [Dk]; weights of the `rms_norm` of every query and key head before the rotation; they need cos.
    eps, offset: arguments of these norms.
    tiles: [B, N * (5 + N)] int32; the `tail_tiles.tail_tiles` of `ancestors`, if they were computed before.
    chunk: a token sees only tokens with the same position // chunk (Llama 4).
    slopes: [H]; slope * (key position - query position) is added to the scores (ALiBi, Press et al. 2021, section 3).
        Or [H, D] or [B, N, H, D], D > 1; the entry at the distance is, the last one from D - 1 on (T5).
    chosen: [B, N, K] int32; the slots that a node sees, ascending and then -1, of those that it would see without them.
    table: [B, n] int32; slot s of row b is slot s % S of page table[b, s // S] of the caches. With n = 1, or None, row
        b is page b.
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
    table: Tensor | None = None

    @property
    def slots(self) -> int:
        """The slots of a row."""
        return self.key_cache.shape[2] * (1 if self.table is None else self.table.shape[1])

    def empty_output(self) -> Tensor:
        """Memory for the result [B, N, H, Dv], of q's dtype."""
        return ops.empty_heads(self.q, self.value_cache)


def plain_attention(call: AttentionCall, max_kv_len: int, mask: Tensor | None = None) -> Tensor:
    """The call in plain PyTorch, over the first `max_kv_len` slots. -> [B, N, H, Dv].

    Values in unseen slots are multiplied by 0, so they must be finite.

    mask: an `ops.tree_mask` [B, 1 or Hkv, G * N, slots], whose slots are read in place of max_kv_len; None: the call
        makes one.
    """
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window, *_ = call
    # Norm and rotate queries and keys.
    if call.q_norm is not None:
        norm = torch.ops.spec_compile.rms_norm  # needs Triton
        q, k = (norm(x, w, call.eps, call.offset) for x, w in ((q, call.q_norm), (k, call.k_norm)))
    if call.cos is not None:
        q, k = (ops.rotated(x, call.cos, call.sin) for x in (q, k))

    # Append the block, then attend to the slots that each node sees.
    if mask is None:
        seen = (positions, lengths, ancestors, max_kv_len, window, q.shape[1] // key_cache.shape[1], q.dtype)
        mask = ops.tree_mask(*seen, call.chunk, call.slopes)
    mask = mask if call.chosen is None else ops.only_chosen(mask, call.chosen)
    if k is not None:
        ops.append_block(key_cache, value_cache, call.scales, k, v, lengths, call.table)
    keys, values = ops.as_read(key_cache, value_cache, call.scales, mask.shape[3], q.dtype, call.table)
    return ops.masked_attention(q, keys, values, mask, sinks, scale, softcap)


PIECES: ContextVar[tuple[Tensor, Tensor, int] | None] = ContextVar("pieces", default=None)
"""The arguments of `riding`, inside it."""


@contextmanager
def riding(lengths: Tensor, table: Tensor, rows: int) -> Iterator[None]:
    """Inside, the last rows of every call are pieces of prompts, each of which has `rows` rows that follow each other,
    so that kernels may take them as causal chunks. With 2 pieces of 3 rows each among 10 rows, the first 4 are trees,
    rows 4 to 6 are a piece and rows 7 to 9 another.

    lengths, table: the prompts' [P] and [P, n], contiguous; the first row of each piece has the same.
    """
    before = PIECES.set((lengths, table, rows))
    try:
        yield
    finally:
        PIECES.reset(before)


LAUNCHES: dict[str, Callable[[AttentionCall, Tensor], Tensor]] = {}
"""By arguments that kernels of `tree_attention` do not read: the function that launches a call that has one, with its
queries rotated and its block in the cache, on a GPU. `contrib` adds some."""
TARGETS: set[Callable] = set()
"""The functions and ops that are attention calls in a graph."""


def from_arguments(function: Callable[[AttentionCall], Tensor]) -> Callable[..., Tensor]:
    """``function(call)`` as a function of the call's arguments."""

    @functools.wraps(function)
    def attention(*arguments, **named):
        return function(AttentionCall(*arguments, **named))

    return attention


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


@functools.cache
def attention_schema() -> str:
    """The schema of an op that takes the call's arguments.

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
            for field in AttentionCall._fields
        ],
        return_annotation=Tensor,
    )  # fmt: skip
    return torch.library.infer_schema(prototype, mutates_args=WRITTEN)


def attention_op(name: str, **options) -> Callable:
    """Decorate ``function(call)``: it becomes the custom op `name` of the call's arguments, with its schema and fake.

    options: see `torch.library.custom_op`.
    """

    def define(function: Callable[[AttentionCall], Tensor]) -> torch.library.CustomOpDef:
        named = {"mutates_args": WRITTEN, "schema": attention_schema(), **options}
        op = torch.library.custom_op(name, from_arguments(function), **named)
        op.register_fake(from_arguments(AttentionCall.empty_output))
        TARGETS.add(getattr(torch.ops.spec_compile, name.removeprefix("spec_compile::")).default)
        return op

    return define


def attention_calls(graph: ModelGraph) -> list[fx.Node]:
    """The attention calls of a graph, in the order of its layers; ``node.kwargs`` has the fields of `AttentionCall`."""
    return [node for node in calls(graph.gm) if node.target in TARGETS]


FEATURES = {
    "window": "sliding windows",
    "softcap": "capped scores",
    "sinks": "sinks",
    "unequal": "keys and values of different head sizes",
    "chunk": "attention within chunks of positions",
    "slopes": "biases by distance, such as ALiBi",
    "indexed": "attention to the tokens that an indexer chooses",
}
"""Features of attention besides softmax(q k^T) v, with their names in error texts."""
ALL = frozenset(FEATURES)
USUAL = ALL - {"chunk", "slopes", "indexed"}
"""The features of a backend that lists none."""


@dataclass(frozen=True)
class Use:
    """How a graph uses a backend."""

    name: str = "auto"  # a backend's name, or "auto"
    role: str = "verify"  # "prefill" (causal chunks only), "verify" or "draft" (trees and chunks)
    captured: bool = True  # the graph runs inside a CUDA graph
    fp8: bool = False  # the cache holds float8_e4m3fn
    scaled: bool = False  # the cache also holds a scale for each token and KV head


@dataclass(frozen=True)
class Backend:
    """A way to run attention.

    load: ``load(use)`` returns the op of `AttentionCall`, or raises ImportError that says what to install.
    room: ``room(layer, dtype, device)`` is a text if heads need more shared memory than the device has; None if not.
    prepare: ``prepare(graph)`` computes once what the attention calls of a graph share, each time the calls were
        edited, and returns a text for the report.
    """

    name: str
    load: Callable[[Use], Callable]
    devices: frozenset[str]  # the types of the devices that it runs on
    dtypes: frozenset[torch.dtype]  # queries, keys and values may have these
    causal: frozenset[str] = USUAL  # the `FEATURES` that it has with causal chunks,
    trees: frozenset[str] = USUAL  # with trees,
    captured: frozenset[str] = USUAL  # and inside a CUDA graph, where it reads lengths only on the device
    takes: frozenset[str] = frozenset()  # the arguments of `TAKEN` that its op reads; with "cos" it rotates
    sizes: frozenset[int] | None = None  # its head sizes; None: all
    fp8: bool = False  # it takes caches of float8_e4m3fn,
    scaled: bool = False  # and with scales
    prompts_captured: bool = False  # inside a CUDA graph it takes chunks of any size as fast as outside
    room: Callable[[LayerSpec, torch.dtype, torch.device], str | None] | None = None
    prepare: Callable[[ModelGraph], str] | None = None

    def why_not(self, layer: LayerSpec, dtype: torch.dtype, use: Use, device: torch.device) -> str | None:
        """A noun for what the backend lacks for this use of a layer, for an error text; None if it lacks nothing."""
        # The numbers and the cache.
        if dtype not in self.dtypes:
            return str(dtype).removeprefix("torch.")
        if use.scaled and not self.scaled:
            return "caches of 8 bits with scales (kv_cache_dtype='auto' needs none)"
        if use.fp8 and not (self.fp8 or use.scaled):
            return "caches of 8 bits (kv_cache_dtype='auto' needs none)"

        # The features that the layer needs.
        needs = vars(layer) | {"unequal": layer.key_dim != layer.value_dim}
        features, form = (self.causal, "causal chunks") if use.role == "prefill" else (self.trees, "token trees")
        if use.captured:
            features, form = self.captured, f"{form} in a CUDA graph"
        for feature in FEATURES:
            if needs[feature] not in (None, False) and feature not in features:
                return f"{FEATURES[feature]} with {form}"

        # The sizes of its heads.
        foreign = {layer.key_dim, layer.value_dim} - (self.sizes or {layer.key_dim, layer.value_dim})
        if foreign:
            return f"heads of {max(foreign)}"
        return self.room(layer, dtype, device) if self.room else None
