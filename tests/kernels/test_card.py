"""What follows from a GPU's facts."""

import logging

import cards
import pytest
import torch

from spec_compile.kernels import card
from spec_compile.kernels.card import Card

GPU = torch.device("cuda", 0)
CARDS = {75: cards.CARDS["T4"], 86: cards.CARDS["RTX 3090"], 90: cards.CARDS["H200"]}


@pytest.fixture
def here(monkeypatch):
    """A function: the compute capability of the GPU, as 75, from now on."""

    def be(capability):
        card.launches_early.cache_clear()
        monkeypatch.setattr(card, "card_of", lambda device: CARDS[capability])

    yield be
    card.launches_early.cache_clear()


def test_a_cpu_is_no_gpu():
    assert card.card_of(torch.device("cpu")) == Card()
    assert not card.launches_early(torch.device("cpu")) and not Card().lacks_tensor_cores


def test_an_old_driver_launches_nothing_early_and_is_named_once(here, monkeypatch, caplog):
    monkeypatch.setattr(card, "driver_version", lambda: 12_020)
    with caplog.at_level(logging.WARNING, "spec_compile"):
        here(86)
        assert not card.launches_early(GPU) and not caplog.records
        here(90)
        assert not card.launches_early(GPU) and not card.launches_early(GPU)
    (record,) = caplog.records
    assert "the driver of H200 is of CUDA 12.2" in record.message and "CUDA 12.3 or later" in record.message
    monkeypatch.setattr(card, "driver_version", lambda: 12_030)
    here(90)
    assert card.launches_early(GPU)


def test_losses():
    assert CARDS[90].losses(launches_early=True) == []
    assert [text.partition(":")[0] for text in CARDS[86].losses(launches_early=False)] == [
        "FP8", "descriptors of tiles", "early launches",
    ]  # fmt: skip
    assert [text.partition(":")[0] for text in CARDS[75].losses(launches_early=False)][:3] == [
        "bfloat16", "tensor cores in Triton", "copies in the background",
    ]  # fmt: skip


def test_a_t4_multiplies_16_bits_as_float32(here):
    for capability, half in ((75, ("wide", 4)), (90, ("tf32", 2))):
        here(capability)
        for dtype, expected in ((torch.float16, half), (torch.float32, ("ieee", 4))):
            assert (card.precision(dtype, GPU), card.multiplied_bytes(dtype, GPU)) == expected
