"""The benchmarks' own arithmetic, and one tiny run of what they measure."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from models import ADMITTED, HYBRIDS, prompts

from spec_compile import speculate
from spec_compile.kernels import experts

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common, cpu, gpu
from benchmarks.quality import acceptance, bits
from benchmarks.rounds import quantised_layers, quantised_shapes, shapes, token_times
from benchmarks.tables import render
from benchmarks.tables.figures import Results

SCRIPTS = [path for path in sorted(common.HERE.rglob("*.py")) if "__doc__" in path.read_text()]
FACTS = {"commit", "date", "command", "cpu", "threads", "python", "torch", "transformers"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(common.HERE)))
def test_every_script_explains_itself(path, monkeypatch, capsys):
    """--help shows the command that runs it."""
    name = ".".join(path.relative_to(common.ROOT).with_suffix("").parts)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    assert end.value.code == 0 and f"-m {name.removesuffix('.__main__')} " in capsys.readouterr().out


def test_a_token_costs_the_difference_of_two_lengths():
    pairs = [((16, 1.016), (144, 1.144)), ((16, 5.0), (144, 5.256)), ((16, 2.0), (144, 2.384))]
    result = common.median_difference(pairs)  # what both lengths cost cancels
    assert result["ms"] == pytest.approx(2.0) and result["runs"] == pytest.approx([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="gave 16 tokens, the shorter 16"):
        common.median_difference([((16, 1.0), (16, 1.1))])


def test_systems_take_turns_and_are_warm():
    calls = []

    def system(name):
        def generate(ids, max_new_tokens):
            calls.append((name, max_new_tokens))
            return torch.zeros(1, ids.shape[1] + max_new_tokens)

        return generate

    result = token_times.step_times({"a": system("a"), "b": system("b")}, torch.zeros(1, 3), (2, 5), repeats=3)
    assert calls[:4] == [("a", 5), ("a", 2), ("b", 5), ("b", 2)]  # the longer one first, untimed
    assert calls[4:] == [("a", 2), ("a", 5), ("b", 2), ("b", 5)] * 3
    assert [len(row["runs"]) for row in result.values()] == [3, 3]


def test_prompt_lookup_is_tuned():
    assert {tuple(setting.values()) for setting in common.LOOKUPS} == {(t, n) for t in (10, 16, 24) for n in (2, 3)}
    tried = [{**setting, "tokens_per_second": rate} for setting, rate in zip(common.LOOKUPS, (3, 1, 4, 1, 5, 2))]
    assert common.fastest(tried) == {"prompt_lookup_num_tokens": 24, "max_matching_ngram_size": 2}


def test_prompts_for_tuning_are_not_measured():
    class Words:
        def __call__(self, text, return_tensors):
            return type("Ids", (), {"input_ids": torch.tensor([[hash(text) % 1000]])})

    some, tuning = common.split_prompts("chat", common.PROMPTS, 10, 2, Words(), 100)
    assert len(some) == 10 and len(tuning) == 2
    with pytest.raises(ValueError, match="chat: 12 prompts; 11 are measured and 2 more are for tuning"):
        common.split_prompts("chat", common.PROMPTS, 11, 2, Words(), 100)


def test_floors_of_a_copy_and_of_a_read():
    result = common.floors(8e9, {"copy": 4e12, "read": 5e12}, 3.0)
    expected = {"floor_copy_ms": 2.0, "over_copy": 1.5, "floor_read_ms": 1.6, "over_read": 1.875}
    assert result == pytest.approx(expected)


def test_stamps(monkeypatch):
    facts = common.stamp()
    assert FACTS <= set(facts) and facts["torch"] == torch.__version__ and all(facts.values())
    answers = {"rev-parse": "abc1234\n", "status": ""}
    monkeypatch.setattr(
        common.subprocess, "run", lambda command, **_: type("Done", (), {"stdout": answers[command[1]]})
    )
    assert common.commit() == "abc1234"
    answers["status"] = " M spec_compile/api.py\n"
    assert common.commit() == "abc1234+dirty"


def test_the_commit_where_git_is_not(monkeypatch):
    def fail(*arguments, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(common.subprocess, "run", fail)
    monkeypatch.setenv("BENCHMARK_COMMIT", "abc1234")
    assert common.commit() == "abc1234"
    monkeypatch.delenv("BENCHMARK_COMMIT")
    assert common.commit() == "unknown"


def test_results_are_a_row_a_line(tmp_path):
    report = {"shapes": {"a": {"rounds": [{"ms": 1.5, "stamp": {"commit": "x"}}] * 2, "empty": [], "runs": [1, 2]}}}
    path = tmp_path / "results" / "file.json"
    common.write_json(path, report)
    assert json.loads(path.read_text()) == report
    assert sum("commit" in line for line in path.read_text().splitlines()) == 2


def test_rows_of_earlier_runs_stay():
    before = [dict(nodes=1, ms=1.0), dict(nodes=4, ms=2.0)]
    rows = common.merge_rows(before, [dict(nodes=4, ms=3.0), dict(nodes=16, ms=4.0)], ("nodes",))
    assert [(row["nodes"], row["ms"]) for row in rows] == [(1, 1.0), (4, 3.0), (16, 4.0)]


def test_saved_acceptance_keeps_other_systems(tmp_path):
    path = tmp_path / "acceptance.json"
    acceptance.save(path, {"chat": {"systems": {"a": {"identical": 1}, "b": {"identical": 2}}}}, {"commit": "1"})
    acceptance.save(path, {"chat": {"systems": {"b": {"identical": 3}}}}, {"commit": "2"})
    rows = json.loads(path.read_text())["workloads"]["chat"]["systems"]
    assert rows["a"] == {"identical": 1, "stamp": {"commit": "1"}}
    assert rows["b"] == {"identical": 3, "stamp": {"commit": "2"}}


def test_parts_that_a_gpu_run_leaves_out_stay():
    old, new = {"commit": "1"}, {"commit": "2"}
    before = {"rounds": [dict(batch=1, context=8, nodes=1, ms=1.0, stamp=old)], "loop": {"gap_us": 1.0, "stamp": old}}
    after = gpu.merged(before, {"rounds": [dict(batch=1, context=8, nodes=4, ms=2.0)], "ready": {"seconds": 3.0}}, new)
    assert [row["stamp"] for row in after["rounds"]] == [old, new]
    assert after["loop"]["stamp"] == old and after["ready"] == {"seconds": 3.0, "stamp": new}


def test_the_tables_are_what_the_results_say():
    for path in render.FILES:
        text = path.read_text()
        assert "<!-- figures: " in text and render.render(text) == text, (
            f"{path}: run python -m benchmarks.tables --write"
        )


def test_tables_from_made_up_results(tmp_path):
    facts = dict(commit="abc", date="2026-01-02 03:04", gpu="GPU X", torch="2", transformers="5")
    systems = {token_times.EAGER: 20.0, common.LOOKUP: 8.0, token_times.STATIC: 9.0, token_times.PLAIN: 4.0}
    rows = [dict(system=name, ms=ms, runs=[ms], stamp=facts) for name, ms in systems.items()]
    common.write_json(tmp_path / "gpu.json", {"shapes": {"llama-8b": {"steps": rows}}})
    marks = "<!-- figures: {} -->\nold\n<!-- end of figures -->"
    text = render.render("a\n" + marks.format("summary") + "\nb\n" + marks.format("gpu_steps"), tmp_path)
    assert "Measured at: commit abc, 2026-01-02, GPU X, torch 2, transformers 5." in text
    assert "not measured" in text and "old" not in text and "| Llama-3.1-8B | 20.00 | 9.00 | 4.00 |" in text
    assert render.render(text, tmp_path) == text
    with pytest.raises(KeyError, match="nothing"):
        render.render(marks.format("nothing"))


def test_the_first_table_from_made_up_results(tmp_path):
    """Each engine by its fastest way; two models, whatever their folders and sets are called; nothing of another."""
    gpu_stamp, cpu_stamp = dict(commit="abc", date="2026-01-02 03:04", torch="2", transformers="5", gpu="GPU X"), {}
    cpu_stamp = {**gpu_stamp, "gpu": None, "cpu": "CPU Y", "threads": 2}

    def row(model, engine, drafts, rate, name, weights=None, stamp=gpu_stamp):
        figures = {name: {"accept_length": 1.5, "tokens_per_second": rate}}
        return dict(model=model, dtype="bfloat16", engine=engine, drafts=drafts, weights=weights, version="1",
                    sets=figures, stamp=stamp)  # fmt: skip

    smol, gemma = "SmolLM2-135M-Instruct", "gemma3-270m"
    rows = [
        row(smol, "ours", "n-gram", 300, "mt_bench"), row(smol, "ours", "plain", 100, "mt_bench"),
        row(smol, "vllm", "plain", 60, "mt_bench"), row(smol, "vllm", "n-gram", 50, "mt_bench"),
        row(smol, "transformers", "plain", 20, "mt_bench"), row(gemma, "ours", "plain", 70, "chat"),
        dict(model=gemma, dtype="bfloat16", engine="vllm", drafts="plain", refused="no", stamp=gpu_stamp),
    ]  # fmt: skip
    common.write_json(tmp_path / "peers.json", {"rows": rows})
    rows = [row(gemma, engine, drafts, rate, "code_editing", weights, cpu_stamp) for engine, drafts, weights, rate in (
        ("ours", "n-gram", "int4", 90), ("ours", "n-gram", "int8", 99), ("llama_cpp", "plain", "int4", 45),
        ("transformers", "n-gram", None, 9))]  # fmt: skip
    common.write_json(tmp_path / "peers_cpu.json", {"rows": rows})
    starts = [dict(model=smol, device=device, system=system, version="1", cache=cache, seconds=seconds,
                   stamp=gpu_stamp if device == "cuda" else cpu_stamp)
              for device, system, cache, seconds in (
                  ("cuda", "ours", "cold", 9.0), ("cuda", "ours", "warm", 4.0), ("cuda", "vllm", "warm", 20.0),
                  ("cpu", "ours", "warm", 3.0))]  # fmt: skip
    common.write_json(tmp_path / "first_token.json", {"rows": starts})
    asked = dict(model="llama-8b", in_flight=64, prompt_tokens="512", stamp=gpu_stamp)
    requests = [asked | dict(system=system, tokens_per_s=rate) for system, rate in (
        ("plain", 40.0), ("ngram", 30.0), ("vLLM 1", 50.0))]  # fmt: skip
    common.write_json(tmp_path / "serving.json", {"random": requests})
    text = render.TABLES["summary"](Results(tmp_path))
    for line in (
        "| SmolLM2-135M, chat | 20 (plain) | 60 (plain) | 300 (n-gram) | 5.0× |",
        "| Gemma-3-270M, chat | not measured | not measured | 70 (plain) |  |",
        "| Gemma-3-270M, code editing, CPU, 4 bits | 9 (n-gram) | 45 (plain) | 90 (n-gram) | 2.0× |",
        "| SmolLM2-135M, first token of a later process | not measured | 20.0 s | 4.0 s | 5.0× |",
        "| 64 requests, Llama-3.1-8B shape |  | 50 | 40 (plain) | 0.80× |",
    ):
        assert line in text
    assert len(text.splitlines()) <= 12
    engines = render.TABLES["peers"](Results(tmp_path))
    assert "| model | drafts | engine | chat |" in engines and "| Gemma-3-270M | plain | vllm | no |" in engines
    on_cpu = render.TABLES["peers_cpu"](Results(tmp_path))
    assert "| Gemma-3-270M | int4 | n-gram | ours 1 | 1.50, 90 (2.00×) |" in on_cpu
    assert "| Gemma-3-270M | int8 | n-gram | ours 1 | 1.50, 99 |" in on_cpu
    assert "| SmolLM2-135M | GPU X | ours 1 | 9.0 s | 4.0 s |" in render.TABLES["first_token"](Results(tmp_path))


@pytest.fixture(scope="module")
def tiny():
    model = ADMITTED["llama"]()
    settings = dict(compile=False, adaptive=False, recycle=0)  # what recycled tokens have gained outlives a reset
    return model, speculate(model, num_draft_tokens=1, compile=False), speculate(model, **settings)


def test_gpu_steps_on_a_tiny_model(tiny):
    model, plain, fast = tiny
    model.generation_config.eos_token_id = plain.generation_config.eos_token_id = None
    fast.generation_config.eos_token_id = None
    ids, tuning = (row for row in prompts()[0][:2])
    rows = {row["system"]: row for row in token_times.steps(model, plain, fast, ids, [tuning], 2, (2, 6))}
    assert list(rows) == [
        token_times.EAGER,
        common.LOOKUP,
        token_times.STATIC,
        token_times.PLAIN,
        token_times.SPECULATIVE,
    ]
    assert all(len(row["runs"]) == 2 and row["new_tokens"] == [2, 6] for row in rows.values())
    assert rows[common.LOOKUP]["lookup"] in common.LOOKUPS and len(rows[common.LOOKUP]["tried"]) == 6
    assert rows[token_times.SPECULATIVE]["accept_length"] >= 1
    assert set(plain.speculation.stats.nodes) == {1}  # nothing was drafted


@pytest.mark.slow
def test_gpu_rounds_and_loop_on_a_tiny_model(tiny, monkeypatch):
    model, plain, fast = tiny
    monkeypatch.setattr(gpu, "text_tokens", lambda count, vocab: torch.arange(count) % vocab)
    (row,) = gpu.round_rows(fast, [1], [100], [16], {"copy": 1e9, "read": 2e9})
    assert row["nodes"] == 16 and row["ms"] > 0 and row["over_read"] == pytest.approx(2 * row["over_copy"])
    bytes_read = gpu.weight_bytes(model) + 100 * fast.speculation.engine.runtime.verify.token_bytes
    assert row["floor_copy_ms"] == pytest.approx(bytes_read / 1e9 * 1e3)
    result = gpu.loop(plain, prompts()[0][0], 12)
    assert result["rounds"] == 12 and result["accept_length"] == 1.0  # one round a token
    fast.speculation.stats.reset()
    fast.speculation.ngram.reset()
    fast.generate(prompts()[0][0], max_new_tokens=40, do_sample=False)
    expected = fast.speculation.stats.rounds  # of an answer that no earlier call has left in the trie
    assert 1 < expected == gpu.loop(fast, prompts()[0][0], 40)["rounds"]
    (row,) = gpu.prompts(fast, model, [40])
    assert row["tokens"] == 40 and row["repeats"] == 3 and row["ours"] > 0 and row["HF"] > 0


@pytest.mark.slow
def test_gpu_rounds_of_a_tiny_hybrid(monkeypatch):
    """States count as bytes, and of experts those that are chosen."""
    monkeypatch.setattr(gpu, "text_tokens", lambda count, vocab: torch.arange(count) % vocab)
    fast = speculate(HYBRIDS["qwen3_next"](), compile=False, adaptive=False, num_draft_tokens=4, check=False)
    graph, config = fast.speculation.engine.runtime.verify, fast.config
    linear = sum(kind == "linear_attention" for kind in config.layer_types)
    heads, size = config.linear_num_value_heads, config.linear_key_head_dim
    channels = (2 * config.linear_num_key_heads + heads) * size
    assert shapes.state_bytes(graph) == 4 * linear * (heads * size * size + config.linear_conv_kernel_dim * channels)
    speeds = {"copy": 1e9, "read": 2e9}
    one, four = gpu.round_rows(fast, [1], [40], [1, 4], speeds)
    assert one["distinct_experts"] == 2 < four["distinct_experts"] <= 4
    weights = shapes.weight_bytes(fast, 4, four["distinct_experts"])
    expected = weights + 40 * graph.token_bytes + 2 * shapes.state_bytes(graph)
    assert four["floor_copy_ms"] == pytest.approx(expected / 1e9 * 1e3) and one["floor_copy_ms"] < four["floor_copy_ms"]


@pytest.mark.parametrize(
    "name, billions",
    [
        ("qwen3.5-9b", 8.95), ("falcon-h1-7b", 7.59), ("nemotron-h-8b", 8.1), ("lfm2-1.2b", 1.17), ("llama-8b", 8.03),
        ("qwen3-30b-a3b", 30.53), ("gpt-oss-20b", 20.91), ("mixtral-8x7b", 46.7),
    ],
)  # fmt: skip
def test_shapes_have_their_published_sizes(name, billions):
    model = shapes.build(name, "meta")
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    "pack, error",
    [(quantised_layers.gptq, 0.12), (quantised_layers.fp8, 0.03), (quantised_layers.nf4, 0.1)],
    ids=["gptq", "fp8", "nf4"],
)
def test_layers_are_quantised(pack, error):
    """Rows of 256 inputs; 72 outputs are no multiple of a block of FP8."""
    weight = torch.randn(72, 256, dtype=torch.float16)
    packed = pack(weight)
    got = packed.layout.unrounded(torch.eye(256), list(packed.parts.values()), None).T
    assert (got - weight).norm() < error * weight.float().norm()


ALIKE = dict(vocab_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
TINY = {
    "llama-8b": dict(hidden_size=256, intermediate_size=384, **ALIKE),
    "qwen3-30b-a3b": dict(hidden_size=128, moe_intermediate_size=128, head_dim=32, num_experts=8, num_experts_per_tok=2,
                          **ALIKE),
    "gpt-oss-20b": dict(hidden_size=64, intermediate_size=96, head_dim=16, num_local_experts=8, num_experts_per_tok=2,
                        sliding_window=16, layer_types=["sliding_attention"], **ALIKE),
}  # fmt: skip
LLAMA, LLAMA_REST = 3 * 384 * 256 + 2 * 256 * 256 + 2 * 128 * 256, 2 * (512 * 256 + 3 * 256) + 2 * 4 * 32
"""Weights that are quantised, and bytes of the output head, norms, and frequencies of the rotary embedding."""
CHOSEN = 8 * (1 - (1 - 2 / 8) ** 3)
"""Of 8 experts, of which a token chooses 2, those that 3 tokens are expected to choose."""
READ = {
    "llama-8b-fp8": LLAMA + 4 * LLAMA / 128**2 + LLAMA_REST,
    "llama-8b-int4": LLAMA / 2 + 2 * LLAMA / 128 + LLAMA_REST,
    "llama-8b-gptq": LLAMA / 2 + (2 + 1 / 2) * LLAMA / 128 + 4 * (6 * 256 + 384) + LLAMA_REST,
    "llama-8b-nf4": LLAMA / 2 + 4 * LLAMA / 64 + 7 * 16 * 4 + LLAMA_REST,
    "qwen3-30b-a3b-fp8": CHOSEN * 3 * (128**2 + 4) + 3 * 128**2 + 4 * 4 + 2 * (512 + 3 + 8) * 128 + 2 * 64 + 2 * 4 * 16,
    "gpt-oss-20b-mxfp4": (
        CHOSEN * (192 + 64) * (256 / 2 + 256 / 32 + 2)  # of 256 inputs, to which the kernel's words are filled up
        + 2 * (6 * 64 * 32 + 192 + 4) + 2 * 8 * 65 + 2 * (512 + 3) * 64 + 2 * 4 * 8
    ),
}  # fmt: skip
"""Bytes that a step over 3 tokens reads of those tiny shapes."""


@pytest.mark.parametrize("name", READ)
def test_quantised_shapes(name, monkeypatch):
    shape = quantised_shapes.QUANTISED[name][0]
    monkeypatch.setitem(shapes.SHAPES, shape, (shapes.SHAPES[shape][0], TINY[shape]))
    model = shapes.build(name, "cpu")
    assert shapes.weight_bytes(model, 3) == pytest.approx(READ[name], abs=1)
    assert model.lm_head.weight.dtype == (torch.float16 if "gptq" in name else torch.bfloat16)
    if name == "gpt-oss-20b-mxfp4":
        monkeypatch.setattr(gpu, "text_tokens", lambda count, vocab: torch.arange(count) % vocab)
        fast = speculate(model, compile=False, num_draft_tokens=2, max_cache_len=64, check=False)
        (row,) = gpu.round_rows(fast, [3], [20], [1], {"copy": 1e9, "read": 1e9})
        assert row["expected_experts"] == pytest.approx(CHOSEN)
        window = 3 * 16 * fast.speculation.engine.runtime.verify.token_bytes
        seen = shapes.weight_bytes(fast, 3, row["distinct_experts"]) + window
        assert row["floor_copy_ms"] == pytest.approx(seen / 1e6)  # of 20 tokens the window has 16


@pytest.mark.slow
def test_nodes_choose_experts_of_their_own_and_those_that_a_round_reads_are_counted(monkeypatch):
    sizes = dict(TINY["qwen3-30b-a3b"], num_experts=64, num_experts_per_tok=4, num_hidden_layers=4)
    monkeypatch.setitem(shapes.SHAPES, "qwen3-30b-a3b", ("qwen3_moe", sizes))
    monkeypatch.setattr(gpu, "text_tokens", lambda count, vocab: torch.arange(count) % vocab)
    product, read = experts._product, []

    def counted(x, ids, parts, kind):
        read.append(len(parts[0][ids.unique()]))
        return product(x, ids, parts, kind)

    monkeypatch.setattr(experts, "_product", counted)
    fast = speculate(shapes.build("qwen3-30b-a3b", "cpu"), compile=False, adaptive=False, check=False)
    same = torch.zeros(1, 60, dtype=torch.int64)
    fast.generate(same, max_new_tokens=2, do_sample=False)  # leaves a cache that draws all nodes to one state
    read.clear()
    one, many = gpu.round_rows(fast, [1], [40], [1, 16], {"copy": 1e9, "read": 1e9})
    assert one["distinct_experts"] == 4 == one["expected_experts"]
    assert many["distinct_experts"] == sum(read[-8:]) / 8  # two products in each layer of the last round
    assert many["distinct_experts"] == pytest.approx(many["expected_experts"], rel=0.1)
    bytes_read = shapes.weight_bytes(fast, 16, many["distinct_experts"])
    assert many["floor_copy_ms"] == pytest.approx(one["floor_copy_ms"] + (bytes_read - shapes.weight_bytes(fast)) / 1e6)


def test_acceptance_and_cpu_on_a_tiny_model(tiny):
    model, plain, fast = tiny
    ours = {"ours, no drafts": plain, "ours, n-gram": fast}
    fixed = dict(do_sample=False, max_new_tokens=6, pad_token_id=0)
    some, tuning = [prompts()[0][0]], [prompts()[0][1]]
    row, identical = cpu.workload_rows(model, ours, (some, tuning), fixed, 1)
    assert identical == row["identical"] == 1 and row["lookup"] in common.LOOKUPS
    assert set(row["tokens_per_second"]) == {"HF greedy", common.LOOKUP, *ours}
    systems = acceptance.hf_systems(model, None, fixed) | {name: wrapped.generate for name, wrapped in ours.items()}
    systems = {name: partial(call, **fixed) for name, call in systems.items()}
    result = acceptance.measure(systems, ours, model, (some, tuning), 1, fixed)
    rows = result["systems"]
    assert rows[common.LOOKUP]["lookup"] in common.LOOKUPS and rows["ours, n-gram"]["identical"] == 1
    best = max(rows["HF greedy"]["tokens_per_second"], rows[common.LOOKUP]["tokens_per_second"])
    assert rows["ours, n-gram"]["over_best_of_hf"] == pytest.approx(rows["ours, n-gram"]["tokens_per_second"] / best)
    assert all(row["first_token_s"] > 0 for row in rows.values())
    whole = 6 / rows["HF greedy"]["tokens_per_second"]
    parts = rows["HF greedy"]["first_token_s"] + 5 * rows["HF greedy"]["further_token_s"]
    assert parts == pytest.approx(whole) and rows["HF greedy"]["tokens"] == 6
    cells = [column._cells for column in acceptance.table("chat", result).columns]
    assert len({*map(len, cells)}) == 1 and [*rows] == cells[0]


def test_systems_that_cannot_run_are_left_out_unless_they_are_named(monkeypatch, capsys):
    heads = common.DEMO_MODEL / "heads"
    assert (
        common.lacking(("eagle3", "eagle3", {"num_steps": 5}), heads)
        == common.lacking(("ngram", None, {}), heads)
        == ""
    )
    assert common.lacking(("jetspec", "jetspec", {}), heads) == f"no jetspec in {heads}"
    monkeypatch.setitem(acceptance.OURS, "other", ("eagle3", "eagle3", dict(num_steps=5, speed=2)))
    assert common.lacking(acceptance.OURS["other"], heads) == "no option speed in this version"
    monkeypatch.setattr(sys, "argv", ["acceptance.py"])
    assert not {"JetSpec, chain", "other"} & {*acceptance.parse().systems}
    monkeypatch.setattr(sys, "argv", ["acceptance.py", "--systems", "JetSpec, chain"])
    with pytest.raises(SystemExit):
        acceptance.parse()
    assert "no jetspec" in capsys.readouterr().err


def test_prompts_of_bits_are_taken_from_the_files_in_turn(tmp_path):
    class Letters:
        chat_template = None

        def __call__(self, text, **options):
            return type("Ids", (), {"input_ids": [ord(letter) for letter in text]})

        def apply_chat_template(self, messages, add_generation_prompt, tokenize):
            return "".join(message["role"][0] + message["content"] for message in messages) + ":"

    (tmp_path / "a.jsonl").write_text('{"prompt": "xyz"}\n{"turns": ["w", "later"]}\n{"prompt": "u"}\n')
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "v"}]}\n')
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    plain = bits.read_prompts(paths, 3, Letters(), 2)
    assert plain == [("a", [ord("y"), ord("z")]), ("b", [ord("v")]), ("a", [ord("w")])]
    Letters.chat_template = "a template"
    assert bits.read_prompts(paths, 2, Letters(), 9)[1] == ("b", [ord(letter) for letter in "uv:"])


def test_bits_counts_answers_that_differ():
    def result(*answers):
        return {"answers": {"greedy": [list(answer) for answer in answers]}, "seconds": {"greedy": 2.0}}

    results = {common.PLAIN: result("abc", "de", "f"), "ngram": result("abc", "dx", "fg"), common.GREEDY: result("abc"),
               common.LOOKUP: result("abd")}  # fmt: skip
    rows = {(row["system"], row["set"]): row for row in bits.compare(results, ["chat", "maths", "chat"])}
    assert {name for name, _ in rows} == {"ngram", common.LOOKUP}
    assert rows["ngram", "all"]["equal"] == 1 and rows["ngram", "all"]["first_differences"] == [1, 1]
    assert (rows["ngram", "chat"]["equal"], rows["ngram", "chat"]["of"]) == (1, 2)
    assert rows["ngram", "all"]["tokens_per_second"] == 3.5
    assert (rows[common.LOOKUP, "all"]["equal"], rows[common.LOOKUP, "all"]["of"]) == (0, 1)


@pytest.mark.slow
def test_bits_on_the_demo_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common, "pin", lambda threads: None)
    path = tmp_path / "bits.json"
    command = ["--count", "2", "--max-new-tokens", "6", "--sampled", "--transformers", "1", "--eager", "--algorithms",
               "ngram", "eagle3-tree", "--json", str(path)]  # fmt: skip
    bits.main(command)
    rows = json.loads(path.read_text())["rows"]
    assert all(row["equal"] == row["of"] for row in rows) and FACTS <= set(rows[0]["stamp"])
    told = {(row["system"], row["mode"], row["set"]): row["of"] for row in rows}
    assert told["ngram", "sampled", "all"] == told["eagle3-tree", "greedy", "all"] == 2
    assert told[common.LOOKUP, "greedy", "all"] == 1
    out = capsys.readouterr().out
    assert "eagle3-tree" in out and "same bits are not promised, because of float32 on a CPU" in out
    with pytest.raises(SystemExit):
        bits.parse(["--heads", str(tmp_path), "--algorithms", "mtp"])
    assert bits.parse(["--heads", str(tmp_path)]).algorithms == ["ngram", "ngram-64", "draft"]


@pytest.mark.slow
def test_bits_of_requests_on_the_demo_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(common, "pin", lambda threads: None)
    command = ["--requests", "--count", "2", "--max-new-tokens", "6", "--eager", "--algorithms", "ngram", "--longest",
               "80", "--batches", "2", "--json", str(tmp_path / "bits.json")]  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        bits.main(command)
    assert ended.value.code is None  # nothing is promised in float32 on a CPU
    rows = json.loads((tmp_path / "bits.json").read_text())["requests"]
    assert all(row["equal"] == 2 for row in rows if "score()" not in row["manner"])
    assert "after a common prefix, 2 rows" in (out := capsys.readouterr().out) and "2 of 2" in out


def test_bits_of_requests_end_with_an_error_if_a_promise_is_broken(tmp_path, monkeypatch):
    row = {"mode": "greedy", "manner": "together, 4 rows", "of": 300, "reused": 0, "first_differences": []}
    rows = [dict(row, system=name, exact="auto", promised=name != "draft", equal=299) for name in ("ngram", "draft")]

    def ask_one(name, options, prompts):
        return [each for each in rows if each["system"] == name]

    monkeypatch.setattr(bits, "ask_one", ask_one)
    options = bits.parse(["--requests", "--algorithms", "ngram", "draft", "--json", str(tmp_path / "bits.json")])
    assert (
        bits.ask(options, [[1]], 0.0) == "ngram: together, 4 rows: an answer differs, although equal ones are promised"
    )


def test_a_system_that_fails_leaves_the_others(monkeypatch):
    def answer(name, options, prompts, modes):
        if name == "mtp":
            raise ValueError("no head")
        return {"answers": {}, "seconds": {"greedy": 1.0}}

    monkeypatch.setattr(bits, "answer", answer)
    options = bits.parse(["--algorithms", "mtp", "ngram"])
    results, failures = bits.answer_all(options, [[1]], None, lambda results: None)
    assert list(results) == [common.PLAIN, "ngram"] and failures == ["mtp: ValueError: no head"]
