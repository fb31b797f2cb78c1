"""Quantised models of published shapes: random weights in the formats of checkpoints (see `shapes.SHAPES`)."""

from functools import partial

import torch
from torch import nn
from transformers import FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from benchmarks.rounds.quantised_layers import fp8, gptq, nf4, pack_layers
from spec_compile.capture.experts import PRODUCTS, Mxfp4Experts
from spec_compile.quantised.fp8 import FP8
from spec_compile.quantised.mxfp4 import GROUP
from spec_compile.quantised.rounded import int4

FP8_SCALES, MXFP4_SCALES = (0.01, 0.03), (119, 122)
"""Ranges of random scales [from, below) that give weights of about 0.02, as transformers initialises them."""


def fp8_layers(model: PreTrainedModel) -> None:
    """Replace linear layers and experts by transformers' own for fine-grained FP8, still without memory."""
    model.config.quantization_config = FineGrainedFP8Config()
    replace_with_fp8_linear(model, ["lm_head"], model.config.quantization_config)


def fp8_mixture(model: PreTrainedModel) -> None:
    """Replace linear layers and experts by those of `fp8_layers`, with random weights."""
    device = model.device
    fp8_layers(model)
    for part in model.modules():
        for name, weight in part._parameters.items():
            if weight is not None and weight.is_meta:
                value = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
                value = value.uniform_(*FP8_SCALES).float() if "scale" in name else value.normal_().to(FP8)
                part._parameters[name] = nn.Parameter(value, requires_grad=False)


def mxfp4_experts(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Replace the experts of a gpt-oss by random ones in MXFP4, as `load_mxfp4` holds them, layer by layer.

    device: where they are, and the same in each process, if the model has no memory yet.
    """
    random = dict(dtype=torch.uint8, device=device or model.device)
    random["generator"] = torch.Generator(random["device"]).manual_seed(2)
    for layer in model.model.layers:
        old, weights, biases = layer.mlp.experts, {}, {}
        for name in PRODUCTS:
            experts, inputs, outputs = getattr(old, name).shape
            shape = experts, outputs, inputs // GROUP
            blocks = torch.randint(0, 256, (*shape, GROUP // 2), **random)
            weights[name] = blocks, torch.randint(*MXFP4_SCALES, shape, **random)
            biases[name] = torch.zeros(experts, outputs, dtype=torch.bfloat16, device=random["device"])
        layer.mlp.experts = Mxfp4Experts(weights, biases, old.alpha, old.limit)


QUANTISED = {
    "llama-8b-fp8": ("llama-8b", torch.bfloat16, partial(pack_layers, pack=fp8)),
    "llama-8b-int4": ("llama-8b", torch.bfloat16, partial(pack_layers, pack=partial(int4, group=128))),
    "llama-8b-gptq": ("llama-8b", torch.float16, partial(pack_layers, pack=gptq)),
    "llama-8b-nf4": ("llama-8b", torch.bfloat16, partial(pack_layers, pack=nf4)),
    "qwen3-30b-a3b-fp8": ("qwen3-30b-a3b", torch.bfloat16, fp8_mixture),
    "gpt-oss-20b-mxfp4": ("gpt-oss-20b", torch.bfloat16, mxfp4_experts),
}
"""Name -> the shape, the dtype of all that is not quantised, and a function that quantises a model in place."""
