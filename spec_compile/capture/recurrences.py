"""Layers that mix tokens: recurrences become marker ops in the trace, and each layer must show what its type says."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ..errors import UnsupportedModelError
from ..graph import RecurrenceSpec, calls, layer_of
from ..kernels import HALF
from ..kernels.ops import arguments_of
from ..kernels.recurrence import KINDS, recurrence, stash_shapes
from ..quantised.codes import class_path
from .modules import RECURRENT

INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""The type of layers with an indexer; the second name is that before transformers 5.20."""
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", *INDEXED)
PARTS: dict[str, tuple[set[str], ...]] = {
    "full_attention": ({"attention"},),
    "sliding_attention": ({"attention"},),
    "linear_attention": ({"convolution", "recurrence"}, {"recurrence"}),
    "conv": ({"convolution"},),
    "hybrid": ({"attention", "convolution", "recurrence"},),
    "mlp": (set(),),
    "moe": (set(),),
}
"""The parts that mix tokens in a layer, by the type that the configuration gives it; linear attention has one of two
forms."""
OF_FAMILY: dict[str, dict[str, tuple[set[str], ...]]] = {
    "recurrent_gemma": {"attention": PARTS["sliding_attention"], "recurrent": PARTS["linear_attention"]},
    "zaya": dict.fromkeys(("hybrid", "hybrid_sliding"), ({"attention", "convolution"},)),
}
"""Other types, by the model's: RecurrentGemma's before transformers 5.24, or types that mean something else."""
MARKERS = torch.ops.spec_compile.attention.default, torch.ops.spec_compile.recurrence.default


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer; empty if the configuration names none."""
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def parts_of(config: PreTrainedConfig) -> dict[str, tuple[set[str], ...]]:
    """`PARTS` as a model's configuration means them."""
    return PARTS | OF_FAMILY.get(config.model_type, {})


def check_layers(model: PreTrainedModel, gm: fx.GraphModule) -> None:
    """UnsupportedModelError unless every layer shows the markers of its type, and nothing else that mixes tokens."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    attention, recurrence = (calls(gm, marker) for marker in MARKERS)
    if not recurrence:
        skipped = {*(getattr(config, "cross_attention_layers", None) or ())}  # Mllama's, in a text without pictures
        if len(attention) != len({*range(config.num_hidden_layers)} - skipped):
            own = next((path for path, part in model.named_modules() if "forward" in vars(part)), None)
            raise UnsupportedModelError(
                f"model: {name} called attention through transformers' interface {len(attention)} times in "
                f"{config.num_hidden_layers} layers; every layer must, or its own mask or state would be lost"
                + ("" if own is None else f". A function was set as {f'{own}.forward'.lstrip('.')}; remove it")
            )
        for kind, types, argument in (("chunked", ("chunked_attention",), "chunk"), ("indexed", INDEXED, "chosen")):
            told = sum(arguments_of(node)[argument] is not None for node in attention)
            if told != sum(each in types for each in layer_types(config)):
                raise UnsupportedModelError(f"model: {name} has {kind} layers that its attention is not told of")
        return
    if calls(gm, torch.ops.aten.conv1d.default):
        raise UnsupportedModelError(f"model: {name} has convolutions over tokens that are not of a known form")
    shown = Counter((layer_of(node), "attention") for node in attention)
    for node in recurrence:
        shown[layer_of(node), "convolution" if node.args[0] == "convolution" else "recurrence"] += 1
    wanted = parts_of(config)
    for number, layer_type in enumerate(layer_types(config) or ["linear_attention"] * config.num_hidden_layers):
        parts = {part for layer, part in shown if layer == number}
        if parts not in wanted[layer_type] or shown[number, "attention"] > 1:
            raise UnsupportedModelError(
                f"model: {name}: layer {number} of type {layer_type} shows {', '.join(sorted(parts)) or 'nothing'} in "
                f"place of {', '.join(sorted(wanted[layer_type][0])) or 'nothing'}; its own state would be lost"
            )


# Functions of transformers' modelling files, and ours in their place.


MARKER = torch.ops.spec_compile.recurrence.default


def _causal_conv1d(hidden_states, weight, bias=None, activation=None, seq_idx=None, **extra) -> Tensor:
    """hidden_states [B, C, T], weight [C, w], bias [C] -> [B, C, T]."""
    _check(seq_idx=seq_idx, initial_states=extra.get("initial_states"))
    out = recurrence("convolution", [hidden_states.transpose(1, 2), weight]).transpose(1, 2)
    if bias is not None:
        out = out + bias.float()[:, None]
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def _delta_rule(
    query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None, **extra,
) -> tuple[Tensor, None]:  # fmt: skip
    """query, key [B, T, Hk, Dk], value [B, T, H, Dv], g [B, T, H] or [B, T, H, Dk], beta [B, T, H] -> [B, T, H, Dv]."""
    _check(initial_state=initial_state, output_final_state=output_final_state or None, cu_seqlens=cu_seqlens)
    q, k = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
    inputs = [q * query.shape[-1] ** -0.5, k, value.float(), g.float(), beta.float()]
    return recurrence("delta", inputs).to(query.dtype), None


def _state_space(
    hidden_states, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
    dt_limit=(0.0, math.inf), return_final_states=False, z=None, seq_idx=None, **extra,
) -> Tensor:  # fmt: skip
    """hidden_states [B, T, H, P], dt [B, T, H], A, D, dt_bias [H], B, C [B, T, G, n] -> [B, T, H, P] float32."""
    _check(initial_states=initial_states, return_final_states=return_final_states or None, z=z, seq_idx=seq_idx)
    x, dt = hidden_states.float(), _time_steps(dt, dt_bias, dt_softplus)
    low, high = map(float, dt_limit)
    if low > 0.0 or high < math.inf:
        dt = torch.ops.spec_compile.clamp_prompt(dt, low, high)
    out = recurrence("decay", [C.float(), B.float(), x * dt[..., None], dt * A.float()])
    return out if D is None else out + D.float()[:, None] * x


def _selective_scan(
    hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False, **extra
) -> Tensor:  # fmt: skip
    """hidden_states, dt, z [B, d, T], A [d, n], B, C [B, n, T], D, delta_bias [d] -> [B, d, T] float32."""
    _check(return_last_state=return_last_state or None)
    x = hidden_states.float()
    steps = _time_steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    inputs = [C.transpose(1, 2).float(), B.transpose(1, 2).float(), x.transpose(1, 2), steps, A.float()]
    out = recurrence("selective", inputs).transpose(1, 2)
    if D is not None:
        out = out + x * D.float()[:, None]
    return out if z is None else out * F.silu(z)


def _wkv(time_decay, time_first, key, value, state=None, return_state=False) -> tuple[Tensor, None]:
    """time_decay, time_first [C], key, value [B, T, C] -> [B, T, C]."""
    _check(state=state, return_state=return_state or None)
    inputs = [key.float(), value.float(), -torch.exp(time_decay.float()), time_first.float()]
    return recurrence("wkv", inputs).to(key.dtype), None


def _time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """dt [B, T, H] in float32, with its bias [H] and activation."""
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _check(**arguments) -> None:
    """UnsupportedModelError if an argument has a value that the markers do not express."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedModelError(f"model: its recurrent layers pass {name} in a forward without a cache")


FUNCTIONS: dict[str, Callable] = {
    "causal_conv1d_fn": _causal_conv1d,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
    "rwkv_linear_attention": _wkv,
}
"""Our functions, by the name that modelling files of transformers give to the function that each replaces."""


def _homes(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """The modules of Python that define classes of `model`, each with the name of a function of `FUNCTIONS` in it."""
    files = {type(module).__module__ for module in model.modules()} & sys.modules.keys()
    return [(sys.modules[file], name) for file in files for name in FUNCTIONS if hasattr(sys.modules[file], name)]


def has_recurrences(model: nn.Module) -> bool:
    """True if the model's layers have recurrences that can be replaced."""
    return bool(_homes(model)) or any(class_path(part) in RECURRENT for part in model.modules())


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """A context in which recurrences of `model` are marker ops. The names are global, so one thread at a time."""
    before = [(home, name, getattr(home, name)) for home, name in _homes(model)]
    try:
        for home, name, _ in before:
            setattr(home, name, FUNCTIONS[name])
        yield
    finally:
        for home, name, function in before:
            setattr(home, name, function)


def describe(gm: fx.GraphModule) -> tuple[RecurrenceSpec, ...]:
    """The recurrences of a captured graph, in its order."""
    specs = []
    for node in calls(gm, MARKER):
        kind, inputs = node.args[0], [x.meta["val"] for x in node.args[1]]
        (state, dtype), stash = KINDS[kind].state(inputs), stash_shapes(kind, inputs)
        dtypes = (dtype, *(dtype for _, dtype, _ in stash))
        specs.append(
            RecurrenceSpec(
                kind, state, tuple((shape, is_shared) for shape, _, is_shared in stash),
                tuple(None if dtype in HALF else dtype for dtype in dtypes),
            )
        )  # fmt: skip
    return tuple(specs)
