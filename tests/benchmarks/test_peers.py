"""Engines next to ours: each answers the same prompts in a process, in turn; llama.cpp and vLLM are among them."""

import json
import math
import sys
import threading
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from models import ADMITTED
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers import compare, worker

SETS = {"a": {"tuning": [[1]], "measured": [[2], [3]]}}


class Noting:
    """An engine that notes in a list who was asked what."""

    version = "1"

    def __init__(self, task):
        if task["setting"]:
            raise ValueError("no such setting\nmore")
        self.name, self.asked = task["engine"], task["asked"]

    def forget(self):
        pass

    def answer(self, ids):
        self.asked.append((self.name, *ids))
        return [7, 8, 9]

    def rounds(self, answer):
        return 2, len(answer)


@pytest.fixture
def here(monkeypatch):
    """Engines run in threads of this process."""

    @contextmanager
    def started(tasks):
        pairs = [worker.multiprocessing.Pipe() for _ in tasks]
        threads = [threading.Thread(target=worker.work, args=(task, there)) for task, (_, there) in zip(tasks, pairs)]
        for thread in threads:
            thread.start()
        yield [here for here, _ in pairs]
        for (here, _), thread in zip(pairs, threads):
            here.send(None)
            thread.join()

    monkeypatch.setattr(worker, "started", started)
    monkeypatch.setattr(worker, "pin", lambda threads: None)
    monkeypatch.setattr(worker, "PAUSE", 0)


def test_every_prompt_is_asked_of_all_engines_before_the_next(monkeypatch, here):
    asked = []
    monkeypatch.setitem(sys.modules, "benchmarks.peers.noting", types.SimpleNamespace(load=Noting))
    for name in "xyz":
        monkeypatch.setitem(worker.ENGINES, name, "noting")
    task = {"sets": SETS, "threads": 1, "repeats": 2, "asked": asked, "setting": None, "device": "cpu"}
    tasks = [task | {"engine": "x"}, task | {"engine": "y", "setting": 1}, task | {"engine": "z"}]
    first, refused, last = worker.measure(tasks, 10)
    assert refused == {"refused": "ValueError: no such setting"}
    assert sorted(asked[:2]) == [("x", 1), ("z", 1)]  # before anything is timed
    assert asked[2:] == [("x", 1), ("z", 1), *[("x", 2), ("z", 2)] * 2, *[("x", 3), ("z", 3)] * 2]
    for result in (first, last):
        figures = result["sets"]["a"]
        assert figures["accept_length"] == 1.5 and figures["tokens"] == 6 and figures["answers"] == [[7, 8, 9]] * 2
        assert figures["tuning_tokens_per_second"] > 0


def test_a_prompt_counts_by_its_fastest_repeat_on_a_cpu():
    answers = worker.Answers([[3.0, 1.0, 5.0], [2.0, 4.0, 7.0]], [[1, 2, 3], [1, 2, 3]])
    assert answers.tokens_per_second(by_fastest=True) == 6 / 3
    assert answers.tokens_per_second(by_fastest=False) == 6 / 5


def test_a_process_that_ends_is_a_result():
    here, there = worker.multiprocessing.Pipe()
    assert worker.received(here, 0) == {"refused": "no result after 0 seconds"}
    there.close()
    assert worker.received(here, 1) == {"refused": "its process ended"}


def test_only_engines_that_round_weights_get_them():
    options = compare.parse(["--device", "cpu", "--engines", "ours", "llama_cpp", "transformers", "--drafts", "plain"])
    assert options.json.name == "peers_cpu.json"
    assert [engine for _, engine in compare.systems(options, None)] == ["ours", "llama_cpp", "transformers"]
    assert [engine for _, engine in compare.systems(options, "int8")] == ["ours", "llama_cpp"]


def fake_llama_cpp(made):
    """A module with what on_llama_cpp.py uses of llama-cpp-python; each forward after the prompt's gives two tokens."""

    class Llama:
        def __init__(self, path, **arguments):
            made.append(arguments | {"size": Path(path).stat().st_size})
            self.n_tokens = 0

        def eval(self, tokens):
            self.n_tokens += len(tokens)

        def reset(self):
            self.n_tokens = 0

        def generate(self, ids, temp, repeat_penalty):
            assert temp == 0.0 and repeat_penalty == 1.0
            self.eval(ids)
            yield 5
            for token in range(6, 100, 2):
                self.eval([token, token])
                yield from (token, token + 1)

    def quantize(source, path, options):
        Path(path.decode()).write_bytes(b"small")
        return 0

    return types.SimpleNamespace(
        __version__="0", Llama=Llama, LLAMA_FTYPE_MOSTLY_Q8_0=7, LLAMA_FTYPE_MOSTLY_Q4_0=2,
        llama_model_quantize=quantize, llama_model_quantize_default_params=types.SimpleNamespace,
    )  # fmt: skip


def test_llama_cpp_as_an_engine(monkeypatch, tmp_path):
    pytest.importorskip("gguf")
    made = []
    lookup = types.SimpleNamespace(LlamaPromptLookupDecoding=lambda **arguments: arguments)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake_llama_cpp(made))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", lookup)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.on_llama_cpp", raising=False)
    from benchmarks.peers import on_llama_cpp

    ADMITTED["llama"]().save_pretrained(tmp_path)
    task = {"model": str(tmp_path), "dtype": "float32", "weights": "int4", "threads": 1, "max_len": 8, "new_tokens": 6}
    engine = on_llama_cpp.load(task | {"eos": [9], "setting": compare.llama_cpp(10, 2)})
    assert made[0]["draft_model"] == {"num_pred_tokens": 10, "max_ngram_size": 2} and made[0]["size"] == 5
    answer = engine.answer([1, 2, 3])
    assert answer == [5, 6, 7, 8, 9] and engine.rounds(answer) == (2, 4)
    plain = on_llama_cpp.load(task | {"weights": None, "eos": [], "setting": {}})
    assert plain.answer([1]) == [5, 6, 7, 8, 9, 10] and made[1]["draft_model"] is None and made[1]["size"] > 5
    with pytest.raises(ValueError, match=r"weights: expected one of int8, int4 for llama\.cpp, got fp8"):
        on_llama_cpp.load(task | {"weights": "fp8", "eos": [], "setting": {}})
    sys.modules.pop("benchmarks.peers.on_llama_cpp")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_model_written_as_gguf_is_the_same_model(name, tmp_path):
    pytest.importorskip("gguf")
    from benchmarks.peers import gguf_file

    model = ADMITTED[name]()
    model.save_pretrained(tmp_path / "model")
    gguf_file.write(tmp_path / "model", tmp_path / "model.gguf", "float32")
    # From a file of a Qwen 3 transformers does not read how wide a head is.
    known = dict(config=model.config) if name == "qwen3" else {}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32, **known)
    tensors = again.state_dict()
    assert all(torch.allclose(tensors[name], tensor, rtol=0, atol=1e-6) for name, tensor in model.state_dict().items())


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)


def scaled(name="llama", **rope):
    """A model of the tests that scales its rotary positions."""
    model = ADMITTED[name]()
    model.config.rope_parameters = {"rope_theta": 10000.0, "original_max_position_embeddings": 64, **rope}
    return type(model)(model.config)


def test_scaled_positions_of_llama_3_are_factors_in_the_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    from benchmarks.peers import gguf_file

    scaled(**LLAMA3).save_pretrained(tmp_path / "model")
    gguf_file.write(tmp_path / "model", tmp_path / "model.gguf", "float32")
    tensors = {one.name: one.data for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    # Frequency 10000 ** (-place / 8) turns 64 positions by 10 to 0.01 rounds, of which 4 and more stay, and 1 and less
    # are divided by 8; between them lies that of 3.2 rounds, of which 0.74 stay as they are.
    rounds = 64 / (2 * math.pi) * 10000 ** (-torch.arange(8) / 8)
    share = ((rounds - 1) / 3).clamp(0, 1)
    torch.testing.assert_close(torch.tensor(tensors["rope_freqs.weight"]), 1 / (share + (1 - share) / 8))


def test_other_models_are_not_written_as_gguf(tmp_path):
    pytest.importorskip("gguf")
    from benchmarks.peers import gguf_file

    others = {"GPT2Config": ADMITTED["gpt2"](), "LlamaConfig": scaled(rope_type="linear", factor=8.0)}
    others["Qwen3Config"] = scaled("qwen3", **LLAMA3)
    for name, model in others.items():
        model.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=f"model: expected a Llama, .* or a Qwen 3 or a Gemma 3 .*, got {name}"):
            gguf_file.write(tmp_path / name, tmp_path / "other.gguf", "float32")


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


def test_engines_side_by_side(tmp_path, monkeypatch, capsys, here):
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
