"""Compiled code is shared between batch sizes, caches and wrappings of a model; a deleted wrapper is freed."""

import copy
import functools
import gc
import weakref
from pathlib import Path

import draft_rounds as rounds
import models
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.compile.part import PartCompiler, Shape, counts
from spec_compile.runtime import compiled_steps as code
from spec_compile.runtime.compiled_steps import example_sizes, static_sizes

OPTIONS = dict(num_draft_tokens=4, adaptive=False, max_cache_len=128, check=False)
NEW = 20
CODER = Path(__file__).parents[2] / "examples/tiny_coder"


def graphs():
    return counts["traced"]


def prompts(rows):
    """[rows, 30] and its mask: row r begins with r tokens of padding."""
    ids = torch.randint(3, models.VOCAB, (rows, 30), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, :row] = 0
    return ids * mask, mask


def answer(model, rows, new=NEW, **options):
    ids, mask = prompts(rows)
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0) | options
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)


@functools.cache
def target(name):
    return models.ADMITTED[name]() if name in models.ADMITTED else models.HYBRIDS[name]()


def code_of(model, algo="ngram", **options):
    return speculate(model, algo, **OPTIONS | options).speculation.engine.runtime.parts


def test_code_is_shared_between_equals_alone(monkeypatch):
    model = models.ADMITTED["llama"]()
    first = code_of(model)
    assert code_of(model, max_cache_len=300) is first
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert code_of(model) is first, "code does not depend on the values of weights"
    assert code_of(model, num_draft_tokens=5) is not first
    assert code_of(copy.deepcopy(model)) is not first
    model.model.norm.variance_epsilon *= 2
    changed = code_of(model)
    assert changed is not first, "another constant in the graph"
    assert code_of(model, compile=False) is not changed
    monkeypatch.setattr(code, "KEPT", 1)
    assert code_of(model) is changed and code_of(model, num_draft_tokens=5) is not changed
    assert code_of(model) is not changed, "only so many are kept"


def test_code_is_shared_between_drafts_that_compute_the_same():
    model, head = rounds.target("llama"), rounds.head("eagle3", "llama")

    def code_of(**options):
        return speculate(model, "eagle3", check=False, **options).speculation.engine.runtime.parts

    first = code_of(draft=head)
    assert code_of(draft=head) is first
    other = copy.deepcopy(head)
    other.embedding, other.head_weight = head.embedding, head.head_weight
    assert code_of(draft=head, num_steps=2) is not first
    assert code_of(draft=head) is first

    class Redefined(type(head)):
        """As a notebook's cell defines a head again."""

    Redefined.__name__, Redefined.__qualname__ = type(head).__name__, type(head).__qualname__
    other.__class__ = Redefined
    assert code_of(draft=other) is not first


@pytest.mark.parametrize("steps", [4, 6, 10])
def test_sizes_of_trees_do_not_vary(steps):
    """Nodes of a head's chain under a union are in no buffer, and in no size of a round."""
    draft = rounds.head("eagle3", "llama")
    runtime = speculate(
        rounds.target("llama"), "eagle3", draft=draft, num_steps=steps, ngram=True, num_draft_tokens=16, check=False
    ).speculation.engine.runtime
    assert steps + 1 in static_sizes(runtime)
    for form in (Shape(0), Shape(1), Shape(0, paged=True)):
        assert all((steps + 1) % prime for prime in example_sizes(runtime, form).varying)


@pytest.mark.slow
@pytest.mark.parametrize("is_new, most", [(False, 1e6), (True, 2.5e6)], ids=["one model", "a model each time"])
def test_what_is_compiled_is_freed(is_new, most):
    """A notebook wraps one model again and again, or a new one each time: by so many bytes a process grows."""
    process, sizes, model = psutil.Process(), [], models.ADMITTED["llama"]()
    for _ in range(9):
        model = models.ADMITTED["llama"]() if is_new else model
        fast = speculate(model, **OPTIONS)
        answer(fast, 1)
        gone = weakref.ref(fast), weakref.ref(fast.speculation.engine.sessions[0, 1])
        del fast
        gc.collect()
        assert [each() for each in gone] == [None, None]
        sizes.append(process.memory_info().rss)
    assert (sizes[-1] - sizes[2]) / 6 < most


def coder_prompts(rows):
    return torch.randint(5, 1000, (rows, 24), generator=torch.Generator().manual_seed(rows))


ANSWERING = [
    *(("llama", algorithm) for algorithm in ("eagle", "eagle3", "naive_eagle", "mtp", "draft_model")),
    *(("coder", algorithm) for algorithm in ("ngram", "eagle3", "mtp", "dflash")),
    *((name, "ngram") for name in ("qwen3_next", "lfm2", "mamba2")),
]
"""Models, the demo model among them, and algorithms."""


@pytest.mark.slow
@pytest.mark.parametrize("name, algorithm", ANSWERING)
def test_answers(name, algorithm):
    """Of every number of rows, after growth, and of a second wrapping, which compiles nothing."""
    prompts, options = rounds.prompts, OPTIONS
    if name == "llama":
        model = rounds.target(name)
        options = rounds.SCHEDULES["chain"] | dict(draft=rounds.draft_of(algorithm, name), max_cache_len=128)
    elif name == "coder":
        model, prompts = AutoModelForCausalLM.from_pretrained(CODER, dtype=torch.float32).eval(), coder_prompts
        options = OPTIONS if algorithm == "ngram" else dict(draft=str(CODER / "heads" / algorithm))
    else:
        model = target(name)
    fast = speculate(model, algorithm, **options)
    for one in (fast, speculate(model, algorithm, **options)):
        before = graphs()
        for rows in (1, 2, 3, 5):
            ids = prompts(rows)
            for new in (20, 130) if rows in (1, 3) else (20,):
                assert torch.equal(rounds.generated(one, ids, new), rounds.generated(model, ids, new)), (rows, new)
            if rows == 2:
                shared = graphs()
        assert algorithm != "ngram" or name != "coder" or graphs() == shared, "more rows have the code of two"
        torch.manual_seed(0)
        rounds.generated(one, prompts(3), do_sample=True)
    assert graphs() == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_and_wrappings_share_code_on_a_gpu(dtype):
    """Captured for each number of rows, compiled once; in float32 the model's own tokens."""
    model = models.ADMITTED["llama"]().to("cuda", dtype)

    def ask(one, rows, new=NEW, **options):
        ids, mask = (part.cuda() for part in prompts(rows))
        options = dict(do_sample=False, eos_token_id=None, pad_token_id=0) | options
        return one.generate(ids, attention_mask=mask, max_new_tokens=new, **options)

    fast = speculate(model, **OPTIONS)
    want = {rows: ask(fast, rows) for rows in (1, 2)}
    before = graphs()
    want |= {rows: ask(fast, rows) for rows in (3, 4, 7)}
    longer = ask(fast, 3, 200)
    assert graphs() == before
    again = speculate(model, **OPTIONS | dict(max_cache_len=512))
    assert all(torch.equal(ask(again, rows), tokens) for rows, tokens in want.items())
    assert torch.equal(ask(again, 3, 200), longer)
    assert graphs() == before
    if dtype == torch.float32:
        assert all(torch.equal(ask(model, rows), tokens) for rows, tokens in want.items())


@pytest.mark.gpu
def test_a_deleted_wrapper_frees_the_gpu():
    model = models.ADMITTED["llama"]().cuda()

    def work():
        fast = speculate(model, **OPTIONS)
        fast.generate(prompts(2)[0].cuda(), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)

    allocated = []
    for _ in range(6):
        work()
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[3:]) <= max(allocated[:3])  # the first calls keep a little of the libraries' own


def test_parts_alike_share_code_and_others_do_not():
    """The number of a region says nothing of what it computes."""
    compiler = PartCompiler(torch.device("cpu"), "test", (37,), 37, 1, exact=False)
    before = graphs()
    texts = ("x * 2", lambda x: x * 2), ("x * 3", lambda x: x * 3), ("x * 2", lambda x: x * 2)
    results = [compiler(function, "region_0", text)(torch.ones(37)) for text, function in texts]
    assert [result[0].item() for result in results] == [2, 3, 2] and graphs() == before + 2
