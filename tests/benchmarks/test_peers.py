"""Benchmarks that compare: other engines with ours, and many requests; and the prompts of heads."""

import json
import sys
import types
from pathlib import Path

import models
import pytest
import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common, serving
from benchmarks.peers import compare, in_turn, worker
from benchmarks.training import chats, hold_out
from spec_compile import speculate


class Counting:
    """An engine that answers with three tokens in two forwards, and notes what it is asked."""

    version = "1"

    def __init__(self):
        self.asked = []

    def forget(self):
        self.asked.append("forget")

    def answer(self, ids):
        self.asked.append(tuple(ids))
        return [7, 8, 9]

    def rounds(self, answer):
        return 2, len(answer)


def test_a_worker_warms_up_and_counts():
    engine = Counting()
    sets = {"a": {"tuning": [[1], [2]], "measured": [[3], [4]]}, "b": {"tuning": [[5]], "measured": [[6]]}}
    results = worker.measure(engine, sets, 2)
    assert engine.asked[:2] == [(1,), (5,)]  # before anything is timed
    assert engine.asked[2:] == [
        word for ids in ([1], [2], [3], [4], [3], [4], [5], [6], [6]) for word in ("forget", tuple(ids))
    ]
    assert results["a"]["accept_length"] == 1.5 and results["a"]["tokens"] == 6
    assert results["b"]["answers"] == [[7, 8, 9]] and results["b"]["tokens_per_second"] > 0


def test_settings_are_chosen_by_prompts_that_are_not_measured():
    def result(tuning, measured):
        return {"version": "1", "sets": {"a": {"tuning_tokens_per_second": tuning, "tokens_per_second": measured}}}

    row = compare.best([result(1.0, 9.0), {"refused": "no"}, result(2.0, 3.0)], [{"x": 1}, {"x": 2}, {"x": 3}], ["a"])
    assert row["sets"]["a"]["tokens_per_second"] == 3.0 and row["sets"]["a"]["setting"] == {"x": 3}
    assert [one.get("refused") for one in row["tried"]] == [None, "no", None]
    assert compare.best([{"refused": "why"}], [{}], ["a"])["refused"] == "why"


def fake_vllm(answers):
    """A module with what on_vllm.py uses of vLLM; each answer accepts one draft."""

    class LLM:
        def __init__(self, **arguments):
            assert arguments["skip_tokenizer_init"] and not arguments["enable_prefix_caching"]
            if (arguments.get("speculative_config") or {}).get("method") == "mtp":
                raise ValueError("no MTP here\nmore")
            self.accepted = 0

        def generate(self, prompts, sampling, use_tqdm):
            self.accepted += 1
            tokens = answers[tuple(prompts[0]["prompt_token_ids"])]
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tokens)])]

        def get_metrics(self):
            return [types.SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=self.accepted)]

    return types.SimpleNamespace(__version__="0", LLM=LLM, SamplingParams=lambda **fields: fields)


def test_engines_side_by_side(tmp_path, monkeypatch, capsys):
    """The whole run on the demo model, in one process, with something that looks like vLLM."""
    path = tmp_path / "peers.json"
    command = ["--engines", "ours", "vllm", "sglang", "--drafts", "plain", "EAGLE-3", "MTP", "JetSpec", "--workloads",
               "chat", "--prompts", "1", "--new-tokens", "6", "--repeats", "1", "--settings", "1", "--eager",
               "--device", "cpu", "--dtype", "float32", "--longest", "24", "--json", str(path)]  # fmt: skip
    for drafts in ("EAGLE-3", "MTP"):
        monkeypatch.delitem(compare.SYSTEMS[drafts][1], "ours")
    task = compare.make_task(compare.parse(command))
    prompts = [ids for part in task["sets"]["chat"].values() for ids in part]
    assert all(len(ids) == 24 for ids in prompts) and task["eos"] == [0]
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm({tuple(ids): [5, 6, 7, 8] for ids in prompts}))
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(in_turn, "measure", lambda tasks, timeout: [worker.work(task) for task in tasks])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    compare.main(command)
    rows = {(row["drafts"], row["engine"]): row for row in json.loads(path.read_text())["rows"]}
    figures = {key: row["sets"]["chat"] for key, row in rows.items() if "sets" in row}
    assert figures["plain", "ours"]["accept_length"] == 1.0 and "answers" not in path.read_text()
    assert figures["EAGLE-3", "vllm"]["accept_length"] == 1.5  # behind the first token, three in two steps
    assert figures["EAGLE-3", "vllm"]["same"] == figures["EAGLE-3", "vllm"]["of"] == 1
    assert figures["EAGLE-3", "vllm"]["setting"]["speculative_config"]["model"].endswith("eagle3")
    assert rows["MTP", "vllm"]["refused"] == "ValueError: no MTP here"
    assert rows["plain", "sglang"]["refused"].startswith("ModuleNotFoundError")
    out = capsys.readouterr().out
    assert "JetSpec: left out" in out and "no MTP here" in out


@pytest.mark.slow
def test_engines_in_processes_of_their_own(tmp_path):
    path = tmp_path / "peers.json"
    compare.main(["--engines", "ours", "transformers", "--drafts", "plain", "EAGLE-3", "--workloads", "chat",
                  "--prompts", "2", "--new-tokens", "12", "--repeats", "1", "--settings", "1", "--eager", "--device",
                  "cpu", "--dtype", "float32", "--json", str(path)])  # fmt: skip
    rows = {(row["drafts"], row["engine"]): row["sets"]["chat"] for row in json.loads(path.read_text())["rows"]}
    assert rows["plain", "ours"]["accept_length"] == 1.0  # of EAGLE-3 it depends on the time that rounds take
    assert rows["EAGLE-3", "ours"]["same"] == 2 == rows["plain", "transformers"]["of"]


@pytest.mark.slow
def test_an_engine_by_itself_in_a_process(monkeypatch):
    command = ["--workloads", "chat", "--prompts", "1", "--new-tokens", "4", "--device", "cpu", "--dtype", "float32"]
    task = compare.make_task(compare.parse(command)) | {"weights": None, "engine": "transformers", "setting": {}}
    assert compare.start(task, 300)["sets"]["chat"]["tokens"] == 4
    assert compare.start(task, 0.1) == {"refused": "no result after 0 seconds"}


def test_prompts_that_heads_were_trained_on_are_refused(tmp_path):
    (tmp_path / "set.jsonl").write_text('{"prompt": "What  is\\nthis?"}\n{"prompt": "And that?"}\n')
    for name, text, is_refused in (
        ("a.txt", "Someone asks: What is this? An answer.", True),
        ("b.jsonl", '{"messages": [{"role": "user", "content": "What is this?"}]}', True),
        ("c.jsonl", '{"prompt": "What was this?"}', False),
    ):
        (tmp_path / name).write_text(text)
        if is_refused:
            with pytest.raises(ValueError, match=rf"--trained-on: 1 of 2 prompts of set.jsonl are in {name}"):
                common.refuse_trained(tmp_path / "set.jsonl", 2, [tmp_path / name])
        else:
            common.refuse_trained(tmp_path / "set.jsonl", 2, [tmp_path / name])


def test_prompts_to_train_on_are_not_in_the_measured_ones():
    sets = {"a": ["Say  one.", "Say two."], "b": ["Say three.", "Please:\nsay one. Say one.", "one.", "Say two."]}
    measured, others = hold_out.split(sets, 1)
    assert measured == {"a": ["Say  one."], "b": ["Say three."]} and others == ["Say two."]


def test_a_model_writes_both_sides_of_a_chat(monkeypatch):
    """Turns that do not end, are too short or come again are left out; greedy answers come before those drawn."""
    tokenizer = AutoTokenizer.from_pretrained(common.DEMO_MODEL)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    asked, end = [], tokenizer.eos_token

    def written(model, documents, length, seed, options, tell):
        texts = [f" say {word} to me" for word in ("one", "two", "one")] if options.get("top_k") == 0 else ["yes"] * 9
        asked.append(([tokenizer.decode(document.ids) for document in documents], options["do_sample"], seed))
        answers = [tokenizer(text + end).input_ids for text in texts[: len(documents) - 1]] + [[7]]  # that has no end
        return [chats.Document(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool)) for ids in answers]

    monkeypatch.setattr(chats, "continue_documents", written)
    writer = chats.Chats(None, tokenizer, 16)
    turns = writer.user_turns(4)
    first, second = chats.OPENINGS[:2]
    assert turns == ["say one to me", f"{first} say two to me"]
    assert asked[0] == (["[user]", f"[user]{first}", "[user]", f"[user]{second}"], True, 0)
    talk = list(writer.answers([*turns, "x " * 3000], drawn=1))  # the last is too long to be answered
    prompts = [f"[user]{turn}{end}[assistant]" for turn in turns]
    assert asked[1:] == [(prompts, False, 0), (prompts, True, 1)]
    assert [chat[0]["content"] for chat in talk] == turns * 2 and talk[0][1] == {"role": "assistant", "content": "yes"}


def test_rates_are_divided_by_static_batches_and_plain_steps():
    rates = {("plain", 4): 10.0, ("plain, static batch", 4): 8.0, ("ngram", 4): 15.0, ("ngram", 1): 3.0}
    rows = [{"system": name, "in_flight": count, "tokens_per_s": rate} for (name, count), rate in rates.items()]
    assert serving.ratios(rows) == ["plain, 4 in flight: 1.25x the static batch", "ngram, 4 in flight: 1.50x plain"]


def test_times_of_a_managers_parts_add_up():
    model = models.ADMITTED["llama"]()
    fast = speculate(model, num_draft_tokens=4, max_cache_len=128, check=False, compile=False)
    manager = fast.init_continuous_batching()
    times = serving.Times(manager)
    manager.start()
    try:
        serving.in_flight(manager, [[5, 6, 7, 8]] * 3, 2, 4)
        assert times.seconds.keys() >= {
            "admit",
            "prompts",
            "launch",
            "collect",
            "wait",
            "deliver",
            "add_request",
            "check",
        }
        assert "microseconds" in times.text(manager.metrics()["rounds_total"]) and not times.seconds
    finally:
        manager.destroy()
