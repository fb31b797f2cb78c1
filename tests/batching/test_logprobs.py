"""Log-probabilities of requests are those of transformers' own logits, whatever is drafted, and so are scores of
texts."""

import functools

import hybrids
import models
import pytest
import torch
from batch_requests import ALGORITHMS, MODEL, PROMPTS, TEXT, running, tokenizer
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import spec_compile
from spec_compile.batching.output import MOST_TOP, Scores, score_tokens

CLOSE = 1e-4  # Float32 on a CPU: libraries sum in another order for another number of rows.
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OPTIONS = {"compile": False, "check": False, "num_draft_tokens": 7}
LONG = tokenizer()(TEXT).input_ids
NEW = 20


@functools.cache
def plain():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()


@functools.cache
def fast(algo="ngram", **options):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
    return spec_compile.speculate(model, algo, **OPTIONS | options)


def answered(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": NEW, "logprobs": 3, "prompt_logprobs": 2} | options
    outputs = [*model.generate_batch(prompts, warmup=False, **options).values()]
    assert all(output.error is None for output in outputs), outputs
    return outputs


def are_right(model, outputs, top=3, prompt_top=2, close=CLOSE):
    """Compare all scores with one forward of `model` over prompt and answer."""
    for output in outputs:
        ids = torch.tensor([output.prompt_ids + output.generated_tokens])
        wanted = model(ids).logits[0].float().log_softmax(-1)
        scores = output.prompt_scores + output.scores
        assert [score.token for score in scores] == ids[0, 1:].tolist()
        own = wanted[:-1].gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([score.logprob for score in scores]), own, atol=close, rtol=0)
        assert output.logprobs == [score.logprob for score in output.scores]
        kept = [prompt_top] * len(output.prompt_scores) + [top] * len(output.scores)
        for score, row, count in zip(scores, wanted, kept):
            best = torch.tensor([value for _, value in score.top])
            assert len(best) == count
            torch.testing.assert_close(best, row.topk(count).values, atol=close, rtol=0)
            assert all(abs(row[token] - value) < close for token, value in score.top)
            assert dict(score.top).get(score.token, score.logprob) == score.logprob


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculation": False},
        {"do_sample": True, "temperature": 1.4, "top_k": 30, "seed": 3},
        {"repetition_penalty": 1.4, "bad_words_ids": [[0]]},
    ],
    ids=["greedy", "plain", "drawn", "processed"],
)
def test_they_are_of_raw_logits(options):
    outputs = answered(fast(), [*PROMPTS, LONG], **options)
    are_right(plain(), outputs)
    if options == {}:
        assert sum(output.speculation.accepted for output in outputs) > 0


def test_drafts_change_nothing():
    for one, other in zip(answered(fast()), answered(fast(), speculation=False)):
        assert one.generated_tokens == other.generated_tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)


@pytest.mark.parametrize(("algo", "shape"), [("eagle3", {"num_steps": 3, "topk": 2}), ("mtp", {"num_draft_tokens": 2})])
def test_heads(algo, shape):
    """A head's own cache is filled with the prompt as without scores: it drafts the same."""
    model = fast(algo, draft=str(MODEL / "heads" / algo), adaptive=False, **shape)
    outputs = answered(model, [*PROMPTS, LONG])
    are_right(plain(), outputs)
    without = answered(model, [*PROMPTS, LONG], prompt_logprobs=None)
    accepted = [[sum(output.speculation.per_step_accepted) for output in each] for each in (outputs, without)]
    assert accepted[0] == accepted[1] and sum(accepted[0]) > 0


@pytest.mark.parametrize(("name", "close"), [("lfm2", CLOSE), ("qwen3_5", 5e-4)])
def test_states(name, close):
    """The states of a recurrence are led over a prompt, too.

    The delta rule of qwen3_5 loses more of float32 in transformers' chunks than in our steps. With a copy of its
    modelling file in float64 the two are equal within 1e-12; from that our log-probabilities of these prompts differ by
    at most 4e-5, and transformers' in float32 by 1.2e-4. The short convolution of lfm2 has neither.
    """
    model, system = hybrids.system(name)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, models.VOCAB, (length,), generator=generator).tolist() for length in (1, 2, 40, 131)]
    outputs = answered(system, prompts, eos_token_id=-1, pad_token_id=0)
    are_right(model, outputs, close=close)
    without = answered(system, prompts, eos_token_id=-1, pad_token_id=0, logprobs=None, prompt_logprobs=None)
    assert [each.generated_tokens for each in outputs] == [each.generated_tokens for each in without]
    assert not any(each.scores or each.prompt_scores or each.logprobs for each in without)


def returning(**options):
    return ContinuousBatchingConfig(return_logprobs=True, **options)


@pytest.mark.sweep("ngram")
@pytest.mark.parametrize("name", ["ngram", "eagle3 tree", "eagle3 drawn", "eagle3 union", "dflash", "draft_model"])
def test_rollouts_have_the_log_probabilities_of_transformers_batches(name):
    drafts = {**ALGORITHMS.get(name, {}), **({"draft": plain()} if name == "draft_model" else {})}
    one = spec_compile.speculate(
        plain(), name.split()[0], **{"adaptive": False, "compile": False, "check": False} | drafts
    )
    options = {"max_new_tokens": NEW, "warmup": False}
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
    pages = {"num_blocks": 16, "max_batch_tokens": 64}
    wanted = plain().generate_batch(PROMPTS, greedy, returning(**pages), **options)
    outputs = one.generate_batch(PROMPTS, greedy, returning(), **options)
    for output, right in zip(outputs.values(), wanted.values(), strict=True):
        assert output.generated_tokens == right.generated_tokens
        assert output.logprobs == pytest.approx(right.logprobs, abs=CLOSE) and not output.scores
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    for drawn in ({"top_k": 20, "top_p": 0.9}, {"top_k": 0}):
        config = GenerationConfig(do_sample=True, temperature=0.7, **drawn)
        outputs = one.generate_batch(PROMPTS, config, returning(seed=3), persistent_manager=True, logprobs=0, **options)
        one.destroy_cached_continuous_batching_manager()
        for output in outputs.values():
            ids = torch.tensor([output.prompt_ids + output.generated_tokens])
            scores = plain()(ids).logits[0, len(output.prompt_ids) - 1 : -1]
            assert [score.token for score in output.scores] == output.generated_tokens
            for warp in warpers if "top_p" in drawn else warpers[:1]:
                scores = warp(None, scores)
            right = scores.log_softmax(-1).gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output.logprobs), right, atol=CLOSE, rtol=0)


def test_rollouts_that_stop_or_stream_have_a_log_probability_for_each_token():
    stops = {"stop_strings": ["\n"], "tokenizer": tokenizer(), "max_new_tokens": 40}
    with fast().continuous_batching_context_manager(continuous_batching_config=returning(), warmup=False) as manager:
        name = manager.add_request(PROMPTS[0], streaming=True, repetition_penalty=1.2, do_sample=False, **stops)
        outputs = [*manager.request_id_iter(name)]
    assert all(len(output.logprobs) == len(output.generated_tokens) for output in outputs)
    last = outputs[-1]
    ids = torch.tensor([last.prompt_ids])
    asked = {"output_scores": True, "return_dict_in_generate": True, "do_sample": False, "repetition_penalty": 1.2}
    wanted = plain().generate(ids, **stops, **asked)
    assert wanted.sequences[0].tolist() == last.prompt_ids + last.generated_tokens
    right = [float(scores[0].softmax(-1)[token].log()) for scores, token in zip(wanted.scores, last.generated_tokens)]
    assert last.logprobs == pytest.approx(right, abs=CLOSE)


def test_a_known_beginning_is_computed_again():
    """Keys and values of the first request would serve the second one, but have no logits."""
    outputs = []
    with running(fast()) as manager:
        for options in ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}, {}):
            manager.add_request(LONG, max_new_tokens=3, logprobs=3, **options)
            outputs.append(manager.get_result(timeout=50))
    are_right(plain(), outputs[:2])
    assert [bool(output.speculation.reused_prompt_tokens) for output in outputs] == [False, False, True]
    assert outputs[2].logprobs == pytest.approx(outputs[0].logprobs, abs=CLOSE) and outputs[2].prompt_scores == []


def test_sequences_of_one_request_have_their_own():
    outputs = answered(fast(), do_sample=True, seed=1, num_return_sequences=2)
    are_right(plain(), outputs)
    assert outputs[0].generated_tokens != outputs[1].generated_tokens


@pytest.mark.parametrize("value", [-1, MOST_TOP + 1, True])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_other_values_are_refused(name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
        answered(fast(), **{name: value})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_token_has_the_same_score_among_any_others(device):
    logits = (3 * torch.randn(33, 49152)).bfloat16().to(device)
    tokens = torch.randint(49152, (33,)).tolist()

    def scores(rows):  # of equal logits any may be the likeliest
        told = score_tokens(logits[rows], tokens[rows], 3, 0.7)
        return [(each.logprob, [value for _, value in each.top]) for each in told]

    together = scores(slice(33))
    assert [scores(slice(row, row + 1))[0] for row in range(33)] == together
    assert scores(slice(5, 9)) == together[5:9]


def test_scores_of_tokens():
    """An impossible token, a tie, and more likeliest tokens than there are."""
    logits = torch.tensor([[0.0, 1.0, float("-inf")], [2.0, 2.0, 2.0]])
    impossible, tied = score_tokens(logits, [2, 1], 9)
    assert impossible.logprob == float("-inf") and [token for token, _ in impossible.top] == [1, 0, 2]
    assert tied.logprob == pytest.approx(-1.0986, abs=1e-4) and {value for _, value in tied.top} == {tied.logprob}
    assert score_tokens(logits[:0], [], 2) == [] and score_tokens(logits, [0, 0], 0)[0].top == ()
    scores = Scores.read(0, None)
    scores.ahead = score_tokens(logits, [0, 1], 0)
    scores.take(1)
    assert [each.token for each in scores.answer] == [0] and Scores.read(None, None) is None


# --- the scores of texts


scorer = functools.partial(fast, max_cache_len=512, adaptive=False)


def rollouts(model, **options):
    """Drawn answers with the log-probabilities of their tokens."""
    options = dict(max_new_tokens=24, do_sample=True, logprobs=0, num_return_sequences=2, seed=5) | options
    return [*model.generate_batch([*PROMPTS, LONG], warmup=False, **options).values()]


def texts_of(outputs):
    return [output.prompt_ids + output.generated_tokens for output in outputs]


def wanted(text, temperature=1.0):
    """By transformers' own logits."""
    ids = torch.tensor([text])
    scores = (plain()(ids).logits[0, :-1].detach() / temperature).log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0]


def test_scores_are_those_of_rollouts():
    outputs = rollouts(scorer(), temperature=0.7, logprobs_temperature=0.7)
    scores = scorer().speculation.score(texts_of(outputs), 0.7)
    for output, text, row in zip(outputs, texts_of(outputs), scores, strict=True):
        assert row.dtype == torch.float32 and row.shape == (len(text) - 1,)
        answer = row[len(output.prompt_ids) - 1 :]
        torch.testing.assert_close(answer, torch.tensor(output.logprobs), atol=CLOSE, rtol=0)
        torch.testing.assert_close(row, wanted(text, 0.7), atol=CLOSE, rtol=0)
    assert sum(output.speculation.accepted for output in outputs) > 0


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"algo": name.split()[0], **ALGORITHMS.get(name, {})}, marks=GPU, id=name)
        for name in ("ngram", "eagle3 tree")
    ],
)
def test_bits_are_those_of_rollouts(options):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).to("cuda").eval()
    exact = spec_compile.speculate(model, exact="request", compile=False, max_cache_len=512, **options)
    outputs = rollouts(exact)
    for output, scores in zip(outputs, exact.speculation.score(texts_of(outputs)), strict=True):
        assert scores[len(output.prompt_ids) - 1 :].tolist() == output.logprobs
    together = exact.speculation.score(texts_of(outputs))
    assert all(torch.equal(exact.speculation.score(text)[0], row) for text, row in zip(texts_of(outputs), together))


def test_forms_of_texts():
    score = scorer().speculation.score
    (whole,) = score(LONG[:40])
    torch.testing.assert_close(whole, wanted(LONG[:40]), atol=CLOSE, rtol=0)
    for ids in ([LONG[:40]], torch.tensor(LONG[:40]), torch.tensor([LONG[:40]]), [torch.tensor(LONG[:40])]):
        assert torch.equal(score(ids)[0], whole)
    assert score([]) == [] and score([LONG[0]])[0].shape == (0,)
    assert scorer().speculation.engine.idle_batch is not None  # the rows of one call serve the next


def test_refusals():
    score = scorer().speculation.score
    with pytest.raises(ValueError, match=r"ids\[1\]: input_ids: expected at least one token"):
        score([LONG[:9], []])
    with pytest.raises(ValueError, match="leaves no room"):
        score([LONG * 9])
    for wrong, error in ((0.0, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="logprobs_temperature must be"):
            score(LONG[:9], temperature=wrong)
    speculation = spec_compile.speculate(plain(), compile=False, check=False).speculation
    with pytest.raises(RuntimeError, match="keep the result of speculate"):
        speculation.score(LONG[:9])
