"""The chunks of prompts beside the rounds of others, and with exact="request", which any load leaves as they are."""

import batch_requests
import models
import pytest
import torch
from batch_requests import collect, managed

import spec_compile
from spec_compile.batching.prefill import choose_size
from spec_compile.runtime.round import PREFILL_SIZES
from spec_compile.runtime.session import Session

STEPS = [2048, 512, 128, 32]


def cost(prompts, size):
    """A small model on a GPU: launching costs as much as computing 900 tokens."""
    return 350 + max(prompts * size, 550)


def chosen(missing, decoding=0, waiting=0, round_cost=650):
    return choose_size(missing, waiting, decoding, STEPS, cost, round_cost)


def test_nobody_waits_for_a_chunk_while_nobody_decodes():
    assert chosen([100]) == 128 and chosen([400]) == 512 and chosen([2000] * 2) == 2048
    assert chosen([100] * 15 + [500]) == 128  # rather than 512 tokens of every prompt, for the sake of one
    assert chosen([30] * 16) == 32


def test_a_chunk_takes_about_as_long_as_a_round_while_others_decode():
    assert chosen([500] * 4, decoding=60) == 128 and chosen([500] * 4) == 512
    assert cost(16, chosen([100] * 16, decoding=48)) <= 1.5 * cost(1, 32) < cost(16, 128)
    assert chosen([9000], decoding=8) <= 512  # whose steps are too many to be planned


def test_rows_that_wait_have_their_share_of_the_time():
    assert chosen([100] * 16, decoding=6) == chosen([100] * 16, decoding=16, waiting=32) == 128
    assert chosen([500] * 16, decoding=1) == 512


SIZES = (64, 32)
"""Smaller steps than a CPU's, so that prompts may be short."""
NEW = 6


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setitem(PREFILL_SIZES, "cpu", SIZES)


def system(model, **options):
    """Rounds verify no drafts, so that each has the same shapes."""
    options = dict(exact="request", num_draft_tokens=1, prefix_cache_host_bytes=1 << 28) | options
    return spec_compile.speculate(model, compile=False, check=False, max_cache_len=512, **options)


def text(length, seed=0):
    return torch.randint(3, models.VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def answer(manager, prompt, **options):
    return batch_requests.answer(manager, prompt, max_new_tokens=NEW, eos_token_id=-1, logprobs=0, **options)


def facts(output):
    return output.generated_tokens, output.logprobs


@pytest.mark.sweep("bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_answers_after_known_beginnings_have_the_bits_of_others(dtype):
    """The beginning lies in the row of a text that is over, or that is still under way, or comes from host memory."""
    model = models.ADMITTED["llama"]().to(dtype)
    first, other, prompt = text(200), text(150, 1), text(199) + text(90, 2)
    with managed(fresh := system(model)) as manager:
        expected = answer(manager, prompt)
        assert expected.speculation.reused_prompt_tokens == 0
    with managed(fast := system(model)) as manager:
        written = answer(manager, first)
        in_row = answer(manager, prompt)
        answer(manager, other)
        from_host = answer(manager, prompt)
        turn = answer(manager, first + written.generated_tokens + text(150, 3))
    assert [each.speculation.reused_prompt_tokens for each in (in_row, from_host)] == [192, 256]
    assert turn.speculation.reused_prompt_tokens == 192  # tokens of rounds do not count
    assert facts(in_row) == facts(from_host) == facts(expected)
    with managed(fresh) as manager:
        assert facts(answer(manager, turn.prompt_ids)) == facts(turn)
    assert "in multiples of 64 tokens" in fast.speculation.explain()


def test_load_does_not_change_chunks(monkeypatch):
    """Prompts that wait, and rows that decode, would make chunks smaller."""
    model, sizes, prefill = models.ADMITTED["llama"](), [], Session.prefill

    def recorded(self, size, max_kv_len):
        sizes.append(size)
        return prefill(self, size, max_kv_len)

    monkeypatch.setattr(Session, "prefill", recorded)
    prompts = [text(length, length) for length in (201, 130, 98)]
    with managed(system(model), 4) as manager:
        for prompt in prompts:
            manager.add_request(prompt, max_new_tokens=NEW, eos_token_id=-1)
        collect(manager, len(prompts))
    assert sizes == [64, 64, 64, 32, 64, 64, 32, 64, 64]


def test_prompts_whose_scores_are_told_are_no_beginnings():
    """They go through rounds."""
    with managed(system(models.ADMITTED["llama"]())) as manager:
        answer(manager, text(200), prompt_logprobs=0)
        assert answer(manager, text(200)).speculation.reused_prompt_tokens == 0


def test_states_are_not_copied():
    """They are those after the end of a prompt, which is no fixed position."""
    with managed(system(models.HYBRIDS["lfm2"]())) as manager:
        outputs = [answer(manager, text(200)) for _ in range(2)]
    assert facts(outputs[0]) == facts(outputs[1])
    assert [each.speculation.reused_prompt_tokens for each in outputs] == [0, 0]


def test_without_the_option_every_token_serves():
    with managed(system(models.ADMITTED["llama"](), exact="auto")) as manager:
        written = answer(manager, text(200))
        turn = answer(manager, text(200) + written.generated_tokens + text(9, 4))
    assert turn.speculation.reused_prompt_tokens > 200
