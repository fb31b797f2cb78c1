"""Layers that mix tokens: recurrences become marker ops in the trace, and each layer must show what its type says."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

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
    return bool(_homes(model)) or any(class_path(part) in MODULES for part in model.modules())


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """A context in which recurrences of `model` are marker ops. The names are global, so one thread at a time."""
    with ExitStack() as stack:
        for home, name in _homes(model):
            stack.enter_context(patch.object(home, name, FUNCTIONS[name]))
        yield


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


# Modules that `capture.modules` changes, because they call no function that could be replaced: recurrent layers, and
# convolutions over tokens.


def zaya(module: nn.Module, attend: Callable) -> None:
    """Compressed convolutional attention (arXiv:2510.04476): queries and keys pass a depthwise convolution and one by
    heads, and half of each value comes from the token before.

    The marker only delays inputs: its weights are 0 and 1. With two taps in either convolution, [0, 1, 0] gives the
    projections of the token before, and [1, 0, 0] the projections two tokens back. Before the text both have zeros.
    """
    depthwise, by_heads, past = module.conv_qk_depthwise, module.conv_qk_grouped, module.conv_kernel_size
    sizes = [depthwise.in_channels] * past + [module.hidden_size]
    delays = module.q_proj.weight.new_zeros(sum(sizes), max(past, 1) + 1)
    for delay, rows in zip([*range(past, 0, -1), 1], delays.split(sizes)):
        rows[:, -1 - delay] = 1
    module.register_buffer("delays", delays, persistent=False)

    def heads_of(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, module.head_dim)).transpose(1, 2)  # [B, T, H * D] -> [B, H, T, D]

    def forward(hidden_states: Tensor, *_, **__) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (project(hidden_states) for project in (module.q_proj, module.k_proj))
        qk = torch.cat([q, k], dim=-1)
        delayed = recurrence("convolution", [torch.cat([qk] * past + [hidden_states], dim=-1), module.delays])
        *before, previous = delayed.to(qk.dtype).split(sizes, dim=-1)
        mixed = _by_heads(by_heads, _depthwise(depthwise, [*before, qk]))
        mixed_q, mixed_k = mixed.split([q.shape[2], k.shape[2]], dim=2)
        q, k, mixed_q, mixed_k = map(heads_of, (q, k, mixed_q, mixed_k))
        q = (q + k.repeat_interleave(module.num_key_value_groups, dim=1)) * 0.5
        k = q.unflatten(1, (-1, module.num_key_value_groups)).mean(dim=2)
        v = torch.cat([module.v_proj_current(hidden_states), module.v_proj_delayed(previous)], dim=-1)
        return tuple(x.transpose(1, 2) for x in (mixed_q + q, mixed_k + k, heads_of(v)))

    module.forward = forward


def _depthwise(convolution: nn.Conv1d, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a depthwise convolution of w taps, w - 1 fewer than the inputs; all [B, T, C], the oldest first.

    Inputs at delays of 2, 1 and 0 tokens and two taps give outputs at delays of 1 and 0.
    """
    columns = convolution.weight[:, 0].unbind(1)
    windows = (inputs[first : first + len(columns)] for first in range(len(inputs) - len(columns) + 1))
    return [sum(x * column for x, column in zip(window, columns)) + convolution.bias for window in windows]


def _by_heads(convolution: nn.Conv1d, inputs: list[Tensor]) -> Tensor:
    """The output [B, T, C] of a convolution whose groups are heads. inputs: [B, T, C] for each tap, oldest first."""
    heads = convolution.weight.unflatten(0, (convolution.groups, -1)).flatten(2)  # [G, D, D * w]
    x = torch.stack(inputs, dim=-1).unflatten(2, (convolution.groups, -1)).flatten(3)  # [B, T, G, D * w]
    return torch.einsum("btgi,goi->btgo", x, heads).flatten(2) + convolution.bias


DECAYS = ("query_decay", "key_decay", "diagonal_decay")
"""Tables of lightning attention: exp(-slope_rate * n) for distances n up to a block, [H, ...]."""


def lightning(module: nn.Module, attend: Callable) -> None:
    """Lightning attention (MiniMax): linear attention whose decay is a constant of each head.

    The decay is exp(-slope_rate), as in the model's cached steps. Its forward without a cache reads powers of it from
    tables, which are rounded to 16 bits in a model of 16 bits (`unrounded_decays`).
    """

    def forward(hidden_states: Tensor, **_) -> tuple[Tensor, None]:
        qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(2, (module.num_attention_heads, -1))
        q, k, v = qkv.float().chunk(3, dim=3)
        decay = (-module.slope_rate.float().flatten()).expand(q.shape[:3])
        out = recurrence("decay", [q, k, v, decay]).flatten(2).to(hidden_states.dtype)
        return module.out_proj(F.sigmoid(module.output_gate(hidden_states)) * module.norm(out)), None

    module.forward = forward


@contextmanager
def unrounded_decays(model: nn.Module) -> Iterator[None]:
    """A context in which `DECAYS` of a model of 16 bits are float32 and follow from its `slope_rate`.

    UnsupportedModelError if a table differs from that by more than its dtype rounds: then the model's own prompts and
    steps have other decays, and no recurrence is both.
    """
    with ExitStack() as stack:
        for part in model.modules():
            if not hasattr(part, "decay_factors") or part.slope_rate.dtype not in HALF:
                continue
            exact = part.decay_factors(part.slope_rate.float().cpu())  # before transformers 5.24 only on a CPU
            for name, table in zip(DECAYS, exact, strict=True):
                rounded = getattr(part, name)
                if (table - rounded.float().cpu()).abs().max() > torch.finfo(rounded.dtype).eps:
                    raise UnsupportedModelError(
                        f"model: {name} of its lightning attention does not follow from slope_rate; load the model "
                        "again, or compute both anew"
                    )
                stack.callback(setattr, part, name, rounded)
                setattr(part, name, table.to(rounded.device))
        yield


def griffin(block: nn.Module, attend: Callable) -> None:
    """The recurrent block of Griffin (RecurrentGemma): a short convolution and a gated linear unit, RG-LRU."""
    convolution, unit = block.conv_1d, block.rg_lru

    def forward(input_states: Tensor, position_ids: Tensor, *_, **__) -> tuple[Tensor, None]:
        gate = block.act_fn(block.linear_y(input_states))
        x = recurrence("convolution", [block.linear_x(input_states), convolution.weight[:, 0]])
        x = (x + convolution.bias.float()).to(input_states.dtype)
        return block.linear_out(unit(x, position_ids) * gate), None

    def scan(hidden_states: Tensor, recurrent_gate: Tensor, **_) -> tuple[Tensor, None]:
        # Without the reset at position 0, where the state is 0 already.
        return recurrence("gated", [hidden_states.float(), recurrent_gate.float()]).to(hidden_states.dtype), None

    block.forward, unit._rnn_scan = forward, scan


def rwkv(module: nn.Module, attend: Callable) -> None:
    """Both halves of a layer of RWKV: their shift to the token before is a convolution with the weights 1, 0."""
    shift = module.time_shift
    taps = torch.tensor([1.0, 0.0], device=module.key.weight.device).repeat(module.key.in_features, 1)
    shift.register_buffer("taps", taps, persistent=False)

    def forward(hidden: Tensor) -> Tensor:
        return recurrence("convolution", [hidden, shift.taps]).to(hidden.dtype)

    shift.forward = forward


MODULES = {
    "transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention": lightning,
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock": griffin,
    "transformers.models.rwkv.modeling_rwkv.RwkvFeedForward": rwkv,
    "transformers.models.rwkv.modeling_rwkv.RwkvSelfAttention": rwkv,
    "transformers.models.zaya.modeling_zaya.ZayaCCAProjection": zaya,
}
"""The functions above by the paths of the classes that they change, see `modules.MODULES`."""
