"""The benchmark of models that several GPUs share: parts of weights, bytes of a rank, and its processes."""

import json
import sys
from pathlib import Path

import models
import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import timers
from benchmarks.rounds import shards, tensor_parallel
from spec_compile.inventory import held_tensors
from spec_compile.parallel.slices import Cut, Slices
from spec_compile.quantised.fp8 import FP8


def test_a_parameter_is_cut_as_the_pass_cuts_it():
    assert shards.cut_of("model.layers.0.self_attn.q_proj.weight", torch.empty(64, 32), 4) == Cut(0, 4)
    assert shards.cut_of("model.layers.0.mlp.down_proj.weight_scale_inv", torch.empty(4, 2), 2) == Cut(1, 2)
    assert shards.cut_of("model.layers.0.mlp.experts.gate_up_proj", torch.empty(8, 1024, 512), 2) == Cut(1, 2, blocks=2)
    assert shards.cut_of("model.layers.0.mlp.experts.down_proj", torch.empty(8, 512, 512), 2) == Cut(2, 2)
    for path in ("model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"):
        assert shards.cut_of(path, torch.empty(8, 8), 2) is None
    assert shards.cut_of("model.layers.0.self_attn.q_proj.bias", torch.empty(8), 2) is None
    assert shards.cut_of("model.layers.0.mlp.experts.down_proj", torch.empty(8, 4, 4), 2, by_number=True) == (0, 2, 1)


def test_weights_exist_in_parts_only(tmp_path):
    def on_a_rank(rank):
        mesh, found = init_device_mesh("cpu", (2,)), {}
        for name in ("llama-70b", "llama-70b-fp8", "qwen3-30b-a3b"):
            model = shards.spread(name, mesh, torch.device("cpu"), tiny=True)
            assert not any(each.is_meta for each in held_tensors(model))
            for path, each in model.named_parameters():
                if isinstance(each, DTensor):  # what the pass takes of the whole is what this rank has
                    cut = shards.cut_of(path, each, 2)
                    assert Slices(rank, 2).part(each, cut) is each._local_tensor
                    if each.dtype != FP8:  # which gloo does not gather
                        assert torch.equal(Slices(rank, 2).take(each.full_tensor(), cut), each._local_tensor)
            found[name] = sum(isinstance(each, DTensor) for each in model.parameters())
        return found

    results = run_ranks(2, on_a_rank, rendezvous=tmp_path / "meeting")
    assert results == [{"llama-70b": 43, "llama-70b-fp8": 85, "qwen3-30b-a3b": 37}] * 2, results


def test_bytes_that_a_rank_reads():
    """All products' weights, but of experts only the share that a round chooses."""
    dense, mixture = models.captured(models.ADMITTED["llama"]()), models.captured(models.ADMITTED["qwen3_moe"]())
    model = models.ADMITTED["llama"]()
    every = sum(each.nbytes for each in model.parameters())
    tied = model.config.tie_word_embeddings
    embedding = 0 if tied else model.get_input_embeddings().weight.nbytes
    assert tensor_parallel.rank_bytes(dense, [], 1) == pytest.approx(every - embedding, rel=0.01)
    layers = len(mixture.layers)
    few, many = (tensor_parallel.rank_bytes(mixture, [chosen] * layers, 4) for chosen in (1, 2))
    experts = models.ADMITTED["qwen3_moe"]().model.layers[0].mlp.experts
    assert many - few == pytest.approx(layers * sum(each[0].nbytes for each in experts.parameters()))


def test_the_fewest_bytes_of_a_sum():
    assert timers.sum_bytes(4096, 4) == 12_288
    assert timers.sum_bytes(4096, 2) == 8_192 and timers.sum_bytes(4096, 1) == 0


@pytest.mark.slow
@pytest.mark.parametrize("case, more", [("llama-8b", []), ("qwen3-30b-a3b", ["--expert-parallel"])])
def test_a_model_on_two_processes(case, more, tmp_path, monkeypatch):
    words = ["x", "--cases", case, "--gpus", "2", "--tiny", "--minutes", "4", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", words + more)
    tensor_parallel.main()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["system"][:6], row["requests"]) for row in rows] == [
        ("n-gram", 1), ("n-gram", 16), ("EAGLE-", 1), ("EAGLE-", 16),
    ]  # fmt: skip
    for row in rows:
        assert row["sums"] == 12 and row.get("expert_parallel", False) == bool(more)
        for nodes, ms in row["ms"].items():
            assert row["over_floor"][nodes] == pytest.approx(ms / row["floor_ms"][nodes])
    read = rows[0]["gigabytes"]
    assert (read["1"] < read["16"]) == bool(more)  # more tokens choose more experts
