"""Every script in examples/ runs, with its smallest settings."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = {
    "hello.py": ["--eager"],
    "batch_and_streaming.py": ["--eager", "--new-tokens", "12"],
    "many_requests.py": ["--eager", "--new-tokens", "12"],
    "grpo.py": ["--eager", "--steps", "1"],
    "train_head.py": ["--eager", "--steps", "2", "--texts", "4", "--batch-size", "2", "--output", "{folder}"],
    "compile_backend.py": ["--layers", "1"],
    "tensor_parallel.py": ["--eager", "--new-tokens", "12"],
}
PRINTS = {
    "hello.py": ["def mean(values):", "accept length"],
    "batch_and_streaming.py": ["class Stack:", "4 sampled answers", "--- streamed:\ndef mean(values):"],
    "many_requests.py": ["stop", "cancelled"],
    "grpo.py": ["reward", "by transformers"],
    "train_head.py": ["2 steps", "accept length"],
    "compile_backend.py": ["largest difference", "merge_linears"],
    "tensor_parallel.py": ["def mean(values):", "1 processes, accept length"],
}
TESTED_ELSEWHERE = {"compare_drafts.py", "json_schema.py", "medusa.py", "ray_data.py", "ray_serve.py"}
"""In tests/test_xgrammar.py, tests/test_extending.py, tests/test_serving_ray.py and
tests/serve/test_compare_drafts.py."""


@pytest.mark.sweep("hello.py batch_and_streaming.py many_requests.py grpo.py tensor_parallel.py")
@pytest.mark.parametrize("name", SETTINGS)
def test_it_runs(name, tmp_path, monkeypatch, capsys, two_layers):
    settings = [argument.format(folder=tmp_path / "head") for argument in SETTINGS[name]]
    monkeypatch.setattr(sys, "argv", [name, *settings])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert [line for line in PRINTS[name] if line not in printed] == []


def test_every_example_is_tested_short_and_says_how_to_run_it():
    scripts = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() - TESTED_ELSEWHERE == SETTINGS.keys()
    for name in SETTINGS:
        assert f"\npython examples/{name}" in scripts[name] and len(scripts[name].splitlines()) <= 60
