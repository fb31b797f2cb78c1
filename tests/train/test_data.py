"""Texts and conversations to train on: reading, batches, and answers that the target writes itself."""

import json
from unittest import mock

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainings import CODER, NEEDS_GPU, TALK, TURNS, chatter, sequences, target, tokenizer
from transformers import AutoModelForCausalLM

from spec_compile import speculate, train_draft
from spec_compile.errors import UnsupportedModelError
from spec_compile.runtime.generate import SpeculativeMixin
from spec_compile.train import data as texts
from spec_compile.train.corpus import continue_documents, prompts
from spec_compile.train.data import read

THINKS = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}hm {% endif %}"
THINKS += "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def parts(document):
    """What is not supervised, and what is."""
    decode = tokenizer().decode
    return [decode(document.ids[document.supervised == wanted]) for wanted in (False, True)]


def test_reading_texts(tmp_path):
    end = tokenizer().eos_token
    (document,) = read(["x = 1\n", "  \n"], tokenizer())
    assert parts(document) == ["", "x = 1\n" + end]
    (document,) = read([{"prompt": "x = ", "completion": "1"}], tokenizer())
    assert parts(document) == ["x = ", "1" + end]
    ids = torch.tensor([4, 5, 6])
    first, second = read(iter([ids, [7, 8]]), vocab_size=9)
    assert first.ids.tolist() == [4, 5, 6] and second.supervised.tolist() == [True, True]
    (tmp_path / "a.txt").write_text("y = 2\n")
    assert parts(read(tmp_path / "a.txt", tokenizer())[0]) == ["", "y = 2\n" + end]
    rows = [{"text": "z"}, {"prompt": "a", "completion": "b"}, {"messages": TALK}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    assert len(read(str(tmp_path / "b.jsonl"), chatter(TURNS))) == 3


def test_reading_conversations():
    (document,) = read([{"messages": TALK}], chatter(TURNS))
    assert parts(document) == ["<user>one?</s><assistant><user>three?</s><assistant>", "two</s>four</s>"]
    assert tokenizer().decode(document.ids) == "<user>one?</s><assistant>two</s><user>three?</s><assistant>four</s>"
    first, second = read([{"messages": TALK}], chatter(THINKS))
    assert parts(first) == ["<user>one?</s><assistant>", "hm two</s>"]
    assert parts(second) == ["<user>one?</s><assistant>two</s><user>three?</s><assistant>", "hm four</s>"]
    (document,) = read([{"messages": TALK[:3]}], chatter(TURNS))
    assert parts(document) == ["<user>one?</s><assistant>", "two</s>"]


def test_reading_prompts_without_an_answer(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"prompt": "x = "}\n')
    document, prompt = read(tmp_path / "a.jsonl", tokenizer(), on_policy=True)
    assert parts(document) == ["", "x" + tokenizer().eos_token] and parts(prompt) == ["x = ", ""]
    assert prompts(prompt, 99) == [tokenizer()("x = ").input_ids] and prompts(prompt, len(prompt.ids)) == []
    with pytest.raises(ValueError, match=r'a.jsonl:3: there is no "completion"; pass on_policy=True'):
        read(tmp_path / "a.jsonl", tokenizer())
    with pytest.raises(ValueError, match=r"data\[0\]: the conversation has no answer; pass on_policy=True"):
        read([{"messages": TALK[:1]}], chatter(TURNS))
    with pytest.raises(TypeError, match=r"data\[0\]: expected text, got NoneType"):
        read([{"prompt": None}], tokenizer(), on_policy=True)
    assert texts.split([prompt], 0.5, 0) == ([prompt], [])


def test_reading_conversations_that_end_with_the_user():
    (document,) = read([{"messages": TALK[:1]}], chatter(TURNS), on_policy=True)
    assert parts(document) == ["<user>one?</s><assistant>", ""]
    (document,) = read([{"messages": TALK[:3]}], chatter(TURNS), on_policy=True)
    assert parts(document) == ["<user>one?</s><assistant><user>three?</s><assistant>", "two</s>"]
    whole = "<user>one?</s><assistant>two</s><user>three?</s><assistant>"
    assert tokenizer().decode(document.ids) == tokenizer().decode(prompts(document, 999)[0]) == whole
    first, second = read([{"messages": TALK[:3]}], chatter(THINKS), on_policy=True)
    assert parts(first) == ["<user>one?</s><assistant>", "hm two</s>"] and parts(second) == [whole, ""]
    (document,) = read([{"messages": TALK}], chatter(TURNS), on_policy=True)  # its last answer is replaced
    assert tokenizer().decode(prompts(document, 999)[0]) == whole


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 7), st.integers(0, 5), st.integers(3, 12))
def test_batches_hold_every_piece_once(lengths, size, seed, length):
    documents = [
        texts.Document(torch.arange(n, dtype=torch.int32) + 100 * i, torch.ones(n, dtype=torch.bool))
        for i, n in enumerate(lengths)
    ]
    pieces = texts.cut(documents, length, 3)
    wanted = [
        tuple(range(100 * i + b, 100 * i + min(b + length, n)))
        for i, n in enumerate(lengths)
        for b in range(0, n, length)
        if min(b + length, n) - b >= 3
    ]
    assert [tuple(piece.ids.tolist()) for piece in pieces] == wanted
    if not pieces:
        return
    batches = texts.Batches(pieces, size, seed)
    orders = []
    for epoch in range(2):
        seen = []
        for step in range(epoch * len(batches), (epoch + 1) * len(batches)):
            batch = batches[step]
            lengths_there = batch.next_supervised.sum(1) + 1
            assert batch.tokens == lengths_there.sum() and len(batch.ids) <= size
            seen += [tuple(row[:n].tolist()) for row, n in zip(batch.ids, lengths_there)]
            width, (slots, step_of, places) = batch.ids.shape[1], batch.rollout(3)
            for ahead in range(3):
                first = ahead * len(batch.ids) * (width - 1)
                expected = [
                    (first + row * (width - 1) + slot, row * width + slot + 1 + ahead)
                    for row, n in enumerate(lengths_there.tolist())
                    for slot in range(n - 2 - ahead)
                ]
                here = step_of == ahead
                assert list(zip(slots[here].tolist(), places[here].tolist())) == expected
        assert sorted(seen) == sorted(wanted)
        orders.append(seen)
    again = texts.Batches(pieces, size, seed)
    assert torch.equal(again[len(batches)].ids, batches[len(batches)].ids)
    assert texts.Batches(pieces, size, seed)[0].ids.tolist() == texts.Batches(pieces, size, seed)[0].ids.tolist()
    if len(pieces) > 20:
        assert orders[0] != orders[1]


def test_long_batches_have_few_widths():
    pieces = read([[5] * length for length in (63, 65, 70, 128, 129)])
    assert [texts.collate([piece]).ids.shape[1] for piece in pieces] == [63, 128, 128, 128, 192]
    batch = texts.collate(pieces[1:3])
    assert batch.tokens == 135 and not batch.next_supervised[0, 64:].any() and batch.next_supervised[1, :69].all()
    assert not batch.ids[1, 70:].any()


def test_held_out_documents():
    documents = read(sequences(20))
    kept, held = texts.split(documents, 0.2, 0)
    assert len(kept) == 16 and len(held) == 4 and {id(d) for d in kept + held} == {id(d) for d in documents}
    assert [id(d) for d in texts.split(documents, 0.2, 1)[1]] != [id(d) for d in held]
    assert len(texts.split(documents, 0.001, 0)[1]) == 1
    ((start,), (end,)) = texts.split(documents[:1], 0.25, 0)
    assert torch.equal(torch.cat([start.ids, end.ids]), documents[0].ids) and len(end.ids) == 5
    assert [len(batch.ids) for batch in texts.sample(documents, 3, 100)] == [3, 2]
    assert sum(len(batch.ids) for batch in texts.sample(documents, 3, 1000)) == 20


@pytest.mark.slow
def test_continuations():
    model = target()
    documents = read([[5, 6, 7, 8], list(range(3, 15))], vocab_size=models.VOCAB)
    documents[0].supervised[:3] = False
    options = dict(do_sample=False, pad_token_id=0)
    for eos in (None, int(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1, **options)[0, -1])):
        found = continue_documents(model, documents, 10, 0, {**options, "eos_token_id": eos})
        assert [document.supervised.tolist().index(True) for document in found] == [3, 5, 1]
        for document in found:
            start = int((~document.supervised).sum())
            alone = model.generate(
                document.ids[None, :start].long(), max_new_tokens=len(document.ids) - start, **options, eos_token_id=eos
            )
            assert document.ids.tolist() == alone[0].tolist() and document.supervised[start:].all()
            assert len(document.ids) == start + 5 or int(document.ids[-1]) == eos
        with mock.patch("spec_compile.train.corpus.CACHE", 1):
            apart = continue_documents(model, documents, 10, 0, {**options, "eos_token_id": eos})
        for one, document in zip(apart, found):  # by itself, each goes on to the whole length
            assert one.ids[: len(document.ids)].tolist() == document.ids.tolist()
            assert len(one.ids) == 10 or int(one.ids[-1]) == eos


def unanswered(count=5):
    """Prompts of 4, 7, 10 ... tokens."""
    documents = read([ids[: 4 + 3 * n] for n, ids in enumerate(sequences(count))])
    return [texts.Document(document.ids, torch.zeros_like(document.supervised)) for document in documents]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("nodes", [1, 8])
def test_answers_are_transformers_own(nodes):
    """Whatever our generate() drafts, in batches of one size, of which the last is filled up."""
    model, lines, shapes, generate = target(), [], [], SpeculativeMixin.generate
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)

    def ours(self, ids, **arguments):
        shapes.append(tuple(ids.shape))
        return generate(self, ids, **arguments)

    with (
        mock.patch.object(SpeculativeMixin, "generate", ours),
        mock.patch.multiple("spec_compile.train.corpus", ROWS={"cpu": 3}, NODES={"cpu": nodes}),
    ):
        answers = continue_documents(model, unanswered(), 64, 0, options, lines.append)
    theirs = [model.generate(document.ids[None].long(), **options)[0].tolist() for document in unanswered()]
    assert [document.ids.tolist() for document in answers] == theirs
    assert [int(document.supervised.sum()) for document in answers] == [24] * 5
    assert shapes == [(3, 10), (3, 16)]
    assert lines[0] == "LlamaForCausalLM writes 5 answers, 3 at a time" and lines[1].startswith("5 answers of 120 tok")


@pytest.mark.slow
def test_answers_of_a_model_that_cannot_be_made_fast(recwarn):
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    ours = continue_documents(target(), unanswered(), 64, 0, options)
    assert not [w for w in recwarn if "on_policy" in str(w.message)]
    for error in (UnsupportedModelError("model: no"), RuntimeError("a step cannot be captured: no")):
        with (
            mock.patch("spec_compile.train.corpus.speculate", side_effect=error),
            pytest.warns(UserWarning, match="on_policy: transformers' own generate.. writes the answers.*no$"),
        ):
            theirs = continue_documents(target(), unanswered(), 64, 0, options)
        assert [document.ids.tolist() for document in theirs] == [document.ids.tolist() for document in ours]


def test_training_on_prompts_alone(tmp_path, capsys):
    rows = [json.dumps({"prompt": f"def f{n}(x):\n"}) for n in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    model = AutoModelForCausalLM.from_pretrained(CODER, dtype="float32", num_hidden_layers=1)
    fast = speculate(model, compile=False, check=False)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    capsys.readouterr()
    result = train_draft(
        fast, data=tmp_path / "data.jsonl", output=tmp_path / "head", tokenizer=tokenizer(), validation=0.2, steps=2,
        on_policy=dict(max_new_tokens=12, do_sample=False), sequence_length=32, ttt_steps=2, intermediate_size=32,
    )  # fmt: skip
    assert result.steps == 2 and result.acceptance is not None
    assert all(p.data_ptr() == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    lines = capsys.readouterr().err.splitlines()[1:]
    assert "writes 6 answers, 6 at a time" in lines[0] and lines[1].startswith("6 answers of ") and len(lines) == 5
    for options, message in (
        (dict(sequence_length=9, validation=0), "data: no prompt leaves room for an answer in the 9 tokens"),
        (dict(sequence_length=3), "sequence_length: a draft of this depth needs at least"),
        (dict(validation=[{"prompt": "x = 1\n" * 99}]), "validation: no prompt leaves room.*Give shorter ones"),
    ):
        options = dict(sequence_length=32, ttt_steps=2, steps=2, on_policy=True) | options
        data = [{"prompt": "def f(x):\n    return x + 1 - 2 * 3\n"}]
        with pytest.raises(ValueError, match=message):
            train_draft(model, data=data, output=tmp_path / "no", tokenizer=tokenizer(), **options)


@pytest.mark.gpu
@NEEDS_GPU
def test_answers_on_a_gpu(recwarn):
    """Those of transformers, in batches of one captured size; drawn ones differ."""
    model = models.ADMITTED["llama"]().to("cuda")
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0)
    documents = unanswered(4) * 5
    with mock.patch("spec_compile.train.corpus.ROWS", {"cuda": 16}):
        answers = continue_documents(model, documents, 256, 0, options)
    assert not [w for w in recwarn if "on_policy" in str(w.message)]
    for document, answer in zip(documents[:4], answers):
        theirs = model.generate(document.ids[None].long().cuda(), **options)[0].tolist()
        assert answer.ids.tolist() == theirs
    assert [answer.ids.tolist() for answer in answers] == [answer.ids.tolist() for answer in answers[:4]] * 5
    sampled = continue_documents(model, documents, 256, 0, options | dict(do_sample=True))
    assert len({tuple(answer.ids.tolist()) for answer in sampled[::4]}) > 1
