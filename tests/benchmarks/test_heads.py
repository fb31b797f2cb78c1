"""The benchmark of trained drafts, and the prompts and chats that they are trained on."""

import json
import sys
from pathlib import Path

import pytest
import torch
from trainings import captured_once, sequences, silent, target  # noqa: F401, a fixture
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common
from benchmarks.training import card, chats, heads, hold_out
from spec_compile import train_draft


def test_a_row_of_each_loss(tmp_path, monkeypatch):
    def quick(model, algo, *, minutes, **options):
        assert minutes == 0.5 and options["batch_size"] == 4
        return train_draft(model, algo, steps=2, progress=silent, **options)

    monkeypatch.setattr(heads, "load", lambda path, device: target())
    monkeypatch.setattr(heads.spec_compile, "train_draft", quick)
    rows = "\n".join(json.dumps({"prompt": ids[:8], "completion": ids[8:]}) for ids in sequences(4))
    data, one, two = (tmp_path / f"{name}.jsonl" for name in ("data", "one", "two"))
    for path in (data, one, two):
        path.write_text(rows)
    small = json.dumps({"batch_size": 4, "sequence_length": 32, "ttt_steps": 2})
    more = ["--algos", "eagle3", "mtp", "--losses", "fixed-exp-decay", "dpace", "--minutes", "0.5", "--rounds", "0"]
    where = ["--data", str(data), "--sets", str(one), str(two), "--output", str(tmp_path / "heads")]
    heads.main([*where, *more, "--options", small, "--json", str(tmp_path / "rows")])
    made = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(row["algorithm"], row["loss"]) for row in made] == [
        ("eagle3", "fixed-exp-decay"), ("eagle3", "dpace"), ("mtp", "fixed-exp-decay"),
    ]  # fmt: skip
    assert all(list(row["accept_length"]) == ["one", "two"] and row["steps"] == 2 for row in made)
    assert made[0]["first_loss"] != made[1]["first_loss"] and "commit" in made[0]["stamp"]


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
    user, assistant = talk[0]["messages"]
    assert assistant == {"role": "assistant", "content": "yes"} and user["role"] == "user"
    assert [line["messages"][0]["content"] for line in talk] == turns * 2
    # Without a template prompts are continued as they are.
    tokenizer.chat_template = None
    texts = [dict(prompt=turns[0], completion="yes"), dict(prompt=turns[1], completion=tokenizer.decode([7]))]
    assert list(writer.answers(turns)) == texts


def test_a_card_has_what_was_measured(tmp_path):
    head, peers, serving = (tmp_path / name for name in ("head", "peers.json", "serving.json"))
    head.mkdir()
    (head / "README.md").write_text("# a draft\n\nThe model's name is in no result.\n")
    stamp = {"commit": "abc", "date": "2026-01-02", "cpu": "a CPU", "threads": 2, "torch": "1", "transformers": "2"}
    shared = {"model": "m", "engine": "ours", "stamp": stamp}
    plain, ours = ({"accept_length": length, "tokens_per_second": 10 * length} for length in (1.0, 2.5))
    rows = [
        shared | {"drafts": "plain", "sets": {"maths": plain}},
        shared | {"drafts": "EAGLE-3", "sets": {"maths": ours}},
    ]
    common.write_json(peers, {"rows": rows})
    command = [str(head), "--model", "m", "--peers", str(peers), "--serving", str(serving)]
    for _ in range(2):
        card.main(command)
    text = (head / "README.md").read_text()
    assert text.count("## Measured") == 1 and "| maths | 2.50 | 10 | 25 |" in text and "in flight" not in text
    flight = {"model": "m", "in_flight": 4, "tokens_per_step": 1.0, "stamp": stamp}
    rows = [flight | {"system": "plain", "tokens_per_s": 100.0}, flight | {"system": "eagle3", "tokens_per_s": 150.0}]
    common.write_json(serving, {"rows": rows})
    card.main(command)
    text = (head / "README.md").read_text()
    assert "| 4 | 100 | 150 | 1.50× | 1.00 |" in text and text.startswith("# a draft") and "commit abc" in text
    with pytest.raises(ValueError, match=r"--model: neither peers\.json nor serving\.json"):
        card.main([str(head), "--model", "other", "--peers", str(peers), "--serving", str(serving)])
