"""Tensor parallelism on two processes that talk by gloo: tokens are one process's, and what goes wrong is named."""

import functools
from types import SimpleNamespace

import models
import pytest
import test_dflash as dflash
import test_draft_rounds as rounds
import torch
from ranks import run_ranks

from spec_compile import UnsupportedModelError, passes
from spec_compile.capture.trace import capture
from spec_compile.graph import calls
from spec_compile.parallel.slices import Cut, Slices
from spec_compile.parallel.start import find_ranks

pytestmark = pytest.mark.xdist_group("tensor_parallel")
FIVE = ("llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
PLAIN = dict(compile=False, max_cache_len=200, check=False)
NEW = 20


@pytest.fixture
def on_ranks(tmp_path):
    """A function that runs another one in several processes: ``function(rank)`` -> its results, by rank."""

    def run(function, size=2):
        results = run_ranks(size, function, rendezvous=tmp_path / "rendezvous")
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    return run


def shared(model, algo="ngram", **options):
    return models.speculate_captured(model, algo, **PLAIN | dict(tensor_parallel="auto") | options)


def answers(fast):
    """What a system answers: to one prompt and to three, greedily and sampling."""
    rows, ids, mask = models.prompts()
    greedy = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    alone, batch = fast.generate(rows[0], **greedy), fast.generate(ids, attention_mask=mask, **greedy)
    torch.manual_seed(3)
    sampled = fast.generate(rows[0], **greedy | dict(do_sample=True, temperature=0.9))
    return alone, batch, sampled


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- tokens

DRAFTS = {
    "ngram": ("ngram", {}),
    "eagle": ("eagle", dict(num_steps=2)),
    "eagle3_tree": ("eagle3", rounds.SCHEDULES["tree"]),
    "naive_eagle": ("naive_eagle", {}),
    "mtp": ("mtp", dict(num_steps=2)),
    "fr_spec": ("eagle", rounds.SCHEDULES["hot"]),
    "drawn": ("eagle", dict(num_steps=2, draft_sample_method="probabilistic")),
    "draft_model": ("draft_model", dict(num_steps=2)),
    "dflash": ("dflash", {}),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_every_algorithm_gives_one_processs_tokens(on_ranks, case):
    model, (algo, options) = rounds.target("llama"), DRAFTS[case]
    if algo != "ngram":
        draft = dflash.trained("llama") if algo == "dflash" else rounds.draft_of(algo, "llama")
        options = {**options, "draft": draft}
    alone = answers(shared(model, algo, **options, tensor_parallel=None))

    def on_a_rank(rank):
        fast = shared(model, algo, **options)
        return answers(fast), fast.speculation.stats.accept_length

    for got, accept_length in on_ranks(on_a_rank):
        assert same(got, alone)
        assert accept_length > 1


@pytest.mark.parametrize("name", FIVE)
def test_every_architecture_gives_one_processs_tokens(on_ranks, name):
    model = models.ADMITTED[name]()
    alone = answers(shared(model, tensor_parallel=None))

    def on_a_rank(rank):
        fast = shared(model, check=True)
        return answers(fast), fast.speculation.explain(), fast.speculation.engine.runtime.token_bytes

    for rank, (got, explained, token_bytes) in enumerate(on_ranks(on_a_rank)):
        assert same(got, alone)
        assert f"rank {rank} of 2 has 2 of 4 query" in explained
        assert token_bytes == speculated_bytes(model) // 2


def speculated_bytes(model):
    return models.captured(model).token_bytes


# --- the pass

SUMS = dict(llama=4, qwen3=4, mixtral=4, qwen3_moe=4, deepseek_v3=6, qwen2=4, gpt_neox=2, gemma2=8, phi3=2, gpt_oss=4)
"""Sums of a forward: two a layer; one where attention and MLP are parallel, or where one of them stays whole."""


def variants():
    """Tiny models by name, those of `SUMS` and others with a vocabulary or heads that do not divide."""
    yield from ((name, models.ADMITTED[name]()) for name in SUMS)
    llama = ("LlamaConfig", "LlamaForCausalLM")
    yield "uneven", models.build(*llama, dict(models.GQA, vocab_size=97))
    yield "tied", models.build(*llama, dict(models.GQA, tie_word_embeddings=True))
    yield "one_kv_head", models.build(*llama, dict(models.GQA, num_key_value_heads=1))


@functools.cache
def graphs():
    return {name: capture(model) for name, model in variants()}


@torch.no_grad()
def compared(graph, ranks):
    """How far a rank's logits are from the whole graph's, relative to their spread, and the sums of a forward."""
    ids = torch.randint(3, models.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9).expand(2, 9)
    part = passes.run(graph, passes.Settings(ranks=ranks), passes.PIPELINE[:3])
    expected, got = graph.gm(ids, positions)[0], part.gm(ids, positions)[0]
    sums = len(calls(part.gm, torch.ops.spec_compile.all_reduce.default))
    return float((got - expected).abs().max() / expected.std()), sums, part.layers[0], got


@pytest.mark.parametrize("size", [2, 4])
def test_parts_add_up_to_the_whole(on_ranks, size):
    all_graphs = graphs()

    def on_a_rank(rank):
        ranks = find_ranks("auto", torch.device("cpu"))
        return {name: compared(graph, ranks) for name, graph in all_graphs.items()}

    results = on_ranks(on_a_rank, size)
    for each in results:
        for name, (error, sums, layer, logits) in each.items():
            assert error < 1e-5, name
            assert sums == SUMS.get(name, 4), name
            assert torch.equal(logits, results[0][name][3]), name
            if name != "phi3":
                assert layer.heads == 4 // size, name
                assert layer.kv_heads == max(1, all_graphs[name].layers[0].kv_heads // size), name


def alone_of(size):
    """One of several ranks, which never talks to the others."""
    return SimpleNamespace(rank=0, size=size, name="nobody", slices=Slices(0, size))


def test_sizes_that_do_not_divide_are_refused_with_those_that_do():
    with pytest.raises(UnsupportedModelError, match=r"4 query and 2 key-value heads .* 3 ranks; start one of 1, 2, 4"):
        passes.run(graphs()["llama"], passes.Settings(ranks=alone_of(3)))


def test_a_model_without_known_layers_is_refused():
    with pytest.raises(UnsupportedModelError, match="tensor_parallel: no layer of the model can be shared out"):
        passes.run(capture(models.ADMITTED["gpt2"]()), passes.Settings(ranks=alone_of(2)))


def test_slices():
    weight = torch.arange(24.0).view(6, 4)
    assert torch.equal(Slices(1, 2).part(weight, Cut(0, 2)), weight[3:])
    assert torch.equal(Slices(1, 2).part(weight, Cut(1, 2)), weight[:, 2:])
    assert torch.equal(Slices(1, 2).part(weight, Cut(0, 2, blocks=3)), weight[1::2])
    assert torch.equal(Slices(3, 4).part(weight, Cut(0, 2)), weight[3:])  # ranks 2 and 3 share a part
    assert torch.equal(Slices(3, 4).part(weight, Cut(0, 4)), torch.zeros(2, 4))  # behind the end
    slices = Slices(0, 2)
    part = slices.part(weight, Cut(1, 2))
    assert slices.part(weight, Cut(1, 2)) is part
    weight += 1
    slices.refresh()
    assert torch.equal(part, weight[:, :2])
