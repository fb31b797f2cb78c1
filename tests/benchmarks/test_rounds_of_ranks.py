"""The benchmark of models that several GPUs share: parts of weights, bytes of a rank, groups of processes that fail."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import models
import psutil
import pytest
import torch
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import timers
from benchmarks.rounds import of_ranks, shards, tensor_parallel
from spec_compile.inventory import held_tensors
from spec_compile.parallel.slices import Cut, Slices
from spec_compile.quantised.fp8 import FP8

WORKER = """
import json, os, signal, sys, time
words = sys.argv[1:]
rows, skip = words[words.index("--rows") + 1], int(words[words.index("--skip") + 1])
assert os.environ["WORLD_SIZE"] == "2" and len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == 2
if os.environ["RANK"] == "1":
    time.sleep(60)  # waits for the other, as in a sum
for number in range(skip, 5):
    name, requests = [("a", 1), ("a", 16), ("b", 1), ("c", 1), ("c", 16)][number]
    row = {"shape": "llama-8b", "gpus": 2, "context": 1024, "system": name, "requests": requests}
    if number == 1:
        print("MemoryError: as the log tells", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 4:
        time.sleep(60)
    row |= {"error": "told"} if number == 2 else {"ms": {"1": 2.0}, "over_floor": {"1": 1.5}}
    with open(rows, "a") as file:
        file.write(json.dumps(row) + "\\n")
    if number == 2:
        os._exit(3)
"""


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
    assert of_ranks.rank_bytes(dense, [], 1) == pytest.approx(every - embedding, rel=0.01)
    layers = len(mixture.layers)
    few, many = (of_ranks.rank_bytes(mixture, [chosen] * layers, 4) for chosen in (1, 2))
    experts = models.ADMITTED["qwen3_moe"]().model.layers[0].mlp.experts
    assert many - few == pytest.approx(layers * sum(each[0].nbytes for each in experts.parameters()))


def test_the_fewest_bytes_of_a_sum():
    assert timers.sum_bytes(4096, 4) == 12_288
    assert timers.sum_bytes(4096, 2) == 8_192 and timers.sum_bytes(4096, 1) == 0


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """A runner of groups of two, whose processes run `WORKER`, and the options."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(tensor_parallel, "COMMAND", (sys.executable, str(tmp_path / "worker.py")))
    one, both = SimpleNamespace(nodes={1: [1]}), SimpleNamespace(nodes={1: [1], 16: [1]})
    monkeypatch.setattr(tensor_parallel, "PAUSE", 0.1)
    monkeypatch.setattr(of_ranks, "SYSTEMS", {"a": both, "b": one, "c": both})
    options = Namespace(
        cases=["llama-8b"], systems=["a", "b", "c"], requests=[1, 16], tiny=True, expert_parallel=False, at_once=2,
        json=tmp_path / "rows.json",
    )  # fmt: skip
    return tensor_parallel.Runner(options, [100.0, 100.0, 20.0, 20.0], tmp_path), options


@pytest.mark.slow
def test_processes_that_die_cost_one_measurement(runner, capsys):
    runner, options = runner
    runner.run(2, until=3)
    rows = json.loads(options.json.read_text())["rows"]
    assert [(row["system"], row["requests"]) for row in rows] == [("a", 1), ("a", 16), ("b", 1), ("c", 1), ("c", 16)]
    assert [row.get("error") for row in rows] == [
        None, "its processes ended; MemoryError: as the log tells", "told", None,
        "stopped after 3 s; MemoryError: as the log tells",
    ]  # fmt: skip
    assert "N=1 2.000 ms (1.50 floors)" in capsys.readouterr().out
    assert not psutil.Process().children(recursive=True)


def test_groups_are_placed_where_there_is_room(runner):
    runner, options = runner
    selection = of_ranks.Selection(options.systems, options.requests, True)
    small, large = (tensor_parallel.Group(case, 2, selection, runner.folder) for case in ("llama-8b", "llama-70b"))
    assert small.gigabytes == 16 / 2 + 10 and large.gigabytes == 141 / 2 + 10
    assert runner.place(large) == [0, 1] and runner.place(small) == [0, 1]
    large.gpus = [0, 1]
    runner.running.append(large)
    assert runner.place(small) == [2, 3]
    small.gpus = [2, 3]
    runner.running.append(small)
    assert runner.place(tensor_parallel.Group("llama-8b", 2, selection, runner.folder)) == [0, 1]
    assert runner.place(tensor_parallel.Group("llama-8b", 4, selection, runner.folder)) == [0, 1, 2, 3]


@pytest.mark.slow
def test_experts_shared_out_by_their_number(tmp_path, monkeypatch):
    """Each process makes half of the experts, and no DTensor has to be gathered."""
    words = ["x", "--cases", "qwen3-30b-a3b", "--gpus", "2", "--tiny", "--systems", "n-gram", "--requests", "1"]
    words += ["--expert-parallel", "--minutes", "3", "--json", str(tmp_path / "rows.json"), "--logs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    tensor_parallel.main()
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["expert_parallel"] and row["sums"] == 12 and row["ms"].keys() == {"1", "16"}


@pytest.mark.slow
def test_a_model_on_two_processes(tmp_path, monkeypatch):
    """Two cases at once, which take turns."""
    words = ["x", "--cases", "llama-8b", "qwen3-30b-a3b", "--gpus", "2", "--tiny", "--at-once", "2", "--minutes", "4"]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(tmp_path / "rows.json"), "--logs", str(tmp_path)])
    tensor_parallel.main()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 2 * 5 and not any("error" in row for row in rows), rows
    for row in rows:
        assert row["sums"] == 12
        for nodes, ms in row["ms"].items():
            assert row["over_floor"][nodes] == pytest.approx(ms / row["floor_ms"][nodes])
    read = [row["gigabytes"] for row in rows if row["shape"] == "qwen3-30b-a3b" and row["system"] == "n-gram"]
    assert read[0]["1"] < read[0]["16"]  # more tokens choose more experts
