"""Rounds of models at published sizes, with random weights, shared by the GPUs of one host.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.rounds.tensor_parallel [--shape llama-8b] [--sizes 1 16 64]
                                                                                  [--drafts] [--json FILE]

No GPU ever holds a whole model: each makes its own parts.
"""

import argparse
import gc
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import spec_compile
from benchmarks.common import RESULTS, save_rows, stamp
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.drafts import TREE, make
from benchmarks.rounds.families import families
from benchmarks.rounds.shapes import DENSE

DENSE["llama-70b"] = ("llama", DENSE["llama-8b"][1] | dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64))  # fmt: skip
CUTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}
"""The dimension that each module's weight is cut along, as in transformers' plan of Llama."""


def spread(name: str, mesh: DeviceMesh) -> PreTrainedModel:
    """A model of the named shape, in bfloat16; each rank makes its own parts of the random weights."""
    model_type, sizes = DENSE[name]
    config = AutoConfig.for_model(model_type, **sizes)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    of_rank = torch.Generator("cuda").manual_seed(1 + mesh.get_rank())
    shared = torch.Generator("cuda").manual_seed(0)
    for path, parameter in model.named_parameters():
        owner, _, leaf = path.rpartition(".")
        dim, shape = CUTS.get(owner.rpartition(".")[2]), list(parameter.shape)
        if dim is not None:
            shape[dim] //= mesh.size()
        part = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        part.normal_(0, 0.02, generator=shared if dim is None else of_rank)
        weight = part if dim is None else DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)
        model.get_submodule(owner)._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to("cuda")
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=[name for name in DENSE if name.startswith("llama")])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafts", action="store_true", help="also a tree of EAGLE-3, whole on each GPU and shared")
    parser.add_argument("--json", type=Path, default=RESULTS / "tensor_parallel.json")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    model = spread(options.shape, mesh)
    systems = {"n-gram": ("ngram", dict(num_draft_tokens=64), options.sizes)}
    if options.drafts:
        torch.manual_seed(0)  # the same draft on every rank
        head = make("eagle3", model, model.config)
        for size in (1, mesh.size()):
            draft = TREE | dict(draft=head, draft_tensor_parallel_size=size)
            systems[f"EAGLE-3, tree of 16 in 5 steps, on {size}"] = ("eagle3", draft, [16])
    rows = []
    for name, (algo, more, sizes) in systems.items():
        fast = spec_compile.speculate(model, algo, check=False, max_cache_len=8192, **more)
        times = rounds(fast, options.context, 1, sizes)
        spent, kernels = families(fast, sizes[-1])
        row = {"shape": options.shape, "gpus": mesh.size(), "system": name, "context": options.context, "ms": times}
        row |= {"us_by_family_at_last": spent, "kernels_at_last": kernels}
        row |= {"notes": fast.speculation.options.ranks.notes}
        if mesh.get_rank() == 0:
            rows.append(row)
            print(json.dumps(row), flush=True)
            print(next(line for line in fast.speculation.explain().splitlines() if line.startswith("  shard")))
        del fast
        gc.collect()  # NCCL waits for captured graphs before its communicators end
    if rows:
        save_rows(options.json, rows, ("shape", "gpus", "system", "context"), stamp(model.device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
