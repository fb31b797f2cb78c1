"""Tensor parallelism on two processes that talk by gloo: tokens are one process's, and what goes wrong is named."""

import functools
import os
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import dflash_drafts as dflash
import draft_rounds as rounds
import models
import pytest
import torch
import transformers
from captures import capture
from mtp_rounds import with_further
from ranks import run_ranks, torchrun
from transformers import LogitsProcessor, StoppingCriteria

from spec_compile import UnsupportedModelError, passes, speculate
from spec_compile.graph import calls
from spec_compile.parallel import start
from spec_compile.parallel.slices import Cut, Slices
from spec_compile.parallel.start import find_ranks
from spec_compile.runtime.pipeline import RoundPipeline

pytestmark = pytest.mark.xdist_group("tensor_parallel")
FIVE = ("llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
HYBRIDS = ("lfm2", "falcon_h1", "jamba", "nemotron_h")
PLAIN = dict(compile=False, max_cache_len=200, check=False, adaptive=False)
NEW = 20
GREEDY = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.fixture
def on_ranks(tmp_path):
    """A function that runs another one in several processes: ``function(rank)`` -> its results, by rank."""
    return lambda function, size=2: run_ranks(size, function, rendezvous=tmp_path / "rendezvous")


def shared(model, algo="ngram", **options):
    return models.speculate_captured(model, algo, **PLAIN | dict(tensor_parallel="auto") | options)


def answers(fast):
    """What a system answers: to one prompt and to three, greedily and sampling."""
    rows, ids, mask = models.prompts()
    alone, batch = fast.generate(rows[0], **GREEDY), fast.generate(ids, attention_mask=mask, **GREEDY)
    torch.manual_seed(3)
    sampled = fast.generate(rows[0], **GREEDY | dict(do_sample=True, temperature=0.9))
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
    "mtp_modules": ("mtp", dict(num_steps=3, topk=2)),
    "fr_spec": ("eagle", rounds.SCHEDULES["hot"]),
    "drawn": ("eagle", dict(num_steps=2, draft_sample_method="probabilistic")),
    "draft_model": ("draft_model", dict(num_steps=2)),
    "dflash": ("dflash", {}),
}


SIZES = {"ngram": (), "eagle": (1,), "naive_eagle": (2,), "mtp": (2,), "fr_spec": (2,), "drawn": (1,)}
"""How many ranks share the draft, where not both are tried."""


@pytest.mark.sweep("eagle3_tree")
@pytest.mark.parametrize("case", DRAFTS)
def test_every_algorithm_gives_one_processs_tokens(on_ranks, case):
    model, (algo, options) = rounds.target("llama"), DRAFTS[case]
    if algo != "ngram":
        draft = dflash.trained("llama") if algo == "dflash" else rounds.draft_of(algo, "llama")
        draft = with_further(draft, own_output=True) if case == "mtp_modules" else draft
        options = {**options, "draft": draft}
    alone = answers(shared(model, algo, **options, tensor_parallel=None))

    sizes = [{"draft_tensor_parallel_size": size} for size in SIZES.get(case, (1, 2))] or [{}]

    def on_a_rank(rank):
        systems = [shared(model, algo, **options, **size) for size in sizes]
        return [(answers(fast), fast.speculation.stats.accept_length, fast.speculation.explain()) for fast in systems]

    for results in on_ranks(on_a_rank):
        for (got, accept_length, explained), size in zip(results, sizes):
            assert same(got, alone)
            assert accept_length == pytest.approx(results[0][1], abs=0.1)
            assert accept_length > 1
            if size:
                place = {1: "whole on each rank", 2: "shared by 2 ranks"}[size["draft_tensor_parallel_size"]]
                assert f"the draft is {place}" in explained


@pytest.mark.sweep("llama")
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRIDS)])
def test_recurrences_stay_whole_beside_what_is_shared(on_ranks, name):
    model = models.HYBRIDS[name]()
    alone = answers(shared(model, tensor_parallel=None))

    def on_a_rank(rank):
        fast = shared(model)
        rows = fast.speculation.engine.runtime.verify.row_bytes
        return answers(fast), fast.speculation.explain(), rows

    for rank, (got, explained, row_bytes) in enumerate(on_ranks(on_a_rank)):
        assert same(got, alone)
        assert f"rank {rank} of 2 has 2 of 4 query" in explained and "whole on each rank: in_proj" in explained
        assert row_bytes == models.captured(model).row_bytes


def speculated_bytes(model):
    return models.captured(model).token_bytes


@pytest.mark.slow
def test_new_weights_are_taken_over(on_ranks):
    def on_a_rank(rank):
        model = models.ADMITTED["llama"]()
        hot = rounds.SCHEDULES["hot"] | {"draft": rounds.draft_of("eagle", "llama")}
        fast = [
            speculate(model, **PLAIN, tensor_parallel="auto"),
            speculate(model, "eagle", **PLAIN | hot, tensor_parallel=2),
        ]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
        for each in fast:
            each.speculation.refresh()
        prompt = models.prompts()[0][0]
        return [each.generate(prompt, **GREEDY) for each in (model, *fast)]

    for plain, *ours in on_ranks(on_a_rank):
        assert all(torch.equal(plain, each) for each in ours)


# --- the pass

SUMS = dict(llama=4, qwen3_moe=4, deepseek_v3=6, gpt_neox=2, phi3=2, gpt_oss=8, glm_moe_dsa=6)
"""Sums of a forward: two a layer; one where attention and MLP are parallel, or where one of them stays whole."""


def variants():
    """Tiny models by name, those of `SUMS` and others with a vocabulary or heads that do not divide."""
    yield from ((name, {**models.ADMITTED, **models.INDEXED}[name]()) for name in SUMS)
    llama = ("LlamaConfig", "LlamaForCausalLM")
    yield "tied_uneven", models.build(*llama, dict(models.GQA, vocab_size=97, tie_word_embeddings=True))
    yield "one_kv_head", models.build(*llama, dict(models.GQA, num_key_value_heads=1, attention_bias=True))


@functools.cache
def graphs():
    return {name: capture(model) for name, model in variants()}


FEW = ("llama", "qwen3_moe", "tied_uneven", "one_kv_head")
"""What four ranks share: heads, experts, and what does not divide."""


@torch.no_grad()
def compared(graph, ranks):
    """How far a rank's logits are from the whole graph's, relative to their spread, and the sums of a forward."""
    ids = torch.randint(3, models.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(9).expand(2, 9)
    part = passes.run(graph, passes.Settings(ranks=ranks), passes.PIPELINE[:3])
    expected, got = graph.gm(ids, positions)[0], part.gm(ids, positions)[0]
    sums = len(calls(part.gm, torch.ops.spec_compile.all_reduce.default))
    return float((got - expected).abs().max() / expected.std()), sums, part.layers[0], got


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_parts_add_up_to_the_whole(on_ranks, size):
    all_graphs = {name: graph for name, graph in graphs().items() if size == 2 or name in FEW}

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
        passes.run(capture(models.ADMITTED["llama"]()), passes.Settings(ranks=alone_of(3)))


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


# --- what rank 0 decides, and what all agree on


class Slow(StoppingCriteria):
    """Ends rows at a length that differs from rank to rank, and notes that it was called."""

    def __init__(self, width):
        self.width, self.calls = width, 0

    def __call__(self, ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(ids),), ids.shape[1] >= self.width)


class Uneven(LogitsProcessor):
    """Adds to the logits what no other rank adds."""

    def __init__(self, rank):
        self.rank = rank

    def __call__(self, ids, scores):
        return scores.roll(self.rank, dims=-1)


class Streamer:
    def __init__(self, fails_at=10**9):
        self.got, self.fails_at = [], fails_at

    def put(self, tokens):
        self.got.append(tokens.tolist())
        if len(self.got) == self.fails_at:
            raise RuntimeError("the connection has timed out")

    def end(self):
        self.got.append("end")


def test_rank_0_decides(on_ranks):
    model, (prompt, *_), _ = rounds.target("llama"), *models.prompts()[:2]

    def on_a_rank(rank):
        fast = shared(model)
        slow, streamer = Slow(35 + 3 * rank), Streamer()
        cut = fast.generate(prompt, stopping_criteria=[slow], streamer=streamer, **GREEDY)
        uneven = fast.generate(prompt, logits_processor=[Uneven(rank)], **GREEDY)
        torch.manual_seed(rank)
        sampled = fast.generate(prompt, **GREEDY | dict(do_sample=True))
        if rank == 1:
            fast.speculation.ngram.add([5] * 50)
        sessions = fast.speculation.engine.sessions.values()
        policies = [policy for session in sessions for policy in session.policies.values()]
        for policy in policies:
            policy.costs.measured.update({nodes: (1 + rank * nodes) * 1e-3 for nodes in policy.sizes})
        again = [fast.generate(prompt, **GREEDY) for _ in range(3)]
        return (cut, uneven, sampled, *again), slow.calls, streamer.got

    (first, calls, streamed), (second, others_calls, others_streamed) = on_ranks(on_a_rank)
    assert same(first, second)
    assert first[0].shape[1] == 35
    assert calls and not others_calls
    assert streamed[-1] == "end" and not others_streamed


def raised(function):
    """The type and the text of the exception that a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def test_disagreement_is_named_on_all_ranks(on_ranks):
    model, (prompt, other, _) = rounds.target("llama"), models.prompts()[0]

    def on_a_rank(rank):
        fast = shared(model)
        return [
            raised(lambda: fast.generate((prompt, other)[rank], **GREEDY)),
            raised(lambda: fast.generate(prompt, **GREEDY | dict(max_new_tokens=NEW + rank))),
            raised(lambda: fast.generate(prompt + 1000 * rank, **GREEDY)),
            raised(lambda: fast.generate(prompt, reference=[1, 2, 3 + rank], **GREEDY)),
            raised(lambda: fast.generate(prompt, num_beams=1 + rank, **GREEDY)),
            raised(lambda: fast.generate(prompt, **GREEDY)),
        ]

    first, second = on_ranks(on_a_rank)
    for errors in zip(first[:2], second[:2]):
        for kind, text in errors:
            assert kind == "ValueError" and "rank 1 differs from rank 0" in text
    assert "the prompts" in first[0][1] and "the generation config" in first[1][1]
    assert "rank 1 refused it: ValueError: input_ids" in first[2][1]
    assert (
        second[2] == ("ValueError", "input_ids: token id 1003 is outside the vocabulary of 96 tokens") or second[2][0]
    )
    assert "the references" in first[3][1]
    assert first[4][0] == second[4][0] == "ValueError"
    assert first[5] == second[5] == (None, "")


def test_models_and_options_that_differ_are_named_on_all_ranks(on_ranks):
    llama, others = rounds.target("llama"), (rounds.target("llama"), models.ADMITTED["llama"]())

    def on_a_rank(rank):
        spread = (llama, models.ADMITTED["llama"]())[rank]
        spread.hf_device_map = {"model": 0, "lm_head": rank}
        errors = [raised(lambda: shared(spread))]
        del spread.hf_device_map
        return [
            *errors,
            raised(lambda: shared(others[rank])),
            raised(lambda: shared(llama, num_draft_tokens=8 + rank)),
            raised(lambda: shared(llama, capacity="much" if rank else 100)),
            raised(lambda: shared(llama, tensor_parallel=3)),
            raised(lambda: shared(llama, tensor_parallel="all")),
            raised(lambda: shared(llama, tensor_parallel=2)),
            raised(lambda: on_a_gpu(llama)),
        ]

    def on_a_gpu(model):
        with mock.patch.object(start, "held_parameters", return_value=[SimpleNamespace(device=torch.device("cuda"))]):
            find_ranks("auto", model)

    for rank, errors in enumerate(on_ranks(on_a_rank)):
        spread, weights, nodes, capacity, count, word, fine, gpu = errors
        assert "device_map over 0, 1" in spread[1]
        assert "the ranks disagree on the weights" in weights[1]
        assert "num_draft_tokens" in nodes[1]
        assert (
            ("capacity: expected int" in capacity[1])
            if rank
            else ("rank 1 refused it: TypeError: capacity" in capacity[1])
        )
        assert "3 processes were asked for and there are 2; start the script by torchrun" in count[1]
        assert word[0] == "TypeError" and "tensor_parallel" in word[1]
        assert fine == (None, "")
        assert gpu[0] == "ValueError" and 'expected init_process_group("nccl")' in gpu[1]


def test_an_error_on_rank_0_ends_the_call_on_all(on_ranks):
    model, prompt = rounds.target("llama"), models.prompts()[0][0]

    def on_a_rank(rank):
        fast = shared(model)
        inner = SimpleNamespace(put=lambda tokens: fast.generate(prompt, **GREEDY), end=lambda: None)
        return [
            raised(lambda: fast.generate(prompt, streamer=Streamer(fails_at=5), **GREEDY)),
            raised(lambda: fast.generate(prompt, streamer=inner, **GREEDY)),
            fast.generate(prompt, **GREEDY),
            fast.speculation.options.ranks._ring.silent(),
        ]

    (failed, nested, answer, silent), (told, told_of_nested, others_answer, _) = on_ranks(on_a_rank)
    assert silent == [0, 1]  # no one has given up
    assert failed == ("RuntimeError", "the connection has timed out")  # which is not about a rank
    assert told == ("RuntimeError", "rank 0 ended this call: RuntimeError: the connection has timed out")
    assert nested[0] == "RuntimeError" and "inside a streamer" in nested[1]
    assert "inside a streamer" in told_of_nested[1]
    assert torch.equal(answer, others_answer)


def test_results_that_part_are_noticed(on_ranks, tmp_path):
    model, prompt = rounds.target("llama"), models.prompts()[0][0]

    def on_a_rank(rank):
        fast = shared(model)
        if rank == 1:
            learn = RoundPipeline.learn
            RoundPipeline.learn = lambda self, flight, outcomes: learn(
                self, flight, [(row, replace(outcome, tokens=[0] * flight.nodes)) for row, outcome in outcomes]
            )
        error = raised(lambda: fast.generate(prompt, **GREEDY))
        if rank == 1:
            (tmp_path / "error").write_text(repr(error))
            os._exit(1)  # as a script does that an exception ends
        return error

    (kind, text), _ = on_ranks(on_a_rank)
    assert "rank 1 has computed something else than rank 0" in (tmp_path / "error").read_text()
    assert kind == "RuntimeError" and "rank 1 (process" in text


# --- models that transformers has spread over the ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("deepseek_v3", "qwen3_5"))]
)
def test_models_that_transformers_has_sharded(on_ranks, tmp_path, name):
    model = models.HYBRIDS[name]() if name in models.HYBRIDS else rounds.target(name)
    model.save_pretrained(tmp_path / name)
    systems = {name: ("ngram", {})}
    if name == "llama":
        systems["eagle3"] = "eagle3", {"draft": rounds.draft_of("eagle3", name)}
    alone = {
        case: answers(shared(model, algo, tensor_parallel=None, **options)) for case, (algo, options) in systems.items()
    }

    def on_a_rank(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        transformers.utils.logging.disable_progress_bar()
        results, loaded = {}, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, tp_plan="auto")
        for case, (algo, options) in systems.items():
            fast = speculate(loaded, algo, **PLAIN | options | {"check": case == "llama"})
            held = [part.data_ptr() for part in fast.speculation.engine.runtime.verify.gm.buffers()]
            local = loaded.model.layers[0].mlp.down_proj.weight if name == "llama" else None
            results[case] = answers(fast), local is None or local._local_tensor.data_ptr() in held
        return results

    for results in on_ranks(on_a_rank):
        for case, (got, takes_memory_once) in results.items():
            assert same(got, alone[case]), case
            assert takes_memory_once, case


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_gpus_answer_as_one(size):
    assert torchrun(size, "tests/support/several_gpus.py").count("torch.bfloat16") == 5


@pytest.mark.gpu
@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_gpus(size, shots):
    """Bits, also of captured sums while ranks stall, and the name of a rank that does not come."""
    output = torchrun(
        size, "-m", "tests.support.all_reduce_on_gpus", "--sums", "2000", "--limit", "300", "--shots", str(shots)
    )
    assert output.count("all bits as they should be") == 2 and "DIFFERENT" not in output
    assert output.count("slots empty: True, counters zero: True") == 2
    assert f"late: rank {size - 1} (is {size - 1})" in output and "NO ERROR" not in output
