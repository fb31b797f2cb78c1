"""Which chunks prompts are processed in beside the rounds of others."""

from spec_compile.batching.prefill import choose_size

SIZES = [2048, 512, 128, 32]


def cost(prompts, size):
    """A small model on a GPU: launching costs as much as computing 900 tokens."""
    return 350 + max(prompts * size, 550)


def chosen(missing, decoding=0, waiting=0, round_cost=650):
    return choose_size(missing, waiting, decoding, SIZES, cost, round_cost)


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
