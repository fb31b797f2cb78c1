"""Linear layers rounded to nearest and packed in the layouts of several libraries, none of which is needed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from spec_compile.capture.quantised import QuantisedLinear
from spec_compile.quantised import Packed
from spec_compile.quantised.bnb import Table4
from spec_compile.quantised.fp8 import FP8, Fp8Block
from spec_compile.quantised.gptq import Gptq
from spec_compile.quantised.rounded import int4_words

GROUP = 64
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E)."""


def fp8(weight: Tensor) -> Packed:
    """Fine-grained FP8 with a scale for each 128 x 128 weights; activations are in FP8, too. weight [O, I]."""
    outputs, inputs = weight.shape
    padded = F.pad(weight.float(), (0, -inputs % 128, 0, -outputs % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    codes = (
        (blocks / scales[:, None, :, None]).to(FP8).flatten(2).flatten(0, 1)[:outputs, :inputs].clone()
    )  # a view keeps its base
    return Packed(Fp8Block(128, 128), {"weight": codes, "weight_scale_inv": scales}, None, inputs)


def gptq(weight: Tensor, group: int = 128) -> Packed:
    """GPTQ's layout of 4 bits, symmetric, in groups of `group` inputs, in order. weight [O, I] float16."""
    words, scales = int4_words(weight, group)
    groups = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device) // group
    zeros = words.new_full((scales.shape[1], len(words) // 8), 0x77777777)  # files have them less 1
    parts = {"qweight": words.T.contiguous(), "qzeros": zeros, "scales": scales.T.contiguous(), "g_idx": groups}
    return Packed(Gptq(1), parts, None, weight.shape[1])


def nf4(weight: Tensor) -> Packed:
    """bitsandbytes NF4 in blocks of 64."""
    table = torch.tensor(NF4, device=weight.device)
    blocks = weight.float().view(-1, GROUP)
    scales = blocks.abs().amax(dim=1)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=1e-12)[:, None], between).to(torch.uint8).view(-1, 2)
    parts = {"weight": codes[:, :1] << 4 | codes[:, 1:], "absmax": scales, "code": table}
    return Packed(Table4(GROUP, 0), parts, None, weight.shape[1])


def pack_layers(model: PreTrainedModel, pack: Callable[[Tensor], Packed]) -> None:
    """Replace the linear layers of `model` by packed ones, in place, except the output head."""
    head = model.get_output_embeddings()
    for path in [path for path, part in model.named_modules() if type(part) is nn.Linear and part is not head]:
        layer = model.get_submodule(path)
        model.set_submodule(path, QuantisedLinear(pack(layer.weight.detach())._replace(bias=layer.bias)))
