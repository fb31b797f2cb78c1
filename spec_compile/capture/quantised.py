"""Quantised targets. The configuration and the classes of modules decide which are served.

A dtype says little here: GPTQ and AWQ keep their weights in buffers, torchao's tensors claim bfloat16, and a
method that transformers does not know leaves weights that were never scaled.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import quantised
from ..errors import UnsupportedModelError, log
from ..inventory import set_in_configs
from ..kernels.linear import QUANTISED, hold_packed
from ..parallel.slices import whole
from .copies import shared_copy
from .experts import IMPLEMENTATION, SELECTOR, are_mxfp4, are_packed, library_tensors, mark_mxfp4
from .ranks import Fake, fake_copy, is_sharded

READ = {
    "fp8": "fine-grained FP8", "compressed-tensors": "compressed-tensors", "gptq": "GPTQ", "awq": "AWQ",
    "bitsandbytes": "bitsandbytes NF4 and FP4", "torchao": "torchao int8, float8 and grouped weights", "mxfp4": "MXFP4",
}  # fmt: skip
"""Methods of ``quantization_config`` whose packed layers are read, and the name that people use for each."""
LIBRARIES = {
    "aqlm", "auto_gptq", "auto_round", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fp_quant", "gptqmodel",
    "hqq", "optimum", "quark", "spqr_quant", "torchao", "vptq",
}  # fmt: skip
"""Packages whose modules and tensors hold quantised weights; so do the modules of ``transformers.integrations``."""
ADVICE = {
    "Linear8bitLt": "load it with load_in_4bit=True, because a row's answer depends on outliers of other rows here",
    "GgufLinear": "load its original checkpoint, or an FP8 one",
}
UNPACKS = "ct_decompress_hook"
"""The hook of compressed-tensors that unpacks all layers in a model's first forward, and is gone then."""

ROWS = 1 << 12
"""Rows of an output head's codes that are made numbers together."""


def admit_quantisation(model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """The paths of packed linear layers, and the paths of packed experts.

    UnsupportedModelError, with the format and the layer, if a module has quantised weights that are not read.
    """
    method = _admit_method(model)
    if method in ("gptq", "awq") and any(hasattr(part, "gate_up_proj") for part in model.modules()):
        refuse(
            model,
            f"is a mixture of experts quantised by {method}, whose experts transformers does not load (they are "
            "random); load an FP8 or 16-bit checkpoint",
        )
    try:
        layers, experts = {*packed_layers(model)}, packed_experts(model)
    except quantised.UnreadError as error:
        refuse(model, f"has the quantised layer {error}, {_advice()}")
    if is_sharded(model) and (experts or not are_shared_by_library(model)):
        refuse(
            model,
            "is quantised in a form that is not read where transformers has shared it out among ranks; load it whole "
            'on each, without tp_plan, and pass tensor_parallel="auto"',
        )
    for path, part in model.named_modules():
        name = type(part).__name__
        if path in layers | experts:
            if part is model.get_output_embeddings() and not isinstance(part, QuantisedLinear):
                refuse(model, f"has a quantised output head ({path}); quantise the model without it")
            continue
        if type(part).__module__.startswith("transformers.integrations.") or _library_of(type(part)):
            refuse(model, f"has quantised layers of class {name} ({path}), {_advice(name)}")
        for key, tensor in part._parameters.items():
            if tensor is not None and _library_of(type(tensor)) | _library_of(type(tensor.data)):
                refuse(model, f"has weights of class {type(tensor.data).__name__} ({path}.{key}), {_advice(name)}")
    return layers, experts


def packed_layers(model: nn.Module) -> dict[str, quantised.Packed]:
    """The quantised linear layers of a model, by path; UnreadError, naming the first whose layout is not read."""
    layers = {path: _named(path, part, packed_layer) for path, part in model.named_modules()}
    return {path: packed for path, packed in layers.items() if packed is not None}


def are_shared_by_library(model: nn.Module) -> bool:
    """True if all parts of quantised linear layers are parameters of their modules."""
    for path, layer in packed_layers(model).items():
        held = {id(each) for each in model.get_submodule(path)._parameters.values()}
        if layer.owner or not {*map(id, layer.parts.values())} <= held:
            return False
    return True


def hold_one_layout(model: PreTrainedModel) -> None:
    """Make layers that a kernel reads in its own layout hold their weights only in that, layer by layer.

    It comes before a model's graphs are read or captured, because they read these weights. Layers that transformers has
    shared out among ranks stay.
    """
    if is_sharded(model):
        return
    dtype, why_slow = output_matrix(model).dtype, set()
    for part in model.modules():
        packed = packed_layer(part)
        if packed is not None:
            why_slow.add(hold_packed(part, packed, dtype))
        packed = None  # the library's tensors go before the next layer is packed
    why_slow.discard(None)
    if why_slow and model.device.type == "cpu":
        log.warning(
            "Quantised layers are unpacked anew in every step, which takes several times as long as 16 bits: %s. "
            "Load the model without quantisation if the memory suffices.",
            "; ".join(sorted(why_slow)),
        )


def packed_layer(part: nn.Module) -> quantised.Packed | None:
    """`quantised.read`, also for a `QuantisedLinear` in a user's model, which that does not know."""
    packed = quantised.read(part)
    return part.packed if packed is None and isinstance(part, QuantisedLinear) else packed


def packed_experts(model: nn.Module) -> set[str]:
    """The paths of routed experts that are packed and read; UnreadError as of `packed_layers`."""
    return {
        path for path, part in model.named_modules() for read in (are_packed, are_mxfp4) if _named(path, part, read)
    }


def _named(path: str, part: nn.Module, read: Callable):
    """``read(part)``, whose UnreadError is made to name the module."""
    try:
        return read(part)
    except quantised.UnreadError as error:
        raise quantised.UnreadError(f"{path} ({type(part).__name__}), which {error}") from error


class QuantisedLinear(nn.Module):
    """A quantised linear layer with its plain meaning. It holds the tensors of the layer that it was read from."""

    def __init__(self, packed: quantised.Packed):
        super().__init__()
        self._kind, self._names, self._inputs = packed.layout.kind, list(packed.parts), packed.inputs
        for name, tensor in {**packed.parts, "bias": packed.bias}.items():
            register = self.register_parameter if isinstance(tensor, nn.Parameter) else self.register_buffer
            register(name, tensor)

    @property
    def packed(self) -> quantised.Packed:
        """The layer that this was made from."""
        parts = {name: getattr(self, name) for name in self._names}
        return quantised.Packed(quantised.layout_of(self._kind), parts, self.bias, self._inputs)

    def forward(self, x: Tensor) -> Tensor:
        bias, packed = None if self.bias is None else whole(self.bias), packed_layer(self)
        return QUANTISED(x, [whole(part) for part in packed.parts.values()], bias, packed.layout.kind)


class RoundedHead(QuantisedLinear):
    """An output head in 8 bits. Its `weight` [V, H] is the input embedding if that is tied to it, which stays as it
    was; otherwise nothing holds it, and it is made of the codes when it is read.

    dtype, shape: the dtype and the shape of that weight.
    """

    def __init__(self, packed: quantised.Packed, embedding: nn.Parameter | None, dtype: torch.dtype):
        super().__init__(packed)
        self.dtype = dtype
        self.shape = packed.layout.outputs([*packed.parts.values()], packed.inputs), packed.inputs
        if embedding is not None:
            self._parameters["weight"] = embedding  # `register_parameter` would find the attribute there already

    def __getattr__(self, name: str):
        if name == "weight" and name not in self._parameters:
            packed = packed_layer(self)
            layout, parts, inputs = packed.layout, [*packed.parts.values()], packed.inputs
            weight = torch.empty(self.shape, dtype=self.dtype, device=parts[0].device)
            for begin in range(0, len(weight), ROWS):
                rows = weight[begin : begin + ROWS]
                rows.copy_(layout.weight(layout.cut(parts, begin, begin + len(rows)), inputs))
            return nn.Parameter(weight, requires_grad=False)
        return super().__getattr__(name)


def output_matrix(model: PreTrainedModel) -> Tensor:
    """The weight [V, H] of a model's output head, or a tensor without values of its shape and dtype."""
    head: Any = model.get_output_embeddings()
    return torch.empty(head.shape, dtype=head.dtype, device="meta") if isinstance(head, RoundedHead) else head.weight


def embedded_tokens(model: PreTrainedModel) -> int:
    """The rows of a model's input embedding, which may be more than its output head has, or fewer."""
    return getattr(model.get_input_embeddings(), "weight", output_matrix(model)).shape[0]


def mark(model: PreTrainedModel) -> PreTrainedModel:
    """Change `model`, a `shared_copy`: its quantised layers become `QuantisedLinear`, and experts that transformers has
    packed become `Mxfp4Experts`."""
    for path, packed in packed_layers(model).items():
        layer, plain = model.get_submodule(path), QuantisedLinear(packed)
        if isinstance(layer, RoundedHead):
            plain = RoundedHead(packed, layer._parameters.get("weight"), layer.dtype)
        model.set_submodule(path, plain)
    for number, hook in [*model._forward_pre_hooks.items()]:
        if UNPACKS in getattr(hook, "__qualname__", ""):  # it would unpack the layers of the original
            del model._forward_pre_hooks[number]
    mark_mxfp4(model)
    return model


def marked_fake_copy(model: PreTrainedModel) -> Fake:
    """`fake_copy` of a sharded model, with a `QuantisedLinear` for each of its quantised layers."""
    (copied, mode), layers = fake_copy(model), packed_layers(model)
    with mode, torch.device(model.device):
        for path, layer in layers.items():
            fakes = {name: copied.get_parameter(f"{path}.{name}") for name in layer.parts}
            bias = copied.get_submodule(path).bias
            copied.set_submodule(path, QuantisedLinear(layer._replace(parts=fakes, bias=bias)))
    return copied, mode


def with_plain_meaning(model: PreTrainedModel) -> PreTrainedModel:
    """`model`; or a marked copy if it has quantised layers, because these may run only on a GPU."""
    if not packed_layers(model) and not library_tensors(model):
        return model
    model = mark(shared_copy(model))
    set_in_configs(model, SELECTOR, IMPLEMENTATION)
    return model


def _admit_method(model: PreTrainedModel) -> str | None:
    """The quantisation method that the configuration names; UnsupportedModelError if it is not read."""
    config = getattr(model.config, "quantization_config", None)
    if config is None:
        return None
    if isinstance(config, dict):
        refuse(
            model,
            f"names the quantisation method {config.get('quant_method')!r}, which transformers did not apply, so that "
            "its weights are not the model's; load a checkpoint in 16 bits, or one of another format",
        )
    method = getattr(config.quant_method, "value", config.quant_method)
    scheme = getattr(config, "quantization_config", config)  # compressed-tensors has its own inside
    for name in ("kv_cache_scheme", "transform_config"):
        if getattr(scheme, name, None):
            refuse(model, f"is quantised with a {name}, {_advice()}")
    if method not in READ and method != "gguf":  # which transformers unpacks while it loads
        refuse(model, f"is quantised by the method {method!r}, {_advice(method)}")
    return method


def _library_of(cls: type) -> set[str]:
    return {cls.__module__.partition(".")[0]} & LIBRARIES


def _advice(name: str = "") -> str:
    served = ", ".join(READ.values())
    default = f"load one of the formats {served}, or 16 bits" if served else "load a checkpoint in 16 bits"
    return f"which are not read yet; {ADVICE.get(name, default)}"


def refuse(model: PreTrainedModel, reason: str) -> NoReturn:
    """Raise UnsupportedModelError with the name of the model's class and a reason, a sentence without its subject."""
    raise UnsupportedModelError(f"model: {type(model).__name__} {reason}")
