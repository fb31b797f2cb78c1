"""Plans by the model of their time, on cards on which nobody has tuned them, and the model against measured times."""

from types import SimpleNamespace

import pytest
import torch
from cards import CARDS

from spec_compile.kernels import card as module
from spec_compile.kernels.card import card_of
from spec_compile.kernels.linear import computed, skinny_gemm
from spec_compile.kernels.linear.plans import (
    AT_ONCE,
    FEW_OUTPUTS,
    SHORT,
    ProductTile,
    ceil_div,
    packed_plan,
    plan,
    squared_columns,
)

H200 = CARDS["H200"]
MODELS = {  # layers, the shapes of a layer's products and of the head, microseconds of all with 1, 16 and 64 rows
    "Llama-3.1-8B": (
        32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (128256, 4096), (3820, 3911, 4260),
    ),
    "Llama-3.2-1B": (16, ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)), (128256, 2048), (776, 788, 923)),
    "Qwen3-0.6B": (28, ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), (151936, 1024), (613, 637, 776)),
    "SmolLM2-135M": (30, ((960, 576), (576, 576), (3072, 576), (576, 1536)), (49152, 576), (408, 434, 583)),
}  # fmt: skip
"""Measured on an H200 with the tuned plans, in rounds whose products begin while the kernel before them runs."""
OLD_SHORT = SHORT[0], *SHORT[2:]
OTHERS = {
    shape: [tile._replace(late=AT_ONCE, prefetch=4) for tile in OLD_SHORT]
    for shape in ((3072, 576), (6144, 1024), (4096, 1024), (1024, 2048), (1024, 3072))
} | {
    (576, 1536): [tile._replace(late=AT_ONCE, prefetch=4) for tile in FEW_OUTPUTS],
}
"""Tiles of the plans with which these shapes were measured. Others serve them now, because whole rounds are faster: the
next kernel's programs find room. The model has one product's time."""


def measured_plan(*shape):
    now = plan(*shape)
    return now._replace(tiles=tuple(OTHERS.get(shape, now.tiles)))


def time_of(shape, plan, rows, card=H200):
    return computed.microseconds(*shape, rows, plan.parts, plan.tile(rows), card)


@pytest.mark.parametrize("layers, shapes, head, measured", MODELS.values(), ids=MODELS)
def test_the_model_has_the_times_of_an_h200(layers, shapes, head, measured):
    """By the model, no tuned plan is far from the fastest, and each shape has about the tuned number of programs."""
    times = [[time_of(shape, measured_plan(*shape), rows) for rows in (1, 16, 64)] for shape in (*shapes, head)]
    for wanted, (*of_layer, of_head) in zip(measured, zip(*times), strict=True):
        assert layers * sum(of_layer) + of_head == pytest.approx(wanted, rel=0.07)
    for shape, tuned in zip((*shapes, head), map(sum, times)):
        mine = computed.plan(*shape, 16, H200)
        fastest = sum(time_of(shape, mine, rows) for rows in (1, 16, 64))
        assert fastest <= 1.001 * tuned <= 1.1 * fastest and mine.parts == plan(*shape).parts


def test_the_example():
    tile = ProductTile(64, 256, 16, 4, 4)
    alone, shared = (computed.microseconds(4096, 4096, 1, parts, tile, H200) for parts in (1, 2))
    assert (round(alone, 1), round(shared, 1)) == (12.4, 10.7)
    assert computed.plan(4096, 4096, 16, H200).parts == 2


SHAPES = [
    (6144, 4096, 16), (4096, 14336, 16), (1024, 3072, 16), (576, 576, 16), (64, 128, 16), (2880, 2880, 8),
    (28672, 4096, 8), (4096, 4096, 4), (5120, 2880, 4),
]  # fmt: skip
SMALL = CARDS["T4"]._replace(processors=6, memory=49_152 - 1024, shared=49_152, bandwidth=60e9)


@pytest.mark.parametrize("card", [*CARDS.values(), SMALL], ids=[*CARDS, "small"])
def test_plans_of_every_card(card):
    """Tiles fit, take one family of instructions where there are two, and hold whole squares of the stream."""
    for outputs, inputs, bits in SHAPES:
        found = computed.plan(outputs, inputs, bits, card)
        assert all(tile.fits(card.memory) and tile.bits == bits for tile in found.tiles)
        assert all(tile.block_o >= squared_columns(outputs) for tile in found.tiles)
        assert not card.has_groups or len({tile.block_o >= 64 for tile in found.tiles}) == 1
        assert found.parts == 1 or inputs >= 512 * found.parts
        assert bits != 4 or ceil_div(inputs, 256) % found.parts == 0
        served = [tile.blocks * tile.block_n for tile in found.tiles[:-1]]
        assert served == sorted(served) and found.tile(1).block_n == 16 and found.tile(64).block_n == 64


def test_a_card_without_room_is_refused():
    with pytest.raises(ValueError, match="card: 8192 bytes of shared memory hold no tile"):
        computed.plan(4096, 4096, 4, H200._replace(memory=8192))


FACTS = dict(
    name="NVIDIA L40S", major=8, minor=9, multi_processor_count=142, shared_memory_per_block_optin=101_376,
    shared_memory_per_multiprocessor=102_400, max_threads_per_multi_processor=1536, L2_cache_size=96 << 20,
)  # fmt: skip
CLOCKS = dict(memory_clock_rate=9_001_000, memory_bus_width=384, clock_rate=2_520_000)


@pytest.fixture
def facts(monkeypatch):
    """Sets what a driver tells."""

    def tell(**told):
        card_of.cache_clear()
        skinny_gemm._plan.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**told))
        return torch.device("cuda", 0)

    yield tell
    card_of.cache_clear()
    skinny_gemm._plan.cache_clear()


def test_a_card_by_its_driver(facts):
    card = card_of(facts(**FACTS, **CLOCKS))
    assert card.bandwidth == 2 * 9.001e9 * 384 / 8 and card.clock == 2.52e9
    assert card[:6] == ("NVIDIA L40S", (8, 9), 142, 101_376, 102_400, 1536) and not card.has_groups
    silent = card_of(facts(**FACTS))
    assert silent.bandwidth == 142 * module.SHARE and silent.clock == module.CLOCK
    computed.plan(4096, 4096, 16, silent)


def test_a_card_is_tuned_computed_or_measured(facts, monkeypatch, tmp_path):
    monkeypatch.setattr(skinny_gemm, "tuned_file", lambda device: tmp_path / "plans.json")
    monkeypatch.setattr(skinny_gemm, "_tuned", lambda device: {})
    hopper = FACTS | dict(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232_448)
    device = facts(**hopper, **CLOCKS)
    assert skinny_gemm._plan(4096, 4096, "", torch.bfloat16, device) == plan(4096, 4096)
    assert skinny_gemm._plan(4096, 4096, "Nibbles 128 0 1", torch.int32, device) == packed_plan(4096, 4096, 4)
    assert skinny_gemm.source_of_plans(device) == "the built-in ones, tuned on an H200"
    device = facts(**FACTS, **CLOCKS)
    for kind, bits in (("", 16), ("Nibbles 128 0 1", 4)):
        wanted = computed.plan(4096, 4096, bits, card_of(device))
        assert skinny_gemm._plan(4096, 4096, kind, torch.bfloat16, device) == wanted
    assert "computed, not measured, from the facts of this GPU (142 m" in skinny_gemm.source_of_plans(device)
    (tmp_path / "plans.json").write_text("{}")
    assert skinny_gemm.source_of_plans(device).startswith(
        f"tuned on this GPU, {tmp_path / 'plans.json'}; for other shapes"
    )
