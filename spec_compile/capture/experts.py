"""Experts: transformers' experts interface is given a function that emits the two markers of routed experts."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ..compat import EXPERTS_INTERFACES, default_gate
from ..inventory import configured
from ..kernels.experts import DOWN, UP, ExpertFormat
from ..quantised.codes import class_path, require, require_scale
from ..quantised.fp8 import FP8

IMPLEMENTATION, SELECTOR = "spec_compile", "_experts_implementation"
"""Our function in transformers' tables, and the attribute of a configuration that names the function to call."""
GPT_OSS = "GptOssExperts._apply_gate"
STEP = "transformers.models.step3p7.modeling_step3p7.Step3p7Experts"
"""Experts of that form whose own forward, a loop over the chosen ones, does not ask the interface."""


@contextmanager
def marked_experts(model: nn.Module) -> Iterator[None]:
    """A context in which `model` shows its routed experts as markers.

    One function serves all families, because transformers' ``use_experts_implementation`` gives their experts one form.
    Another mixture that does not ask the interface keeps its own forward.
    """
    loops = [part for part in model.modules() if class_path(part) == STEP]
    for part in loops:
        part.forward = partial(_experts, part)
    try:
        with configured(model, SELECTOR, IMPLEMENTATION):
            yield
    finally:
        for part in loops:
            del part.forward


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a mixture's experts: hidden_states [T, H], top_k_index, top_k_weights [T, k] -> [T, H]."""
    if getattr(module, "has_post_expert_norm", False):  # a norm between the second product and the weights
        return EXPERTS_INTERFACES[0]["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    first, second = "gate_up_proj" if _has_gate(module) else "up_proj", "down_proj"
    layout = dict(transposed=getattr(module, "is_transposed", False), biased=_has_bias(module))
    layout["block"] = _block(module)
    gate = _gate(module)
    x = UP(hidden_states, top_k_index, _parts(module, first), ExpertFormat(**gate, **layout).text)
    if gate["gate"] == "none":
        apply = module._apply_gate if _has_gate(module) else module.act_fn
        x = apply(x.flatten(0, 1)).unflatten(0, top_k_index.shape)
    return DOWN(x, top_k_index, top_k_weights, _parts(module, second), ExpertFormat(**layout).text)


for _interface in EXPERTS_INTERFACES:
    _interface.register(IMPLEMENTATION, _experts)


def _parts(module: nn.Module, name: str) -> list[Tensor]:
    """The tensors of a product in the order of `ExpertFormat`."""
    names = name, *([f"{name}_scale_inv"] if _block(module) else ()), *([f"{name}_bias"] if _has_bias(module) else ())
    return [getattr(module, each) for each in names]


def _gate(module: nn.Module) -> dict:
    """The fields of an `ExpertFormat` for the gate between the products; with "none" the gate stays in the graph."""
    method = type(module)._apply_gate
    is_default = method is default_gate or _is_plain_fp8(module) or _is_unclamped(module)
    if _has_gate(module) and is_default and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
        return dict(gate="silu")
    if method.__qualname__ == GPT_OSS:
        return dict(gate="clamped", interleaved=True, alpha=float(module.alpha), limit=float(module.limit))
    return dict(gate="none")


def _has_gate(module: nn.Module) -> bool:
    return getattr(module, "has_gate", True)


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "has_bias", False)


def _is_unclamped(module: nn.Module) -> bool:
    """True if these are experts of Step without a bound, so that their clamps change nothing."""
    return class_path(module) == STEP and module.limit == math.inf


def _is_plain_fp8(module: nn.Module) -> bool:
    """True if these are experts of FP8 with the default gate."""
    changes = "swiglu_alpha", "limit", "gate_softcap"
    return _block(module) > 0 and all(getattr(module, name, None) is None for name in changes)


def are_packed(module: nn.Module) -> bool:
    """True if a module is a mixture's experts in FP8; UnreadError if `ExpertFormat` cannot describe their layout."""
    if class_path(module) != "transformers.integrations.finegrained_fp8.FP8Experts":
        return False
    size = module.block_size
    require(size is not None and size[0] == size[1], f"has blocks of {size}, expected square ones")
    require(module.activation_scheme == "dynamic", f"has activations of the scheme {module.activation_scheme!r}")
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weight, scales = getattr(module, name), getattr(module, f"{name}_scale_inv")
        require(weight.dtype == FP8, f"has weights of {weight.dtype}, expected {FP8}")
        require(scales.dtype == torch.float32, f"has scales of {scales.dtype}, expected torch.float32")
        experts, *sizes = weight.shape
        require_scale(f"{name}_scale_inv", scales, (experts, *(-(-each // size[0]) for each in sizes)))
    return True


def _block(module: nn.Module) -> int:
    """The size of blocks of weights that share a scale; 0 if they are not quantised."""
    size = getattr(module, "block_size", None)
    return 0 if size is None else size[0]
