"""Writers of tiny quantised checkpoints, one for each published format: exactly its keys and its configuration.

``write(name, folder)`` quantises a random Llama, ``write_draft(name, flavour, folder)`` a draft of `draft_checkpoints`.
Each function of a format takes a weight [O, I] and returns its tensors, by the ends of their names, and the weight that
they mean, computed here number by number from the format's definition. Two calls give equal weights.
"""

import json
from functools import partial
from pathlib import Path

import draft_checkpoints as drafts
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig

VOCAB, H, HEADS, KV, LAYERS = 256, 256, 4, 2, 2
FP8 = torch.float8_e4m3fn
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (-1.0, -0.69, -0.52, -0.39, -0.28, -0.18, -0.09, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0)
GROUP = 32  # inputs that share a scale in drafts; in `FORMATS` there are 128


def eight_bits(weight, end=".weight_scale", dtype=FP8, by="channel", to=torch.float32, **also):
    """FP8 or int8. by: "tensor", "channel", or rows and columns of a block. to: dtype of the scales. also: numbers of
    further tensors by the ends of their names."""
    largest = 448 if dtype == FP8 else 127
    if isinstance(by, tuple):
        (outputs, inputs), (rows, columns) = weight.shape, by
        padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
        scale = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax(dim=(1, 3)) / largest
        wide = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:outputs, :inputs]
    else:
        scale = weight.abs().amax(dim=1, keepdim=True) if by == "channel" else weight.abs().max().view(1)
        scale = (scale / largest).to(to)
        wide = scale.float()
    codes = weight / wide
    codes = codes.to(FP8) if dtype == FP8 else codes.round().to(torch.int8)
    further = {f".{name}": torch.full((1,), number) for name, number in also.items()}
    return {".weight": codes, end: scale, **further}, codes.float() * wide


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """codes [R, C] -> words int32, the first in the lowest bits."""
    each = 32 // bits
    return (codes.long().unflatten(1, (-1, each)) << (bits * torch.arange(each))).sum(dim=2).to(torch.int32)


def groups(weight: Tensor, levels: int = 16, group: int = GROUP):
    """Codes [O, I], zeros and scales [O, G] of groups of inputs, and the weight in the scales' dtype."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(dim=2), parts.amax(dim=2)
    scales = ((high - low) / (levels - 1)).half()
    zeros = (-low / scales).round().clamp(1, levels - 1)
    codes = (parts / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, levels - 1)
    meant = ((codes - zeros[:, :, None]).half() * scales[:, :, None]).flatten(1)
    return codes.flatten(1).int(), zeros.int(), scales, meant


def ct_words(weight, bits=4, symmetric=True, group=GROUP, to=torch.float16, in_bytes=False):
    """compressed-tensors, packed along the inputs. in_bytes: not packed, a byte for each weight."""
    codes, zeros, scales, meant = groups(weight, 1 << bits, group)
    if symmetric:
        half = 1 << bits - 1
        scales = (weight.unflatten(1, (-1, group)).abs().amax(dim=2) / (half - 0.5)).to(to)
        codes = (weight / scales.float().repeat_interleave(group, 1)).round().clamp(-half, half - 1).int() + half
        meant = ((codes - half).to(to) * scales.repeat_interleave(group, 1)).float()
    if in_bytes:
        return {".weight": (codes - half).to(torch.int8), ".weight_scale": scales}, meant
    tensors = {".weight_packed": words(codes, bits), ".weight_scale": scales}
    tensors[".weight_shape"] = torch.tensor(weight.shape)
    return tensors | ({} if symmetric else {".weight_zero_point": words(zeros.T, bits).T}), meant


def gptq(weight, by_activation=False, offset=1, group=GROUP):
    """Its first format, whose files have the zeros less 1. by_activation: groups follow no order of inputs."""
    order = torch.arange(weight.shape[1])
    if by_activation:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    codes, zeros, scales, meant = groups(weight[:, order], group=group)
    back = order.argsort()
    tensors = {".qweight": words(codes[:, back]).T, ".qzeros": words(zeros.T - offset), ".scales": scales.T}
    return tensors | {".g_idx": (back // group).int()}, meant[:, back]


def awq(weight, group=GROUP):
    """Its words have outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, zeros, scales, meant = groups(weight, group=group)
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


def fp4(weight, style="ct", **also):
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
    factors |= {f".{name}": torch.full((1,), number) for name, number in also.items()}
    return {".weight_packed": packed, ".weight_scale": stored, **factors}, meant


CT = {"quant_method": "compressed-tensors"}


def _ct(form: str, weights: dict, activations: dict | None) -> dict:
    """A ``quantization_config`` of compressed-tensors."""
    weights = dict(dynamic=False, symmetric=True, **weights)
    group = dict(targets=["Linear"], weights=weights, input_activations=activations, format=form)
    return dict(
        CT, format=form, quantization_status="compressed", ignore=["lm_head"], config_groups=dict(group_0=group)
    )


NVFP4 = dict(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn",
    zp_dtype="torch.float8_e4m3fn",
)  # fmt: skip
INT4 = dict(num_bits=4, type="int", strategy="group", group_size=128)
TOKENS = dict(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)
"""What compressed-tensors calls W4A8: its weights and its activations."""
STATIC = dict(num_bits=8, type="float", strategy="tensor")
GPTQ = dict(quant_method="gptq", bits=4, group_size=128, sym=False, checkpoint_format="gptq")
BF16, HALF = torch.bfloat16, torch.float16
INT4_WORDS = partial(ct_words, group=128, to=BF16)
FORMATS = {
    "plain": (lambda weight: ({".weight": weight.bfloat16()}, weight), BF16, None),
    "fp8_block": (
        partial(eight_bits, end=".weight_scale_inv", by=(128, 128)), BF16,
        dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128]),
    ),
    "ct_fp8": (
        partial(eight_bits, to=BF16), BF16,
        _ct("float-quantized", STATIC | {"strategy": "channel"}, TOKENS | {"type": "float"}),
    ),
    "ct_fp8_static": (
        partial(eight_bits, by="tensor", to=BF16, input_scale=0.01), BF16,
        _ct("float-quantized", STATIC, dict(STATIC, dynamic=False, symmetric=True)),
    ),
    "ct_w4a16": (INT4_WORDS, BF16, _ct("pack-quantized", INT4, None)),
    "ct_w4a8": (INT4_WORDS, BF16, _ct("pack-quantized", INT4, TOKENS)),
    "ct_w4a8_bytes": (partial(INT4_WORDS, in_bytes=True), BF16, _ct("int-quantized", INT4, TOKENS)),
    "ct_w4afp8": (INT4_WORDS, BF16, _ct("pack-quantized", INT4, TOKENS | {"type": "float"})),
    "ct_nvfp4": (fp4, BF16, _ct("nvfp4-pack-quantized", NVFP4, None)),
    "ct_nvfp4_both": (
        partial(fp4, input_global_scale=448 * 6 / 5.0), BF16,
        _ct("nvfp4-pack-quantized", NVFP4, NVFP4 | dict(dynamic="local", symmetric=True)),
    ),
    "gptq": (partial(gptq, group=128), HALF, dict(GPTQ, desc_act=False)),
    "gptq_by_activation": (partial(gptq, group=128, by_activation=True), HALF, dict(GPTQ, desc_act=True)),
    "awq": (
        partial(awq, group=128), HALF,
        dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm"),
    ),
    "modelopt": (
        partial(eight_bits, by="tensor", input_scale=0.01), BF16, dict(quant_method="modelopt", quant_algo="FP8"),
    ),
}  # fmt: skip
"""Formats of models: name -> how a matrix is stored, the dtype of everything else, and ``quantization_config``. The
last is one that transformers does not know."""
OF_DRAFTS = {
    "fp8_blocks": (
        partial(eight_bits, end=".weight_scale_inv", by=(16, 32)),
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
    ),
    "fp8_tensor": (
        partial(eight_bits, end=".weight_scale_inv", by="tensor", activation_scale=1.0),
        {"quant_method": "fp8", "weight_block_size": None},
    ),
    "ct_fp8": (eight_bits, CT),
    "ct_fp8_tensor": (partial(eight_bits, by="tensor", input_scale=1.0), CT),
    "ct_int8": (partial(eight_bits, dtype=torch.int8), CT),
    "ct_int4": (ct_words, CT),
    "ct_int4_zeros": (partial(ct_words, symmetric=False), CT),
    "ct_int8_words": (partial(ct_words, bits=8), CT),
    "ct_nvfp4": (fp4, CT),
    "ct_mxfp4": (partial(fp4, style="mx"), CT),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq_v2": (
        partial(gptq, offset=0, by_activation=True),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "nf4": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4_nested": (partial(bitsandbytes, nested=True), {"quant_method": "bitsandbytes"}),
    "bnb_int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "torchao_fp8": (torchao, {"quant_method": "torchao"}),
    "torchao_int8": (partial(torchao, dtype=torch.int8), {"quant_method": "torchao"}),
    "torchao_groups": (torchao_groups, {"quant_method": "torchao"}),
    "mxfp4": (partial(fp4, style="blocks"), {"quant_method": "mxfp4"}),
    "modelopt_fp8": (partial(eight_bits, by="tensor"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt_nvfp4": (partial(fp4, style="modelopt"), {"quantization": {"quant_algo": "NVFP4"}}),
}
"""Formats of drafts: name -> how a matrix is stored, and ``quantization_config``. The last has a file for it."""


def outputs(size: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of a decoder layer, for a hidden size."""
    kv, inner = KV * size // HEADS, 2 * size
    return {
        "self_attn.q_proj": (size, size), "self_attn.k_proj": (kv, size), "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, size), "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }  # fmt: skip


def write(name: str, folder: Path, size: int = H, **changes) -> Path:
    """Write the checkpoint of a format. size: its hidden size. changes: of its ``quantization_config``."""
    store, dtype, config = FORMATS[name]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"model.norm.weight": 1 + 0.1 * normal(size)}
    for key in ("model.embed_tokens", "lm_head"):
        tensors[f"{key}.weight"] = normal(VOCAB, size) * (1 if "embed" in key else size**-0.5)
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.1 * normal(size)
    tensors = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    for layer in range(LAYERS):
        for module, shape in outputs(size).items():
            weight = normal(*shape) * (2 * shape[1] ** -0.5)
            for end, tensor in store(weight)[0].items():
                tensors[f"model.layers.{layer}.{module}{end}"] = tensor.contiguous()
    model = LlamaConfig(
        vocab_size=VOCAB, hidden_size=size, intermediate_size=2 * size, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV, max_position_embeddings=512, tie_word_embeddings=False,
        pad_token_id=0, architectures=["LlamaForCausalLM"], dtype=dtype,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantisation = {} if config is None else {"quantization_config": {**config, **changes}}
    (folder / "config.json").write_text(json.dumps({**model.to_dict(), **quantisation}))
    return folder


def write_mxfp4(folder: Path) -> Path:
    """A gpt-oss with experts in MXFP4: 32 values of 4 bits in 16 bytes, and a power of two for each."""
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, max_position_embeddings=512, pad_token_id=0,
        architectures=["GptOssForCausalLM"], dtype=torch.bfloat16,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, shape in ((key, tensor.shape) for key, tensor in GptOssForCausalLM(config).state_dict().items()):
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = shape
            blocks = experts, outputs, inputs // 32, 16
            tensors[f"{key}_blocks"] = torch.randint(0, 256, blocks, dtype=torch.uint8, generator=generator)
            tensors[f"{key}_scales"] = torch.full(blocks[:3], 122, dtype=torch.uint8)
        else:
            tensors[key] = (torch.randn(shape, generator=generator) / 8 + ("norm" in key)).bfloat16()
    others = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantisation = dict(quant_method="mxfp4", modules_to_not_convert=others)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": quantisation}))
    return folder


def write_draft(name: str, flavour: str, folder: Path):
    """The checkpoint of a flavour with its linear layers in a format, at ``folder / "quantised"``, and the same with
    the weights that these mean, at ``folder / "twin"``."""
    store, config = OF_DRAFTS[name]
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
