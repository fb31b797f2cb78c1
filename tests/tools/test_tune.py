"""``python -m spec_compile tune``: the settings of a draft on a user's prompts."""

import json
import re
from pathlib import Path

import pytest
import torch
from models import ADMITTED

import spec_compile
from spec_compile.__main__ import main
from spec_compile.tools import tune

DEMO = Path(__file__).parents[2] / "examples" / "tiny_coder"
HEAD = DEMO / "heads" / "eagle3"


def test_combinations_are_those_that_make_sense():
    for algo in ("ngram", "Lookahead"):
        chosen = [*tune.combinations(algo, [1], [1], [1, 4, 8])]
        assert chosen == [dict(num_draft_tokens=4), dict(num_draft_tokens=8)]
    assert [*tune.combinations("eagle3", [1, 3], [1, 4], [2, 16, 64])] == [
        dict(num_steps=1, topk=1), dict(num_steps=1, topk=4), dict(num_steps=3, topk=1),
        dict(num_steps=3, topk=4, num_draft_tokens=16),
    ]  # fmt: skip
    assert [*tune.combinations("dflash", [1, 3], [1, 4], [1, 16])] == [dict(topk=1), dict(topk=4, num_draft_tokens=16)]


def test_settings_that_speculate_refuses_are_left_out():
    candidates = [dict(num_steps=20, topk=4, num_draft_tokens=32), dict(num_steps=3, topk=1)]
    fitting, (line,) = tune.sort_out("eagle3", candidates, {"draft": "head"})
    assert fitting == candidates[1:]
    assert line.startswith("num_steps 20, topk 4, num_draft_tokens 32 is left out: (num_steps - 1) * topk must be at")


@pytest.mark.parametrize(
    ("algo", "grid", "options", "message"),
    [
        ("ngram", ([3], [1], [1]), {}, r"^--nodes: .*'ngram'.* 2 to 64 nodes, as with --nodes 8$"),
        ("ngram", ([3], [1], [65]), {}, r"^--nodes: .*\(num_draft_tokens 65 is left out: num_draft_tokens: expected 1"),
        ("eagle3", ([5], [4], [4]), {"draft": "head"}, "^--steps, --topk, --nodes: .* --steps 3 --topk 4 --nodes 16"),
        ("dflash", ([5], [4], [1]), {"draft": "head"}, "^--topk, --nodes: .* as with --topk 1,8 --nodes 16"),
        ("eagle3", ([3], [1], [4]), {}, "^draft: algo='eagle3' needs an EAGLE-3 head"),
        ("eagle3", ([3], [1], [4]), {"draft": "head", "adaptive": True}, "^options: 'adaptive' is fixed in them"),
        ("ngrm", ([3], [1], [4]), {}, "Did you mean 'ngram'"),
    ],
)
def test_a_search_without_settings_is_refused(algo, grid, options, message):
    with pytest.raises(ValueError, match=message):
        tune.sort_out(algo, tune.combinations(algo, *grid), options)


def test_an_unknown_option_is_refused_before_the_search():
    with pytest.raises(TypeError, match=r"unknown option 'max_cache'. Did you mean 'max_cache_len'"):
        tune.sort_out("ngram", [{}], {"max_cache": 3})


def test_plain_steps_run_in_the_same_engine(monkeypatch):
    """A cache in FP8 changes answers, so drafts give those of plain steps only if both have it."""
    asked, made = [], []

    def speculate(model, algo="ngram", **options):
        asked.append((algo, options))
        made.append(spec_compile.speculate(model, algo, **options))
        return made[-1]

    monkeypatch.setattr(tune, "speculate", speculate)
    model, ids = ADMITTED["llama"](), [torch.arange(3, 12)[None], torch.arange(20, 25)[None]]
    engine = dict(compile=False, max_cache_len=96, kv_cache_dtype="fp8_per_token_head", exact="auto", check=False)
    plain, chain = tune.search(
        model, "draft_model", [dict(num_steps=2, topk=1)], ids, 40, draft=ADMITTED["llama"](), **engine
    )
    assert [algo for algo, _ in asked] == ["ngram", "draft_model", "draft_model"]
    assert asked[0][1] == engine | {"num_draft_tokens": 1}
    assert [options["adaptive"] for _, options in asked[1:]] == [True, False]
    assert all(engine.items() <= options.items() for _, options in asked[1:])
    assert plain.drafting_share == 0.0 and plain.mean_nodes == 1.0
    assert chain.differing == 0 and chain.accept_length > 2.5
    chosen, fixed = (each.speculation.stats for each in made[1:])
    assert (chain.drafting_share, chain.mean_nodes) == (chosen.drafting_share, chosen.mean_nodes)
    assert chain.accept_length == fixed.accept_length and fixed.drafting_share == 1.0
    assert chain.needed == pytest.approx(chain.accept_length * plain.chosen / chain.fixed)


def found(*rates):
    """Plain steps at 10 tokens a second, and settings with these rates, adaptive and fixed."""
    drafts = [tune.Setting({"topk": k}, *pair, 0.25, 4.75, 2.0, 1.5, 0) for k, pair in enumerate(rates, 1)]
    return [tune.Setting({}, 10.0, 10.0), *drafts]


def test_the_verdict_names_the_fastest_setting():
    told = tune.verdict(found((20.0, 18.0), (25.0, 24.0))).splitlines()
    assert told[0] == "take topk 2: 2.50 times plain steps"
    assert told[1] == (
        "with topk 2 25% of the rounds drafted, 4.8 nodes a round; its drafts pay from an accept length of 1.50 on and "
        "reach 2.00"
    )
    for rates, first in (
        (((20.0, 26.0), (22.0, 21.0)), "take topk 2: 2.20 times plain steps; on texts like these only, topk 1 with "
         "adaptive=False gives 2.60"),
        (((9.0, 5.0), (9.8, 4.0)), "no setting is faster than plain steps here; topk 2 comes nearest"),
        (((9.0, 5.0), (8.0, 12.0)), "no setting is faster than plain steps here; topk 1 comes nearest; on texts like "
         "these only, topk 2 with adaptive=False gives 1.20"),
    ):  # fmt: skip
        assert tune.verdict(found(*rates)).splitlines()[0] == first


def test_the_table_tells_what_rounds_chose():
    table = tune.table(found((20.0, 18.0)))
    columns = {column.header: [*column.cells] for column in table.columns}
    assert columns["setting"] == ["topk 1", "plain steps"]
    assert columns["rounds that draft"] == ["25%", "0%"] and columns["nodes a round"] == ["4.8", "1.0"]
    assert columns["accept length"] == ["2.00", "1.00"] and columns["that pays"] == ["1.50", "1.00"]


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
        (["--nodes", "1"], "--nodes: none of them is a draft of algo='ngram'"),
        (["--options", '{"num_draft_tokens": 8}'], "options: 'num_draft_tokens' is fixed in them"),
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
