"""Forwards for the passes of the backend "spec", and a backend that keeps the calls before and after them."""

import pytest
import torch
from torch import nn

from spec_compile import backend
from spec_compile.backend import BackendOptions, rewrite
from spec_compile.graph import calls
from spec_compile.passes.forward import bind, lower


@pytest.fixture
def new_compilations():
    """The test compiles anew, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def interpreted(monkeypatch):
    """The whole backend, with the rewritten graph run as it is instead of by Inductor."""
    graphs = []
    monkeypatch.setattr(backend, "compile_fx", lambda gm, inputs, **_: graphs.append(gm) or gm.forward)
    return graphs


class Recorder:
    """A backend that runs some of the passes, then the rewritten graph as it is; it keeps the calls of both."""

    def __init__(self, *passes, **options):
        self.passes, self.options, self.before, self.after = passes, BackendOptions(**options), [], []

    def __call__(self, gm, inputs):
        graph = lower(gm, inputs)
        self.before.append([node.target for node in calls(graph.gm)])
        rewrite(graph, self.options, self.passes)
        self.after.append([node.target for node in calls(graph.gm)])
        return bind(graph, inputs, lambda gm, *_: gm.forward)

    def counts(self, target) -> tuple[int, int]:
        """Calls of `target` before and after the passes, over all graphs."""
        return tuple(sum(names.count(target) for names in side) for side in (self.before, self.after))


def run(module, recorder, *inputs, **options):
    with torch.no_grad():
        return torch.compile(module, backend=recorder, **options)(*inputs)


class With(nn.Module):
    """A function as a module with a parameter, which every forward that the passes take has."""

    def __init__(self, function):
        super().__init__()
        self.function, self.bias = function, nn.Parameter(torch.zeros(()))

    def forward(self, *inputs):
        return self.function(*inputs) + self.bias


class Linears(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=bias) for n in (8, 4, 4))
        self.down = nn.Linear(8, 8)

    def forward(self, x):
        y = self.q(x) * torch.cat([self.k(x), self.v(x)], -1)
        return self.down(y), self.k(y)  # k is used twice, so it stays out of the group


def repeated(x, n):
    batch, heads, slots, size = x.shape
    return x[:, :, None, :, :].expand(batch, heads, n, slots, size).reshape(batch, heads * n, slots, size)
