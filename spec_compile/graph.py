"""`ModelGraph`: the captured model, and the contract between capture, the passes and the runtime."""

import math
import re
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn

LAYER = re.compile(r"\.(?:layers|h|blocks?|decoder_layers)\.(\d+)(?:\.|$)")
"""The number of a decoder layer in the path of a module."""
SIZE = "size"
"""Stands for the value of a node that computes a size, in a graph that was read from disk."""


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer: its shapes, and the additions to softmax(scale * q k^T) v.

    heads, kv_heads: number of heads of queries, and of keys and values.
    key_dim, value_dim: sizes of a head.
    scale: factor of the scores.
    window: tokens that a token sees back; None for all.
    softcap: bound of the scores; None for none.
    sinks: True if it has learned sinks.
    chunk: a token sees only tokens with the same position // chunk; None for all.
    slopes: True if biases by distance (ALiBi) are added to the scores.
    indexed: True if an indexer chooses the tokens that a token sees.
    device: where it is, as text; None for the device of the graph.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    chunk: int | None = None
    slopes: bool = False
    indexed: bool = False
    device: str | None = None


@dataclass(frozen=True)
class IndexSpec:
    """An indexer, which chooses `topk` tokens by index keys of `size`, cached in `dtype` (None: the model's)."""

    size: int
    topk: int
    dtype: torch.dtype | None


@dataclass(frozen=True)
class RecurrenceSpec:
    """One recurrence: its kind, and the tensors that a batch of sequences keeps of it.

    kind: a key of `kernels.recurrence.KINDS`.
    state: shape of a row's state.
    stash: for each input that a commit reads, its shape, and True if all rows share it.
    dtypes: the dtype of the state, and of each part of the stash; None for the dtype of the model.
    """

    kind: str
    state: tuple[int, ...]
    stash: tuple[tuple[tuple[int, ...], bool], ...]
    dtypes: tuple[torch.dtype | None, ...]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the state and of each part of the stash, without rows."""
        return [self.state, *(shape for shape, _ in self.stash)]


@dataclass(frozen=True)
class PassReport:
    """The result of one pass: a sentence about the change, the call nodes before and after, the code after it."""

    name: str
    summary: str
    nodes_before: int
    nodes_after: int
    code: str


@dataclass
class ModelGraph:
    """A causal LM as one FX graph of ATen calls.

    As captured, ``gm(input_ids[B, T], positions[B, T]) -> (logits[B, T, V],)`` with one
    ``spec_compile::attention`` node for each attention, one ``spec_compile::recurrence`` node for each recurrence and
    each short convolution, symbolic B and T, and parameters shared with the model.
    """

    gm: fx.GraphModule
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    position_limit: int | None
    """Rows of the learned position table; None if the model has none."""
    head_weight: str
    """Name of the output embedding's weight in `gm`; "" if it has none."""
    log: list[PassReport] = field(default_factory=list)
    cache_dtype: torch.dtype | None = None
    """The dtype of cached keys and values; None for `dtype`."""
    scaled_cache: bool = False
    """True if cached keys and values have a scale for each token and KV head."""
    is_functional = True
    """True if a call whose result nobody reads can be dropped."""
    backend: str = ""
    """Name of its attention backend; "" if its layers have no cache yet."""
    recurrences: tuple[RecurrenceSpec, ...] = ()
    indexes: tuple[IndexSpec, ...] = ()
    clamps_prompts: bool = False
    """True if the model clamps the time steps of prompts, and not of tokens that it generates."""
    shifts_positions: bool = False
    """True if positions may differ from slots: multi-axis RoPE gives a picture fewer positions than it has tokens."""
    decoder_layers: int = 0
    """Number of decoder layers with attention, recurrences, both or none; 0 for the number of attention layers."""
    embedded: int = 0
    """Tokens that it reads, the rows of the input embedding: ids below this may be in a text, and ids below
    `vocab_size` in an answer. 0 for `vocab_size`."""
    has_adapters: bool = False
    """True if the last entry of its input ``cache`` is the adapter of each row, see `passes.add_adapters`."""
    traced_layers: int = 0
    """Number of decoder layers that were traced, from which the others were copied; 0 if each was traced."""

    def __post_init__(self):
        self.decoder_layers = self.decoder_layers or len(self.layers)
        self.embedded = self.embedded or self.vocab_size

    @property
    def common_tokens(self) -> int:
        """Ids below this are both read and generated, so that they can be drafted."""
        return min(self.vocab_size, self.embedded)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.gm.parameters()).device

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token."""
        numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in self.layers)
        scales = 2 * sum(layer.kv_heads for layer in self.layers) if self.scaled_cache else 0
        indexes = sum(spec.size * (spec.dtype or self.dtype).itemsize for spec in self.indexes)
        return numbers * (self.cache_dtype or self.dtype).itemsize + scales * torch.float32.itemsize + indexes

    @property
    def layer_tensors(self) -> int:
        """Tensors in which a layer's keys and values are cached."""
        return 3 if self.scaled_cache else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of the states of one sequence and of the stash of its tree."""
        parts = [(shape, dtype) for spec in self.recurrences for shape, dtype in zip(spec.shapes, spec.dtypes)]
        return sum(math.prod(shape) * (dtype or self.dtype).itemsize for shape, dtype in parts)

    def copy(self) -> "ModelGraph":
        """A copy that passes may rewrite, with the same parameters."""
        graph = fx.Graph()
        output = graph.graph_copy(self.gm.graph, {}, return_output_node=True)
        graph.output(output[0])
        return ModelGraph(**{**self.__dict__, "gm": fx.GraphModule(self.gm, graph), "log": list(self.log)})


def calls(gm: fx.GraphModule, target=None) -> list[fx.Node]:
    """The call nodes of a graph, or only the calls of one target."""
    nodes = (node for node in gm.graph.nodes if node.op.startswith("call_"))
    return [node for node in nodes if target is None or node.target == target]


def is_size(node: fx.Node) -> bool:
    """True if a node computes a size that varies."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) or value is SIZE


def owner(node: fx.Node) -> str:
    """Path of the innermost module that issued a node; "" if it is not known."""
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0] if stack else ""


def layer_of(node: fx.Node) -> int | None:
    """Number of the decoder layer that issued a node; None for a node outside of them."""
    for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values()):
        if match := LAYER.search(path):
            return int(match[1])
    return None


def attribute(gm: nn.Module, name: fx.node.Target) -> Any:
    """The parameter or buffer, or the graph, with this name: the target of a ``get_attr`` node."""
    return attrgetter(str(name))(gm)
