"""The likeliest tokens against a slow meaning in Python; the kernel against the operator's plain-PyTorch form.

Without a GPU the kernel runs in Triton's interpreter, in float32; ``pytest -m gpu`` runs it on a CUDA device.
"""

import math

import pytest
import torch
from counters import all_zero
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GPU, places

from spec_compile.drafters.recycle import LOW, renew
from spec_compile.kernels import top_logits
from spec_compile.kernels.top_logits import launch_likeliest, likeliest
from spec_compile.kernels.trees import launch_renew

PLACES = places(torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered")  # in NumPy
INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, INF, -INF, NAN, 3e38, -3e38, 1e-40]


def slow(row, k, temperature):
    """[(id, log-probability)] of one row, in Python's own floats and order."""
    largest = torch.finfo(torch.float32).max
    row = [-INF if math.isnan(x) else min(x, largest) for x in row]
    peak = max(row)
    below = [x - peak if x - peak >= -largest else -INF for x in row]  # NaN, where all are -inf, becomes -inf
    total = sum(math.exp(x / temperature) for x in below)
    order = sorted(range(len(row)), key=lambda i: -row[i])[:k]
    return [(i, below[i] / temperature - math.log(total) if total else -INF) for i in order]


def check(found, logits, k, temperature):
    logprobs, ids = (x.cpu() for x in found)
    assert logprobs.dtype == torch.float32 and ids.dtype == torch.int64
    assert logprobs.shape == ids.shape == (len(logits), k)
    rows = [slow(row, k, temperature) for row in logits.float().tolist()]
    assert ids.tolist() == [[i for i, _ in row] for row in rows]
    expected = torch.tensor([[logprob for _, logprob in row] for row in rows], dtype=torch.float32).view(-1, k)
    torch.testing.assert_close(logprobs, expected, rtol=2e-6, atol=2e-6)
    assert (logprobs <= 0).all()


def launch(place, logits, k, temperature, **how):
    """The kernel's answer, checked to leave its counters zero."""
    found = top_logits.launch(logits.to(place[0]), k, temperature, **how)
    assert all_zero()
    return found


@st.composite
def cases(draw):
    """Logits [R, V], many of them equal or special; k, temperature. Few shapes: the kernel is compiled for each."""
    vocab = draw(st.sampled_from([1, 5, 16, 17, 40, 70]))
    number = st.sampled_from(SPECIAL) | st.floats(-8, 8, width=16) if draw(st.booleans()) else st.integers(-2, 2)
    row = st.lists(number.map(float), min_size=vocab, max_size=vocab)
    logits = torch.tensor(draw(st.lists(row, min_size=1, max_size=3)))
    return logits, min(vocab, draw(st.sampled_from([1, 3, 16]))), draw(st.sampled_from([1.0, 0.5, 3.0]))


@settings(max_examples=100 if GPU else 25)
@given(cases())
def test_the_operator_and_the_kernel(place, case):
    logits, k, temperature = case
    logits = logits.to(place[1])
    check(top_logits.top_logits(logits, k, temperature), logits, k, temperature)
    check(launch(place, logits, k, temperature, block=16), logits, k, temperature)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 65])
def test_ends_of_parts(place, vocab):
    """The largest logit lies first, last, and on both sides of each part's end."""
    logits = torch.randn(vocab, vocab).fill_diagonal_(9).to(place[1])
    k = min(vocab, 3)
    check(launch(place, logits, k, 0.7, block=16), logits, k, 0.7)


@pytest.mark.parametrize("value", [0.0, -3.0, -INF, INF, NAN])
def test_equal_logits(place, value):
    """Every id of a row is as good: the lowest ones, in order, over the parts' ends."""
    logits = torch.full((2, 100), value).to(place[1])
    found = launch(place, logits, 16, 1.0, block=16)
    check(found, logits, 16, 1.0)
    assert found[1].tolist() == [list(range(16))] * 2


@settings(max_examples=100 if GPU else 25, deadline=None)
@given(cases(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_likeliest_token(place, case, nodes, rng):
    """Banned tokens count as -inf after the nodes that say so; the lower id comes first."""
    rows = case[0].nan_to_num(0.0, math.inf, -math.inf)
    logits = torch.stack([rows.roll(shift, 1) for shift in range(nodes)], 1).to(place[1])
    banned, applies = (torch.tensor([[rng.random() < 0.5 for _ in range(size)] for _ in rows]) for size in (
        rows.shape[1], nodes))  # fmt: skip
    right = logits.float().masked_fill(applies[:, :, None] & banned[:, None], -INF).argmax(-1)
    assert torch.equal(likeliest(logits, banned, applies), right)
    there = (x.to(place[0]) for x in (logits, banned, applies))
    assert torch.equal(launch_likeliest(*there, block=16).cpu(), right)
    assert all_zero()


@pytest.mark.parametrize("strides", [(100, 1), (1, 3), (160, 2)])
def test_strides(place, strides):
    memory = torch.full((500,), INF).to(place[1])
    logits, there = (x.as_strided((3, 50), strides) for x in (memory, memory.to(place[0])))
    logits.copy_(torch.randn(3, 50))
    there.copy_(logits)
    check(launch(place, there, 3, 1.0, block=16), logits, 3, 1.0)
    check(top_logits.top_logits(there, 3, 1.0), logits, 3, 1.0)


def same_table(found, right):
    """The same candidates, whose quantised log-probabilities may round to the next number."""
    found = found.cpu()
    assert torch.equal(found >> 8, right >> 8) and ((found & LOW) - (right & LOW)).abs().max() <= 1


@settings(max_examples=100 if GPU else 25, deadline=None)
@given(st.lists(st.integers(-1, 5), min_size=1, max_size=20), cases())
def test_rows_of_a_table(place, tokens, case):
    """Of equal tokens the last counts; ids outside of the table and logits of -inf leave no candidate."""
    row, k, _ = case
    logits = row[torch.arange(len(tokens)) % len(row)].roll(1, 0) + torch.arange(len(tokens))[:, None] % 3
    logits, tokens, table = logits.to(place[1]), torch.tensor(tokens), torch.full((6, k), 77, dtype=torch.int32)
    there = table.to(place[0])
    launch_renew(there, tokens.to(place[0]), logits.to(place[0]), block=16)
    assert all_zero()
    renew(table, tokens, logits)
    same_table(there, table)


def test_a_table_is_written_as_by_an_operator():
    table = torch.full((30, 4), -1, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.spec_compile.recycle_renew.default, (table, torch.tensor([3, -1, 3]), torch.randn(3, 40))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 1000])
def test_a_table_in_a_graph(rows):
    """Many rows share a token: with 1,000 rows and 300 tokens, a row has others of its token in several blocks."""
    table = torch.full((50000, 8), -1, dtype=torch.int32, device="cuda")
    tokens, logits = torch.zeros(rows, dtype=torch.int64, device="cuda"), torch.randn(rows, 50257, device="cuda").half()
    renew(table, tokens, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        renew(table, tokens, logits)
    for _ in range(3):
        tokens.random_(-1, 300)
        logits.normal_()
        right = table.cpu()
        graph.replay()
        renew(right, tokens.cpu(), logits.cpu())
        same_table(table, right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_operator(dtype):
    logits = torch.randn(3, 40).to(dtype)
    torch.library.opcheck(torch.ops.spec_compile.top_logits.default, (logits, 4, 0.8))
    check(torch.ops.spec_compile.top_logits(logits, 4, 0.8), logits, 4, 0.8)
    logprobs, ids = torch.ops.spec_compile.top_logits(logits[:0], 4, 1.0)
    assert logprobs.shape == ids.shape == (0, 4)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(logits=torch.zeros(3)), TypeError, "logits"),
        (dict(logits=torch.zeros(2, 9, dtype=torch.int64)), TypeError, "logits"),
        (dict(k=0), ValueError, "k must be from 1 to 16"),
        (dict(k=17), ValueError, "k must be from 1 to 16"),
        (dict(logits=torch.zeros(2, 3)), ValueError, "at most the 3 logits"),
        (dict(temperature=0.0), ValueError, "temperature"),
        (dict(temperature=NAN), ValueError, "temperature"),
    ],
)
def test_refused(change, error, words):
    arguments = dict(logits=torch.zeros(2, 30), k=4, temperature=1.0) | change
    with pytest.raises(error, match=words):
        torch.ops.spec_compile.top_logits(*arguments.values())


MODELS = [(1, 128256, 1), (4, 128256, 4), (10, 32000, 10), (64, 50257, 16), (3, 262144, 16)]


def same(found, expected):
    assert torch.equal(found[1].cpu(), expected[1].cpu())
    torch.testing.assert_close(found[0].cpu(), expected[0].cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows, vocab, k", MODELS)
def test_models(rows, vocab, k, dtype):
    """bf16 logits are full of ties. The same bits every time."""
    logits = (3 * torch.randn(rows, vocab)).to(dtype)
    found = [torch.ops.spec_compile.top_logits(logits.cuda(), k, 0.9) for _ in range(20)]
    same(found[0], top_logits.top_logits(logits, k, 0.9))
    assert all(torch.equal(a, b) for again in found for a, b in zip(again, found[0]))


@pytest.mark.gpu
def test_more_than_2_to_31_logits():
    logits = torch.zeros(1 << 14, (1 << 17) + 16, dtype=torch.bfloat16, device="cuda")
    logits[-1, 70000] = 4
    logprobs, ids = torch.ops.spec_compile.top_logits(logits, 2, 1.0)
    assert ids[-1].tolist() == [70000, 0] and ids[0].tolist() == [0, 1]
    assert float(logprobs[-1, 0]) == pytest.approx(4 - math.log(logits.shape[1] - 1 + math.exp(4)), abs=1e-5)


@pytest.mark.gpu
def test_captured():
    """A graph in which several run in a row, replayed on new logits; and under torch.compile."""
    logits = torch.randn(4, 128256, device="cuda", dtype=torch.bfloat16)
    other = torch.randn(9, 5000, device="cuda")

    def answers(op, first, second):
        return [op(first, 4, 1.0), op(second, 16, 2.0), op(first.t().contiguous().t(), 1, 1.0)]

    def run():
        return answers(torch.ops.spec_compile.top_logits, logits, other)

    def expected():
        return answers(top_logits.top_logits, logits.cpu(), other.cpu())

    for found, right in zip(torch.compile(run, fullgraph=True)(), expected()):
        same(found, right)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(5):
        logits.normal_()
        other.normal_()
        graph.replay()
        for one, right in zip(found, expected()):
            same(one, right)


@pytest.mark.gpu
def test_never_waits():
    logits = torch.randn(4, 32000, device="cuda")
    torch.ops.spec_compile.top_logits(logits, 4, 1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.spec_compile.top_logits(logits, 4, 1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
