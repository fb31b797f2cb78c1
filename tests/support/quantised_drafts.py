"""Writers of quantised drafts: checkpoints of `draft_checkpoints` whose matrices are stored as formats publish them.

Each function takes a weight [O, I] and returns its tensors, by the ends of their names, and the weight that they mean,
computed here number by number from the format's definition.
"""

import functools
import json
from pathlib import Path

import draft_checkpoints as drafts
import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (-1.0, -0.69, -0.52, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0)
GROUP = 32


def eight_bits(weight, end=".weight_scale", dtype=FP8, by="channel", also=()):
    """FP8 or int8. by: "tensor", "channel" or "block" (of 16 x 32 weights)."""
    largest = 448 if dtype == FP8 else 127
    if by == "block":
        outputs, inputs = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -inputs % 32, 0, -outputs % 16))
        scale = padded.unflatten(1, (-1, 32)).unflatten(0, (-1, 16)).abs().amax(dim=(1, 3)) / largest
        wide = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)[:outputs, :inputs]
    else:
        scale = weight.abs().amax(dim=1, keepdim=True) / largest if by == "channel" else weight.abs().max() / largest
        wide = scale
    codes = weight / wide
    codes = codes.to(FP8) if dtype == FP8 else codes.round().to(torch.int8)
    tensors = {".weight": codes, end: scale, **{name: torch.ones(1) for name in also}}
    return tensors, codes.float() * wide


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """codes [R, C] -> words int32, the first in the lowest bits."""
    each = 32 // bits
    return (codes.long().unflatten(1, (-1, each)) << (bits * torch.arange(each))).sum(dim=2).to(torch.int32)


def groups(weight: Tensor, levels: int = 16):
    """Codes [O, I], zeros and scales [O, G] of groups of GROUP inputs, and the weight in the scales' dtype."""
    parts = weight.unflatten(1, (-1, GROUP))
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    scales = ((high - low) / (levels - 1)).half()
    zeros = (-low / scales).round().clamp(1, levels - 1)
    codes = (parts / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, levels - 1)
    meant = ((codes - zeros[:, :, None]).half() * scales[:, :, None]).flatten(1)
    return codes.flatten(1).int(), zeros.int(), scales, meant


def ct_words(weight, bits=4, symmetric=True):
    codes, zeros, scales, meant = groups(weight, 1 << bits)
    if symmetric:
        half = 1 << bits - 1
        scales = (weight.unflatten(1, (-1, GROUP)).abs().amax(dim=2) / (half - 0.5)).half()
        codes = (weight / scales.repeat_interleave(GROUP, 1)).round().clamp(-half, half - 1).int() + half
        meant = ((codes - half).half() * scales.repeat_interleave(GROUP, 1)).float()
    tensors = {".weight_packed": words(codes, bits), ".weight_scale": scales}
    tensors[".weight_shape"] = torch.tensor(weight.shape)
    return tensors | ({} if symmetric else {".weight_zero_point": words(zeros.T, bits).T}), meant


def gptq(weight, by_activation=False, offset=1):
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3)) if by_activation else None
    codes, zeros, scales, meant = groups(weight if order is None else weight[:, order])
    index = torch.arange(weight.shape[1]) // GROUP
    if order is not None:
        back = order.argsort()
        codes, meant, index = codes[:, back], meant[:, back], index[back]
    tensors = {".qweight": words(codes).T, ".qzeros": words(zeros.T - offset), ".scales": scales.T}
    return tensors | {".g_idx": index.int()}, meant


def awq(weight):
    codes, zeros, scales, meant = groups(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = (words(x.T.unflatten(1, (-1, 8))[:, :, order].flatten(1)) for x in (codes, zeros))
    return dict(zip((".qweight", ".qzeros", ".scales"), (*packed, scales.T))), meant


def nearest(numbers: Tensor, table) -> Tensor:
    return (numbers[..., None] - torch.tensor(table)).abs().argmin(dim=-1)


def bitsandbytes(weight, nested=False):
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(dim=1)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors = {".weight.quant_map": torch.tensor(NF4), ".weight.absmax": scales}
    if nested:
        table, offset = torch.linspace(-1, 1, 256), float(scales.mean())
        second = (scales - offset).abs().max().view(1)
        tensors[".weight.absmax"] = nearest((scales - offset) / second, table.tolist()).to(torch.uint8)
        tensors |= {".weight.nested_absmax": second, ".weight.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        scales = table[tensors[".weight.absmax"].int()] * second + offset
    codes = nearest(blocks / scales[:, None], NF4).flatten()
    tensors[".weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    data = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors[".weight.quant_state.bitsandbytes__nf4"] = data
    return tensors, (torch.tensor(NF4)[codes].view(-1, 64) * scales[:, None]).view(weight.shape)


def llm_int8(weight):
    tensors, _ = eight_bits(weight, dtype=torch.int8)
    scb = tensors.pop(".weight_scale").flatten() * 127
    meant = tensors[".weight"].float() * (scb[:, None] / 127)
    return tensors | {".SCB": scb, ".weight_format": torch.tensor(0, dtype=torch.uint8)}, meant


def torchao(weight, dtype=FP8):
    tensors, meant = eight_bits(weight, dtype=dtype)
    return {"._weight_qdata": tensors[".weight"], "._weight_scale": tensors[".weight_scale"]}, meant


def torchao_groups(weight):
    codes, zeros, scales, meant = groups(weight)
    tensors = {"qdata": codes - 8, "scale": scales, "zero_point": zeros - 8}
    return {f"._weight_{name}": x.to(torch.int8) if name != "scale" else x for name, x in tensors.items()}, meant


def fp4(weight, style="ct"):
    """NVFP4 of compressed-tensors ("ct") and of modelopt, MXFP4 of compressed-tensors ("mx") and gpt-oss ("blocks")."""
    size = 16 if style in ("ct", "modelopt") else 32
    parts = weight.unflatten(1, (-1, size))
    needed = parts.abs().amax(dim=2) / 6
    if size == 16:
        factor = needed.max() / 448
        stored = (needed / factor).to(FP8)
        scales = stored.float() / (1 / factor) if style == "ct" else stored.float() * factor
    else:
        stored = (needed.log2().ceil() + 127).to(torch.uint8)
        scales = 2.0 ** (stored.float() - 127)
    codes = nearest(parts / scales[:, :, None], FP4).flatten(1)
    meant = (torch.tensor(FP4)[codes].unflatten(1, (-1, size)) * scales[:, :, None]).flatten(1)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if style == "blocks":
        return {".weight_blocks": packed.unflatten(1, (-1, 16)), ".weight_scales": stored}, meant
    if style == "modelopt":
        factors = {".weight_scale_2": factor, ".input_scale": torch.tensor(0.1)}
        return {".weight": packed, ".weight_scale": stored, **factors}, meant
    factors = {".weight_global_scale": (1 / factor).view(1)} if style == "ct" else {}
    return {".weight_packed": packed, ".weight_scale": stored, **factors}, meant


_ct = {"quant_method": "compressed-tensors"}
FORMATS = {
    "fp8_blocks": (
        functools.partial(eight_bits, end=".weight_scale_inv", by="block"),
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
    ),
    "fp8_tensor": (
        functools.partial(eight_bits, end=".weight_scale_inv", by="tensor", also=[".activation_scale"]),
        {"quant_method": "fp8", "weight_block_size": None},
    ),
    "ct_fp8": (eight_bits, _ct),
    "ct_fp8_tensor": (functools.partial(eight_bits, by="tensor", also=[".input_scale"]), _ct),
    "ct_int8": (functools.partial(eight_bits, dtype=torch.int8), _ct),
    "ct_int4": (ct_words, _ct),
    "ct_int4_zeros": (functools.partial(ct_words, symmetric=False), _ct),
    "ct_int8_words": (functools.partial(ct_words, bits=8), _ct),
    "ct_nvfp4": (fp4, _ct),
    "ct_mxfp4": (functools.partial(fp4, style="mx"), _ct),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq_v2": (
        functools.partial(gptq, offset=0, by_activation=True),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "nf4": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4_nested": (functools.partial(bitsandbytes, nested=True), {"quant_method": "bitsandbytes"}),
    "bnb_int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "torchao_fp8": (torchao, {"quant_method": "torchao"}),
    "torchao_int8": (functools.partial(torchao, dtype=torch.int8), {"quant_method": "torchao"}),
    "torchao_groups": (torchao_groups, {"quant_method": "torchao"}),
    "mxfp4": (functools.partial(fp4, style="blocks"), {"quant_method": "mxfp4"}),
    "modelopt_fp8": (functools.partial(eight_bits, by="tensor"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt_nvfp4": (functools.partial(fp4, style="modelopt"), {"quantization": {"quant_algo": "NVFP4"}}),
}
"""Name -> how a matrix is stored, and ``quantization_config``. The last is in a file of its own."""


def write(name: str, flavour: str, folder: Path, dtype=torch.float32):
    """The checkpoint of a flavour with its linear layers in a format, at ``folder / "quantised"``, and the same with
    the weights that these mean, at ``folder / "twin"``."""
    store, config = FORMATS[name]
    twin = drafts.write(flavour, folder / "twin")
    tensors, meant = {}, {}
    for key, tensor in twin.tensors.items():
        stem = key.removesuffix(".weight")
        if not key.endswith("weight") or tensor.dim() != 2 or "embed" in key:
            tensors[key] = meant[key] = tensor
            continue
        stored, weight = store(tensor)
        tensors |= {stem + end: x.contiguous() for end, x in stored.items()}
        meant[key] = weight.float()
    for path in (folder / "twin").iterdir():
        path.unlink()
    drafts.save(folder / "twin", twin.config, meant)
    in_config = {} if "quantization" in config else {"quantization_config": config}
    drafts.save(folder / "quantised", {**twin.config, **in_config}, tensors)
    if "quantization" in config:
        (folder / "quantised/hf_quant_config.json").write_text(json.dumps(config))
    return twin
