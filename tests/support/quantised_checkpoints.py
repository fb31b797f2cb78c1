"""Writers of tiny quantised checkpoints, one for each published format: exactly its keys and its configuration.

``write(name, folder)`` quantises a random Llama and writes `config.json` and one file of safetensors. Two calls give
equal weights.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig

VOCAB, H, HEADS, KV, LAYERS = 256, 256, 4, 2, 2


def outputs(size: int) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of a decoder layer, for a hidden size."""
    kv, inner = KV * size // HEADS, 2 * size
    return {
        "self_attn.q_proj": (size, size), "self_attn.k_proj": (kv, size), "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, size), "mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }  # fmt: skip


FP8 = torch.float8_e4m3fn


def fp8_block(weight: Tensor) -> dict[str, Tensor]:
    """Fine-grained FP8: a scale for each 128 x 128 weights. Weight [O, I]."""
    blocks = weight.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(FP8).reshape(weight.shape)
    return {"weight": codes, "weight_scale_inv": scale}


def ct_w4a16(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors, 4 bits in groups of 128, packed along the inputs, the lowest bits first."""
    scale = (weight.unflatten(1, (-1, 128)).abs().amax(dim=2) / 7.5).bfloat16()
    codes = (weight / scale.float().repeat_interleave(128, 1)).round().clamp(-8, 7).int() + 8
    words = (codes.unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(dim=2).int()
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def ct_w4a8_bytes(weight: Tensor) -> dict[str, Tensor]:
    """The same with a byte for each weight."""
    scale = (weight.unflatten(1, (-1, 128)).abs().amax(dim=2) / 7.5).bfloat16()
    codes = (weight / scale.float().repeat_interleave(128, 1)).round().clamp(-8, 7)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def ct_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors NVFP4A16: 4 bits in groups of 16 with scales in FP8, all over a scale."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.unflatten(1, (-1, 16))
    divisor = 448 * 6 / weight.abs().max()
    scale = (groups.abs().amax(dim=2) / 6 * divisor).to(FP8)
    ratios = groups / (scale.float() / divisor)[:, :, None]
    codes = (ratios.abs()[..., None] - numbers).abs().argmin(dim=-1) + 8 * (ratios < 0)
    codes = codes.flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor.view(1)}


def ct_nvfp4_both(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors NVFP4: activations are rounded to 4 bits, too."""
    return ct_nvfp4(weight) | {"input_global_scale": torch.tensor([448 * 6 / 5.0])}


def ct_fp8(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors, FP8 with a scale for each output."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    return {"weight": (weight / scale.float()).to(FP8), "weight_scale": scale}


def ct_fp8_static(weight: Tensor) -> dict[str, Tensor]:
    """compressed-tensors, FP8 with one scale for a matrix and a constant one for its activations."""
    scale = (weight.abs().max() / 448).bfloat16().view(1)
    return {"weight": (weight / scale.float()).to(FP8), "weight_scale": scale, "input_scale": torch.full((1,), 0.01)}


def _groups(weight: Tensor, groups: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [I, O], zeros [G, O] and scales [G, O] of 4 bits in groups of 128 inputs. groups [I]: of each input."""
    groups = torch.arange(weight.shape[1]) // 128 if groups is None else groups
    parts = [weight[:, groups == group] for group in range(int(groups.max()) + 1)]
    low, high = (torch.stack([extreme(part, 1).values for part in parts]) for extreme in (torch.min, torch.max))
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(1, 15).int()
    codes = (weight.T / scales[groups] + zeros[groups]).round().clamp(0, 15).int()
    return codes, zeros, scales


def _words(values: Tensor) -> Tensor:
    """values [R, 8 * C] -> [R, C] int32, the first in the lowest bits."""
    return (values.long().unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(dim=2).to(torch.int32)


def gptq(weight: Tensor, by_activation: bool = False) -> dict[str, Tensor]:
    """GPTQ in its first format, whose files have the zeros less 1. by_activation: groups follow no order of inputs."""
    groups = torch.arange(weight.shape[1]) // 128
    groups = groups.flip(0).roll(5) if by_activation else groups
    codes, zeros, scales = _groups(weight, groups)
    return {"qweight": _words(codes.T).T, "qzeros": _words(zeros - 1), "scales": scales, "g_idx": groups.int()}


def awq(weight: Tensor) -> dict[str, Tensor]:
    """AWQ, whose words have outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    codes, zeros, scales = _groups(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes, zeros = (_words(x.unflatten(1, (-1, 8))[:, :, order].flatten(1)) for x in (codes, zeros))
    return {"qweight": codes, "qzeros": zeros, "scales": scales}


def _ct(form: str, weights: dict, activations: dict | None) -> dict:
    """A ``quantization_config`` of compressed-tensors."""
    weights = dict(dynamic=False, symmetric=True, **weights)
    group = dict(targets=["Linear"], weights=weights, input_activations=activations, format=form)
    return dict(
        quant_method="compressed-tensors", format=form, quantization_status="compressed", ignore=["lm_head"],
        config_groups=dict(group_0=group),
    )  # fmt: skip


def modelopt(weight: Tensor) -> dict[str, Tensor]:
    """A format that transformers does not know: a scale for each matrix."""
    scale = weight.abs().max() / 448
    return {"weight": (weight / scale).to(FP8), "weight_scale": scale, "input_scale": torch.tensor(0.01)}


NVFP4 = dict(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn",
    zp_dtype="torch.float8_e4m3fn",
)  # fmt: skip
INT4 = dict(num_bits=4, type="int", strategy="group", group_size=128)
TOKENS = dict(num_bits=8, type="int", strategy="token", dynamic=True, symmetric=True)
"""What compressed-tensors calls W4A8: its weights and its activations."""

FORMATS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], torch.dtype, dict | None]] = {
    "plain": (lambda weight: {"weight": weight.bfloat16()}, torch.bfloat16, None),
    "fp8_block": (
        fp8_block, torch.bfloat16,
        dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128]),
    ),
    "ct_fp8": (
        ct_fp8, torch.bfloat16,
        _ct(
            "float-quantized", dict(num_bits=8, type="float", strategy="channel"),
            TOKENS | {"type": "float"},
        ),
    ),
    "ct_fp8_static": (
        ct_fp8_static, torch.bfloat16,
        _ct(
            "float-quantized", dict(num_bits=8, type="float", strategy="tensor"),
            dict(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True),
        ),
    ),
    "ct_w4a16": (
        ct_w4a16, torch.bfloat16,
        _ct("pack-quantized", INT4, None),
    ),
    "ct_w4a8": (ct_w4a16, torch.bfloat16, _ct("pack-quantized", INT4, TOKENS)),
    "ct_w4a8_bytes": (ct_w4a8_bytes, torch.bfloat16, _ct("int-quantized", INT4, TOKENS)),
    "ct_w4afp8": (ct_w4a16, torch.bfloat16, _ct("pack-quantized", INT4, TOKENS | {"type": "float"})),
    "ct_nvfp4": (
        ct_nvfp4, torch.bfloat16,
        _ct("nvfp4-pack-quantized", NVFP4, None),
    ),
    "ct_nvfp4_both": (
        ct_nvfp4_both, torch.bfloat16, _ct("nvfp4-pack-quantized", NVFP4, NVFP4 | dict(dynamic="local", symmetric=True))
    ),
    "gptq": (
        gptq, torch.float16,
        dict(quant_method="gptq", bits=4, group_size=128, sym=False, desc_act=False, checkpoint_format="gptq"),
    ),
    "gptq_by_activation": (
        functools.partial(gptq, by_activation=True), torch.float16,
        dict(quant_method="gptq", bits=4, group_size=128, sym=False, desc_act=True, checkpoint_format="gptq"),
    ),
    "awq": (
        awq, torch.float16,
        dict(quant_method="awq", bits=4, group_size=128, zero_point=True, version="gemm"),
    ),
    "modelopt": (modelopt, torch.bfloat16, dict(quant_method="modelopt", quant_algo="FP8")),
}  # fmt: skip
"""Name -> how a matrix is quantised, the dtype of everything else, and ``quantization_config``."""


def write(name: str, folder: Path, size: int = H, **changes) -> Path:
    """Write the checkpoint of a format. size: its hidden size. changes: of its ``quantization_config``."""
    quantise, dtype, config = FORMATS[name]
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
            for key, tensor in quantise(weight).items():
                tensors[f"model.layers.{layer}.{module}.{key}"] = tensor.contiguous()
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
    quantisation = dict(
        quant_method="mxfp4",
        modules_to_not_convert=[
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": quantisation}))
    return folder
