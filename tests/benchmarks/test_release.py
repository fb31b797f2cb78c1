"""The measurements of a release: their commands, the rows that stay, and the two scripts that only a release needs."""

import argparse
import importlib
import json
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common, release
from benchmarks.host import first_token
from benchmarks.peers import requests_on_vllm

COMMAND = ["--model", "models/a", "models/b", "--heads", "heads", "--on"]
COMMANDS = [
    (machine, command)
    for machine, make in (("gpu", release.on_gpu), ("cpu", release.on_cpu))
    for _, _, command in make(release.parse([*COMMAND, machine]))
]


class ParsedError(Exception):
    """Raised in place of a measurement, with its options."""


@pytest.mark.parametrize(("machine", "command"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_is_one_that_its_script_takes(machine, command, monkeypatch):
    parse_args = argparse.ArgumentParser.parse_args

    def parsed(self, *arguments):
        raise ParsedError(parse_args(self, *arguments))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(ParsedError) as end:
        importlib.import_module(command[0]).main()
    (options,) = end.value.args
    if command[0] == "benchmarks.peers.compare":
        assert options.device == {"gpu": "cuda"}.get(machine, machine)
        assert all((options.folder / f"{name}.jsonl").is_file() for name in options.workloads)


def test_both_models_are_measured_with_their_heads():
    compared = [command for machine, command in COMMANDS if "benchmarks.peers.compare" in command and machine == "gpu"]
    pairs = [(command[command.index("--model") + 1], command[command.index("--heads") + 1]) for command in compared]
    assert {*pairs} == {("models/a", "heads/a"), ("models/b", "heads/b")}


def test_rows_of_other_commits_leave(tmp_path, monkeypatch, capsys):
    new, old = {"stamp": {"commit": "4acf3517"}}, {"stamp": {"commit": "f8f19cc"}}
    report = {"rows": [old, new], "shapes": {"a": {"ready": old, "rounds": [old]}, "b": {"ready": new}}, "facts": [1]}
    assert release.of_commit(report, "4acf351") == {"rows": [new], "shapes": {"b": {"ready": new}}}
    common.write_json(tmp_path / "peers_cpu.json", report)
    common.write_json(tmp_path / "first_token.json", report)
    asked = []

    def run(command, cwd):
        asked.append(command[2])
        return types.SimpleNamespace(returncode=asked[-1] != "benchmarks.peers.compare")

    monkeypatch.setattr(release, "RESULTS", tmp_path)
    monkeypatch.setattr(release, "commit", lambda: "4acf3517")
    monkeypatch.setattr(release, "subprocess", types.SimpleNamespace(run=run))
    with pytest.raises(SystemExit) as end:
        release.main(["--on", "cpu", "--model", "a", "--only", "peers"])
    assert end.value.code == 0 and {*asked} == {"benchmarks.peers.compare"}
    assert json.loads((tmp_path / "peers_cpu.json").read_text())["rows"] == [new]
    with pytest.raises(SystemExit) as end:
        release.main(["--on", "cpu", "--model", "a", "--only", "start"])
    assert end.value.code == 1 and json.loads((tmp_path / "first_token.json").read_text()) == report
    assert "failed: start" in capsys.readouterr().out


def test_a_process_of_vllm_answers_with_one_token(monkeypatch, capsys):
    told = {}

    class LLM:
        def __init__(self, **arguments):
            told.update(arguments)

        def generate(self, prompts, sampling):
            told.update(sampling)
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[7])])]

    fake = types.SimpleNamespace(LLM=LLM, SamplingParams=lambda **fields: fields, __version__="1")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    first_token.main(["--model", "folder", "--one", "vllm"])
    assert told == {"model": "folder", "dtype": "bfloat16", "temperature": 0.0, "max_tokens": 1}
    first_token.main(["--model", "folder", "--one", "vllm", "--only-import"])
    assert capsys.readouterr().out.splitlines() == ["first token: 7", "first token: 1"]


@pytest.mark.slow
def test_our_process_answers_as_that_of_transformers(capsys):
    for system in ("ours", "transformers"):
        first_token.main(["--model", str(common.DEMO_MODEL), "--device", "cpu", "--one", system])
    assert len({*capsys.readouterr().out.splitlines()}) == 1


def test_a_start_that_fails_says_why(tmp_path):
    options = first_token.parse(["--model", str(common.DEMO_MODEL)])
    with pytest.raises(RuntimeError, match=r"(?s)nothing said no token: .*ModuleNotFoundError"):
        first_token.start("nothing", options, str(tmp_path), only_import=True)


def test_a_cold_and_a_warm_start_have_one_cache(monkeypatch, tmp_path):
    path, seen = tmp_path / "first_token.json", []

    def start(system, options, cache, only_import=False):
        seen.append(cache)
        return (1.0 + len(seen), "1.2" if only_import else "7")

    monkeypatch.setattr(first_token, "start", start)
    first_token.main(["--model", "a/model", "--systems", "ours", "--repeats", "2", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["cache"], row["seconds"], row["version"]) for row in rows] == [
        ("cold", 4.0, "1.2"),
        ("warm", 5.0, "1.2"),
    ]
    assert seen[1] == seen[2] != seen[3] == seen[4]


class Core:
    """An engine that gives a token to each request in a step."""

    def __init__(self):
        self.left, self.most = {}, 0

    def add_request(self, name, prompt, sampling):
        assert prompt["prompt_token_ids"]
        self.left[name] = [sampling, 0]
        self.most = max(self.most, len(self.left))

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        outputs = []
        for name, (wanted, given) in [*self.left.items()]:
            self.left[name][1] = given = given + 1
            if is_last := given == wanted:
                del self.left[name]
            tokens = types.SimpleNamespace(token_ids=[1] * given)
            outputs.append(types.SimpleNamespace(request_id=name, outputs=[tokens], finished=is_last))
        return outputs


def test_as_many_requests_of_vllm_are_under_way_as_asked_for():
    core = Core()
    row = requests_on_vllm.in_flight(core, [[1, 2]] * 7, 3, 5)
    assert core.most == 3 and row["requests"] == 7 and row["tokens_per_s"] > 0
    assert 0 <= row["first_token_s"] <= row["first_token_p99_s"]
    options = requests_on_vllm.parse(["--in-flight", "2", "--prompt-tokens", "4"])
    prompts = requests_on_vllm.random_requests(options, 10)
    assert [len(ids) for ids in prompts] == [4] * 6
