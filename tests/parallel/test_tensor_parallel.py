"""Tensor parallelism on two processes that talk by gloo: tokens are one process's, and what goes wrong is named."""

import os
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import dflash_drafts as dflash
import draft_rounds as rounds
import models
import pytest
import torch
from captures import capture
from mtp_rounds import with_further
from packed_layers import packed
from ranks import run_ranks, torchrun
from transformers import LogitsProcessor, StoppingCriteria

from spec_compile import UnsupportedModelError, passes, speculate
from spec_compile.graph import calls
from spec_compile.parallel import start
from spec_compile.parallel.slices import Cut, Slices
from spec_compile.parallel.start import find_ranks
from spec_compile.runtime.pipeline import RoundPipeline

pytestmark = pytest.mark.xdist_group("tensor_parallel")
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
    "packed draft": ("draft_model", dict(num_steps=2)),
    "dflash": ("dflash", {}),
}


SIZES = {
    "ngram": (),
    "eagle": (1,),
    "naive_eagle": (2,),
    "mtp": (2,),
    "fr_spec": (2,),
    "drawn": (1,),
    "packed draft": (2,),
}
"""How many ranks share the draft, where not both are tried."""


@pytest.mark.sweep("eagle3_tree")
@pytest.mark.parametrize("case", DRAFTS)
def test_every_algorithm_gives_one_processs_tokens(on_ranks, case):
    model, (algo, options) = rounds.target("llama"), DRAFTS[case]
    if algo != "ngram":
        draft = dflash.trained("llama") if algo == "dflash" else rounds.draft_of(algo, "llama")
        draft = with_further(draft, own_output=True) if case == "mtp_modules" else draft
        draft = packed(models.ADMITTED["llama"](), "ct") if case == "packed draft" else draft
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


LLAMA = "LlamaConfig", "LlamaForCausalLM"
UNEVEN = {
    "tied_uneven": (*LLAMA, dict(models.GQA, vocab_size=97, tie_word_embeddings=True)),
    "one_kv_head": (*LLAMA, dict(models.GQA, num_key_value_heads=1, attention_bias=True)),
}
"""Models with a vocabulary or with heads that do not divide."""
SUMS = dict(
    llama=4, qwen3=4, mixtral=4, qwen3_moe=4, deepseek_v3=6, gpt_neox=2, phi3=2, gpt_oss=8, glm_moe_dsa=6, qwen3_5=3,
    tied_uneven=4, one_kv_head=4,
)  # fmt: skip
"""Sums of a forward: two a layer; one where attention and MLP are parallel, or where one of them stays whole."""
FOUR = "llama", "qwen3_moe", "one_kv_head"
"""What four ranks share as well."""


@pytest.mark.sweep("llama-2")
@pytest.mark.parametrize(("name", "size"), [(name, 2) for name in SUMS] + [(name, 4) for name in FOUR])
def test_every_architecture_gives_one_processs_tokens(on_ranks, name, size):
    zoo = {**models.ADMITTED, **models.HYBRIDS, **models.INDEXED}
    model = models.build(*UNEVEN[name]) if name in UNEVEN else zoo[name]()
    alone, whole = answers(shared(model, tensor_parallel=None)), models.captured(model)

    def on_a_rank(rank):
        fast = shared(model, check=True)
        runtime = fast.speculation.engine.runtime
        sums = len(calls(runtime.verify.gm, torch.ops.spec_compile.all_reduce.default))
        return answers(fast), fast.speculation.explain(), sums, runtime.token_bytes, runtime.verify.row_bytes

    for rank, (got, explained, sums, token_bytes, row_bytes) in enumerate(on_ranks(on_a_rank, size)):
        assert same(got, alone) and sums == SUMS[name]
        assert name == "phi3" or f"rank {rank} of {size} has {4 // size} of 4 query" in explained
        assert ("whole on each rank: in_proj" in explained) == (name == "qwen3_5")
        assert row_bytes == whole.row_bytes, "recurrences stay whole"
        assert name != "llama" or token_bytes == whole.token_bytes // 2


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


def raised(function, *arguments, **options):
    """The type and the text of the exception that a function raises."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None, ""


def test_disagreement_is_named_on_all_ranks(on_ranks):
    model, (prompt, other, _) = rounds.target("llama"), models.prompts()[0]

    def on_a_rank(rank):
        fast = shared(model)
        return [
            raised(fast.generate, given, **GREEDY | options)
            for given, options in (
                ((prompt, other)[rank], {}),
                (prompt, dict(max_new_tokens=NEW + rank)),
                (prompt, dict(reference=[1, 2, 3 + rank])),
                (prompt + 1000 * rank, {}),
                (prompt, dict(num_beams=1 + rank)),
                (prompt, {}),
            )
        ]

    first, second = on_ranks(on_a_rank)
    for number, part in enumerate(("the prompts", "the generation config", "the references")):
        for kind, text in (first[number], second[number]):
            assert kind == "ValueError" and "rank 1 differs from rank 0" in text and part in text
    assert "rank 1 refused it: ValueError: input_ids" in first[3][1]
    assert second[3][0] == "ValueError" and "is outside the vocabulary of 96 tokens" in second[3][1]
    assert first[4][0] == second[4][0] == "ValueError"
    assert first[5] == second[5] == (None, "")


def test_models_and_options_that_differ_are_named_on_all_ranks(on_ranks):
    llama, other = rounds.target("llama"), models.ADMITTED["llama"]()

    def on_a_gpu():
        with mock.patch.object(start, "held_parameters", return_value=[SimpleNamespace(device=torch.device("cuda"))]):
            find_ranks("auto", llama)

    def on_a_rank(rank):
        spread = (llama, models.ADMITTED["llama"]())[rank]
        spread.hf_device_map = {"model": 0, "lm_head": rank}
        errors = [raised(shared, spread)]
        del spread.hf_device_map
        errors.append(raised(shared, (llama, other)[rank]))
        for options in (
            dict(num_draft_tokens=8 + rank), dict(capacity="much" if rank else 100), dict(tensor_parallel=3),
            dict(tensor_parallel="all"), dict(tensor_parallel=2),
        ):  # fmt: skip
            errors.append(raised(shared, llama, **options))
        return [*errors, raised(on_a_gpu)]

    told = [
        "device_map over 0, 1", "the ranks disagree on the weights", "num_draft_tokens", "capacity: expected int",
        "3 processes were asked for and there are 2; start the script by torchrun", "tensor_parallel", "",
        'expected init_process_group("nccl")',
    ]  # fmt: skip
    for rank, errors in enumerate(on_ranks(on_a_rank)):
        for number, ((kind, text), part) in enumerate(zip(errors, told, strict=True)):
            if (rank, number) == (0, 3):
                part = "rank 1 refused it: TypeError: capacity"
            assert part in text and (kind is None) == (part == ""), text


def test_an_error_on_rank_0_ends_the_call_on_all(on_ranks):
    model, prompt = rounds.target("llama"), models.prompts()[0][0]

    def on_a_rank(rank):
        fast = shared(model)
        inner = SimpleNamespace(put=lambda tokens: fast.generate(prompt, **GREEDY), end=lambda: None)
        return [
            raised(fast.generate, prompt, streamer=Streamer(fails_at=5), **GREEDY),
            raised(fast.generate, prompt, streamer=inner, **GREEDY),
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
        error = raised(fast.generate, prompt, **GREEDY)
        if rank == 1:
            (tmp_path / "error").write_text(repr(error))
            os._exit(1)  # as a script does that an exception ends
        return error

    (kind, text), _ = on_ranks(on_a_rank)
    assert "rank 1 has computed something else than rank 0" in (tmp_path / "error").read_text()
    assert kind == "RuntimeError" and "rank 1 (process" in text


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
