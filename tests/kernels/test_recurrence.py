"""Recurrences: the plain forms and the kernels against one token after the other, and the kernels' bits.

Without a GPU the kernels run in Triton's interpreter; ``pytest -m gpu`` runs them on a CUDA device.
"""

import pytest
import torch
from places import GPU, ON_GPU

from spec_compile.kernels.recurrence import (
    KINDS,
    advance_or_look,
    commit,
    initial_state,
    launch,
    recurrence,
    stash_shapes,
    walk_of,
)
from spec_compile.kernels.recurrence.walk import launch as launch_walk
from spec_compile.kernels.recurrence.walk import slots, tree_walk
from spec_compile.tree import ancestry

DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = ON_GPU if GPU else []

ALL = ["convolution", "convolution in bfloat16", "decay", "delta", "delta by channel", "selective", "gated", "wkv"]


@pytest.fixture(params=[False, True], ids=["plain", "kernels"])
def by_kernels(request, monkeypatch):
    """Whether kernels run, on every device; a test that says nothing else runs with and without them."""
    monkeypatch.setattr(launch, "supports", lambda kind, state: request.param and kind in launch.KERNELS)
    return request.param


KERNELS_ALONE = pytest.mark.parametrize("by_kernels", [True], indirect=True, ids=["kernels"])


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def positive(*shape):
    return torch.rand(shape, device=DEVICE)


def inputs_of(kind, batch, tokens, decay=1.0, key_heads=2, heads=4, dk=20, dv=12):
    """Random inputs [batch, tokens, ...]; decay: the size of the logarithms of decays."""
    if kind.startswith("convolution"):
        dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
        return [normal(batch, tokens, 600).to(dtype)[..., 8:308], normal(300, 3).to(dtype)]  # of a merged product
    if kind == "selective":
        rows = [normal(batch, tokens, size) for size in (5, 5, 300)]
        return [*rows, decay * positive(batch, tokens, 300), -positive(300, 5)]
    if kind == "gated":
        return [normal(batch, tokens, 300), positive(batch, tokens, 300)]
    if kind == "wkv":
        return [20 * normal(batch, tokens, 300) - 150, normal(batch, tokens, 300), -decay * positive(300), normal(300)]
    q, k, v = (normal(batch, tokens, n, d) for n, d in ((key_heads, dk), (key_heads, dk), (heads, dv)))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -decay * positive(batch, tokens, heads, *((dk,) if kind == "delta by channel" else ()))
    return [q, k, v, g] if kind == "decay" else [q, k, v, g, 2 * positive(batch, tokens, heads)]


def step(kind, state, inputs):
    """One token after `state`, in float64: inputs [B, ...] -> output, next state."""
    if kind == "convolution":
        x, weight = inputs
        window = torch.cat([state[:, 1:], x[:, None]], dim=1)
        return (window * weight.T).sum(dim=1), window
    if kind == "selective":
        c, b, x, dt, a = inputs
        state = (dt[..., None] * a).exp() * state + (dt * x)[..., None] * b[:, None]
        return (state * c[:, None]).sum(dim=2), state
    if kind == "gated":
        x, a = inputs
        return a * state + x, a * state + x
    if kind == "wkv":  # by the sums themselves, which float64 holds
        k, v, w, u = inputs
        n, d, m = state.unbind(1)
        m = torch.where(d > 0, m, -torch.inf)
        n, d, top = n * m.exp(), d * m.exp(), torch.maximum(m + w, k)
        out = (n + (u + k).exp() * v) / (d + (u + k).exp())
        n, d = w.exp() * n + k.exp() * v, w.exp() * d + k.exp()
        return out, torch.stack([n / top.exp(), d / top.exp(), top], dim=1)
    q, k, v, g, *beta = inputs
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    state = state * g.exp().view(*v.shape[:2], -1, 1)
    if beta:
        v = beta[0][..., None] * (v - (state * k[..., None]).sum(dim=2))
    state = state + k[..., None] * v[:, :, None]
    return (state * q[..., None]).sum(dim=2), state


def walk(kind, inputs, state, tokens):
    """The output of the last of `tokens` (numbers), one after the other, and the state behind it, in float64."""
    state, out, constants = state.double(), None, KINDS[kind].constants
    for token in tokens:
        each = [x.double() if number in constants else x[:, token].double() for number, x in enumerate(inputs)]
        out, state = step(kind, state, each)
    return out, state


class Layer:
    """Random inputs of one recurrence, the state behind nine tokens, and a stash. No size is a power of two, or `sizes`
    are."""

    def __init__(self, kind, batch, tokens, **sizes):
        self.kind = kind.split()[0]
        self.inputs = inputs_of(kind, batch, tokens, **sizes)
        begin = initial_state(self.kind, self.inputs, batch)
        self.state = walk(self.kind, inputs_of(kind, batch, 9, **sizes), begin, range(9))[1].to(begin.dtype)
        shapes = stash_shapes(self.kind, self.inputs)
        self.stash = [normal(*(() if shared else (batch,)), *shape).to(dtype) for shape, dtype, shared in shapes]

    def look(self, ancestors, nodes=None, state=None):
        """Outputs of a tree over some nodes of the inputs (None: all)."""
        if GPU:
            torch.cuda.synchronize()  # a tree reads a state that no kernel shortly before it writes
        return advance_or_look(
            self.kind, self.some(nodes), self.state if state is None else state, self.stash, torch.zeros(1), ancestors
        )

    def some(self, tokens):
        """The inputs of some tokens (a slice or numbers; None: all)."""
        constants = KINDS[self.kind].constants
        return [x if n in constants or tokens is None else x[:, tokens] for n, x in enumerate(self.inputs)]

    def advance(self, state, size, valid):
        """Outputs of chunks of `size` tokens, of which the first valid[b] update `state`."""
        outputs = []
        for begin in range(0, self.inputs[0].shape[1], size):
            inputs = self.some(slice(begin, begin + size))
            counted = (valid - begin).clamp(0, inputs[0].shape[1])
            outputs.append(advance_or_look(self.kind, inputs, state, [], counted, None))
        return torch.cat(outputs, dim=1)

    def generate(self, state, size, valid):
        """Outputs of trees that are chains of `size` nodes, of which those before valid[b] are committed."""
        outputs = []
        for begin in range(0, self.inputs[0].shape[1], size):
            nodes = list(range(begin, min(begin + size, self.inputs[0].shape[1])))
            chains = ancestry(torch.arange(-1, len(nodes) - 1, device=DEVICE).repeat(len(valid), 1))[0]
            outputs.append(self.look(chains, nodes, state))
            counted = (valid - begin).clamp(0, len(nodes)).tolist()
            self.commit(state, [list(range(len(nodes)))] * len(valid), counted)
        return torch.cat(outputs, dim=1)

    def commit(self, state, path, gained):
        commit(self.kind, [state], self.stash, torch.tensor(path, device=DEVICE), torch.tensor(gained, device=DEVICE))


def tree_of(shape, batch, nodes, span=5):
    """A tree for each row: parents [B, N] and ancestors. span: how far before a node of a random tree its parent is."""
    parents = {
        "chain": lambda node: node - 1,
        "star": lambda node: min(node, 1) - 1,
        "random": lambda node: int(torch.randint(max(node - span, 0), node, ())) if node else -1,
    }[shape]
    rows = torch.tensor([[parents(node) for node in range(nodes)] for _ in range(batch)], device=DEVICE)
    return rows, ancestry(rows)[0]


def path_to(ancestors, row, node):
    return [each for each in range(ancestors.shape[1]) if int(ancestors[row, node]) >> each & 1]


def close(kind, got, expected):
    atol = 5e-4 if kind == "wkv" else 2e-5  # it keeps logarithms about -150, which float32 rounds
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=atol)


TREES = [(True, "chain", 1), (True, "random", 5), (True, "random", 20)]
TREES += [(False, "chain", 1), (False, "chain", 17), (False, "star", 5), *((False, "random", n) for n in (7, 33, 64))]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("by_kernels, shape, nodes", TREES, indirect=["by_kernels"])
def test_trees_and_commits(by_kernels, kind, shape, nodes):
    layer = Layer(kind, 2, nodes)
    before = layer.state.clone()
    parents, ancestors = tree_of(shape, 2, nodes)
    out = layer.look(ancestors)
    assert torch.equal(layer.state, before) and out.dtype == torch.float32 and out.is_contiguous()
    deepest = int(ancestry(parents)[1][0].argmax())
    for row in range(2):
        for node in {0, nodes // 2, nodes - 1, deepest}:
            expected = walk(layer.kind, layer.inputs, before, path_to(ancestors, row, node))[0][row]
            close(layer.kind, out[row, node], expected)

    # Row 0 gains the deepest path, row 1 nothing: its bits stay.
    path = path_to(ancestors, 0, deepest)
    layer.commit(layer.state, [path, [0] * len(path)], [len(path), 0])
    close(layer.kind, layer.state[0], walk(layer.kind, layer.inputs, before, path)[1][0])
    assert torch.equal(layer.state[1], before[1])


CHUNKS = [(True, [(2, 2), (5, 2), (2, 0)]), (False, [(2, 2), (70, 31), (60, 0)])]
"""By kernels or not; the tokens of each chunk, and how many of them row 1 counts. Row 0 counts all."""


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("by_kernels, chunks", CHUNKS, indirect=["by_kernels"], ids=["kernels", "plain"])
def test_chunks_carry_the_state_over(by_kernels, kind, chunks):
    tokens, counted = (sum(each) for each in zip(*chunks))
    layer, outputs, begin = Layer(kind, 2, tokens), [], 0
    state = initial_state(layer.kind, layer.inputs, 2)
    start = state.clone()
    for size, valid in chunks:
        inputs, valid = layer.some(slice(begin, begin + size)), torch.tensor([size, valid], device=DEVICE)
        outputs.append(advance_or_look(layer.kind, inputs, state, [], valid, None))
        begin += size
    out = torch.cat(outputs, dim=1)
    assert out.dtype == torch.float32 and outputs[0].is_contiguous()
    for token in {0, 1, 2, tokens // 2, tokens - 1}:
        rows = slice(0, 2 if token < counted else 1)
        expected = walk(layer.kind, layer.inputs, start, range(token + 1))[0]
        close(layer.kind, out[rows, token], expected[rows])
    for row, length in enumerate((tokens, counted)):
        close(layer.kind, state[row], walk(layer.kind, layer.inputs, start, range(length))[1][row])
    close(layer.kind, recurrence(layer.kind, layer.inputs)[0], out[0])


@pytest.mark.parametrize("decay, beta", [(0.0, 0.98), (0.0, 2.0), (40.0, 1.0), (1e-4, 1.0)])
@pytest.mark.parametrize("by_kernels", [False], indirect=True, ids=["plain"])
def test_the_delta_rule_where_it_is_hard(by_kernels, decay, beta):
    """Near-equal keys without decay, which an inverse by squaring does not survive; decays that differences lose."""
    layer = Layer("delta", 2, 64, decay=decay)
    q, k, v, g, _ = layer.inputs
    k = torch.nn.functional.normalize(k[:, :1] + 0.01 * k, dim=-1)
    layer.inputs = [q, k, v, g, torch.full_like(layer.inputs[4], beta)]
    out = layer.look(tree_of("chain", 2, 64)[1])
    expected, after = walk("delta", layer.inputs, layer.state, range(64))
    torch.testing.assert_close(out[:, -1].double(), expected, rtol=1e-4, atol=1e-4)
    advance_or_look("delta", layer.inputs, layer.state, [], torch.full((2,), 64, device=DEVICE), None)
    torch.testing.assert_close(layer.state.double(), after, rtol=1e-4, atol=1e-4)


def test_siblings_have_windows_of_their_own(by_kernels):
    """The predecessors of a node are its ancestors, then what was committed, and never a node beside it."""
    layer, taps = Layer("convolution", 1, 5), torch.tensor([1e2, 1e1, 1.0], device=DEVICE)
    layer.inputs = [x.expand(*shape).contiguous() for x, shape in (
        (torch.arange(1.0, 6.0, device=DEVICE)[None, :, None], (1, 5, 300)), (taps, (300, 3)),
    )]  # fmt: skip
    layer.state[:] = torch.tensor([7.0, 8.0, 9.0], device=DEVICE)[None, :, None]
    out = layer.look(ancestry(torch.tensor([[-1, 0, 0, 1, 2]], device=DEVICE))[0])
    assert out[0, :, 0].tolist() == [891.0, 912.0, 913.0, 124.0, 135.0]


@KERNELS_ALONE
@pytest.mark.parametrize("kind", ALL)
def test_a_node_and_a_state_have_the_bits_of_single_steps(by_kernels, kind):
    """Nodes of a tree, the same nodes as chains, and roots alone, each committed before the next."""
    nodes = 12 if GPU else 7
    layer = Layer(kind, 1, nodes)
    parents, ancestors = tree_of("random", 1, nodes)
    in_tree, before = layer.look(ancestors), layer.state.clone()
    deepest = int(ancestry(parents)[1].argmax())
    for leaf in {deepest, nodes - 1}:
        path = path_to(ancestors, 0, leaf)
        chain = ancestry(torch.arange(-1, len(path) - 1, device=DEVICE)[None])[0]
        assert torch.equal(layer.look(chain, path), in_tree[:, path])
        at_once, state = before.clone(), before.clone()
        layer.look(ancestors)
        layer.commit(at_once, [path], [len(path)])
        for node in path:
            alone = layer.look(torch.ones(1, 1, dtype=torch.int64, device=DEVICE), [node], state)
            assert torch.equal(alone[:, 0], in_tree[:, node])
            layer.commit(state, [[0]], [1])
        assert torch.equal(state, at_once)
    assert torch.equal(layer.state, before)


@KERNELS_ALONE
def test_layers_alike_are_committed_at_once(by_kernels):
    """And each is led over inputs of its own."""
    layers = [Layer("delta", 2, 3) for _ in range(3)]
    path, gained = torch.tensor([[0, 2, 1]] * 2, device=DEVICE), torch.tensor([2, 1], device=DEVICE)
    states = [layer.state.clone() for layer in layers]
    commit("delta", states, [part for layer in layers for part in layer.stash], path, gained)
    for layer, state in zip(layers, states):
        commit("delta", [layer.state], layer.stash, path, gained)
        assert torch.equal(layer.state, state)


@pytest.mark.sweep("plain-convolution kernels-delta")
@pytest.mark.parametrize("kind", ["convolution", "delta", "selective"])
def test_one_compilation_serves_every_number_of_nodes(by_kernels, kind):
    """As a round on a GPU is compiled, whose guards are dropped; recurrences of a graph share the walk, another op."""
    torch._dynamo.reset()

    def look(inputs, state, stash, ancestors):
        return advance_or_look(kind, inputs, state, stash, torch.zeros(1), ancestors, walk_of(ancestors))

    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled = torch.compile(look, backend="aot_eager", dynamic=True, fullgraph=True, options=options)
    for turn, nodes in enumerate((7, 3, 9) if by_kernels else (37, 5, 64)):
        layer = Layer(kind, 2, nodes)
        _, ancestors = tree_of("random", 2, nodes)
        if turn == 0:
            varying = [x for number, x in enumerate(layer.inputs) if number not in KINDS[kind].constants]
            for tensor in (*varying, ancestors):
                torch._dynamo.mark_dynamic(tensor, 1)
        stash = [part.clone() for part in layer.stash]
        with torch.compiler.set_stance("default" if turn == 0 else "fail_on_recompile"):
            out = compiled(layer.inputs, layer.state, stash, ancestors)
        torch.testing.assert_close(out, layer.look(ancestors))
        assert all(map(torch.equal, stash, layer.stash))


PUBLISHED = dict(key_heads=2, heads=4, dk=128, dv=128)
LENGTHS = [
    pytest.param(5, 2, {}, id="5 tokens"),
    *(pytest.param(300, 16, sizes, id=f"300 tokens, heads of {dk}", marks=ON_GPU)
      for dk, sizes in ((20, {}), (128, PUBLISHED), (256, PUBLISHED | dict(dk=256)))),
]  # fmt: skip
"""Tokens, the nodes of a tree, and sizes of linear attention."""


@KERNELS_ALONE
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("tokens, nodes, sizes", LENGTHS)
@pytest.mark.parametrize("batch", [1, 3] if GPU else [3])
def test_a_token_has_the_same_bits_in_every_chunk_and_every_tree(by_kernels, kind, tokens, nodes, sizes, batch):
    """Outputs and states of one chunk, of small chunks, of trees with commits, and of single tokens."""
    linear = kind.split()[0] in ("decay", "delta")
    layer = Layer(kind, batch, tokens, **(sizes if linear else {}))
    valid = torch.tensor([tokens, tokens // 2, 0][:batch], device=DEVICE)
    counts = torch.arange(tokens, device=DEVICE) < valid[:, None]
    state = layer.state.clone()
    out = layer.advance(state, tokens, valid)[counts]
    assert batch < 3 or torch.equal(state[2], layer.state[2])
    ways = [(layer.advance, size) for size in (nodes + 1, tokens - nodes - 1)]
    for way, size in (*ways, (layer.generate, nodes), (layer.generate, 1)):
        other = layer.state.clone()
        assert torch.equal(way(other, size, valid)[counts], out), (way.__name__, size)
        assert torch.equal(other, state), (way.__name__, size)


@pytest.mark.parametrize("nodes, span", [(1, 1), (2, 1), (5, 5), (16, 3), (33, 33), (64, 2), (64, 64)])
def test_a_walk_holds_or_keeps_the_parent_of_every_node(nodes, span):
    parents, ancestors = tree_of("random", 3, nodes, span)
    walks = tree_walk(ancestors)
    assert torch.equal(walks, launch_walk(ancestors))
    for row, (order, resumed, leads, kept, by_node) in enumerate(walks.tolist()):
        assert by_node == parents[row].tolist() and sorted(order) == list(range(nodes))
        held, states = -1, {}
        for step, node in enumerate(order):
            held = states[resumed[step]] if resumed[step] >= 0 else held
            assert held == by_node[node] and bool(leads[step]) == (node in by_node)
            held = node if leads[step] else held
            if kept[step] >= 0:
                states[kept[step]] = node
        assert max(states, default=-1) < slots(nodes)
