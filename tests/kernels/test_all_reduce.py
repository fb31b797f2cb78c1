"""The kernel that sums the parts of all ranks: in Triton's interpreter, in float32.

One process plays all ranks, first as each sender and then as each receiver; or processes with memory in common wait for
each other as GPUs do. ``tests/support/all_reduce_on_gpus.py`` checks the same on GPUs.
"""

import random
import time
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GPU, INTERPRETER
from ranks import run_ranks

from spec_compile.kernels import all_reduce, all_reduce_kernel
from spec_compile.kernels.linear import skinny_gemm
from spec_compile.kernels.linear.plans import squared_columns
from spec_compile.kernels.linear.product import Product
from spec_compile.kernels.linear.product_ops import plain_stream, product_to_stream, stream_after

pytestmark = INTERPRETER
GROUP = "a group of tests"
STEPS = dict(reduce=False, receive=False), dict(send=False, receive=False), dict(send=False, reduce=False)
"""What one process does as each rank, one after another: it sends, reduces in two shots, and receives."""
SHOTS = {1: float("inf"), 2: -1.0}
"""Values of `HOP_BYTES` with which all sums take so many shots."""


@contextmanager
def manner(shots):
    """A context in which all sums take so many shots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_reduce, "HOP_BYTES", SHOTS[shots])
        yield


def exchanges_of(ranks, words):
    """An exchange of each rank; all memory is this process's."""
    slots = [torch.empty(2, ranks + 1, words, dtype=torch.int32).share_memory_() for _ in range(ranks)]
    addresses = [each.data_ptr() for each in slots]
    exchanges = [all_reduce.make_exchange(each, rank, addresses) for rank, each in enumerate(slots)]
    for each in exchanges:
        each.state.share_memory_()
    return exchanges


def in_order(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def summed(exchanges, parts, behind=(), block=None, dtype=None):
    """The sum that each rank has of the parts [R, C], in a dtype (None: theirs); with a residual, the weight of a norm
    and its offset behind it, the stream, scaled and squares."""
    outs = [torch.empty_like(part, dtype=dtype) for part in parts]
    ends = [(stream_after(*behind), squared_columns(parts[0].shape[1])) if behind else () for _ in parts]
    for step in STEPS:
        for exchange, part, out, end in zip(exchanges, parts, outs, ends):
            all_reduce_kernel.launch(exchange, part, out, *end, block=block, **step)
    for exchange in exchanges:
        assert (exchange.slots == -1).all() and exchange.state[1] == 0 == exchange.late[0]
    return [(out, end[0].scaled, end[0].squares) if end else out for out, end in zip(outs, ends)]


@settings(max_examples=12)
@given(
    ranks=st.sampled_from([2, 3, 4, 8]), rows=st.integers(1, 4), size=st.integers(1, 700),
    turns=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3), block=st.sampled_from([None, 64, 1024]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_sums_in_the_order_of_the_ranks(ranks, rows, size, turns, block, seed):
    """turns: the shots of each of several sums."""
    torch.manual_seed(seed)
    exchanges = exchanges_of(ranks, 6304)
    for turn, shots in enumerate(turns):
        parts = list(torch.randn(ranks, rows, size).exp())
        with manner(shots):
            outs = summed(exchanges, parts, block=block)
        for out in outs:
            assert torch.equal(out, in_order(parts))
        assert all(exchange.state[0] == turn + 1 for exchange in exchanges)


@settings(max_examples=8)
@given(
    ranks=st.integers(2, 4), rows=st.integers(1, 3), size=st.sampled_from([64, 65, 576, 1000, 2048, 4096]),
    block=st.sampled_from([None, 64, 256]), offset=st.sampled_from([0.0, 1.0]), shots=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_stream_and_norm_after_the_sum(ranks, rows, size, block, offset, shots, seed):
    torch.manual_seed(seed)
    parts, residual, weight = list(torch.randn(ranks, rows, size)), torch.randn(rows, size), torch.randn(size)
    with manner(shots):
        results = summed(exchanges_of(ranks, 1 << 15), parts, (residual, weight, offset), block)
    want = plain_stream(in_order(parts), residual, weight, offset)
    for got in results:
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        torch.testing.assert_close(got[2], want[2])
        assert all(torch.equal(a, b) for a, b in zip(got, results[0]))


@pytest.mark.parametrize("size, blocks", [(72, (64, 512)), (2048, (256, 512))])
def test_a_row_has_the_same_bits_in_all_launches(size, blocks):
    parts, residual, weight = list(torch.randn(2, 7, size)), torch.randn(7, size), torch.randn(size)
    exchanges = exchanges_of(2, 1 << 14)
    every = summed(exchanges, parts, (residual, weight, 0.0))[0]
    for shots, rows in ((2, slice(0, 7)), (1, slice(0, 1)), (2, slice(3, 5)), (1, slice(6, 7))):
        some = [part[rows] for part in parts]
        for block in blocks:
            with manner(shots):
                got = summed(exchanges, some, (residual[rows], weight, 0.0), block)[1]
            assert all(torch.equal(a, b[rows]) for a, b in zip(got, every))


def test_one_gpu_has_the_same_bits():
    """A sum with nothing to add gives what the product's own kernel gives."""
    x, weight = torch.randn(3, 64), torch.randn(48, 64)
    behind = torch.randn(3, 48), torch.randn(48), 1.0
    tile, outs = skinny_gemm.ProductTile(16, 32, 16, 4, 1), torch.empty(2, 3, 48)
    product, first, second = torch.empty(3, 48), stream_after(*behind), stream_after(*behind)
    skinny_gemm.launch(Product(x, weight), product, 1, tile)
    skinny_gemm.launch(Product(x, weight, after=first), outs[0], 1, tile)
    all_reduce_kernel.all_reduce_add(None, product, outs[1], second, squared_columns(48))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(first.scaled, second.scaled) and torch.equal(first.squares, second.squares)


@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_products_send_for_themselves(parts, shots, monkeypatch):
    """Programs of a product, some of which share columns, send what the product is, with a bias of one rank."""
    monkeypatch.setattr(all_reduce, "HOP_BYTES", SHOTS[shots])
    ranks, exchanges = 3, exchanges_of(3, 512)
    tile, behind = skinny_gemm.ProductTile(32, 64, 16, 4, 1), (torch.randn(3, 80), torch.randn(80), 1.0)
    for _ in range(2):
        x, weights, bias = torch.randn(ranks, 3, 512), torch.randn(ranks, 80, 512), [torch.randn(80), None, None]
        products = torch.empty(ranks, 3, 80)
        for exchange, product, *factors in zip(exchanges, products, x, weights, bias):
            skinny_gemm.launch(Product(*factors), product, parts, tile)
            skinny_gemm.launch(Product(*factors, after=exchange), None, parts, tile)
        want = plain_stream(in_order(products), *behind)
        for exchange in exchanges:
            all_reduce_kernel.launch(exchange, None, torch.empty(3, 80), receive=False)
        for exchange in exchanges:
            out, each = torch.empty(3, 80), stream_after(*behind)
            all_reduce_kernel.launch(exchange, None, out, each, squared_columns(80), reduce=False)
            assert torch.equal(out, want[0]) and torch.equal(each.scaled, want[1])
            torch.testing.assert_close(each.squares, want[2])
    assert all((each.slots == -1).all() and each.state.tolist()[:2] == [2, 0] for each in exchanges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shots", [1, 2])
def test_numbers_that_are_no_numbers(shots, dtype):
    """Every word arrives, even one that looks as if nobody had sent it, as a part or as a sum."""
    unsent = torch.full((1,), -1, dtype=torch.int32).view(torch.float32)
    odd = torch.cat([torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45]), unsent])
    parts = [odd.repeat_interleave(8)[None], odd.repeat(8)[None]]
    with manner(shots):
        outs = summed(exchanges_of(2, 64), parts, dtype=dtype)
    for out in outs:
        torch.testing.assert_close(out, in_order(parts).to(dtype), rtol=0, atol=0, equal_nan=True)
        signs = torch.signbit(in_order(parts)) != torch.signbit(out)
        assert not signs[~out.isnan()].any()


def wait_for_each_other(rank, exchanges, seed):
    """Sums of many sizes, by several launches where the memory is small, while this rank sleeps now and then."""
    pause, numbers, bad = random.Random(rank), torch.Generator().manual_seed(seed), 0
    for turn in range(20):
        size = (1, 700, 200, 320, 512)[turn % 5]
        parts = torch.randn(len(exchanges), 1, size, generator=numbers)
        if pause.random() < 0.3:
            time.sleep(pause.random() * 0.05)
        if turn % 5 < 3:
            out = all_reduce_kernel.all_reduce(exchanges[rank], parts[rank])
        else:  # a product with the unit matrix, of which programs send as they are done
            out, unit = torch.empty(8, 40), torch.eye(40)
            parts = parts.flatten()[: len(parts) * 320].view(-1, 8, 40)
            sent = Product(parts[rank], unit, after=exchanges[rank])
            skinny_gemm.launch(sent, None, 1, skinny_gemm.ProductTile(16, 32, 16, 4, 1))
            behind = stream_after(torch.zeros(8, 40), unit[0], 0.0)
            all_reduce_kernel.all_reduce_add(exchanges[rank], None, out, behind, squared_columns(40))
        bad += int((out != in_order(parts)).sum())
    return bad, int(exchanges[rank].state[0])


@pytest.mark.sweep("2-1 3-2")
@pytest.mark.parametrize("shots", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_processes_wait_for_each_other(ranks, shots, tmp_path, monkeypatch):
    monkeypatch.setattr(all_reduce, "HOP_BYTES", SHOTS[shots])
    results = run_ranks(ranks, wait_for_each_other, exchanges_of(ranks, 512), 7, rendezvous=tmp_path / "meeting")
    assert results == [(0, 24)] * ranks  # the largest takes two launches


def test_shots_by_ranks_and_bytes():
    """Two shots where the bytes that they save take longer than a hop: 1, 7.5 and 22.75 a number."""
    assert all_reduce.bytes_saved(4, 4096) == 30_720
    exchanges = {ranks: exchanges_of(ranks, 4)[0] for ranks in (2, 4, 8)}
    for ranks, saved in ((2, 1.0), (4, 7.5), (8, 22.75)):
        first = int(all_reduce.HOP_BYTES / saved) + 1
        assert [exchanges[ranks].shots(count) for count in (1, first - 2, first + 1)] == [1, 1, 2]


def test_large_sums_are_a_librarys():
    exchange = exchanges_of(2, 64)[0]
    sizes = (512, torch.float32), (513, torch.float32), (0, torch.float32), (8, torch.float64)
    taken = [all_reduce_kernel.supports(exchange, torch.empty(size, dtype=dtype)) for size, dtype in sizes]
    assert taken == [True, False, False, False]


def test_product_of_a_rank(monkeypatch):
    """The op without a kernel, where the other rank's part is one."""
    monkeypatch.setattr(all_reduce, "sum_of_parts", lambda part, group_name: part + 1)
    x, weight, bias = torch.randn(2, 3, 32), torch.randn(48, 32), torch.randn(48)
    residual, norm = torch.randn(2, 3, 48), torch.randn(48)
    want = product_to_stream(x, weight, bias + 1, residual, norm, 1.0)
    for got, expected in zip(product_to_stream(x, weight, bias, residual, norm, 1.0, group_name=GROUP), want):
        torch.testing.assert_close(got, expected)
    torch.library.opcheck(product_to_stream, (x, weight, bias, residual, norm, 1.0), dict(group_name=GROUP))


def test_a_rank_that_did_not_come():
    exchange = exchanges_of(2, 64)[1]
    all_reduce.EXCHANGES[GROUP] = exchange
    try:
        assert all_reduce.missing_rank(GROUP) is None
        all_reduce.set_deadline(GROUP, 1.5)
        assert exchange.state.tolist() == [0, 0, 1_500_000_000]
        exchange.late[:] = torch.tensor([1, 5])
        assert all_reduce.missing_rank(GROUP) == 0
    finally:
        all_reduce.release(GROUP)
    assert all_reduce.missing_rank(GROUP) is None and not GPU
