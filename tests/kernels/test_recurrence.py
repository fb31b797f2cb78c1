"""Kernels of recurrences: against their plain forms, and the bits of a node in a tree against those of single steps.

Without a GPU the kernels run in Triton's interpreter; ``pytest -m gpu`` runs them on a CUDA device.
"""

import pytest
import torch
from places import GPU, ON_GPU

from spec_compile.kernels.recurrence import KINDS, advance_or_look, commit, initial_state, launch, stash_shapes, walk_of
from spec_compile.kernels.recurrence.walk import launch as launch_walk
from spec_compile.kernels.recurrence.walk import slots, tree_walk
from spec_compile.tree import ancestry

DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = ON_GPU if GPU else []

ALL = ["convolution", "convolution in bfloat16", "decay", "delta", "delta by channel", "selective", "gated", "wkv"]


@pytest.fixture
def served(monkeypatch):
    """The kernels run on every device."""
    monkeypatch.setattr(launch, "supports", lambda kind, state: kind in launch.RUNS)


def normal(*shape):
    return torch.randn(shape, device=DEVICE)


def positive(*shape):
    return torch.rand(shape, device=DEVICE)


class Layer:
    """Random inputs of one recurrence for a tree, a state and a stash. No size is a power of two, or `sizes` are."""

    def __init__(self, kind, batch, tokens, **sizes):
        self.kind = kind.split()[0]
        self.inputs = inputs_of(kind, batch, tokens, **sizes)
        self.state = torch.randn_like(initial_state(self.kind, self.inputs, batch))
        if kind == "wkv":
            self.state[:, 1] = 1 + positive(batch, 300)  # a sum of weights
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


def inputs_of(kind, batch, tokens, key_heads=1, heads=2, dk=20, dv=12):
    if kind.startswith("convolution"):
        dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
        return [normal(batch, tokens, 600).to(dtype)[..., 8:308], normal(300, 3).to(dtype)]  # of a merged product
    if kind == "selective":
        rows = [normal(batch, tokens, size) for size in (5, 5, 300)]
        return [*rows, positive(batch, tokens, 300), -positive(300, 5)]
    if kind == "gated":
        return [normal(batch, tokens, 300), positive(batch, tokens, 300)]
    if kind == "wkv":
        return [normal(batch, tokens, 300), normal(batch, tokens, 300), -positive(300), normal(300)]
    q, k, v = (normal(batch, tokens, n, d) for n, d in ((key_heads, dk), (key_heads, dk), (heads, dv)))
    k, g = torch.nn.functional.normalize(k, dim=-1), -positive(batch, tokens, heads)
    if kind == "decay":
        return [q, k, v, g]
    g = -positive(batch, tokens, heads, dk) if kind == "delta by channel" else g
    return [q, k, v, g, 2 * positive(batch, tokens, heads)]


def trees(batch, nodes, span=5):
    """A random tree for each row: parents [B, N] and ancestors. span: how far before a node its parent stands."""
    rows = [
        [-1] + [int(torch.randint(max(node - span, 0), node, ())) for node in range(1, nodes)] for _ in range(batch)
    ]
    parents = torch.tensor(rows, device=DEVICE)
    return parents, ancestry(parents)[0]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("batch, nodes", [(1, 1), (3, 5), (1, 20)])
def test_trees_and_commits_are_those_of_the_plain_form(served, monkeypatch, kind, batch, nodes):
    layer = Layer(kind, batch, nodes)
    _, ancestors = trees(batch, nodes)
    path, gained = [[0, *range(1, nodes, 2)]] * batch, [nodes // 2, 0, 1][-batch:]
    results, kept = [], len({*KINDS[layer.kind].kept} - {*KINDS[layer.kind].constants})
    for is_served in (True, False):
        monkeypatch.setattr(launch, "supports", lambda kind, state, is_served=is_served: is_served)
        out, state = layer.look(ancestors), layer.state.clone()
        layer.commit(state, path, gained)
        results.append((out, state, [part[:, :nodes] for part in layer.stash[:kept]]))
    (out, state, stash), (plain_out, plain_state, plain_stash) = results
    assert out.dtype == torch.float32 and out.is_contiguous()
    torch.testing.assert_close(out, plain_out, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(state, plain_state, rtol=1e-4, atol=2e-5)
    assert all(map(torch.equal, stash, plain_stash))
    for row, count in enumerate(gained):
        assert count or torch.equal(state[row], layer.state[row])


@pytest.mark.parametrize("kind", ALL)
def test_a_node_and_a_state_have_the_bits_of_single_steps(served, kind):
    """Nodes of a tree, the same nodes as chains, and roots alone, each committed before the next."""
    nodes = 12 if GPU else 7
    layer = Layer(kind, 1, nodes)
    parents, ancestors = trees(1, nodes)
    in_tree, before = layer.look(ancestors), layer.state.clone()
    deepest = int(ancestry(parents)[1].argmax())
    for leaf in {deepest, nodes - 1}:
        path = [node for node in range(nodes) if int(ancestors[0, leaf]) >> node & 1]
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


def test_layers_alike_are_committed_at_once(served):
    """And each is led over inputs of its own."""
    layers = [Layer("delta", 2, 3) for _ in range(3)]
    path, gained = torch.tensor([[0, 2, 1]] * 2, device=DEVICE), torch.tensor([2, 1], device=DEVICE)
    states = [layer.state.clone() for layer in layers]
    commit("delta", states, [part for layer in layers for part in layer.stash], path, gained)
    for layer, state in zip(layers, states):
        commit("delta", [layer.state], layer.stash, path, gained)
        assert torch.equal(layer.state, state)


def test_one_compilation_serves_every_number_of_nodes(served):
    """As a round on a GPU is compiled; the walk is an op beside the recurrences that share it."""
    torch._dynamo.reset()

    def look(inputs, state, stash, ancestors):
        return advance_or_look("delta", inputs, state, stash, torch.zeros(1), ancestors, walk_of(ancestors))

    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    compiled = torch.compile(look, backend="aot_eager", dynamic=True, fullgraph=True, options=options)
    for nodes in (7, 3, 9):
        layer = Layer("delta", 1, nodes)
        _, ancestors = trees(1, nodes)
        if nodes == 7:
            for tensor in (*layer.inputs, ancestors):
                torch._dynamo.mark_dynamic(tensor, 1)
        stash = [part.clone() for part in layer.stash]
        with torch.compiler.set_stance("default" if nodes == 7 else "fail_on_recompile"):
            out = compiled(layer.inputs, layer.state, stash, ancestors)
        assert torch.equal(out, layer.look(ancestors))
        assert all(map(torch.equal, stash, layer.stash))


@pytest.mark.parametrize("kind", ALL)
def test_a_prompt_is_scanned_as_the_plain_form_does(served, monkeypatch, kind):
    layer, valid = Layer(kind, 2, 9), torch.tensor([9, 4], device=DEVICE)
    state = layer.state.clone()
    plain_out, plain_state = KINDS[layer.kind].chunk(layer.inputs, state, valid)
    out = advance_or_look(layer.kind, layer.inputs, state, [], valid, None)
    assert out.dtype == torch.float32 and out.is_contiguous()
    torch.testing.assert_close(out[0], plain_out[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(out[1, :4], plain_out[1, :4], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(state, plain_state, rtol=1e-4, atol=2e-5)


PUBLISHED = dict(key_heads=2, heads=4, dk=128, dv=128)
LENGTHS = [
    pytest.param(5, 2, {}, id="5 tokens"),
    *(pytest.param(300, 16, sizes, id=f"300 tokens, heads of {dk}", marks=ON_GPU)
      for dk, sizes in ((20, {}), (128, PUBLISHED), (256, PUBLISHED | dict(dk=256)))),
]  # fmt: skip
"""Tokens, the nodes of a tree, and sizes of linear attention."""


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("tokens, nodes, sizes", LENGTHS)
@pytest.mark.parametrize("batch", [1, 3] if GPU else [3])
def test_a_token_has_the_same_bits_in_every_chunk_and_every_tree(served, kind, tokens, nodes, sizes, batch):
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
    parents, ancestors = trees(3, nodes, span)
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
