"""generate() inside generate(), beside it in other threads, and on both sides of a fork: every answer is its own."""

import copy
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from contextlib import contextmanager

import dflash_drafts
import draft_rounds as rounds
import models
import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor

from spec_compile import NgramTrie, speculate
from spec_compile.compat import CACHE

ALGORITHMS = ("ngram", "eagle", "eagle3", "naive_eagle", "mtp", "draft_model", "dflash")
NEW, INNER = 20, 12
OUTER_IDS, INNER_IDS = rounds.prompts(1), rounds.prompts(2)[:1, 5:]
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS)
compiled = pytest.mark.parametrize(
    "compile", [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.slow)]
)


@functools.cache
def system(algorithm, compile=False):
    if algorithm == "ngram":
        return models.speculate_captured(rounds.target("llama"), compile=compile, max_cache_len=200)
    if algorithm == "dflash":
        return dflash_drafts.fast("llama", "chain", compile=compile)
    return rounds.fast(algorithm, "llama", "chain", compile=compile)


def answer(one, ids, new=NEW, **options):
    return rounds.generated(one, ids, new, **options)[0].tolist()


@functools.cache
def expected(which, new=NEW):
    return answer(rounds.target("llama"), dict(outer=OUTER_IDS, inner=INNER_IDS)[which], new)


def together(*works):
    """Call functions in threads, and wait until all have ended."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def repeated(*works):
    """Threads call the functions again and again as long as the context lasts."""
    stop = threading.Event()

    def repeat(work):
        while not stop.is_set():
            work()

    running = threading.Thread(target=together, args=[functools.partial(repeat, work) for work in works])
    running.start()
    try:
        yield
    finally:
        stop.set()
        running.join()


class Nests:
    """Calls generate() again, in the midst of an answer, as a streamer, a criterion or a processor."""

    def __init__(self, fast, depth=1):
        self.fast, self.depth, self.calls, self.answers = fast, depth, 0, []

    def step(self):
        self.calls += 1
        if self.calls in (3, 7):
            deeper = dict(streamer=Streamer(self.fast, self.depth - 1)) if self.depth > 1 else {}
            self.answers.append(answer(self.fast, INNER_IDS, INNER, **deeper))
            if deeper:
                self.answers += deeper["streamer"].answers


class Streamer(Nests):
    def put(self, value):
        self.step()

    def end(self):
        pass


class Criterion(Nests, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.step()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Processor(Nests, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.step()
        return scores


NESTS = {
    "streamer": lambda fast: dict(streamer=Streamer(fast)),
    "two deep": lambda fast: dict(streamer=Streamer(fast, 2)),
    "criterion": lambda fast: dict(stopping_criteria=StoppingCriteriaList([Criterion(fast)])),
    "processor": lambda fast: dict(logits_processor=[Processor(fast)]),
}


@pytest.mark.sweep("ngram-eager eagle3-eager")
@compiled
@algorithms
def test_calls_inside_a_call(algorithm, compile):
    fast = system(algorithm, compile)
    for name in NESTS if algorithm == "ngram" else ("streamer", "processor"):
        options = NESTS[name](fast)
        nest = next(iter(options.values()))
        nest = nest[0] if isinstance(nest, list) else nest
        assert answer(fast, OUTER_IDS, **options) == expected("outer"), name
        assert len(nest.answers) >= 2 and all(inner == expected("inner", INNER) for inner in nest.answers), name
    assert answer(fast, OUTER_IDS) == expected("outer")


def test_calls_inside_a_call_of_the_same_and_other_batch_sizes_with_a_cache_to_hand_back():
    fast, ids = system("ngram"), rounds.prompts(3)
    plain = rounds.target("llama")

    class Batches(Streamer):
        def step(self):
            self.calls += 1
            if self.calls == 4:
                for batch in (1, 3, 2, 4, 5, 6):
                    assert answer(self.fast, ids[:1].repeat(batch, 1), 6) == answer(plain, ids[:1], 6)

    options = dict(return_dict_in_generate=True, use_cache=True)
    want = rounds.generated(plain, OUTER_IDS, **options)
    got = rounds.generated(fast, OUTER_IDS, streamer=Batches(fast), **options)
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got[CACHE].layers, want[CACHE].layers):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


def test_a_call_inside_is_counted_once():
    fast = models.speculate_captured(rounds.target("llama"), compile=False)
    stats, nest = fast.speculation.stats, Streamer(fast)
    begin = time.perf_counter()
    answer(fast, OUTER_IDS, streamer=nest)
    assert sum(stats.seconds.values()) <= time.perf_counter() - begin
    assert sum(map(sum, stats.trace)) == NEW, "the trace is of the call that ended last"
    assert stats.tokens == NEW + INNER * len(nest.answers)


@pytest.mark.sweep("ngram eagle3 draft_model")
@algorithms
def test_calls_of_several_threads(algorithm):
    fast, wrong = system(algorithm), []

    def work(which, ids):
        for _ in range(3):
            if answer(fast, ids) != expected(which):
                wrong.append(which)

    together(lambda: work("outer", OUTER_IDS), lambda: work("inner", INNER_IDS))
    assert not wrong


def in_a_fork(work) -> None:
    """Run `work` in a forked child that has 100 seconds; fails with what it raised."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that threads are running is the point
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(100)
        try:
            work()
            os.write(write, b"well")
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said == "well", said or "the child hung"


class Paused(Streamer):
    """Stops in the midst of an answer until it is told to go on."""

    def __init__(self, fast):
        super().__init__(fast)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def step(self):
        self.calls += 1
        if self.calls == 4:
            self.reached.set()
            self.go_on.wait(120)


@pytest.mark.sweep("ngram-eager eagle3-eager draft_model-eager")
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@compiled
@algorithms
def test_both_sides_of_a_fork_while_another_thread_generates(algorithm, compile):
    fast, answers = system(algorithm, compile), []
    answer(fast, INNER_IDS)
    paused = Paused(fast)
    thread = threading.Thread(target=lambda: answers.append(answer(fast, OUTER_IDS, streamer=paused)))
    thread.start()
    assert paused.reached.wait(120)

    def child():
        for ids, which in ((INNER_IDS, "inner"), (OUTER_IDS, "outer")):
            assert answer(fast, ids) == expected(which)

    in_a_fork(child)
    paused.go_on.set()
    thread.join()
    assert answers == [expected("outer")]
    assert answer(fast, INNER_IDS) == expected("inner")


def test_a_call_of_another_thread_waits():
    fast, answers = system("ngram"), {}
    answer(fast, INNER_IDS)
    paused = Paused(fast)

    def work(which, ids, **options):
        answers[which] = answer(fast, ids, **options)

    first = threading.Thread(target=work, args=("outer", OUTER_IDS), kwargs=dict(streamer=paused))
    second = threading.Thread(target=work, args=("inner", INNER_IDS))
    first.start()
    assert paused.reached.wait(120)
    second.start()
    second.join(1.0)
    assert second.is_alive() and not answers
    paused.go_on.set()
    first.join()
    second.join()
    assert answers == dict(outer=expected("outer"), inner=expected("inner"))


def test_a_child_does_not_write_into_its_parents_cache():
    fast = system("ngram")

    class Forks(Streamer):
        def step(self):
            self.calls += 1
            if self.calls == 5:  # the child overwrites all that the parent has committed, then the parent goes on
                in_a_fork(lambda: overwrite(fast))

    def overwrite(fast):
        session, _ = fast.speculation.engine.running[-1]
        for tensor in session.state.kv.tensors:
            tensor.fill_(7.0)

    assert answer(fast, OUTER_IDS, streamer=Forks(fast)) == expected("outer")


def test_a_fork_while_other_threads_are_in_the_trie():
    trie, text = NgramTrie(capacity=4000), torch.randint(0, 5, (2000,)).tolist()

    def work():
        stream = trie.open()
        trie.extend(stream, text)
        proposed = trie.propose(stream, 16)
        trie.close(stream)
        return proposed

    def child():
        assert work().count > 1

    with repeated(work, work, work):
        for _ in range(10):
            in_a_fork(child)


def test_speculate_on_a_model_that_another_thread_runs():
    model, failures = models.ADMITTED["llama"](), []
    want = answer(model, OUTER_IDS)

    def work():
        try:
            if answer(model, OUTER_IDS) != want:
                failures.append("another answer")
        except Exception as error:
            failures.append(repr(error))

    with repeated(work):
        for merged in (False, True):
            assert answer(speculate(model, compile=False, merge_linears=merged), OUTER_IDS) == want
    assert not failures


@pytest.mark.slow
def test_models_are_made_speculative_in_several_threads():
    answers = {}

    def work(name):
        model = models.ADMITTED[name]()
        answers[name] = answer(speculate(model, compile=False), OUTER_IDS), answer(model, OUTER_IDS)

    together(*(functools.partial(work, name) for name in ("llama", "qwen3", "gpt2")))
    assert len(answers) == 3 and all(got == want for got, want in answers.values())


def test_another_merge_linears_leaves_an_earlier_one_as_it_is():
    model = models.ADMITTED["llama"]()
    want = answer(model, OUTER_IDS)
    apart = speculate(model, compile=False, merge_linears=False)
    assert answer(apart, OUTER_IDS) == want
    merged = speculate(model, compile=False)
    assert answer(apart, OUTER_IDS) == answer(merged, OUTER_IDS) == want
    assert "stay apart for an earlier speculate(merge_linears=False)" in merged.speculation.explain()
    del apart
    gc.collect()
    assert "stay apart" not in speculate(model, compile=False).speculation.explain()


def pickled(fast):
    return pickle.loads(pickle.dumps(fast))


@pytest.mark.parametrize(
    ("copied", "algorithm"),
    [
        (copy.deepcopy, "ngram"), (pickled, "eagle3"),
        pytest.param(copy.deepcopy, "eagle3", marks=pytest.mark.slow),
        pytest.param(pickled, "ngram", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_copies_have_weights_of_their_own(copied, algorithm):
    model = models.ADMITTED["llama"]()
    head = copy.deepcopy(rounds.head("eagle3", "llama"))
    head.embedding, head.head_weight = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    draft = dict(num_draft_tokens=8) if algorithm == "ngram" else dict(draft=head)
    fast = speculate(model, algorithm, compile=False, max_cache_len=200, **draft)
    want = answer(fast, OUTER_IDS)
    other = copied(fast)
    assert type(other).__name__ == "LlamaForCausalLM" and other.speculation.engine.name == algorithm
    assert other.speculation.options.num_draft_tokens == fast.speculation.options.num_draft_tokens
    assert answer(other, OUTER_IDS) == want
    with torch.no_grad():
        other.lm_head.weight.zero_()
    assert answer(fast, OUTER_IDS) == want


def test_speculate_again_takes_the_original():
    fast = system("ngram")
    again = speculate(fast, compile=False, num_draft_tokens=4)
    assert again.speculation.original is fast.speculation.original
    assert again.speculation.options.num_draft_tokens == 4
    assert answer(again, OUTER_IDS) == answer(fast, OUTER_IDS)
