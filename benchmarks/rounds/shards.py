"""Models of published shapes with random weights, of which each rank makes only its own parts, on its own device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.rounds.quantised_shapes import FP8_SCALES, fp8_layers, mxfp4_experts
from benchmarks.rounds.shapes import DENSE, EXPERTS, IDENTITY
from spec_compile.parallel.slices import Cut
from spec_compile.quantised.fp8 import FP8

COLUMNS = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"
ROWS = "o_proj", "down_proj"
"""Modules whose weights [O, I] are cut by outputs, and by inputs, as in transformers' plans."""
TINY = dict(hidden_size=512, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
            vocab_size=1024, intermediate_size=1024)  # fmt: skip
TINY_EXPERTS = {"qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
                "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=256)}  # fmt: skip
"""Sizes in place of a shape's own, for a try without GPUs."""


class Shape(NamedTuple):
    """A model of `CASES`.

    sizes: of its configuration.
    quantise: changes the model on the meta device, given the device of the weights; None: bfloat16.
    whole: True if each rank must have the whole model, of which `speculate` copies its parts.
    """

    model_type: str
    sizes: dict
    quantise: Callable | None = None
    whole: bool = False


LLAMA_70B = DENSE["llama-8b"][1] | dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64
)
CASES = {
    "llama-70b": Shape("llama", LLAMA_70B),
    "llama-70b-fp8": Shape("llama", LLAMA_70B, lambda model, device: fp8_layers(model)),
    "llama-8b": Shape(*DENSE["llama-8b"]),
    "qwen3-30b-a3b": Shape(*EXPERTS["qwen3-30b-a3b"]),
    "gpt-oss-120b-mxfp4": Shape("gpt_oss", dict(num_hidden_layers=36, num_local_experts=128), mxfp4_experts, True),
}
"""Names of shapes, in the order in which they are measured."""


def spread(
    name: str, mesh: DeviceMesh, device: torch.device, tiny: bool = False, by_number: bool = False
) -> PreTrainedModel:  # fmt: skip
    """A model of the named shape whose random weights exist in parts only, unless its format must be whole.

    Matrices are DTensors over the ranks of `mesh`. All else is whole and the same on each rank. tiny: see `TINY`.
    by_number: a rank has some experts, not a part of each.
    """
    shape = CASES[name]
    sizes = shape.sizes | (TINY | TINY_EXPERTS.get(shape.model_type, {}) if tiny else {})
    config = AutoConfig.for_model(shape.model_type, **sizes)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if shape.quantise is not None:
        shape.quantise(model, device)
    own = torch.Generator(device).manual_seed(1 + mesh.get_rank())
    shared = torch.Generator(device).manual_seed(0)
    for path, parameter in [*model.named_parameters()]:
        if parameter.is_meta:
            owner, _, leaf = path.rpartition(".")
            cut = None if shape.whole else cut_of(path, parameter, mesh.size(), by_number)
            weight = _part(path, parameter, cut, mesh, device, shared if cut is None else own)
            model.get_submodule(owner)._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
    if shape.model_type in ("qwen3_moe", "gpt_oss"):
        nn.init.normal_(model.get_input_embeddings().weight, std=IDENTITY, generator=shared)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval()


def cut_of(path: str, parameter: Tensor, size: int, by_number: bool = False) -> Cut | None:
    """The cut of a parameter among `size` ranks, which is the same for its scales; None: it stays whole.

    The outputs of experts have two blocks, gate and up. Example: ``mlp.experts.gate_up_proj`` [8, 1024, 512] of two
    ranks has ``Cut(1, 2, blocks=2)``, so the first has rows 0 to 255 and 512 to 767 of each expert.
    """
    *_, module, leaf = path.split(".")
    if parameter.dim() < 2:
        return None
    if module == "experts" and by_number:
        return Cut(0, size)
    if module == "experts":
        return Cut(1, size, blocks=2) if leaf.startswith("gate_up_proj") else Cut(2, size)
    return Cut(0, size) if module in COLUMNS else Cut(1, size) if module in ROWS else None


def _part(
    path: str, parameter: Tensor, cut: Cut | None, mesh: DeviceMesh, device: torch.device, numbers: torch.Generator
) -> Tensor:  # fmt: skip
    """This rank's random part of a parameter, as a DTensor if it is cut. ValueError if its size does not divide."""
    shape = list(parameter.shape)
    if cut is not None:
        if shape[cut.dim] % (cut.parts * cut.blocks):
            raise ValueError(f"{path}: {shape[cut.dim]} do not divide into {cut.parts * cut.blocks} parts")
        shape[cut.dim] //= cut.parts
    part = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if "_scale_inv" in path:
        part = part.uniform_(*FP8_SCALES, generator=numbers).float()
    elif parameter.dtype == FP8:
        part = part.normal_(generator=numbers).to(FP8)
    elif parameter.dim() > 1:
        part.normal_(0, 0.02, generator=numbers)
    else:
        part.fill_(0.0 if path.endswith(("bias", "sinks")) else 1.0)
    if cut is None:
        return part
    placement = Shard(cut.dim) if cut.blocks == 1 else _StridedShard(cut.dim, split_factor=cut.blocks)
    whole = torch.empty(parameter.shape, device="meta")
    return DTensor.from_local(part, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
