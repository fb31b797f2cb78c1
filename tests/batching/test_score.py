"""Log-probabilities of texts are those that their rollouts had, and those of transformers' own logits."""

import functools

import pytest
import torch
from batch_requests import ALGORITHMS, MODEL, PROMPTS, TEXT, tokenizer
from transformers import AutoModelForCausalLM

import spec_compile

CLOSE = 1e-4
"""Float32 on a CPU: libraries sum in another order for another number of rows."""
LONG = tokenizer()(TEXT).input_ids
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@functools.cache
def fast(algo="ngram"):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
    return spec_compile.speculate(model, algo, compile=False, check=False, max_cache_len=512, adaptive=False)


def rollouts(model, **options):
    """Drawn answers with the log-probabilities of their tokens."""
    options = dict(max_new_tokens=24, do_sample=True, logprobs=0, num_return_sequences=2, seed=5) | options
    return [*model.generate_batch([*PROMPTS, LONG], warmup=False, **options).values()]


def texts_of(outputs):
    return [output.prompt_ids + output.generated_tokens for output in outputs]


def wanted(text, temperature=1.0):
    """By transformers' own logits."""
    ids = torch.tensor([text])
    scores = (fast().speculation.original(ids).logits[0, :-1].detach() / temperature).log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0]


def test_scores_are_those_of_rollouts():
    outputs = rollouts(fast(), temperature=0.7, logprobs_temperature=0.7)
    scores = fast().speculation.score(texts_of(outputs), 0.7)
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
    score = fast().speculation.score
    (whole,) = score(LONG[:40])
    torch.testing.assert_close(whole, wanted(LONG[:40]), atol=CLOSE, rtol=0)
    for ids in ([LONG[:40]], torch.tensor(LONG[:40]), torch.tensor([LONG[:40]]), [torch.tensor(LONG[:40])]):
        assert torch.equal(score(ids)[0], whole)
    assert score([]) == [] and score([LONG[0]])[0].shape == (0,)
    assert fast().speculation.engine.idle_batch is not None  # the rows of one call serve the next


def test_refusals():
    score = fast().speculation.score
    with pytest.raises(ValueError, match=r"ids\[1\]: input_ids: expected at least one token"):
        score([LONG[:9], []])
    with pytest.raises(ValueError, match="leaves no room"):
        score([LONG * 9])
    for wrong, error in ((0.0, ValueError), (float("nan"), ValueError), (float("inf"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match="logprobs_temperature must be"):
            score(LONG[:9], temperature=wrong)
    speculation = spec_compile.speculate(fast().speculation.original, compile=False, check=False).speculation
    with pytest.raises(RuntimeError, match="keep the result of speculate"):
        speculation.score(LONG[:9])
