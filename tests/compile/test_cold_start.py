"""Tiers: answers are the same in each, no part changes inside an answer, and faults leave rounds as they are."""

import gc
import os
import time
import weakref

import draft_rounds as rounds
import models
import pytest
import torch
from batch_requests import config
from fake_children import doing  # noqa: F401, a fixture
from torch._inductor import config as config_of_inductor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from spec_compile import speculate
from spec_compile.compile import cold_start as background
from spec_compile.compile import workers
from spec_compile.compile.part import counts
from spec_compile.compile.trace import trace

OPTIONS = dict(num_draft_tokens=4, adaptive=False, max_cache_len=128, check=False)
GREEDY, SAMPLED = dict(do_sample=False), dict(do_sample=True, temperature=0.8, top_k=20)
LONG = 60


def prompt(rows=1):
    return torch.randint(3, models.VOCAB, (rows, 20), generator=torch.Generator().manual_seed(rows))


def ask(model, rows=1, new=16, **options):
    torch.manual_seed(3)
    ids = prompt(rows)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, eos_token_id=None, pad_token_id=0,
        **GREEDY | options,
    )  # fmt: skip


def wait_until(condition):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + LONG
        time.sleep(0.02)


def tiers_of(fast):
    return fast.speculation.engine.runtime.cold_start


def traced(fast):
    """Wait until all that was asked for is traced."""
    wait_until(lambda: not tiers_of(fast).untraced)


def adopted(fast, children):
    """Let all that was asked for be compiled and adopted."""
    traced(fast)
    children.finish()
    wait_until(lambda: not tiers_of(fast).waits)


class During(BaseStreamer):
    """Does something once in the middle of an answer."""

    def __init__(self, work):
        self.work, self.times = work, 0

    def put(self, value):
        self.times += 1
        if self.times == 3:
            self.work()

    def end(self):
        pass


@pytest.mark.parametrize("algorithm", ["ngram", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_answers_and_draws_are_the_same_in_every_tier(doing, algorithm):  # noqa: F811
    model = rounds.target("llama")
    options = OPTIONS
    if algorithm == "eagle3":
        options = rounds.SCHEDULES["chain"] | dict(draft=rounds.draft_of("eagle3", "llama"), check=False)
    fast = speculate(model, algorithm, **options)
    source = fast.speculation.engine.runtime.parts
    want = {rows: ask(model, rows) for rows in (1, 3)}
    with fast.speculation.engine.turns:
        before, drawn = counts["traced"], {rows: ask(fast, rows, **SAMPLED) for rows in (1, 3)}
        assert all(torch.equal(ask(fast, rows), want[rows]) for rows in want)
        assert counts["traced"] == before and not source.adopted, "the first calls trace and compile nothing"
    adopted(fast, doing)
    assert counts["traced"] > before and source.adopted > 8 and not source.failures
    compiled = counts["traced"]
    calls = counting(source, fast)
    for rows, answer in want.items():
        assert torch.equal(ask(fast, rows), answer)
        assert torch.equal(ask(fast, rows, **SAMPLED), drawn[rows])
    assert counts["traced"] == compiled and calls, "compiled parts run"


def counting(source, fast):
    """A list that grows whenever a compiled part of this model runs."""
    calls = []
    for compiler in fast.speculation.engine.runtime.parts.compilers.values():
        for part in compiler._made.values():
            if part.loaded is not None:
                part.loaded = lambda *inputs, run=part.loaded: calls.append(1) or run(*inputs)
    return calls


@pytest.mark.parametrize("is_other, is_warmup", [(False, False), (True, True)], ids=["itself", "another_wrapper"])
def test_no_part_changes_inside_an_answer(doing, is_other, is_warmup):  # noqa: F811
    """Nor while another wrapper of the model, which has the same code, warms up."""
    model = models.ADMITTED["llama"]()
    first = speculate(model, **OPTIONS)
    second = speculate(model, **OPTIONS) if is_other else first
    source, seen = first.speculation.engine.runtime.parts, []
    assert second.speculation.engine.runtime.parts is source
    for fast in (second, first):
        ask(fast)
        traced(fast)

    def finish():
        doing.finish()
        first.speculation.warmup() if is_warmup else time.sleep(0.5)
        seen.append(source.adopted)

    ask(second, new=20, streamer=During(finish))
    assert seen == [0]
    wait_until(lambda: source.adopted and not tiers_of(second).waits)
    assert torch.equal(ask(first), ask(model)) and torch.equal(ask(second), ask(model))


@pytest.mark.slow
def test_warmup_waits_until_everything_is_compiled_and_adopted(doing):  # noqa: F811
    model = models.ADMITTED["llama"]()
    fast, lines = speculate(model, **OPTIONS), []
    fast.speculation.warmup(2, lines.append, do_sample=True)
    source = fast.speculation.engine.runtime.parts
    assert source.adopted and not tiers_of(fast).waits and lines
    before = counts.copy()
    assert torch.equal(ask(fast, 2), ask(model, 2))
    ask(fast, 2, **SAMPLED)
    assert counts == before and not tiers_of(fast).waits, "no call compiles after it"
    assert f"{source.adopted} parts run compiled, 0 wait, 0 stay eager" in fast.speculation.explain()


def manager_of(fast, rows):
    options = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)
    return fast.init_continuous_batching(options, config(max_requests_per_batch=rows))


def test_requests_are_answered_alike_in_every_tier(doing):  # noqa: F811
    model = models.ADMITTED["llama"]()
    fast = speculate(model, **OPTIONS)
    manager = manager_of(fast, 2)
    manager.start()
    try:
        for tier in ("eager", "compiled"):
            names = [manager.add_request(prompt(1)[0].tolist(), max_new_tokens=8) for _ in range(3)]
            found = [manager.get_result(name, timeout=LONG) for name in names]
            assert all(each.generated_tokens == ask(model, new=8)[0, 20:].tolist() for each in found)
            if tier == "eager":
                adopted(fast, doing)
    finally:
        manager.stop()
    assert fast.speculation.engine.runtime.parts.adopted


@pytest.mark.slow
def test_warmup_of_a_manager_compiles_all_widths(doing):  # noqa: F811
    fast = speculate(models.ADMITTED["llama"](), **OPTIONS)
    manager = manager_of(fast, 4)
    manager.warmup()
    before = counts["traced"]
    assert before and not tiers_of(fast).waits
    manager.start()
    names = [manager.add_request(prompt(1)[0].tolist(), max_new_tokens=8) for _ in range(4)]
    assert all(manager.get_result(name, timeout=LONG).generated_tokens for name in names)
    manager.stop()
    assert counts["traced"] == before and not tiers_of(fast).waits


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.sweep("trace compile load")
@pytest.mark.parametrize("fault", ["example", "trace", "submit", "compile", "collect", "load"])
def test_a_fault_in_the_background_is_one_warning_and_rounds_go_on_eagerly(doing, fault, monkeypatch, caplog):  # noqa: F811
    def broken(*_):
        raise RuntimeError("broken on purpose")

    model = models.ADMITTED["llama"]()
    want = ask(model)
    doing.is_broken = fault == "submit"
    if fault == "example":
        monkeypatch.setattr("spec_compile.runtime.compiled_steps.State", broken)
    if fault == "trace":
        monkeypatch.setattr("spec_compile.compile.part.trace", broken)
    if fault == "load":
        monkeypatch.setattr("spec_compile.compile.part.load_part", broken)
    fast = speculate(model, **OPTIONS)
    assert torch.equal(ask(fast), want)
    traced(fast)
    doing.fails = {*doing.jobs} if fault == "compile" else set()
    doing.is_broken = fault in ("submit", "collect")
    doing.finish()
    wait_until(lambda: not tiers_of(fast).waits)
    assert torch.equal(ask(fast), want)
    (warning,) = warnings_of(caplog)
    reason = {"compile": "reason", "submit": "no processes", "collect": "no processes", "load": "cannot be loaded"}
    assert "uncompiled" in warning and reason.get(fault, "broken on purpose") in warning
    failed = len(fast.speculation.engine.runtime.parts.failures)
    assert f"0 parts run compiled, 0 wait, {failed} stay eager" in fast.speculation.explain()
    fast.speculation.warmup()
    assert torch.equal(ask(fast), want) and len(warnings_of(caplog)) == 1


def test_one_part_that_fails_leaves_the_others(doing, monkeypatch):  # noqa: F811
    model, traced_parts = models.ADMITTED["llama"](), []

    def once(*arguments):
        traced_parts.append(1)
        if len(traced_parts) == 1:
            raise RuntimeError("broken on purpose")
        return trace(*arguments)

    monkeypatch.setattr("spec_compile.compile.part.trace", once)
    fast = speculate(model, **OPTIONS)
    ask(fast)
    adopted(fast, doing)
    source = fast.speculation.engine.runtime.parts
    assert len(source.failures) == 1 and source.adopted == len(traced_parts) - 1 > 0
    assert torch.equal(ask(fast), ask(model))


@pytest.mark.parametrize("fault", ["compiler", "folder"])
def test_without_a_compiler_or_a_folder_rounds_stay_eager(fault, monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("SPEC_COMPILE_CHILDREN", "1")
    workers.workers.cache_clear()
    if fault == "folder":
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    compiler = {"cpp.cxx": (str(tmp_path / "no-such-compiler"),)} if fault == "compiler" else {}
    with config_of_inductor.patch(compiler):
        model = models.ADMITTED["llama"]()
        fast = speculate(model, **OPTIONS)
        assert torch.equal(ask(fast), ask(model))
        (warning,) = warnings_of(caplog)
        assert "stay uncompiled" in warning and "compiled in the background: nothing" in fast.speculation.explain()
        fast.speculation.warmup()
        assert torch.equal(ask(fast), ask(model)) and not tiers_of(fast).waits
        if fault == "compiler":
            with pytest.raises(ValueError, match="compile: "):
                speculate(model, **OPTIONS, compile=True)
    workers.workers.cache_clear()


def test_a_model_that_is_deleted_meanwhile_is_freed_and_its_jobs_are_forgotten(doing):  # noqa: F811
    model = models.ADMITTED["llama"]()
    fast = speculate(model, **OPTIONS)
    ask(fast)
    wait_until(lambda: doing.jobs)
    gone = weakref.ref(model), weakref.ref(fast), weakref.ref(fast.speculation.engine)
    del model, fast

    def is_freed():
        time.sleep(0.2)  # the thread ends its piece of work
        gc.collect()
        return [each() for each in gone] == [None, None, None]

    wait_until(is_freed)
    wait_until(lambda: gc.collect() is not None and not doing.jobs)
    assert doing.forgotten
    wait_until(lambda: background.background._thread is None)


def test_a_forked_process_and_its_parent_go_on(doing):  # noqa: F811
    model = models.ADMITTED["llama"]()
    fast, want = speculate(model, **OPTIONS), ask(model)
    with fast.speculation.engine.turns:
        ask(fast)
    child = os.fork()
    if not child:
        try:
            is_right = torch.equal(ask(fast), want)
            adopted(fast, doing)
            is_right = is_right and torch.equal(ask(fast), want) and fast.speculation.engine.runtime.parts.adopted
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    adopted(fast, doing)
    assert torch.equal(ask(fast), want)


def test_the_thread_waits_for_its_turn_while_a_call_runs(doing):  # noqa: F811
    """Calls that follow one another leave no moment without one in which it could look."""
    fast, seen = speculate(models.ADMITTED["llama"](), **OPTIONS), []
    ask(fast)
    traced(fast)
    tiers = tiers_of(fast)
    with fast.speculation.engine.turns:
        doing.finish()
        wait_until(lambda: tiers.parts.ready)
        ask(fast, streamer=During(lambda: seen.append(tiers.has_work())))
    assert seen == [True]
    wait_until(lambda: not tiers.waits)


def test_zero_children_compile_at_once_and_false_never(monkeypatch):
    for variable, compile, traces in (("0", "background", True), ("1", False, False)):
        monkeypatch.setenv("SPEC_COMPILE_CHILDREN", variable)
        monkeypatch.setattr("spec_compile.compile.part.Parts.provide", lambda *_: None)
        before = counts["traced"]
        fast = speculate(models.ADMITTED["llama"](), **OPTIONS, compile=compile)
        ask(fast)
        assert tiers_of(fast) is None and (counts["traced"] > before) == traces
