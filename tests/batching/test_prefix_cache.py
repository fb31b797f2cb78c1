"""Prefixes that outlive rows: answers, cached bits and drafts are those of a prompt that is processed anew."""

import functools
import itertools

import batch_requests
import hybrids
import models
import pytest
import torch
from batch_requests import ALGORITHMS, MODEL, PROMPTS, TEXT, collect, demo, generated, managed, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import thinned
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.batching.pages import row_pages
from spec_compile.batching.prefix_copies import PageCopies
from spec_compile.batching.rows import Rows
from spec_compile.cache import PAGE
from spec_compile.runtime.draft_budget import WholeTreeBudget
from spec_compile.serve.metrics import PrometheusMetrics
from spec_compile.serve.shadow import Shadow

LONG = (tokenizer()(TEXT).input_ids * 2)[:450]
OTHER = LONG[::-1][:100]
ROOM = 1 << 27
OFF = dict(prefix_cache_host_bytes=0)
NO_END = dict(eos_token_id=None, pad_token_id=0)
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]


@functools.cache
def system(name="ngram", **options):
    """The model with this draft, on which a round's number of nodes does not depend on measured times."""
    options = dict(compile=False, check=False, adaptive=False) | ALGORITHMS.get(name, {}) | options
    options |= dict(draft=demo()) if name == "draft_model" else {}
    return speculate(demo(), name.split()[0], **options)


def answer(manager, prompt, new=8, **options):
    return batch_requests.answer(manager, prompt, max_new_tokens=new, **dict(eos_token_id=-1) | options)


def reused(manager, prompt, new=8, model=None, **options):
    """The known tokens of a prompt, whose answer is that of `model`, or of the demo model."""
    output = answer(manager, prompt, new, **options)
    assert output.generated_tokens == generated(model or demo(), prompt, max_new_tokens=new, **NO_END)
    return output.speculation.reused_prompt_tokens


def turns(fast, **options):
    """Two turns of a chat, with another request between them that takes the row."""
    with managed(fast) as manager:
        first = answer(manager, LONG, 20, **options)
        answer(manager, OTHER)
        return first, answer(manager, LONG + first.generated_tokens + OTHER[:9], 20, **options)


# --- answers


@pytest.mark.parametrize("options", [{}, dict(do_sample=True, temperature=0.9, seed=3)], ids=["greedy", "sampled"])
def test_a_second_turn_starts_from_what_a_row_has_lost(options):
    _, second = turns(system(), **options)
    assert second.speculation.reused_prompt_tokens == 450 + 19
    assert second.generated_tokens == generated(system(), second.prompt_ids, max_new_tokens=20, **NO_END | options)
    _, anew = turns(system(**OFF), **options)
    assert anew.speculation.reused_prompt_tokens == 0 and anew.generated_tokens == second.generated_tokens


@pytest.mark.parametrize(
    "name",
    [
        "eagle3 union",
        "dflash",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle3 tree", "mtp", "draft_model")),
    ],
)
def test_drafts_know_what_a_row_has_lost(name):
    """Their own keys and values come back, too: so many drafts are accepted in each step as after a prompt that is
    processed anew."""
    (_, second), (_, anew) = turns(system(name)), turns(system(name, **OFF))
    assert second.speculation.reused_prompt_tokens == 469 and anew.speculation.reused_prompt_tokens == 0
    assert second.generated_tokens == anew.generated_tokens
    assert second.speculation.per_step_accepted == anew.speculation.per_step_accepted
    assert sum(second.speculation.per_step_accepted) > 0


@pytest.mark.parametrize("name, known", [("ngram", PAGE), ("draft_model", PAGE - 1)])
def test_a_page_of_a_draft_has_the_token_after_it(name, known):
    """The slot of a head depends on the next token, so a text that goes on otherwise cannot have it."""
    with managed(system(name)) as manager:
        answer(manager, LONG[:90])
        answer(manager, OTHER)
        prompt = [*LONG[:PAGE], LONG[PAGE] + 1, *LONG[PAGE + 1 : 90]]
        assert reused(manager, prompt) == known


def test_requests_at_once_share_a_prefix():
    fast, ends = system(), [[5], [6, 7, 8], [9], [11, 12]]
    with managed(fast, slots=4) as manager:
        answer(manager, LONG)
        names = [manager.add_request(OTHER[n:], max_new_tokens=8, eos_token_id=-1) for n in range(4)]
        assert collect(manager, 4).keys() == {*names}
        for number, end in enumerate(ends):
            manager.add_request(LONG[:300] + end, f"r{number}", max_new_tokens=8, eos_token_id=-1)
        outputs = collect(manager, 4)
        metrics = manager.metrics()
    for number, end in enumerate(ends):
        output = outputs[f"r{number}"]
        assert output.generated_tokens == generated(demo(), LONG[:300] + end, max_new_tokens=8, **NO_END)
        assert output.speculation.reused_prompt_tokens >= 256
    assert metrics["prefix_cache_hits_by_place_total"]["device"] >= 256
    assert metrics["prefix_cache_hits_total"] == metrics["reused_prompt_tokens_total"]


def test_a_row_that_goes_on_shares_its_pages():
    with managed(system(**OFF), slots=2) as manager:
        manager.add_request(LONG, "first", max_new_tokens=200, eos_token_id=-1, streaming=True)
        next(iter(manager))
        manager.add_request(LONG[:300], "second", max_new_tokens=8, eos_token_id=-1)
        outputs = collect(manager, 2)
        assert manager.metrics()["prefix_cache_hits_by_place_total"] == {"device": 288, "host": 0}
    assert outputs["second"].speculation.reused_prompt_tokens == 299
    for name, prompt, new in (("first", LONG, 200), ("second", LONG[:300], 8)):
        assert outputs[name].generated_tokens == generated(demo(), prompt, max_new_tokens=new, **NO_END)


def test_a_cancelled_request_leaves_its_text():
    with managed(system()) as manager:
        name = manager.add_request(LONG, max_new_tokens=300, eos_token_id=-1, streaming=True)
        next(iter(manager))
        manager.cancel_request(name)
        assert collect(manager, 1)[name].finish_reason == "cancelled"
        answer(manager, OTHER)
        assert reused(manager, LONG) == 449


# --- texts that do not count


def test_nothing_of_other_weights_is_kept():
    fast, weight = system(), demo().model.layers[0].self_attn.v_proj.weight
    before = weight.detach().clone()
    with managed(fast) as manager:
        answer(manager, LONG)
        answer(manager, OTHER)
        prefixes = manager.scheduler.prefixes
        assert prefixes.bytes("device") > 0
        fast.speculation.refresh()
        assert prefixes.bytes("device") == 0 and prefixes.counts["evicted"] == 0
        answer(manager, LONG)
        answer(manager, OTHER)
        try:
            with manager.pause():
                weight.data.mul_(-1.0)  # torch does not count it
            assert reused(manager, LONG) == 0
            manager.add_request(LONG, "long", max_new_tokens=200, eos_token_id=-1, streaming=True)
            next(iter(manager))
        finally:
            with manager.pause(), torch.no_grad():
                weight.copy_(before)
        collect(manager, 1)  # it has keys and values of both weights
        answer(manager, OTHER)
        reused(manager, LONG)


DRAFTING = ["eagle3", "mtp", "dflash", "draft_model", "eagle3 union", "eagle3 drawn"]


@pytest.mark.parametrize("name, sizes", thinned(2, DRAFTING, [[1], [1, 5, 1, 1], None]))
def test_each_turn_of_a_chat_reuses_all_but_the_last_token(name, sizes, monkeypatch):
    """Also if rounds draft nothing: the draft processes their tokens before another request goes on from them."""
    limit = None
    if sizes == [1]:
        limit = False
    elif sizes:
        pattern = itertools.cycle(sizes)
        monkeypatch.setattr(WholeTreeBudget, "choose", lambda policy, *known: min(next(pattern), policy.sizes[-1]))
    prompt, known = LONG[:93], 0
    with managed(system(name)) as manager:
        for _ in range(3):
            output = answer(manager, prompt, 16, speculation=limit)
            assert output.speculation.reused_prompt_tokens == known
            assert output.generated_tokens == generated(demo(), prompt, max_new_tokens=16, **NO_END)
            prompt = [*prompt, *output.generated_tokens, *OTHER[:8]]
            known = len(prompt) - 9


@pytest.mark.parametrize("name, left", [("eagle3 tree", 2), ("mtp", 2), ("dflash", 2), ("draft_model", 1)])
def test_the_first_drafts_of_a_known_prompt_are_those_of_a_new_one(name, left):
    """A draft that continues the target's state at the token before the root needs that token processed again."""
    with managed(system(name)) as manager:
        outputs = [answer(manager, LONG[:90], 16) for _ in range(2)]
    assert [output.speculation.reused_prompt_tokens for output in outputs] == [0, 90 - left]
    new, known = (output.speculation.per_step_accepted for output in outputs)
    assert new == known and sum(new) > 0


# --- recurrences


@functools.cache
def head(name):
    return hybrids.heads_of(models.HYBRIDS[name]())


@functools.cache
def hybrid(name, has_head, **options):
    """A model with recurrences, and what `speculate` makes of it, with a head if `has_head`."""
    made, algo, draft = models.HYBRIDS[name](), "ngram", {}
    if has_head:
        algo, draft = "eagle3", dict(draft=head(name), num_steps=3, topk=2, num_draft_tokens=8)
    return made, speculate(made, algo, compile=False, check=False, adaptive=False, **draft, **options)


def hybrid_turns(fast, first, answers):
    """A prompt, another one that takes the row, and the first one with its answer, or without, and more tokens.

    Returns the last output, and the keys and values of its row.
    """
    other = [*range(80, 3, -1)]
    with managed(fast) as manager:
        one = answer(manager, first, 20)
        answer(manager, other)
        second = first + (one.generated_tokens if answers else [5]) + [7, 8, 9]
        prefixes, pools = manager.scheduler.prefixes, manager.scheduler.decoder.cache_tensors()
        keep, slots = prefixes.keep, []

        def keep_and_read(sequence, known, rows):
            keep(sequence, known, rows)
            if known == len(second) + 19:
                slots[:] = [pool[sequence.pages].transpose(0, 1).flatten(1, 2)[:, :known].clone() for pool in pools]

        prefixes.keep = keep_and_read
        output = answer(manager, second, 20)
        return output, slots


@pytest.mark.sweep("lfm2-True")
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "mamba2", "nemotron_h"])
def test_states_outlive_a_row(name, has_head):
    """A prompt goes on from the end of the text before it, or of that text's prompt. A model whose states after an
    answer are not those of a prompt goes on from its prompt only."""
    first = torch.randint(3, models.VOCAB, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    made, fast = hybrid(name, has_head)
    for answers, tokens in ((True, 149 if name == "nemotron_h" else 169), (False, 149)):
        fast.speculation.refresh()
        second, slots = hybrid_turns(fast, first, answers)
        assert second.speculation.reused_prompt_tokens == tokens
        assert second.generated_tokens == generated(made, second.prompt_ids, max_new_tokens=20, **NO_END)
    anew, wanted = hybrid_turns(hybrid(name, has_head, **OFF)[1], first, False)
    assert anew.speculation.reused_prompt_tokens == 0
    assert len(slots) == len(wanted) and (slots or name == "mamba2")
    for got, want in zip(slots, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep("lfm2-True")
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "mamba2", "nemotron_h"])
def test_states_are_kept_where_prompts_branch(name, has_head):
    """The second prompt that begins alike keeps the states there, and the third one goes on from them."""
    made, fast = hybrid(name, has_head)
    fast.speculation.refresh()
    common = torch.randint(3, models.VOCAB, (330,), generator=torch.Generator().manual_seed(5)).tolist()
    with managed(fast) as manager:
        known = [reused(manager, [*common, *[end] * 90], model=made) for end in range(5, 9)]
    assert known == [0, 0, 320, 320]


def test_a_silent_draft_knows_a_text_with_states():
    """Rounds without drafts leave nothing that the next turn has to process again."""
    made, fast = hybrid("lfm2", True)
    fast.speculation.refresh()
    first = torch.randint(3, models.VOCAB, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    with managed(fast) as manager:
        one = answer(manager, first, 20, speculation=False)
        answer(manager, [*range(80, 3, -1)])
        second = answer(manager, [*first, *one.generated_tokens, 7, 8, 9], 20)
    assert second.speculation.reused_prompt_tokens == 169
    assert second.generated_tokens == generated(made, second.prompt_ids, max_new_tokens=20, **NO_END)


def test_no_room_for_the_end_of_a_text():
    made, fast = hybrids.system("lfm2", check=False, prefix_cache_host_bytes=1 << 14)
    with managed(fast) as manager:
        prompt, prefixes = [*range(3, 90)] * 3, manager.scheduler.prefixes
        assert prefixes._copies.memory.ready < prefixes._copies.state_places
        assert [reused(manager, prompt, model=made) for _ in range(2)] == [0, 0]


# --- figures


def test_metrics():
    fast = system(prefix_cache_bytes=PAGE * 8192, prefix_cache_host_bytes=0, max_cache_len=500)
    with managed(fast) as manager:
        page, pool = manager.scheduler.prefixes.page_bytes, manager.scheduler.pages.usable
        assert page == PAGE * fast.speculation.engine.runtime.token_bytes == PAGE * 8192
        assert pool == 1 + row_pages(fast.speculation.engine.runtime, 500)
        answer(manager, LONG)
        assert manager.metrics()["prefix_cache_bytes"] == {"device": 8 * page, "host": 0}
        answer(manager, OTHER)
        answer(manager, LONG)
        metrics = manager.metrics()
    assert metrics["prefix_cache_queries_total"] == 450 + 100 + 450
    known = metrics["prefix_cache_hits_total"]
    assert 3 * PAGE <= known == metrics["reused_prompt_tokens_total"] // 16 * 16
    assert metrics["prefix_cache_hits_by_place_total"] == {"device": known, "host": 0}
    evicted = metrics["prefix_cache_evicted_blocks_total"]
    assert evicted > 0
    samples = PrometheusMetrics(lambda: metrics, Shadow(None)).registry.get_sample_value
    assert samples("spec_compile:prefix_cache_bytes", {"place": "device"}) > 0
    assert samples("spec_compile:prefix_cache_hits_total") == known
    assert samples("spec_compile:prefix_cache_queries_total") == 1000
    assert samples("spec_compile:prefix_cache_hits_by_place_total", {"place": "device"}) == known
    assert samples("spec_compile:prefix_cache_evicted_blocks_total") == evicted


# --- bits

TARGETS = {"latent": "deepseek_v3"}


@functools.cache
def rows_of(name, device="cpu"):
    """Rows of a model and a head in a pool of 12 pages."""
    draft = {"llama": {}, "fp8": dict(kv_cache_dtype="fp8_per_token_head")}.get(name, {})
    algo = dict(algo="draft_model", draft=models.ADMITTED["qwen2"]().to(device)) if name == "draft" else {}
    made = models.HYBRIDS[name]() if name in models.HYBRIDS else models.ADMITTED[TARGETS.get(name, "llama")]()
    made = made.to(device)
    fast = speculate(made, compile=False, check=False, **draft, **algo)
    return Rows(fast.speculation.engine.runtime, 3, 400, 12)


def fill(tensors, seed):
    """Give tensors bits of their own."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        view = tensor.view(torch.uint8)
        view.copy_(torch.randint(256, view.shape, generator=generator))


def take_all(memory):
    """All places of host memory."""
    places = []
    while memory.ready < memory.most or memory.free:
        places += memory.take(memory.free)
    return places


def bits(tensors, where):
    return [tensor[where].clone().view(torch.uint8).cpu() for tensor in tensors]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("name", ["llama", "fp8", "draft", "latent", "lfm2", "mamba2"])
@settings(max_examples=10, deadline=None)
@given(st.sampled_from([1, 2, 1 << 27]), st.data())
def test_bits_come_back(where, name, most, data):
    """On a GPU pages are written again while they are copied."""
    rows = rows_of(name, where)
    pools, states = rows.cache_tensors(), rows.state_tensors()
    copies = PageCopies(rows, 0)
    copies = PageCopies(rows, (12 + copies.state_places) * copies.page_bytes)
    copies._most = min(most, copies._most)
    room = take_all(copies.memory)
    of_states = room[: copies.state_places]
    pages, targets = (data.draw(st.permutations(range(12)))[:5] for _ in range(2))
    places = data.draw(st.permutations(room[copies.state_places :]))[:5]
    fill([*pools, *states], 1)
    wanted, wanted_states = bits(pools, pages), bits(states, 2)
    if states:
        copies.save_states(rows, 2, of_states)
    rows.reuse(2)
    with copies.aside():
        copies.pages(pages, places, to_pages=False)
    copies.wait()
    fill([*pools, *states], 2)
    with copies.aside():
        copies.pages(targets, places, to_pages=True)
    copies.wait()
    assert all(map(torch.equal, bits(pools, targets), wanted))
    if states:
        copies.restore(copies.load_states(of_states), rows, 0)
        assert all(map(torch.equal, bits(states, 0), wanted_states))


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_the_host_of_a_gpu_never_waits(name):
    rows = rows_of(name, "cuda")
    copies = PageCopies(rows, 1 << 27)
    room = take_all(copies.memory)
    of_states, places = room[: copies.state_places], [room[-2], room[-1], room[-9]]

    def copy():
        with copies.aside():
            copies.pages([1, 5, 2], places, to_pages=False)
            copies.pages([7, 8, 9], places, to_pages=True)
        copies.wait()
        if rows.state_tensors():
            copies.save_states(rows, 1, of_states)
            copies.restore(copies.load_states(of_states), rows, 2)
            rows.reuse(1)

    copy()  # takes memory
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        copy()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("device_pages", [1, None])
def test_on_a_gpu(device_pages):
    """Host memory is pinned, and copies run on a stream of their own next to the rounds."""
    one = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).cuda()
    room = None if device_pages is None else device_pages * PAGE * 8192
    fast = speculate(one, prefix_cache_bytes=room, prefix_cache_host_bytes=ROOM, max_cache_len=512)
    with managed(fast, slots=2) as manager:
        for number in range(4):
            prompts = [LONG[number : number + 300], OTHER + PROMPTS[number % len(PROMPTS)], LONG[: 100 + 64 * number]]
            for index, prompt in enumerate(prompts):
                manager.add_request(prompt, f"{number} {index}", max_new_tokens=8, eos_token_id=-1)
            outputs = collect(manager, len(prompts))
            for index, prompt in enumerate(prompts):
                wanted = generated(one, prompt, max_new_tokens=8, **NO_END)
                assert outputs[f"{number} {index}"].generated_tokens == wanted
        hits = manager.metrics()["prefix_cache_hits_by_place_total"]
    assert hits["host"] + hits["device"] > 0
