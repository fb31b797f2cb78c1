"""Prompts that ride along with rounds: answers are those of ``generate()``, whatever rides with what."""

import functools
from types import SimpleNamespace

import pytest
import torch
from batch_requests import ALGORITHMS, TEXT, demo, generated, stopped, tokenizer

from spec_compile import speculate
from spec_compile.batching import decoding, prefill
from spec_compile.runtime.draft_budget import VaryingTreeBudget
from spec_compile.runtime.runtime import Runtime
from spec_compile.runtime.session import Session, StepKind
from spec_compile.runtime.verify import choose_route

LONG = tokenizer()(TEXT).input_ids


@functools.cache
def fast(name):
    options = ALGORITHMS.get(name, {}) | dict(max_cache_len=320, attention_backend="sdpa")
    if options.get("draft") == "itself":
        options["draft"] = demo()
    return speculate(demo(), name.split()[0], compile=False, check=False, **options)


@pytest.fixture
def rode(monkeypatch):
    """The pieces that rode along. A CPU takes turns by itself, because its products cost the same apart."""
    pieces = []
    monkeypatch.setattr(Runtime, "mixes", True)
    of_rows = prefill.PrefillRows.rode
    monkeypatch.setattr(prefill.PrefillRows, "rode", lambda self, piece: (pieces.append(piece), of_rows(self, piece)))
    return pieces


@pytest.mark.sweep(["eagle3 tree", "eagle3 drawn"])
@pytest.mark.parametrize("name", ["ngram", *ALGORITHMS])
def test_answers_are_those_of_generate(name, rode, monkeypatch):
    draws = {}
    if name == "eagle3 drawn":  # rounds draw, as on a GPU
        draws = dict(do_sample=True, temperature=0.8, top_k=20)
        gpu = torch.device("cuda")
        route = "spec_compile.runtime.request.choose_route"
        monkeypatch.setattr(route, lambda config, given, _, *more: choose_route(config, given, gpu, *more))
    manager, run = stopped(fast(name), max_requests_per_batch=6, max_batch_tokens=64)
    prompts = [LONG[3 * n : 3 * n + 1 + 37 * n % 190] for n in range(14)]
    for number, prompt in enumerate(prompts):
        # The host chooses the tokens of two requests, whose rounds take no prompts with them.
        more = draws | (dict(repetition_penalty=1.2) if number in (5, 6) else {})
        manager.add_request(
            prompt, f"r{number}", max_new_tokens=20, eos_token_id=-1, **more, **(dict(seed=number) if draws else {})
        )
    outputs = run()
    batches = {piece.prompts.batch for piece in rode}
    assert len(rode) >= 5 and (batches == {1, 2} or name != "ngram")
    for number, prompt in enumerate(prompts):
        more = draws | (dict(repetition_penalty=1.2) if number in (5, 6) else {})
        alone = generated(
            fast(name), prompt, seed=number, max_new_tokens=20, eos_token_id=None, pad_token_id=0, **more
        )  # fmt: skip
        assert outputs[f"r{number}"].generated_tokens == alone
    manager.destroy()


def test_a_piece_of_too_few_tokens_is_refused(rode):
    with pytest.raises(ValueError, match="max_batch_tokens: expected at least 64, got 63"):
        stopped(fast("ngram"), max_batch_tokens=63)


def test_pieces_compute_the_most_for_their_cost(rode):
    manager, _ = stopped(fast("ngram"), max_requests_per_batch=6, max_batch_tokens=512)
    prompts, session = manager.scheduler.prefill, manager.scheduler.decoder.session(6)
    for missing, rows, size in (((500,), 1, 506), ((500, 60), 1, 506), ((52, 60), 2, 125), ((0, 60), 2, 125)):
        prompts.sequences = [SimpleNamespace(row=row) for row in range(len(missing))]
        prompts._stops = [*missing]
        piece = prompts.piece(session, StepKind.ROUND, 1)
        assert (piece.prompts.batch, piece.size) == (rows, size)
    manager.scheduler = None


@pytest.mark.parametrize("captured", [True, False])
def test_no_step_is_captured_for_a_prompt(rode, monkeypatch, captured):
    """Without a captured step prompts take chunks of their own."""
    monkeypatch.setattr(Session, "has", lambda self, kind, nodes: captured)
    manager, run = stopped(fast("ngram"), max_requests_per_batch=2)
    for number in range(4):
        manager.add_request(LONG[number : 60 + 9 * number], f"r{number}", max_new_tokens=9, eos_token_id=-1)
    outputs = run()
    assert bool(rode) == captured
    for name, output in outputs.items():
        alone = generated(fast("ngram"), output.prompt_ids, max_new_tokens=9, eos_token_id=None, pad_token_id=0)
        assert output.generated_tokens == alone, name
    manager.destroy()


def test_rounds_that_may_not_draft_teach_nothing(rode, monkeypatch):
    learned = []
    monkeypatch.setattr(decoding, "RIDDEN_NODES", 1)
    monkeypatch.setattr(VaryingTreeBudget, "choose", lambda *_: 4)
    monkeypatch.setattr(VaryingTreeBudget, "learn", lambda self, nodes, *_: learned.append(nodes))
    manager, run = stopped(fast("ngram"), max_requests_per_batch=2)
    for number in range(4):
        manager.add_request(LONG[number : 60 + 9 * number], max_new_tokens=9, eos_token_id=-1)
    run()
    assert rode and manager.scheduler.decoder.rounds_by_nodes[1] and {*learned} == {4}
    manager.destroy()
