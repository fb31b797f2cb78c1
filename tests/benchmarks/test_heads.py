"""The benchmark of trained drafts: recorded answers, and a row of JSON for each algorithm and loss."""

import json

import models
import pytest
from trainings import captured_once, sequences, silent, target  # noqa: F401, a fixture

from benchmarks.training import heads
from spec_compile import train_draft


class Letters:
    """A tokenizer without a chat template, whose tokens are letters."""

    chat_template = None

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return type("Encoded", (), {"input_ids": [3 + ord(letter) % (models.VOCAB - 3) for letter in text]})


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Two files of prompts, of which one holds a prompt of the other."""
    monkeypatch.setattr(heads, "load", lambda options: (target(), Letters()))
    prompts = {"a": ["first one", "second", "third"], "b": ["fourth", "the first one", "fifth", "sixth"]}
    for name, texts in prompts.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts))
    return tmp_path


def test_answers_are_recorded(files, monkeypatch):
    monkeypatch.setattr("spec_compile.train.corpus.accelerate", lambda model, *_: model)  # no rounds are made
    where = ["--answers", str(files / "answers.jsonl"), "--new-tokens", "12"]
    sets = [f"one={files / 'a.jsonl'}", str(files / "b.jsonl")]
    heads.main(["record", *sets, *where, "--measured", "1", "--seconds", "0"])
    rows = [json.loads(line) for line in (files / "answers.jsonl").read_text().splitlines()]
    assert [row["set"] for row in rows[:2]] == ["one", "b"]
    assert rows[0]["prompt"] == Letters()("first one", False).input_ids and len(rows[0]["completion"]) <= 12
    learned = [row["prompt"] for row in rows if row["set"] is None]
    assert len(learned) == 2 * 4 and Letters()("the first one", False).input_ids not in learned  # drawn once more


def test_a_row_of_each_loss(files, monkeypatch):
    def quick(model, algo, *, minutes, **options):
        assert minutes == 0.5 and options["batch_size"] == 4
        return train_draft(model, algo, steps=2, progress=silent, **options)

    monkeypatch.setattr(heads.spec_compile, "train_draft", quick)
    rows = [{"set": None, "prompt": ids[:8], "completion": ids[8:]} for ids in sequences(4)]
    rows += [{**rows[0], "set": name} for name in ("one", "b")]
    (files / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = json.dumps({"batch_size": 4, "sequence_length": 32, "ttt_steps": 2})
    more = ["--algos", "eagle3", "mtp", "--losses", "fixed-exp-decay", "dpace", "--minutes", "0.5", "--rounds", "0"]
    where = ["--answers", str(files / "answers.jsonl"), "--output", str(files / "heads"), "--json", str(files / "rows")]
    heads.main(["train", *where, *more, "--options", small])
    made = [json.loads(line) for line in (files / "rows").read_text().splitlines()]
    assert [(row["algorithm"], row["loss"]) for row in made] == [
        ("eagle3", "fixed-exp-decay"), ("eagle3", "dpace"), ("mtp", "fixed-exp-decay"),
    ]  # fmt: skip
    assert all(list(row["accept_length"]) == ["one", "b"] and row["steps"] == 2 for row in made)
    assert made[0]["first_loss"] != made[1]["first_loss"] and "commit" in made[0]["stamp"]
