"""The search for plans of matrix products, and the file that keeps them. A GPU is not needed: times are made up."""

import json
from types import SimpleNamespace

import pytest
import torch
from cards import CARDS
from places import ON_GPU

from spec_compile.__main__ import main
from spec_compile.kernels.linear import computed, skinny_gemm, tuned
from spec_compile.kernels.linear.plans import packed_plan, plan, squared_columns
from spec_compile.tools import tune_kernels
from spec_compile.tools import tune_kernels as tune

CARD = CARDS["H200"]
SHAPES = [
    (28672, 4096, "", 16), (4096, 14336, "", 16), (1024, 3072, "", 16), (576, 1536, "", 16),
    (4096, 4096, "PerChannel", 8), (6144, 4096, "Nibbles 128 0 1", 4), (28672, 4096, "Fp8Block 128 128", 8),
]  # fmt: skip


def product(outputs, inputs, kind=""):
    return tune.ProductShape(outputs, inputs, kind, torch.bfloat16, [(torch.empty(0), None)])


def present(outputs, inputs, bits):
    return plan(outputs, inputs) if bits == 16 else packed_plan(outputs, inputs, bits)


@pytest.mark.parametrize("outputs, inputs, kind, bits", SHAPES)
def test_candidates_fit(outputs, inputs, kind, bits):
    tried = list(tune.candidates(product(outputs, inputs, kind), CARD))
    for width, parts, tile in tried:
        assert tile.fitting(CARD.memory) == tile and (tile.block_n, tile.bits) == (width, bits)
        assert tile.block_o >= squared_columns(outputs) and 1 <= parts <= 8
    # A search that ends after the first three has tried the plan of the model.
    mine = computed.plan(outputs, inputs, bits, CARD)
    assert [width for width, _, _ in tried[:3]] == list(tune.WIDTHS) and len(tried) == len({*tried})
    assert tried[:2] == [(rows, mine.parts, mine.tile(rows)._replace(blocks=1)) for rows in (16, 64)]


@pytest.mark.parametrize("outputs, inputs, kind, bits", SHAPES[1:-1])
def test_the_fastest_plan_of_one_order_of_summation(outputs, inputs, kind, bits, monkeypatch):
    """Plans whose rows differ are passed over, and one that gains little is not taken."""
    mine, known = product(outputs, inputs, kind), present(outputs, inputs, bits)
    monkeypatch.setattr(skinny_gemm, "plan_of", lambda x, weight, kind: known)
    monkeypatch.setattr(tune, "card_of", lambda device: CARD)
    checked = []
    monkeypatch.setattr(tune, "same_bits", lambda product, plan: checked.append(plan) or len(checked) > 1)

    def time(product, rows, parts, tile):
        if parts == known.parts and tile == known.tile(rows):
            return 100.0
        return 40.0 + 2 * abs(parts - 2) + tile.block_o / 100 + tile.stages

    outcome = tune.tune(mine, time=time)
    assert outcome.refused == 1 and outcome.plan == checked[1] and outcome.after < outcome.before == 300
    assert [tile.block_n for tile in outcome.plan.tiles] == list(tune.WIDTHS)
    assert len({tile.block_o >= 64 for tile in outcome.plan.tiles}) == 1
    assert tune.tune(mine, time=lambda *args: 100.0).plan is None


def test_a_search_ends_in_time(monkeypatch):
    """After the seconds no tile is timed any more, and the best plan so far is taken."""
    monkeypatch.setattr(skinny_gemm, "plan_of", lambda x, weight, kind: present(4096, 4096, 16))
    monkeypatch.setattr(tune, "card_of", lambda device: CARD)
    monkeypatch.setattr(tune, "same_bits", lambda product, plan: True)
    now = iter(range(100))
    monkeypatch.setattr(tune, "clock", lambda: next(now))
    timed = []
    outcome = tune.tune(
        product(4096, 4096), 3, lambda product, rows, parts, tile: timed.append(tile) or 10 / len(timed)
    )
    assert len(timed) == 3 + 4  # the present plan with 1, 16 and 64 rows, and three tiles, the first with 1 and 16
    assert [tile.block_n for tile in outcome.plan.tiles] == list(tune.WIDTHS)
    now = iter(range(100))
    assert tune.tune(product(4096, 4096), 0, lambda *args: 1.0).plan is None


def test_the_file_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tuned.file_of("NVIDIA H200", "3.6.0")
    assert path == tmp_path / "spec_compile" / "plans" / "NVIDIA-H200_triton-3.6.0.json"
    assert tuned.read(path) == {}
    names = [tuned.name_of("", torch.bfloat16, 4096, 4096), tuned.name_of("Nibbles 128 0 1", torch.int32, 4096, 4096)]
    plans = dict(zip(names, (plan(4096, 4096), packed_plan(4096, 4096, 4)), strict=True))
    for name, each in plans.items():
        tuned.add(path, {name: each}, (35.125, 33.0))
    assert tuned.read(path) == plans and list(path.parent.iterdir()) == [path]
    assert [entry[2:] for entry in json.loads(path.read_text()).values()] == [[35.12, 33.0]] * 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tuned.file_of("a", "b").parts[-4:-1] == (".cache", "spec_compile", "plans")


DAMAGED = "{", "[]", '{"a": 1}', '{"a": [1, []]}', '{"a": [1, [[64]]]}', '{"a": [0, [[1, 2, 3, 4, 5]]]}'


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "plans.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plans.json: expected plans.*tune-kernels again"):
        tuned.read(path)
    tuned.add(path, {"a": plan(64, 512)})
    assert json.loads(path.read_text()).keys() == {"a"}


def test_a_kernel_takes_the_tuned_plan(monkeypatch):
    device, faster = torch.device("cuda", 7), packed_plan(64, 512, 8)
    monkeypatch.setattr(skinny_gemm, "card_of", lambda device: CARD)
    monkeypatch.setattr(
        skinny_gemm, "_tuned", lambda device: {tuned.name_of("PerChannel 0", torch.int8, 4096, 4096): faster}
    )
    monkeypatch.setattr(skinny_gemm, "_plan", skinny_gemm._plan.__wrapped__)
    assert skinny_gemm._plan(4096, 4096, "PerChannel 0", torch.int8, device) == faster
    assert skinny_gemm._plan(4096, 4096, "PerChannel 0", torch.float8_e4m3fn, device) == packed_plan(4096, 4096, 8)
    assert skinny_gemm._plan(4096, 4096, "", torch.bfloat16, device) == plan(4096, 4096)


@pytest.mark.parametrize(
    "change, arguments, text",
    [
        ({}, ["--device", "cpu"], "--device: kernels are tuned on the GPU that runs them; expected cuda, got cpu"),
        ({"gpu": False}, [], "on which torch sees no GPU"),
        ({}, ["--seconds", "0"], "--seconds: expected a number above 0, got 0.0; 90 suffice"),
        ({"gpu": True, "lack": "Triton is not installed"}, [], "because Triton is not installed"),
        ({"gpu": True}, [], "--model: there is no folder ./nowhere"),
    ],
)
def test_errors_of_the_command(change, arguments, text, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: change.get("gpu", False))
    monkeypatch.setattr(skinny_gemm, "why_not_on", lambda device: change.get("lack"))
    assert main(["tune-kernels", "--model", "./nowhere", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_line_of_a_product():
    outcome = SimpleNamespace(before=10.0, after=8.0, plan=plan(64, 512), refused=1)
    line = tune_kernels._line("16_bits 64x512", outcome)
    assert "10.0 us for 1, 16 and 64 rows -> 8.0 us" in line and "differed in 1" in line


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=ON_GPU) for kind in ("", "Int8Weight")])
def test_a_search_on_a_gpu(kind):
    weight = torch.randn(2048, 1024, device="cuda").bfloat16()
    weights = [(weight, None)]
    if kind:
        weights = [((weight * 40).to(torch.int8), torch.ones(2048, 1, device="cuda"))]
    mine = tune.ProductShape(2048, 1024, kind, torch.bfloat16, weights)
    outcome = tune.tune(mine)
    assert outcome.refused == 0 and 0 < outcome.after <= outcome.before
    assert outcome.plan is None or tune.same_bits(mine, outcome.plan)
