"""Benchmarks that compare drafting, serving and rollouts with other ways, each in a tiny run."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import ADMITTED

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common, host_layers, never_slower, prefixes, rollouts, serving, simulated_acceptance
from benchmarks.rounds import shapes
from benchmarks.tables import render
from benchmarks.tables.figures import Results
from spec_compile import speculate

SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=512, num_hidden_layers=6,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip


@pytest.fixture(autouse=True)
def not_pinned(monkeypatch):
    """The process of the tests keeps its cores and its one thread."""
    monkeypatch.setattr(common, "pin", lambda threads: None)


@pytest.fixture
def tiny_shapes(monkeypatch):
    for name in ("llama-8b", "llama-1b"):
        monkeypatch.setitem(shapes.SHAPES, name, ("llama", SIZES))


def test_a_simulated_tree_is_the_best_of_its_size():
    form = simulated_acceptance.Form(2, 4, 4, "cpu")
    assert form.parents.tolist() == [-1, 0, 1, 0] and form.rank.tolist() == [0, 0, 0, 1]
    whole = simulated_acceptance.Form(5, 4, 16, "cpu")
    smaller = simulated_acceptance.Form(5, 4, 8, "cpu")
    assert whole.parents[:8].equal(smaller.parents) and (whole.parents < torch.arange(16)).all()
    text, right = torch.arange(40).view(2, 20), torch.tensor([0, -1])[:, None].expand(2, 20).clone()
    right[1, 6] = 1
    tokens, parents = form.trees(torch.tensor([3, 30]), torch.tensor([3, 5]), text, right, 100)
    assert tokens.tolist() == [[3, 4, 5, 6], [30, 27, 28, 26]] and parents.tolist() == [[-1, 0, 1, 0]] * 2
    assert form.trees(torch.tensor([3]), torch.tensor([19]), text, right, 20)[0].max() < 20


def test_simulated_drafts_are_right_as_often_as_stated():
    right = simulated_acceptance.draw_right(0.7, 50, 1000)
    share = [(right == rank).float().mean().item() for rank in range(3)]
    assert share == pytest.approx([0.7, 0.3 * 0.35, 0.3 * 0.65 * 0.175], abs=0.01)
    assert not right[0].equal(right[1])  # each row has draws of its own
    assert (simulated_acceptance.draw_right(0, 2, 9) == -1).all() and (
        simulated_acceptance.draw_right(1, 2, 9) == 0
    ).all()


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--forms", "tree"], ["--forms", "chain", "--head", "none"]])
def test_simulated_acceptance_on_a_tiny_shape(more, tiny_shapes, tmp_path, capsys):
    path = tmp_path / "rows.json"
    command = ["--shape", "llama-8b", "--batch", "2", "--acceptance", "0", "1", "--new-tokens", "30", "--repeats", "1"]
    simulated_acceptance.main([*command, "--no-compile", "--json", str(path), *more])
    none, all_right = json.loads(path.read_text())["rows"]
    assert "simulated" in capsys.readouterr().out and none["stamp"]["commit"]
    assert {"EAGLE-3 head": "tree", "free": "chain"}[none["drafting"]] == none["form"]
    assert none["same answers"] and all_right["same answers"]
    for name, length in none["accept lengths"].items():
        depth = {"chain of 1": 1, "chain of 2": 2, "chain of 3": 3, "tree of 4 nodes": 2, "tree of 8 nodes": 3}
        gained = all_right["accept lengths"][name]
        assert length == 1 and (name not in depth or gained == pytest.approx(1 + depth[name], abs=0.5))
    assert all_right["best"] in none["accept lengths"] and all_right["over best"] > 0


@pytest.mark.slow
def test_layers_and_experts_on_the_host(tiny_shapes, monkeypatch, tmp_path, capsys):
    sizes = dict(SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    monkeypatch.setitem(shapes.SHAPES, "qwen3-30b-a3b", ("qwen3_moe", sizes))
    path = tmp_path / "rows.json"
    host_layers.main(["--layers", "2", "--new-tokens", "4", "--our-tokens", "6", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["shape"] for row in rows] == ["llama-8b"] * 4 + ["qwen3-30b-a3b"] * 4
    first, ours = rows[0], rows[1]
    assert first["over transformers"] == 1 and ours["equal tokens"].endswith(" of 4") and ours["accept length"] == 1
    assert ours["over transformers"] == pytest.approx(first["ms a token"] / ours["ms a token"])
    assert "Qwen3MoeExperts, are offloaded" in capsys.readouterr().out


def test_bytes_that_are_read_from_the_host():
    """Half of the layers of a dense model; of a mixture, 2 of 4 experts of each layer."""
    dense, mixture = ADMITTED["llama"](), ADMITTED["mixtral"]()
    for model in (dense, mixture):
        parts = host_layers.to_host(model, None)
        assert parts == ([model.model.layers[-1]] if model is dense else [x.mlp.experts for x in model.model.layers])
        held = sum(each.numel() * 4 for part in parts for each in part.parameters())
        fast = speculate(model, num_draft_tokens=1, compile=False, check=False)
        assert host_layers.read_bytes(fast) == held / (1 if model is dense else 2)


def test_hindsight():
    assert common.hindsight({"plain": 5.0, "adaptive": 6.0, "fixed": 8.0}) == {"best": "fixed", "over best": 0.75}


@pytest.mark.parametrize("without", [[rollouts.BASELINES[0]], pytest.param([], marks=pytest.mark.slow)], ids=len)
def test_rollouts_of_the_demo_model(without, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "device_for", lambda threads: "cpu")
    path = tmp_path / "rows.json"
    size = ["--prompts", "2", "--answers", "2", "--new-tokens", "3", "--context", "20", "--epochs", "2"]
    rollouts.main([*size, "--rows", "2", "--no-compile", "--json", str(path), "--without", *without])
    rows = json.loads(path.read_text())["rows"]
    systems = [name for name in rollouts.BASELINES if name not in without]
    epochs = [("n-grams", 1), ("n-grams", 2), *((name, 1) for name in systems)]
    assert [(row["system"], row["epoch"]) for row in rows] == epochs
    assert [row["tokens"] for row in rows] == [12] * len(rows)
    for row in rows:
        for name in systems:
            rate = next(other["tokens_per_s"] for other in rows if other["system"] == name)
            assert row[f"over {name}"] == row["tokens_per_s"] / rate


@pytest.mark.sweep("PARD")
@pytest.mark.parametrize("name", ["EAGLE-3, tree", "JetSpec, tree", "P-EAGLE", "draft model", "PARD"])
def test_drafts_of_random_weights_run(name, tiny_shapes):
    options = SimpleNamespace(shape="llama-8b", model=None, draft=None, no_compile=True)
    model = shapes.build("llama-8b", "cpu").float()
    systems = never_slower.systems_of(model, name, options)
    ids = torch.arange(1, 12)[None]
    answers = [fast.generate(ids, max_new_tokens=8, do_sample=False) for fast in systems.values()]
    assert all(answer.equal(answers[0]) for answer in answers)
    assert max(systems["fixed"].speculation.stats.nodes) > 1


def test_drafts_that_are_possible(capsys):
    def named(*arguments):
        parser = argparse.ArgumentParser()
        never_slower.add_model(parser)
        options = parser.parse_args(arguments)
        never_slower.check(parser, options)
        return options.drafts

    assert "DFlash, tree, shuffled" in named() and "PARD" not in named()
    assert named("--model", "folder") == ["n-grams"] and "PARD" in named("--shape", "llama-8b")
    assert named("--model", "folder", "--draft", "head", "--drafts", "PARD") == ["PARD"]
    for wrong in (["--drafts", "PARD"], ["--draft", "head"]):
        with pytest.raises(SystemExit):
            named(*wrong)
    assert "PARD: not possible with this model" in capsys.readouterr().err


def test_rates_are_divided_by_static_batches_and_plain_steps():
    rates = {("plain", 4): 10.0, ("plain, static batch", 4): 8.0, ("ngram", 4): 15.0, ("ngram", 1): 3.0}
    rows = [{"system": name, "in_flight": count, "tokens_per_s": rate} for (name, count), rate in rates.items()]
    assert serving.ratios(rows) == ["plain, 4 in flight: 1.25x the static batch", "ngram, 4 in flight: 1.50x plain"]


def test_times_of_a_managers_parts_add_up():
    model = ADMITTED["llama"]()
    fast = speculate(model, num_draft_tokens=4, max_cache_len=128, check=False, compile=False)
    manager = fast.init_continuous_batching()
    times = serving.Times(manager)
    manager.start()
    try:
        serving.in_flight(manager, [[5, 6, 7, 8]] * 3, 2, 4)
        parts = "admit prompts launch collect wait deliver add_request check"
        assert times.seconds.keys() >= {*parts.split()}
        assert "microseconds" in times.text(manager.metrics()["rounds_total"]) and not times.seconds
    finally:
        manager.destroy()


@pytest.mark.sweep("arrivals")
@pytest.mark.parametrize("more", ["--arrivals 3", "--requests 5", "--pool 0.005"], ids=["arrivals", "requests", "pool"])
def test_random_prompts(more, tmp_path, capsys):
    path = tmp_path / "serving.json"
    command = "--systems plain --eager --prompt-tokens 20 90 --new-tokens 24 --in-flight 3"
    serving.main([*command.split(), *more.split(), "--json", str(path)])
    ((part, (row,)),) = json.loads(path.read_text()).items()
    assert row["prompt_tokens"] == "20 to 90" and "3 in flight" in capsys.readouterr().out
    if part == "arrivals":
        assert row["arrivals"] == 3 and 0 < row["with_p99_s"] <= row["with_longest_s"] <= row["arrivals_s"]
        assert 0 < row["without_p99_s"] <= row["without_longest_s"]
    else:
        assert row["requests"] == (5 if "--requests" in more else 9) and row["most_at_once"] == 3
        assert row["whole_rows"] >= 1 and row["tokens_per_step"] == 1
        assert "20 to 90" in render.TABLES["serving_random"](Results(tmp_path))


@pytest.mark.slow
def test_simulated_acceptance_under_load(tmp_path, capsys):
    path = tmp_path / "simulated_acceptance.json"
    command = "--in-flight 1 3 --acceptance 0 1 --head none --no-compile --new-tokens 30 --forms".split()
    model = ["--model", str(common.DEMO_MODEL), "--json", str(path)]
    simulated_acceptance.main([*command, "chain of 3", *model])
    rows = json.loads(path.read_text())["load"]
    assert [(row["in flight"], row["simulated acceptance"]) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for row in rows:
        wanted = {"plain": 1, "chain of 3": 1 + 3 * row["simulated acceptance"]}
        assert {name: row["accept lengths"][name] for name in wanted} == pytest.approx(wanted, abs=0.5)
    assert "simulated, free, chain of 3, 3 in flight" in capsys.readouterr().out


def test_kept_prefixes(tiny_shapes, tmp_path, capsys):
    path = tmp_path / "rows.json"
    command = "--shape llama-1b --layers 2 --no-compile --tokens 300 600 --repeats 1 --in-flight 2 --requests 4"
    prefixes.main([*command.split(), "--new-tokens", "8", "--prompt-tokens", "80", "--json", str(path)])
    saved = json.loads(path.read_text())
    (turn,) = saved["turns"]  # 600 tokens are more than the model allows
    assert turn["tokens"] == 300 and turn["reused"] == 315 and turn["token_bytes"] == 2 * 2 * 2 * 16 * 2
    assert turn["second over cold"] == pytest.approx(turn["second_s"] / turn["cold_s"])
    off, on = saved["serving"]
    assert (off["prefixes"], on["prefixes"], off["over off"]) == ("off", "on", 1.0)
    assert on["over off"] == pytest.approx(on["tokens_per_s"] / off["tokens_per_s"])
    assert "serving" in capsys.readouterr().out
