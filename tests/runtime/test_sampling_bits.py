"""Sums that decide tokens: the kernels against torch, and the same bits for a row alone and among others.

Without a GPU the kernels run in Triton's interpreter; ``pytest -m gpu`` runs them on a CUDA device, at the sizes of
vocabularies.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from places import GPU, ON_GPU
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from spec_compile.kernels import row_scan
from spec_compile.runtime.answer import Answer
from spec_compile.runtime.verify.host import HostAcceptor
from spec_compile.runtime.verify.processors import OF_SCORES, RowInvariant, row_invariant
from spec_compile.runtime.verify.sample import DrawInRound, accept_chain, draw
from spec_compile.tree import Tree, ancestry

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered")  # in NumPy
DEVICE = torch.device("cuda" if GPU else "cpu")
VOCABS, ROWS = ((100, 49152, 50257, 128256, 151936), (1, 2, 16, 64, 192)) if GPU else ((100, 9001), (1, 2, 5))
INF, NAN = math.inf, math.nan
KERNELS = {
    "sum": (row_scan.launch_sum, row_scan.row_sum),
    "cumsum": (row_scan.launch_cumsum, row_scan.row_cumsum),
    "softmax": (row_scan.launch_softmax, row_scan.row_softmax),
    "log_softmax": (
        lambda x, dtype=None: row_scan.launch_softmax(x, dtype, True),
        lambda x, dtype=None: row_scan.row_softmax(x, dtype, True),
    ),
}
"""By name: the kernels, and what they mean."""
WARPERS = {
    "temperature": lambda: TemperatureLogitsWarper(0.7),
    "top-k": lambda: TopKLogitsWarper(50),
    "top-p": lambda: TopPLogitsWarper(0.9),
    "top-p of many": lambda: TopPLogitsWarper(0.999),
    "top-h": lambda: TopHLogitsWarper(0.4),
    "min-p": lambda: MinPLogitsWarper(0.05),
    "min-p of some": lambda: MinPLogitsWarper(0.9, min_tokens_to_keep=20),
    "typical": lambda: TypicalLogitsWarper(0.9),
    "epsilon": lambda: EpsilonLogitsWarper(3e-4),
    "eta": lambda: EtaLogitsWarper(3e-4, device=str(DEVICE)),
    "finite": lambda: InfNanRemoveLogitsProcessor(),
    "normalisation": lambda: LogitNormalization(),
    "suppressed": lambda: SuppressTokensLogitsProcessor([3, 5], device=str(DEVICE)),
}


def gpu(function):
    for mark in ON_GPU:
        function = mark(function)
    return function


def scores_of(rows, vocab):
    """Logits as a model in bfloat16 gives them, full of equal ones."""
    return (3 * torch.randn(rows, vocab)).bfloat16().float().to(DEVICE)


def same(got, want):
    """The same bits, NaN included."""
    return got.dtype == want.dtype and torch.equal(got.nan_to_num(123.0), want.nan_to_num(123.0))


# --- the kernels against torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 4095), (1, 4096), (2, 4097), (2, 2, 9001), (33,)])
def test_kernels(name, shape, dtype):
    launch, meaning = KERNELS[name]
    x = torch.randn(shape, dtype=dtype, device=DEVICE)
    accuracy = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(launch(x), meaning(x.cpu().double()).to(DEVICE, dtype), **accuracy)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "row",
    [[-INF, 1.0, -INF, 2.0], [-INF] * 4, [NAN, 1.0, 2.0, 3.0], [INF, 1.0, 2.0, 3.0], [INF, -INF, 1.0, 1.0],
     [NAN, -INF, -INF, -INF], [3e38, 3e38, -3e38, 1.0], [0.0, -0.0, -0.0, 0.0]],
)  # fmt: skip
@pytest.mark.parametrize("times", [1, 2100])
def test_special_entries(name, row, times):
    """In each part of a row, and in its last part alone."""
    launch, meaning = KERNELS[name]
    x = torch.tensor(row, dtype=torch.float64, device=DEVICE).repeat(times)
    rows = torch.stack([x, x.where(torch.arange(len(x), device=DEVICE) >= len(x) - 4, -1.0)])
    torch.testing.assert_close(launch(rows), meaning(rows.cpu()).to(DEVICE), equal_nan=True)


@pytest.mark.parametrize("name", KERNELS)
def test_dtypes_and_strides(name):
    launch, meaning = KERNELS[name]
    x = torch.randn(6, 50, dtype=torch.bfloat16, device=DEVICE)[::2, 3:40] if GPU else torch.randn(6, 50)[::2, 3:40]
    got = launch(x, torch.float64)
    assert got.dtype == torch.float64 and got.is_contiguous()
    torch.testing.assert_close(got, meaning(x.cpu().double()).to(DEVICE))
    assert launch(x).dtype == x.dtype


@pytest.mark.parametrize("op", [row_scan.row_sum, row_scan.row_cumsum, row_scan.row_softmax])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_operators(op, dtype):
    torch.library.opcheck(op, (torch.randn(2, 3, 9), dtype))


# --- the same bits for a row alone and among others


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_row_alone_has_the_bits_of_a_row_among_others(name, vocab, dtype):
    """Also if it begins at an odd address, as a view of a row does."""
    launch = KERNELS[name][0]
    x = torch.randn(max(ROWS), vocab, device=DEVICE).to(dtype)
    every = launch(x)
    for rows in ROWS:
        assert torch.equal(launch(x[:rows].clone()), every[:rows])
    for row in range(0, len(x), max(len(x) // 8, 1)):
        assert torch.equal(launch(x[row]), every[row])
    odd = torch.empty(vocab + 1, dtype=dtype, device=DEVICE)[1:].copy_(x[0])
    assert torch.equal(launch(odd), every[0])


@gpu
@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_warpers(name, vocab):
    """What a warper leaves of a row, and what is drawn from it."""
    scores, warper = scores_of(max(ROWS), vocab), WARPERS[name]()
    u = torch.rand(len(scores), dtype=torch.float64, device=DEVICE)

    def process(rows):
        with row_invariant(DEVICE, [warper]):
            left = warper(None, scores[rows].clone())
            weights = left.double().softmax(dim=-1)
            return left, weights, draw(weights, u[rows])

    every = process(slice(None))
    assert (every[2] < vocab).all()
    for rows in [*(slice(0, rows) for rows in ROWS), *(slice(row, row + 1) for row in range(0, len(scores), 7))]:
        for part, whole in zip(process(rows), every):
            assert same(part, whole[rows])


@gpu
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_chain_among_others(vocab):
    """A round takes all rows, the host those that go on."""
    target, draft = (scores_of(16 * 5, vocab).double().softmax(dim=1).view(16, 5, vocab) for _ in range(2))
    target, draft = (target + 3 * draft) / 4, draft.float()
    tokens = draft.flatten(0, 1).multinomial(1).view(16, 5).roll(1, dims=1)
    real = torch.ones_like(tokens, dtype=torch.bool)
    u = torch.rand(16, 5, dtype=torch.float64, device=DEVICE)
    with row_invariant(DEVICE, []):
        every = accept_chain(target, draft, tokens, real, u)
        assert len(every.count.unique()) > 1
        for rows in ([3], [0, 7, 15]):
            some = accept_chain(*(part[rows] for part in (target, draft, tokens, real, u)))
            assert torch.equal(some.count, every.count[rows]) and torch.equal(some.tokens, every.tokens[rows])


@pytest.mark.parametrize("is_drawn", [False, True], ids=["likely drafts", "drawn drafts"])
@pytest.mark.parametrize("name", WARPERS)
def test_the_routes_agree(name, is_drawn):
    """A round, which processes every node of every row, and the host give the same tokens for a seed."""
    rows, nodes, vocab, warper = 16, 5, VOCABS[-1], WARPERS[name]()
    draft = (2 * scores_of(rows * nodes, vocab)).softmax(dim=1).view(rows, nodes, vocab)
    tokens = draft.flatten(0, 1).multinomial(1).view(rows, nodes)
    likelier = torch.full((rows, nodes, 1), 1.0 if is_drawn else 12.0, device=DEVICE)
    logits = draft.log().scatter_add(2, tokens[:, :, None], likelier).bfloat16()
    tokens, parents = tokens.roll(1, dims=1), torch.arange(-1, nodes - 1, device=DEVICE).expand(rows, -1)
    tree = Tree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool), draft if is_drawn else None)
    state = SimpleNamespace(
        forbid_early_eos=lambda logits, depth: logits, seed=torch.tensor([7], device=DEVICE),
        numbers=torch.arange(rows, device=DEVICE),
        lengths=torch.full((rows,), 3, device=DEVICE), prompt_lengths=torch.full((rows,), 4, device=DEVICE),
    )  # fmt: skip
    answer = Answer(torch.zeros(rows, 4, dtype=torch.int64), 4 + nodes, [], 0)
    expected = HostAcceptor(answer, LogitsProcessorList([warper]), seed=7)(tree, logits)
    accepted = DrawInRound([warper])(state, tree, *ancestry(parents), logits)
    assert torch.equal(accepted.count.cpu(), expected.count) and expected.count.max() > 1
    reached = torch.arange(nodes) < expected.count[:, None]
    assert torch.equal(accepted.tokens.cpu()[reached], expected.tokens[reached])


@gpu
@pytest.mark.parametrize("name", [name for name in WARPERS if name not in ("top-h", "eta")])
def test_captured(name):
    """A graph replayed on new scores gives the bits of the same calls made one at a time, and nothing waits."""
    scores, warper = scores_of(16, 128256), WARPERS[name]()
    u = torch.rand(16, dtype=torch.float64, device=DEVICE)

    def run():
        with row_invariant(DEVICE, [warper]):
            left = warper(None, scores)
            return left, draw(left.double().softmax(dim=-1), u)

    for _ in range(2):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        scores.copy_(scores_of(16, 128256))
        graph.replay()
        assert all(same(got, want) for got, want in zip(captured, run()))


# --- what is replaced


def test_every_processor_of_scores_is_tested():
    assert {type(make()).__name__ for make in WARPERS.values()} == OF_SCORES


ORDERED = {
    "sum", "nansum", "mean", "prod", "cumsum", "cumprod", "logcumsumexp", "logsumexp", "softmax", "_softmax",
    "log_softmax", "_log_softmax", "norm", "linalg_vector_norm", "std", "var",
}  # fmt: skip
"""Operations whose result depends on the order of a sum."""


class Reached(TorchDispatchMode):
    """Remembers those of `ORDERED` over floating numbers that reach torch."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ORDERED and args[0].is_floating_point():
            self.names.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WARPERS)
def test_no_sum_of_a_warper_is_left_to_torch(name, grad):
    """On a CPU the ops in their place are torch's own."""
    scores, warper = scores_of(4, 333), WARPERS[name]()
    with grad():
        want = warper(None, scores.clone())
        with Reached() as reached, RowInvariant(ranks=True):
            got = warper(None, scores.clone())
    if not GPU and name not in ("top-h", "min-p of some"):  # there torch orders equal scores as it likes
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert reached.names == set()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.sum((0, 1)), lambda x: x.sum(-1, keepdim=True),
        lambda x: x.sum(1, dtype=torch.float64), lambda x: x.sum(1, dtype=torch.int64), lambda x: (x > 0).sum(1),
        lambda x: x[0].sum(), lambda x: x[:, :0].sum(1), lambda x: x[0, 0].sum(), lambda x: x.cumsum(0),
        lambda x: x.cumsum(1, dtype=torch.float64), lambda x: x.softmax(0), lambda x: x.log_softmax(-1),
        lambda x: x.softmax(-1, dtype=torch.float64), lambda x: x.nansum(), lambda x: x.nansum(1, keepdim=True),
        lambda x: x.logsumexp(0), lambda x: x.logsumexp(-1, keepdim=True), lambda x: (x - INF).logsumexp(1),
        lambda x: x.sort(0)[1], lambda x: x.sort(descending=True)[1], lambda x: x.topk(3)[1],
        lambda x: x.topk(2, dim=0, largest=False)[0], lambda x: x.topk(4, largest=False)[1], lambda x: x.topk(1)[1],
        lambda x: x.argsort(1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_operations(function, grad):
    x = torch.randn(4, 30)
    with grad():
        want = function(x)
        with RowInvariant(ranks=True):
            got = function(x)
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, equal_nan=True)


def test_equal_values_are_ranked_by_index():
    x = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    with RowInvariant(ranks=True):
        assert x.topk(4)[1].tolist() == [[1, 2, 4, 0]]
        assert x.topk(3, largest=False)[1].tolist() == [[0, 3, 1]]


def test_a_cpu_keeps_torch():
    with row_invariant(torch.device("cpu"), []) as mode:
        assert mode is None
