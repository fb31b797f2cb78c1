"""Routed experts: transformers' interface is given a function that emits their two markers; and gpt-oss's MXFP4."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.activations import SiLUActivation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from ..compat import EXPERTS_INTERFACES, default_gate
from ..inventory import configured
from ..kernels.experts import DOWN, UP, ExpertFormat
from ..quantised import mxfp4
from ..quantised.codes import class_path, require, require_scale
from ..quantised.fp8 import FP8

IMPLEMENTATION, SELECTOR = "spec_compile", "_experts_implementation"
"""Our function in transformers' tables, and the attribute of a configuration that names the function to call."""
GPT_OSS = "GptOssExperts._apply_gate"
STEP = "transformers.models.step3p7.modeling_step3p7.Step3p7Experts"
"""Experts of that form whose own forward, a loop over the chosen ones, does not ask the interface."""


@contextmanager
def marked_experts(root: nn.Module) -> Iterator[None]:
    """A context in which `root`, a model or a draft head, shows its routed experts as markers.

    One function serves all families, because transformers' ``use_experts_implementation`` gives their experts one form.
    Another mixture that does not ask the interface keeps its own forward.
    """
    with ExitStack() as stack, configured(root, SELECTOR, IMPLEMENTATION):
        for part in root.modules():
            if class_path(part) == STEP:
                part.forward = partial(_experts, part)
                stack.callback(delattr, part, "forward")
        yield


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a mixture's experts: hidden_states [T, H], top_k_index, top_k_weights [T, k] -> [T, H]."""
    if getattr(module, "has_post_expert_norm", False):  # a norm between the second product and the weights
        return EXPERTS_INTERFACES[0]["grouped_mm"](module, hidden_states, top_k_index, top_k_weights)
    first, second = "gate_up_proj" if _has_gate(module) else "up_proj", "down_proj"
    layout = dict(transposed=getattr(module, "is_transposed", False), biased=_has_bias(module), block=_block(module))
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
    changes = "swiglu_alpha", "limit", "gate_softcap"
    is_plain_fp8 = _block(module) > 0 and all(getattr(module, name, None) is None for name in changes)
    is_unclamped = class_path(module) == STEP and module.limit == math.inf  # so that the clamps of Step change nothing
    is_default = method is default_gate or is_plain_fp8 or is_unclamped
    if _has_gate(module) and is_default and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
        return dict(gate="silu")
    if method.__qualname__ == GPT_OSS:
        return dict(gate="clamped", interleaved=True, alpha=float(module.alpha), limit=float(module.limit))
    return dict(gate="none")


def _has_gate(module: nn.Module) -> bool:
    return getattr(module, "has_gate", True)


def _has_bias(module: nn.Module) -> bool:
    return getattr(module, "has_bias", False)


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


# Modules that `capture.modules` changes, because they do not ask transformers' experts interface.


def aria(module: nn.Module, attend: Callable) -> None:
    """Weights [E, I, O], of which no kernel has a gate; before transformers 5.18 two modules had them."""
    experts, top = module.experts, module.router
    split = hasattr(experts, "fc1")
    first, second = (experts.fc1.weight, experts.fc2.weight) if split else (experts.gate_up_proj, experts.down_proj)
    count = experts.config.moe_topk if split else module.router.top_k

    def forward(hidden_states: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, 1)
        logits, ids = F.linear(rows, top.weight).topk(count, dim=-1)
        layout = ExpertFormat(transposed=True).text
        gate, up = UP(rows, ids, [first], layout).chunk(2, dim=-1)
        routed = DOWN(F.silu(gate) * up, ids, logits.softmax(dim=-1), [second], layout)
        return routed.view_as(hidden_states) + module.shared_experts(hidden_states)

    module.forward = forward


def dbrx(module: nn.Module, attend: Callable) -> None:
    """Gate and up are two weights, each [E * I, H] with the experts one after the other."""
    for name in ("w1", "v1", "w2"):
        weight = getattr(module.mlp, name).detach().unflatten(0, (module.num_experts, module.ffn_hidden_size))
        module.register_buffer(name, weight, persistent=False)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, 1)
        gate, up = (UP(rows, top_k_index, [weight], ExpertFormat().text) for weight in (module.w1, module.v1))
        x = module.mlp.activation_fn(gate) * up
        down = ExpertFormat(transposed=True).text
        return DOWN(x, top_k_index, top_k_weights, [module.w2], down).view_as(hidden_states)

    module.forward = forward


def longcat_flash(module: nn.Module, attend: Callable) -> None:
    """The experts numbered after the routed ones return their input."""
    if module.gate_up_proj is None:
        return

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        is_routed = top_k_index < module.num_routed_experts
        ids, weights = torch.where(is_routed, top_k_index, 0), torch.where(is_routed, top_k_weights, 0)
        x = UP(hidden_states, ids, [module.gate_up_proj], ExpertFormat(gate="silu").text)
        kept = hidden_states * (top_k_weights - weights).sum(dim=-1, keepdim=True)
        return DOWN(x, ids, weights, [module.down_proj], ExpertFormat().text) + kept.to(hidden_states.dtype)

    module.forward = forward


MODULES = {
    "transformers.models.aria.modeling_aria.AriaTextMoELayer": aria,
    "transformers.models.dbrx.modeling_dbrx.DbrxExperts": dbrx,
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": longcat_flash,
}
"""The functions above by the paths of the classes that they change, see `modules.MODULES`."""


# gpt-oss's experts in MXFP4: `load_mxfp4` keeps them packed, and those that transformers has packed are read.
#
# transformers unpacks such experts while it loads, unless it runs on a GPU with the package `kernels`. Then it keeps
# them in tensors of triton_kernels, which are neither parameters nor buffers, in an order that depends on the GPU.


PRODUCTS = "gate_up_proj", "down_proj"
FROM_HUB = "cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token"
"""Options of ``from_pretrained`` that say where the files are."""
LIBRARY = "transformers.integrations.mxfp4"


class Mxfp4Experts(nn.Module):
    """The experts of a layer of gpt-oss in MXFP4. Buffers have the weights in the order of the kernel (see `mxfp4`), a
    state dict has them in the order of files.

    weights: blocks and scales of each of `PRODUCTS`.
    biases: [E, O] of each of `PRODUCTS`.
    alpha, limit: the numbers of the clamped gate.
    """

    def __init__(
        self, weights: dict[str, tuple[Tensor, Tensor]], biases: dict[str, Tensor], alpha: float, limit: float
    ):
        super().__init__()
        self.alpha, self.limit, self._inputs = float(alpha), float(limit), {}
        for name, (blocks, scales) in weights.items():
            self._inputs[name] = blocks.shape[2] * mxfp4.GROUP
            for part, tensor in zip(("words", "units"), mxfp4.pack(blocks, scales)):
                self.register_buffer(f"{name}_{part}", tensor)
            self.register_parameter(f"{name}_bias", nn.Parameter(biases[name].detach(), requires_grad=False))

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """hidden_states [T, H], the experts of each row and their weights [T, k] -> [T, H]."""
        up, down = ([getattr(self, f"{name}_{part}") for part in ("words", "units", "bias")] for name in PRODUCTS)
        first, second = (ExpertFormat(biased=True, mxfp4=self._inputs[name]) for name in PRODUCTS)
        first = replace(first, gate="clamped", interleaved=True, alpha=self.alpha, limit=self.limit)
        x = UP(hidden_states, router_indices, up, first.text)
        return DOWN(x, router_indices, routing_weights, down, second.text)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        for name, inputs in self._inputs.items():
            words, units, bias = (getattr(self, f"{name}_{part}") for part in ("words", "units", "bias"))
            parts = *mxfp4.unpack(words, units, inputs), bias if keep_vars else bias.detach()
            for part, tensor in zip(("blocks", "scales", "bias"), parts):
                destination[f"{prefix}{name}_{part}"] = tensor

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, *others) -> None:
        ours = {}
        for name in PRODUCTS:
            keys = [f"{prefix}{name}_{part}" for part in ("blocks", "scales")]
            missing_keys += [key for key in keys if key not in state_dict]
            if all(key in state_dict for key in keys):
                packed = mxfp4.pack(*(state_dict[key] for key in keys))
                ours |= zip((f"{prefix}{name}_words", f"{prefix}{name}_units"), packed)
        biases = {f"{prefix}{name}_bias" for name in PRODUCTS}
        ours |= {key: state_dict[key] for key in biases & state_dict.keys()}
        super()._load_from_state_dict(ours, prefix, local_metadata, False, missing_keys, *others)


class _FromFile(nn.Module):
    """The tensors of a layer's experts in the order of files, and the numbers of their gate."""

    def __init__(self, config: GptOssConfig, alpha: float, limit: float):
        super().__init__()
        self.alpha, self.limit = alpha, limit
        experts, size, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        for name, (outputs, inputs) in zip(PRODUCTS, ((2 * inner, size), (size, inner))):
            blocks = torch.empty(experts, outputs, inputs // mxfp4.GROUP, mxfp4.GROUP // 2, dtype=torch.uint8)
            tensors = {"blocks": blocks, "scales": torch.empty(blocks.shape[:3], dtype=torch.uint8)}
            for part, tensor in {**tensors, "bias": torch.empty(experts, outputs)}.items():
                self.register_parameter(f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))


class _GptOss(GptOssForCausalLM):
    """gpt-oss while it is loaded."""

    def __init__(self, config: GptOssConfig):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = _FromFile(config, layer.mlp.experts.alpha, layer.mlp.experts.limit)


def load_mxfp4(name: str | PathLike, **options) -> GptOssForCausalLM:
    """A gpt-oss whose experts stay in MXFP4, on any device and without the package `kernels`.

    name, options: as for ``GptOssForCausalLM.from_pretrained``, without quantization_config.

    ``save_pretrained`` writes the experts as they were published.
    Raises ValueError if the checkpoint is not a gpt-oss in MXFP4 or lacks weights.
    """
    if "quantization_config" in options:
        raise ValueError("quantization_config: load_mxfp4 keeps experts as they are in the checkpoint; leave it out")
    config = GptOssConfig.from_pretrained(name, **{key: options[key] for key in FROM_HUB if key in options})
    quantisation = getattr(config, "quantization_config", None) or {}
    if config.model_type != "gpt_oss" or quantisation.get("quant_method") != "mxfp4":
        raise ValueError(f"name: {name} is not a gpt-oss in MXFP4; load it by transformers")
    del config.quantization_config
    model, report = _GptOss.from_pretrained(name, config=config, output_loading_info=True, **options)
    missing = sorted(report["missing_keys"] | report["mismatched_keys"])
    if missing:
        raise ValueError(
            f"name: {name} lacks weights, or has them in another shape: {', '.join(map(str, missing[:3]))}"
        )
    model.__class__ = GptOssForCausalLM
    model.config.quantization_config = Mxfp4Config.from_dict(quantisation)
    for number, layer in enumerate(model.model.layers):  # one at a time, because both forms of it take memory
        part = layer.mlp.experts
        weights = {each: (getattr(part, f"{each}_blocks"), getattr(part, f"{each}_scales")) for each in PRODUCTS}
        biases = {each: getattr(part, f"{each}_bias") for each in PRODUCTS}
        try:
            layer.mlp.experts = Mxfp4Experts(weights, biases, part.alpha, part.limit)
        except ValueError as error:
            raise ValueError(f"name: {name}: model.layers.{number}.mlp.experts {error}") from error
    return model


def library_tensors(model: nn.Module) -> list:
    """The tensors that transformers' packed experts keep outside of parameters and buffers."""
    names = [*PRODUCTS, *(f"{name}_precision_config" for name in PRODUCTS)]
    return [getattr(part, name) for part in model.modules() if _is_packed_by_library(part) for name in names]


def are_mxfp4(module: nn.Module) -> bool:
    """True if a module is a mixture, or its experts, in MXFP4; UnreadError if transformers keeps them in other ways."""
    if not _is_packed_by_library(module):
        return isinstance(module, Mxfp4Experts) or class_path(module) == f"{LIBRARY}.Mxfp4GptOssMLP"
    for name in PRODUCTS:
        layouts = getattr(module, name), getattr(getattr(module, f"{name}_precision_config"), "weight_scale", None)
        require(all(hasattr(each, "storage") for each in layouts), f"keeps {name} in no tensor of triton_kernels")
        require(int(_published(layouts[1]).max()) <= mxfp4.LARGEST_SCALE, f"has scales of {name} above 2, or NaN")
    return True


def mark_mxfp4(model: nn.Module) -> None:
    """In `model`, a shared copy, replace experts that transformers has packed by a copy, `Mxfp4Experts`."""
    for part in model.modules():
        if class_path(part) == f"{LIBRARY}.Mxfp4GptOssMLP":  # its forward does not call its router
            part.__class__, part.experts = GptOssMLP, _copied(part.experts)


def _is_packed_by_library(module: nn.Module) -> bool:
    return class_path(module) == f"{LIBRARY}.Mxfp4GptOssExperts"


_copies: "WeakValueDictionary[tuple, Mxfp4Experts]" = WeakValueDictionary()
"""The copies, by the addresses of their sources."""


def _copied(experts: nn.Module) -> Mxfp4Experts:
    """A copy of experts that transformers has packed, made once for all graphs."""
    tensors = {name: (getattr(experts, name), getattr(experts, f"{name}_precision_config")) for name in PRODUCTS}
    key = tuple(part.storage.data.data_ptr() for weight, how in tensors.values() for part in (weight, how.weight_scale))
    copy = _copies.get(key)
    if copy is None:
        weights = {}
        for name, (weight, how) in tensors.items():
            scales = _published(how.weight_scale)
            weights[name] = _published(weight).reshape(*scales.shape, -1), scales
        biases = {name: getattr(experts, f"{name}_bias") for name in PRODUCTS}
        copy = _copies[key] = Mxfp4Experts(weights, biases, experts.alpha, experts.limit)
        for name in PRODUCTS:  # the graphs hold these; the source is held so that its addresses stay in use
            getattr(copy, f"{name}_words").made_of = copy, tensors
    return copy


def _published(tensor) -> Tensor:
    """The numbers of a tensor of triton_kernels in the order of files: the last dimension has the bytes of a row."""
    return tensor.storage.layout.unswizzle_data(tensor.storage.data).transpose(-1, -2)
