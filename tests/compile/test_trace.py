"""Traces: methods of modules with buffers become rows and adapters that serve any owner and any sizes."""

from typing import NamedTuple

import pytest
import torch
from parts import described
from torch import nn

from spec_compile.compile import trace as tracing
from spec_compile.compile.serialise import graph_of


def trace(function, arguments):
    varying = (5, 37)
    return tracing.trace(
        function, arguments, lambda size: any(size % prime == 0 for prime in varying), torch.device("cpu")
    )


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


class Inner(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.register_buffer("counts", torch.zeros(rows, dtype=torch.int64))
        self.table = torch.randn(8)  # neither a parameter nor a buffer
        self.weight = nn.Parameter(torch.randn(8, 8))

    def step(self, gained):
        self.counts.add_(gained)
        return self.counts.clone()


class Output:
    """A plain object with a tensor that no module has, and one that a module has."""

    def __init__(self, weight):
        self.bias, self.weight = torch.randn(8), weight


class Owner(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.output = Output(None)
        self.inner, self.again = Inner(rows), [Inner(rows)]
        self.register_buffer("unused", torch.zeros(rows, 4))
        self.register_buffer("same", self.inner.counts)
        self.output.weight = self.inner.weight

    def compute(self, x, number, parts, absent):
        assert absent is None
        x = x.clone()
        x[:, 0] = -1
        counts = self.inner.step(parts[0].first + number)
        scores = (x + self.inner.table) @ self.inner.weight @ self.output.weight + self.output.bias
        return {0: scores}[0], [counts + self.same, None, (parts[1].sum() + torch.arange(number).sum(),)], 7


def arguments(owner, rows, number):
    gained = torch.randint(0, 9, (rows,))
    return owner, torch.randn(rows, 8), number, [Pair(gained, None), torch.randn(3)], None


def run(traced, arguments):
    results = graph_of(traced.rows)(*described(traced).read(arguments, described(traced).holders(arguments)))
    return described(traced).write(results)


def test_a_method_serves_other_owners_and_sizes():
    example = arguments(Owner(5), 5, 37)
    with torch.no_grad():
        traced = trace(Owner.compute, example)
    for rows, number in ((5, 37), (2, 4), (9, 128)):
        given = arguments(Owner(rows), rows, number)
        before = given[0].inner.counts.clone()
        with torch.no_grad():
            scores, (counts, absent, (total,)), seven = run(traced, given)
            after = given[0].inner.counts.clone()
            given[0].inner.counts.copy_(before)
            want_scores, (want_counts, _, (want_total,)), _ = given[0].compute(*given[1:])
        assert torch.equal(after, given[0].inner.counts) and not torch.equal(after, before)
        assert torch.equal(counts, want_counts) and torch.equal(total, want_total)
        assert torch.equal(scores, want_scores) and absent is None and seven == 7
    names = {slot[2] for _, _, *slots in traced.sources for slot in slots}
    assert names == {"table", "weight", "same", "bias"}, "tensors that it reads, each once"


def test_a_trace_changes_nothing():
    owner = Owner(5)
    example = arguments(owner, 5, 37)
    held = {name: id(tensor) for name, tensor in owner.state_dict(keep_vars=True).items()}
    table, values = owner.inner.table, owner.inner.counts.clone()
    traced = trace(Owner.compute, example)
    assert held == {name: id(tensor) for name, tensor in owner.state_dict(keep_vars=True).items()}
    assert owner.inner.table is table and torch.equal(owner.inner.counts, values)
    assert trace(Owner.compute, example).rows == traced.rows, "equal texts for equal computations"


def test_a_buffer_that_is_replaced_is_read_anew():
    owner = Owner(5)
    traced = trace(Owner.compute, arguments(owner, 5, 37))
    given = arguments(owner, 3, 4)
    holders = described(traced).holders(given)
    owner.inner.counts = owner.same = torch.full((3,), 100)
    reads = described(traced).read(given, holders)
    assert any(value is owner.inner.counts for value in reads if isinstance(value, torch.Tensor))


class Choice:
    """A plain object with a module, and with another plain object."""

    def __init__(self, first, second):
        self.layer, self.output = first, Output(second)

    def __call__(self, x):
        return self.layer(x) @ self.output.weight + self.output.bias


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.choice = Choice(nn.Linear(8, 8), torch.randn(8, 8))

    def compute(self, x):
        return self.choice(x)


def test_tensors_of_modules_and_objects_in_plain_objects_are_inputs():
    first, second = Chooser(), Chooser()
    with torch.no_grad():
        traced = trace(Chooser.compute, (first, torch.randn(5, 8)))
        x = torch.randn(3, 8)
        assert torch.equal(run(traced, (second, x)), second.compute(x))
    paths = [slot[0][0] for _, _, *slot in traced.sources if slot]
    assert paths == [".choice.layer", ".choice.layer", ".choice.output", ".choice.output"]


def test_integers_below_two_are_constants():
    rows = [trace(lambda x, n: x * n, (torch.ones(5), n)).rows for n in (0, 1, 2, 3)]
    assert rows[0] != rows[1] and rows[2] == rows[3]


def test_inputs_of_a_trace_are_as_the_example_but_for_what_varies():
    """They have no memory; a symbol stands for all dimensions of one size."""
    base = torch.zeros(5, 9, 8, dtype=torch.float16)
    examples = [base, base[:, ::3], base.transpose(1, 2), base[0, 0], torch.tensor(3), torch.zeros(5, 1, 35), 35, 3]
    _, made = tracing.fakes([tracing.spec_of(example, lambda size: size % 5 == 0) for example in examples])
    for fake, example in zip(made[:-2], examples):
        assert fake.dtype == example.dtype and fake.device == example.device
        assert [*map(int, fake.shape)] == [*example.shape] and [*map(int, fake.stride())] == [*example.stride()]
        varies = [isinstance(size, torch.SymInt) for size in fake.shape]
        assert varies == [size % 5 == 0 and size > 1 for size in example.shape]
    rows, wide = {str(fake.shape[0]) for fake in (made[0], made[1], made[5])}, {str(made[5].shape[2]), str(made[6])}
    assert len(rows) == len(wide) == 1 and rows != wide
    assert int(made[7]) == 3 and isinstance(made[7], torch.SymInt)
    assert str(made[0].stride()[0]) == "72" and str(made[5].stride()[0]) == str(made[5].shape[2])


def test_what_has_no_graph_is_refused():
    hidden = torch.randn(5)
    with pytest.raises(TypeError, match="none of its modules has"):
        trace(lambda x: x + hidden, (torch.ones(5),))
    with pytest.raises(TypeError, match="expected an input or a call of an operator"):
        trace(lambda x: torch.ops.higher_order.cond(x[0] > 0, torch.neg, torch.exp, (x,)), (torch.ones(5),))
    with pytest.raises(TypeError, match="returns tensors"):
        trace(lambda x: "text", (torch.ones(5),))


def test_arguments_that_are_one_tensor_may_be_two_in_the_next_call():
    x, y = torch.randn(5), torch.randn(5)
    traced = trace(lambda a, b, parts: a - 2 * b + parts[0], (x, x, [x]))
    assert torch.equal(run(traced, (x, y, [y * 3])), x - 2 * y + y * 3)


def test_a_size_that_varies_may_not_become_a_number():
    rows = torch.ones(10, 4)
    assert trace(lambda x: x.new_zeros(2, x.shape[0]), (rows,)).result == {"result": 0}
    with pytest.raises(TypeError, match=r"fixes sizes that vary, of which the example has \[10\]"):
        trace(lambda x: x.new_zeros(2, len(x)), (rows,))
    trace(lambda x, number: x.new_zeros(2, int(number)), (rows, 7))  # an integer may be constant
