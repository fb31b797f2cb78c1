"""``python -m spec_compile tune``: the settings of a draft on a user's prompts."""

import json
import re
from pathlib import Path

import pytest

from spec_compile import tune
from spec_compile.__main__ import main

DEMO = Path(__file__).parents[2] / "examples" / "tiny_coder"
HEAD = DEMO / "heads" / "eagle3"


def test_combinations_are_those_that_make_sense():
    assert [*tune.combinations(True, [1], [1], [4, 8])] == [dict(num_draft_tokens=4), dict(num_draft_tokens=8)]
    assert [*tune.combinations(False, [1, 3], [1, 4], [2, 16, 64])] == [
        dict(num_steps=1, topk=1), dict(num_steps=1, topk=4), dict(num_steps=3, topk=1),
        dict(num_steps=3, topk=4, num_draft_tokens=16),
    ]  # fmt: skip


def found(*rates):
    """Plain steps at 10 tokens a second, and settings with these rates, adaptive and fixed."""
    plain = tune.Setting({}, 10.0, 10.0, 1.0, 1.0, 0)
    return [plain, *(tune.Setting({"topk": k}, *pair, 2.0, 1.5, 0) for k, pair in enumerate(rates, 1))]


def test_the_verdict_names_the_fastest_setting():
    assert tune.verdict(found((20.0, 18.0), (25.0, 24.0))) == "take topk 2: 2.50 times plain steps"
    assert tune.verdict(found((20.0, 26.0), (22.0, 21.0))).endswith("only, topk 1 with adaptive=False gives 2.60")
    assert tune.verdict(found((9.0, 5.0), (9.8, 4.0))).startswith("no setting is faster than plain steps here; topk 2")


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path, capsys):
    prompts, texts = tmp_path / "prompts.jsonl", ("import os\nimport ", "def add(a, b):")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    heads = ["--algo", "eagle3", "--draft", str(HEAD), "--options", '{"max_cache_len": 256}']
    sizes = ["--max-new-tokens", "24", "--steps", "2", "--topk", "1,2", "--nodes", "6", "--dtype", "float32"]
    assert not main(["tune", "--model", str(DEMO), "--prompts", str(prompts), *heads, *sizes])
    row = r"│ (plain steps|num_steps 2[^│]*?) *│ +(\d+) │ +([\d.]+) │ .*│ +(\d+) │"
    rows = re.findall(row, capsys.readouterr().out)
    names = "plain steps", "num_steps 2, topk 1", "num_steps 2, topk 2, num_draft_tokens 6"
    assert {name for name, *_ in rows} == {*names}
    rates = [float(rate) for _, rate, *_ in rows]
    assert rates == sorted(rates, reverse=True) and {differing for *_, differing in rows} == {"0"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: expected an int of 1 or more"),
        (["--nodes", "4,x"], "--nodes: expected an int of 1 or more, got 'x'"),
        (["--prompts", "missing.txt"], "--prompts: missing.txt cannot be read"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, capsys, arguments, message):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n")
    try:
        assert main(["tune", "--model", str(DEMO), "--prompts", str(prompts), *arguments]) == 2
    except SystemExit as end:
        assert end.code == 2
    assert message in capsys.readouterr().err


def test_without_prompts_nothing_is_loaded(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    assert main(["tune", "--model", "nowhere", "--prompts", str(tmp_path / "empty.txt")]) == 2
    assert "has no prompts" in capsys.readouterr().err
