"""Outcomes on their way to the host."""

import pytest
import torch
from places import places

from spec_compile.kernels.publish import publish


@pytest.mark.parametrize("place", places(torch.float32))
@pytest.mark.parametrize("shape", [(1, 5), (3, 133), (8, 261)])
def test_outcomes_go_round_the_slots(place, shape):
    device, _ = place
    slots = torch.zeros(5, 1 + 8 * 261, dtype=torch.int64, pin_memory=device == "cuda")
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    for number in range(11):
        outcome = torch.randint(-1, 1 << 40, shape)
        publish(outcome.to(device), slots, turn)
        if device == "cuda":
            torch.cuda.synchronize()
        slot = slots[number % 4]
        assert slot[0] == number + 1 == int(turn)
        assert torch.equal(slot[1 : 1 + outcome.numel()], outcome.flatten())


@pytest.mark.parametrize("place", places(torch.float32))
def test_what_is_for_nobody_disturbs_nothing(place):
    device, _ = place
    slots = torch.zeros(5, 9, dtype=torch.int64, pin_memory=device == "cuda")
    turn = torch.full((1,), -1, dtype=torch.int64, device=device)
    for _ in range(3):
        publish(torch.arange(8, device=device), slots, turn)
    if device == "cuda":
        torch.cuda.synchronize()
    assert int(turn) == -1 and not slots[:4].any()
    assert slots[4].tolist() == [0, *range(8)]  # number 0: no round has it
