"""Requests in the rows of a batch, also of several clients: whose turn it is, who drafts from whose text, and who takes
whose keys and values."""

import functools
import queue

import hybrids
import models
import pytest
import torch
from batch_requests import ALGORITHMS, PROMPTS, TEXT, collect, demo, generated, managed, stopped, tokenizer
from server_fixtures import Script

from spec_compile import speculate
from spec_compile.batching.prefill import PREFILL_ROWS
from spec_compile.compile.part import counts
from spec_compile.runtime.session import StepKind

LONG = tokenizer()(TEXT).input_ids
NO_END = dict(eos_token_id=None, pad_token_id=0)


@functools.cache
def fast(name="ngram"):
    options = ALGORITHMS.get(name, {}) | dict(adaptive=False, max_cache_len=512)
    return speculate(demo(), name.split()[0], compile=False, check=False, **options)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_free_row_goes_to_another_client(slots):
    """The only requests of two clients that come after six of another one begin before the rest of these."""
    manager, run = stopped(fast(), max_requests_per_batch=slots)
    for number in range(6):
        manager.add_request(PROMPTS[number % 3], f"heavy{number}", max_new_tokens=40, eos_token_id=-1, client="heavy")
    with torch.no_grad():
        manager._deliver(manager.scheduler.step())
    manager.add_request(PROMPTS[1], "light", max_new_tokens=8, eos_token_id=-1, client="light")
    manager.add_request(PROMPTS[2], "third", max_new_tokens=8, eos_token_id=-1, client="third")
    outputs = run()
    begun = sorted(outputs, key=lambda name: outputs[name].lifespan[0])
    assert begun[:3] == ["heavy0", "light", "third"]
    heavy = [name for name in begun if name.startswith("heavy")]
    assert heavy == sorted(heavy), "first come, first served within a client"
    assert not manager.scheduler._turns.keys() - {"heavy", "light", "third"}
    manager.destroy()


def test_prompts_are_processed_together(monkeypatch):
    """Of requests that come together several are processed at once, whatever their lengths, and rows are left free."""
    monkeypatch.setitem(PREFILL_ROWS, "cpu", 4)
    fast().speculation.ngram.reset()  # a text of an earlier test would be drafted from, and end requests in few rounds
    manager, run = stopped(fast(), max_requests_per_batch=6)
    requests = {f"r{n}": LONG[7 * n : 7 * n + length] for n, length in enumerate((5, 200, 40, 1, 70))}
    for name, prompt in requests.items():
        manager.add_request(prompt, name, max_new_tokens=4, eos_token_id=-1)
    places, prompts = [], manager.scheduler.prefill
    assert len(prompts.sequences) == 4
    outputs = run(lambda: places.append({each.request_id: each.row for each in prompts.active}))
    for name, prompt in requests.items():
        assert outputs[name].generated_tokens == generated(demo(), prompt, max_new_tokens=4, **NO_END)
    assert any(len(each) > 1 for each in places)
    moved = [each["r1"] for each in places if "r1" in each]
    assert moved[0] == 1 and moved[-1] == 0
    manager.scheduler = None  # nobody else is to have that many rows of prefill


def test_rows_in_use_are_kept_at_the_front():
    fast().speculation.ngram.reset()
    manager, run = stopped(fast(), max_requests_per_batch=4)
    requests = {f"r{length}": (PROMPTS[0] + [length], length) for length in (4, 40, 10, 60)}
    for name, (prompt, length) in requests.items():
        manager.add_request(prompt, name, max_new_tokens=length, eos_token_id=-1)
    rows = []
    outputs = run(lambda: rows.append([each.row for each in manager.scheduler.decoder.active]))
    assert [0, 1] in rows and rows[-2] == [0]
    for name, (prompt, length) in requests.items():
        assert outputs[name].generated_tokens == generated(demo(), prompt, max_new_tokens=length, **NO_END)
    manager.destroy()


@pytest.mark.slow
def test_rows_of_any_number_share_what_is_compiled(monkeypatch):
    monkeypatch.setitem(PREFILL_ROWS, "cpu", 8)
    model = models.ADMITTED["llama"]()
    one = speculate(model, num_draft_tokens=4, adaptive=False, max_cache_len=256, check=False)
    manager, run = stopped(one, max_requests_per_batch=8)
    for rows in (manager.scheduler.decoder, manager.scheduler.prefill):
        graphs = {}
        for width in rows.widths:
            before, session = counts["traced"], rows.session(width)
            session.make(session.prompt_steps() if rows is manager.scheduler.prefill else [(StepKind.ROUND, 4)])
            graphs[width] = counts["traced"] - before
        assert [width for width, count in graphs.items() if count] == rows.widths[:2], graphs
    for number, length in enumerate((3, 40, 90) * 4):
        prompt = torch.randint(5, 20, (length,)).tolist()
        manager.add_request(prompt, max_new_tokens=10 + number, eos_token_id=-1)
    for output in run().values():
        expected = generated(model, output.prompt_ids, max_new_tokens=len(output.generated_tokens), **NO_END)
        assert output.generated_tokens == expected
    manager.destroy()


def test_warmup_measures_the_rounds_of_all_widths():
    """So the first requests do not try sizes whose costs are unknown. They have their answers as without it."""
    model = models.ADMITTED["llama"]()
    manager, run = stopped(speculate(model, compile=False, check=False), max_requests_per_batch=3)
    manager.warmup()
    decoder = manager.scheduler.decoder
    policies = [decoder.session(width).policies[StepKind.ROUND] for width in decoder.widths]
    assert len(policies) > 1 and all({*policy.costs.measured} == {*policy.sizes} for policy in policies)
    prompt = [5, 6, 7, 5, 6]
    manager.add_request(prompt, "one", max_new_tokens=12, eos_token_id=-1)
    assert run()["one"].generated_tokens == generated(model, prompt, max_new_tokens=12, **NO_END)
    manager.destroy()


@pytest.mark.parametrize("name", ["ngram", "eagle3 tree"])
def test_a_long_prompt_of_another_client_is_set_aside(name, monkeypatch):
    """Four prompts whose log-probabilities are told hold up another client's prompt for one turn of theirs, and have
    the same log-probabilities and answers as without it."""
    monkeypatch.setattr("spec_compile.batching.prefill.TURN", 32)
    manager, run = stopped(fast(name), max_requests_per_batch=12)
    for number in range(4):
        prompt = LONG[number : 250 + number]
        manager.add_request(prompt, f"r{number}", max_new_tokens=4, eos_token_id=-1, prompt_logprobs=0, client="heavy")
    chunks, prompts = [], manager.scheduler.prefill
    step = prompts.step
    monkeypatch.setattr(prompts, "step", lambda *given: chunks.append(prompts.active[0].request_id) or step(*given))
    with torch.no_grad():
        for _ in range(3):
            manager._deliver(manager.scheduler.step())
    manager.add_request(LONG[40:160], "light", max_new_tokens=4, eos_token_id=-1, client="light")
    assert manager.metrics()["requests_prefilling"] == 1
    outputs = run()
    light = chunks.index("light")
    assert {*chunks[:light]} == {"r0"} and "r1" not in chunks[: chunks.index("light") + chunks.count("light")]
    assert chunks[light:].index("r0") > 0, "the first prompt goes on where it was"
    for number in range(4):
        output, prompt = outputs[f"r{number}"], LONG[number : 250 + number]
        logits = demo()(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(prompt)[1:, None])[:, 0]
        told = torch.tensor([each.logprob for each in output.prompt_scores])
        torch.testing.assert_close(told, wanted.detach(), atol=1e-4, rtol=0)
        assert output.generated_tokens == generated(demo(), prompt, max_new_tokens=4, **NO_END)
    assert outputs["light"].generated_tokens == generated(demo(), LONG[40:160], max_new_tokens=4, **NO_END)
    assert not prompts.aside
    manager.destroy()


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_states_of_a_prompt_that_is_set_aside(name, monkeypatch):
    monkeypatch.setattr("spec_compile.batching.prefill.TURN", 1)
    plain, one = hybrids.system(name)
    manager, run = stopped(one, max_requests_per_batch=4)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, models.VOCAB, (length,), generator=generator).tolist() for length in (300, 290, 40)]
    for number, client in enumerate("abc"):
        scored = {"prompt_logprobs": 0} if number < 2 else {}
        manager.add_request(prompts[number], client, max_new_tokens=6, eos_token_id=-1, client=client, **scored)
    outputs = run()
    for client, prompt in zip("abc", prompts):
        ids = torch.tensor([prompt])
        wanted = hybrids.answer(plain, ids, torch.ones_like(ids), 6)[0, len(prompt) :].tolist()
        assert outputs[client].generated_tokens == wanted
    manager.destroy()


def test_a_prompt_that_waits_aside_is_cancelled(monkeypatch):
    monkeypatch.setattr("spec_compile.batching.prefill.TURN", 1)
    manager, run = stopped(fast(), max_requests_per_batch=4)
    manager.add_request(LONG[:200], "gone", max_new_tokens=4, prompt_logprobs=0, client="heavy")
    with torch.no_grad():
        manager.scheduler.step()
        manager.add_request(LONG[:190], "light", max_new_tokens=4, prompt_logprobs=0, client="light")
        manager.scheduler.step()
        assert [job.request_id for job in manager.scheduler.prefill.aside] == ["gone"]
    manager.cancel_request("gone")
    outputs = run()
    assert [output.finish_reason for output in outputs.values()] == ["cancelled", "length"]
    assert not manager.scheduler.prefill.begun and not fast().speculation.engine.runtime.algorithm.ngram.private
    manager.destroy()


def test_each_client_has_a_share_of_the_queue():
    manager, run = stopped(fast(), max_requests_per_batch=1, max_queue_size=4)

    def add(client, count=1):
        for _ in range(count):
            manager.add_request(PROMPTS[0], max_new_tokens=2, client=client)

    add("heavy", 4)
    with pytest.raises(queue.Full, match="max_queue_size: 4 requests may wait, 4 do, and 1 were added"):
        add("heavy")
    add("light", 2)
    words = "max_queue_size: 2 requests of each of 2 clients may wait, {} do, and 1 were added"
    for client, waiting in (("light", 2), ("heavy", 4)):
        with pytest.raises(queue.Full, match=words.format(waiting)):
            add(client)
    assert len(run()) == 6
    add("heavy", 4)
    run()
    manager.destroy()


STEPS = dict(max_new_tokens=24, eos_token_id=-1)


def ask(manager, prompt, **options):
    manager.add_request(prompt, **{**STEPS, **options})
    (output,) = collect(manager, 1).values()
    return output.speculation


@pytest.mark.parametrize("name", ["ngram", "eagle3 union"])
def test_texts_belong_to_their_owners(name):
    """The figures of a request are those of a new model, whatever others have sent. (A union also learns how often its
    sources are right.)"""
    one = fast(name)

    def probe(manager, owner):
        forced = [Script(LONG[120:140], 20)]  # the attacker guesses what comes after a known beginning
        speculation = ask(manager, LONG[100:120], share_text=owner, logits_processor=forced, max_new_tokens=20)
        return speculation.steps if "union" in name else (speculation.per_step_accepted, speculation.per_step_drafted)

    one.speculation.ngram.reset()
    with managed(one, slots=2) as manager:
        new = probe(manager, "")
        for owner in ("victim", ""):
            ask(manager, LONG[:200], share_text=owner)
            ask(manager, LONG[:200], share_text=owner, reference=LONG[:200])
        for owner in ("attacker", ""):
            assert probe(manager, owner) == new
        assert len(one.speculation.ngram) == 0
        assert probe(manager, "victim") != new, "texts of the same owner are drafted from"
        ask(manager, LONG[:200])
        assert probe(manager, "other") == new and probe(manager, None) != new
        with pytest.raises(TypeError, match="share_text must be True, False, None or a text, not int"):
            ask(manager, PROMPTS[0], share_text=1)
    assert one.speculation.ngram.owned.keys() == {"victim", "attacker", "other"}
    one.speculation.ngram.reset()
    assert not one.speculation.ngram.owned


def test_owners_texts_are_bounded(monkeypatch):
    monkeypatch.setattr("spec_compile.ngram.store.MOST_OWNERS", 2)
    store = fast().speculation.ngram
    store.reset()
    with managed(fast(), slots=2) as manager:
        for owner in "abca":
            ask(manager, PROMPTS[0], share_text=owner)
        assert [*store.owned] == ["c", "a"]
        store.owned.capacity = 3 * len(store.owned["a"]) // 2
        ask(manager, PROMPTS[0], share_text="c")
        assert [*store.owned] == ["c"]
    store.owned.capacity = store.capacity
    forgets = speculate(demo(), compile=False, check=False, share_text=False)
    with managed(forgets) as manager:
        ask(manager, PROMPTS[0], share_text="a")
        assert not forgets.speculation.ngram.owned and len(forgets.speculation.ngram) == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_prompts_share_keys_and_values_within_a_salt(slots):
    """In a row that decodes, in one that is left, and among the kept prefixes."""
    with managed(fast(), slots=slots) as manager:
        for salt in (None, "one"):
            assert ask(manager, LONG[:200], cache_salt=salt).reused_prompt_tokens == 0
            assert ask(manager, LONG[:200], cache_salt="other" + (salt or "")).reused_prompt_tokens == 0
            assert ask(manager, LONG[:200], cache_salt=salt).reused_prompt_tokens in (192, 199)
            assert ask(manager, LONG[:200], cache_salt=f"{salt}\ud800").reused_prompt_tokens == 0
        with pytest.raises(TypeError, match="cache_salt: expected a text, not int"):
            ask(manager, LONG[:200], cache_salt=1)


def test_a_guess_counts_in_multiples_of_sixteen_tokens():
    """Neither what is copied for another client nor a counter tells how far a guess is right."""
    one = speculate(demo(), compile=False, check=False, max_cache_len=512, prefix_cache_bytes=1 << 26)
    with managed(one, slots=2) as manager:
        ask(manager, LONG[:200])
        assert ask(manager, [*LONG[:37], *range(300, 340)]).reused_prompt_tokens == 37
        metrics = manager.metrics()
        assert metrics["prefix_cache_hits_total"] == 32 == metrics["reused_prompt_tokens_total"]
        assert ask(manager, [*LONG[:53], *range(400, 440)], client="other").reused_prompt_tokens == 48


def test_nothing_is_kept_of_a_request_that_fails_before_its_prompt(monkeypatch):
    """Its row had another prompt before, of more tokens than it has keys and values of."""
    manager, run = stopped(fast(), max_requests_per_batch=2)
    manager.add_request(LONG[:200], "first", max_new_tokens=2, eos_token_id=-1)
    run()
    kept, begin = len(manager.scheduler.prefixes._blocks), manager.scheduler.prefill.begin

    def fail(*arguments, **numbers):
        begin(*arguments, **numbers)
        raise RuntimeError("no memory")

    monkeypatch.setattr(manager.scheduler.prefill, "begin", fail)
    manager.add_request(LONG[10:210], "second", max_new_tokens=2, eos_token_id=-1)
    assert run()["second"].error == "no memory" and len(manager.scheduler.prefixes._blocks) == kept
    manager.destroy()
