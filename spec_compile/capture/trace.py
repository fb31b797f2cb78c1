"""Capture: one cache-free trace of a Hugging Face causal LM, with one marker node per attention layer."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo
from transformers import PreTrainedModel

from ..compat import attention_implementation
from ..errors import UnsupportedModelError, log
from ..graph import LayerSpec, ModelGraph, attribute, calls
from ..kernels import ops
from ..passes.outputs import FINAL
from ..quantised.codes import class_path
from . import recurrences
from .copies import shared_copy
from .experts import marked_experts
from .kinds import Expansion, UnlikeLayersError, copy_of, repeats_of
from .modules import MODULES, UNREAD, connect
from .quantised import QuantisedLinear, embedded_tokens, mark, marked_fake_copy, output_matrix, refuse
from .ranks import bind, is_sharded
from .recurrences import check_layers

IMPLEMENTATION = "spec_compile"
HARMLESS = {
    "position_ids",
    "use_cache",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "logits_to_keep",
    "is_causal",
}
FACTS: dict[str, Callable[[fx.GraphModule], Any]] = {}
"""Further attributes of a `ModelGraph`, each with the function that reads it from the trace; `contrib` adds some."""


class _Attention:
    """The attention function that transformers calls during the trace. It numbers the layers and emits markers."""

    def __init__(self, model: PreTrainedModel):
        self.model, self.count = model, 0
        self.ignores_softcap = model.config._attn_implementation == "sdpa"  # as transformers' SDPA function does

    def __call__(
        self, module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, softcap=None,
        s_aux=None, chunk=None, slopes=None, indices=None, **extra,
    ):  # fmt: skip
        unknown = sorted(name for name, value in extra.items() if value is not None and name not in HARMLESS)
        if unknown:
            refuse(self.model, f"passes {', '.join(unknown)} to attention, which is unknown here")
        if attention_mask is not None and attention_mask is not UNREAD:
            refuse(self.model, "builds an attention mask of its own")
        if self.ignores_softcap:
            softcap = None
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        layer, self.count = self.count, self.count + 1
        more = chunk, slopes, indices
        return ops.attention(query, key, value, s_aux, scale, sliding_window, softcap, layer, *more), None


class _Forward(nn.Module):
    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids, positions):
        return self.model(input_ids=input_ids, position_ids=positions, use_cache=False).logits


def capture(model: PreTrainedModel, whole: bool = False) -> ModelGraph:
    """Trace `model`, which was admitted, into a `ModelGraph` that shares its parameters, or a rank's parts of them.

    whole: True to trace every layer. Otherwise layers alike are traced once (see `kinds`), if the model has any; the
        graph is the same.
    Raises UnsupportedModelError if the trace fails, or does not show exactly one attention call per layer.
    """
    graph = None if whole else _capture_kinds(model)
    if graph is not None:
        return graph
    if is_sharded(model):
        copied, mode = marked_fake_copy(model)
    else:
        copied, mode = mark(shared_copy(model)), nullcontext()
    gm, limits = _trace_model(copied, model, mode)
    graph = _describe(copied, gm, limits)
    if is_sharded(model):
        bind(gm, model)
    return graph


def _capture_kinds(model: PreTrainedModel) -> ModelGraph | None:
    """The graph from a trace of some layers of each kind; None, with the reason in the log, if there is none."""
    name = type(model).__name__
    try:
        repeats = repeats_of(model)
        gm, limits = _trace_model(copy_of(model, repeats), model, nullcontext())
        source = model
        if any(class_path(part) in MODULES for part in model.modules()):  # `connect` gives them other tensors
            connect(source := shared_copy(model), _Attention(source))
        graph = _describe(model, Expansion(gm, source, repeats).graph_module(), limits)
    except UnlikeLayersError as reason:
        log.info("model: %s %s, so each of its layers is captured", name, reason)
        return None
    except Exception as error:  # perhaps the copy's fault, and if it is the model's, tracing all of it shows that
        log.info("model: each layer of %s is captured, because a copy with fewer failed (%r)", name, error)
        return None
    graph.traced_layers = len(repeats.kept)
    return graph


def _trace_model(copied: PreTrainedModel, model: PreTrainedModel, mode) -> tuple[fx.GraphModule, list[int]]:
    """The graph of `copied`, a copy of `model`, and the lengths of its tables of positions.

    mode: a context in which example inputs are made.
    """
    nn.Module.train(copied, False)  # admitted models compute the same in either mode  # guard: evaluation-mode
    attention = _Attention(copied)
    try:
        limits = connect(copied, attention)
        attention_marked = attention_implementation(copied, IMPLEMENTATION, attention)
        with attention_marked, marked_experts(copied), recurrences.marked(copied):
            with mode:
                example = _example(model.device)
            return _trace(_Forward(copied), *example), limits
    except (UnsupportedModelError, UnlikeLayersError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        problem = "could not be captured as one graph"
        if attention.count == 0 and not recurrences.has_recurrences(copied):
            problem = "does not call its attention through transformers' AttentionInterface, so it cannot be rewritten"
        name = type(model).__name__
        raise UnsupportedModelError(f"model: {name} {problem} ({type(error).__name__}: {reason})") from error


def capture_head(head: nn.Module, width: int | None = None) -> ModelGraph:
    """Trace a draft head that calls the marker op itself. The graph shares its parameters.

    head: ``forward(input_ids [B, T], positions [B, T], state [B, T, width])``.
    width: channels of the state; None for a head that takes none.
    """
    parameter = next(head.parameters())
    arguments = _example(parameter.device)
    if width is not None:
        arguments = (*arguments, parameter.new_zeros(2, 7, width))
    with marked_experts(head):
        gm = _trace(head, *arguments)
    markers = calls(gm, torch.ops.spec_compile.attention.default)
    layers = tuple(_layer(node) for node in markers)
    return ModelGraph(gm, layers, 0, head.hidden_size, parameter.dtype, None, "", **_more_facts(gm))


def _example(device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and positions [2, 7] for the trace."""
    return torch.zeros(2, 7, dtype=torch.int64, device=device), torch.arange(7, device=device).expand(2, 7)


def _trace(module: nn.Module, *arguments: Tensor) -> fx.GraphModule:
    """One graph of ATen calls for any B and T; the arguments are [B, T, ...]."""
    dims = {0: torch.export.Dim("B", min=1, max=4096), 1: torch.export.Dim("T", min=2, max=1 << 20)}
    # Nobody reads the Python stack of each call, which takes a sixth of a trace. Equal layers are traced once or twice,
    # so a cache of fake tensors costs more than it saves.
    stacks = patch.object(torch.fx.config, "do_not_emit_stack_traces", True, create=True)  # torch 2.11 has none
    with torch.no_grad(), stacks, dynamo.patch(fake_tensor_cache_enabled=False):
        program = torch.export.export(module, arguments, dynamic_shapes=(dims,) * len(arguments), strict=False)
    gm = program.module(check_guards=False)
    gm.graph._codegen = fx.graph.CodeGen()  # plain arguments, and none of the exporter's input checks
    return fx.GraphModule(gm, gm.graph)


def _describe(model: PreTrainedModel, gm: fx.GraphModule, limits: list[int]) -> ModelGraph:
    config = model.config.get_text_config(decoder=True)
    markers = calls(gm, torch.ops.spec_compile.attention.default)
    check_layers(model, gm)
    # The weight of the output head, by identity or else by address.
    output, matrix = model.get_output_embeddings(), output_matrix(model)
    head = next(iter(output.packed.parts.values())) if isinstance(output, QuantisedLinear) else matrix
    # For tied weights the exporter leaves a node that nothing reads, whose tensor a graph on disk lacks.
    read = {n.target: attribute(gm, n.target) for n in gm.graph.nodes if n.op == "get_attr" and n.users}
    names = [name for name, tensor in read.items() if tensor is head]
    names = names or [name for name, tensor in read.items() if tensor.data_ptr() == head.data_ptr()]
    # Tables of positions: learned embeddings, and tables that are read by gather.
    tables = [
        attribute(gm, node.args[0].target).shape[0]
        for node in calls(gm, torch.ops.aten.embedding.default)
        if _depends_on(node.args[1], "positions")
    ]
    gathers = [n for n in calls(gm, torch.ops.aten.gather.default) if _depends_on(n.args[2], "positions")]
    sizes = [node.args[0].meta["val"].shape[node.args[1]] for node in gathers]
    tables += limits + [size for size in sizes if isinstance(size, int)]
    return ModelGraph(
        gm=gm,
        layers=tuple(_layer(node) for node in markers),
        vocab_size=matrix.shape[0],
        hidden_size=matrix.shape[1],
        dtype=matrix.dtype,
        position_limit=min([getattr(config, "max_position_embeddings", tables[0]), *tables]) if tables else None,
        head_weight=names[0] if names else "",
        recurrences=recurrences.describe(gm),
        clamps_prompts=bool(calls(gm, torch.ops.spec_compile.clamp_prompt.default)),
        shifts_positions=any(hasattr(module, "rope_deltas") for module in model.modules()),
        decoder_layers=config.num_hidden_layers,
        embedded=embedded_tokens(model),
        **_more_facts(gm),
    )


def _more_facts(gm: fx.GraphModule) -> dict[str, Any]:
    return {name: describe(gm) for name, describe in FACTS.items()}


def _depends_on(node: fx.Node, placeholder: str) -> bool:
    """True if the values of a tensor are computed from an input's values."""
    seen, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node.op == "placeholder" and node.target == placeholder:
            return True
        if node not in seen:
            seen.add(node)
            gathers = node.target is torch.ops.aten.gather.default  # its values come from its first operand
            inputs = node.args[:1] if gathers else node.all_input_nodes
            todo += [n for n in inputs if isinstance(n.meta.get("val"), torch.Tensor)]  # sizes are no data
    return False


def _layer(node: fx.Node) -> LayerSpec:
    call = ops.arguments_of(node)
    q, k, v = (call[name].meta["val"] for name in ("q", "k", "v"))
    return LayerSpec(
        heads=q.shape[1], kv_heads=k.shape[1], key_dim=q.shape[3], value_dim=v.shape[3],
        sinks=call["sinks"] is not None, slopes=call["slopes"] is not None, indexed=call["chosen"] is not None,
        **{name: call[name] for name in ("scale", "window", "softcap", "chunk")},
    )  # fmt: skip


# The hidden states that a draft reads, from transformers' own forwards.


@contextmanager
def tapped(model: PreTrainedModel, taps: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """A context that yields a list. When it ends, the list holds for each tap the states [B, T, C] of all tokens that
    `model` has processed inside. Several forwards are chunks of one text.

    model: a shared copy, because it is given hooks.
    taps: numbered as in `passes.Settings`.
    """
    states, result = defaultdict(list), list[Tensor]()

    def keep(tap: int, value: Tensor | tuple) -> None:
        states[tap].append(value[0] if isinstance(value, tuple) else value)

    layers = decoder_layers(model)  # their inputs are read, because a picture may add to the output of the layer before
    head = model.get_output_embeddings()
    with ExitStack() as stack:
        for tap, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_pre_hook(lambda module, args, tap=tap: keep(tap, args)))
        stack.enter_context(layers[-1].register_forward_hook(lambda module, args, out: keep(len(layers), out)))
        stack.enter_context(head.register_forward_pre_hook(lambda module, args: keep(FINAL, args)))
        yield result
    result += [torch.cat(states[tap], dim=1) for tap in taps]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model, in their order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next(layers for layers in lists if len(layers) == count)
