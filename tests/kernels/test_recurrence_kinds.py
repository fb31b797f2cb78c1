"""The forms of every recurrence, over trees, chunks and commits, against one token after the other."""

import pytest
import torch

from spec_compile.kernels.recurrence import KINDS, advance_or_look, commit, initial_state, recurrence, stash_shapes
from spec_compile.tree import ancestry

B, HK, H, DK, DV = 2, 2, 4, 12, 8


def normal(*shape):
    return torch.randn(shape)


def keys(tokens):
    return torch.nn.functional.normalize(normal(B, tokens, HK, DK), dim=-1)


def inputs_of(kind, tokens, decay=1.0):
    """Random inputs [B, tokens, ...]; decay: the size of the logarithms of decays."""
    if kind == "convolution":
        return [normal(B, tokens, 6), normal(6, 4)]
    if kind == "selective":
        return [normal(B, tokens, 5), normal(B, tokens, 5), normal(B, tokens, 6), decay * torch.rand(B, tokens, 6),
                -torch.rand(6, 5)]  # fmt: skip
    if kind == "gated":
        return [normal(B, tokens, 6), torch.rand(B, tokens, 6)]
    if kind == "wkv":
        return [20 * normal(B, tokens, 6) - 150, normal(B, tokens, 6), -decay * torch.rand(6), normal(6)]
    q, k, v = normal(B, tokens, HK, DK), keys(tokens), normal(B, tokens, H, DV)
    if kind == "decay":
        return [q, k, v, -decay * torch.rand(B, tokens, H)]
    channels = (DK,) if kind == "delta by channel" else ()
    return [q, k, v, -decay * torch.rand(B, tokens, H, *channels), 2 * torch.rand(B, tokens, H)]


def step(kind, state, inputs):
    """One token after `state`: inputs [B, ...] -> output, next state. In float64."""
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
    q, k = (x.repeat_interleave(H // HK, dim=1) for x in (q, k))
    state = state * g.exp().view(B, H, -1, 1)
    if beta:
        v = beta[0][..., None] * (v - (state * k[..., None]).sum(dim=2))
    state = state + k[..., None] * v[:, :, None]
    return (state * q[..., None]).sum(dim=2), state


def walk(kind, inputs, state, tokens):
    """The output of the last of `tokens` (numbers), one after the other, and the state behind it, in float64."""
    state, out, constants = state.double(), None, KINDS[name_of(kind)].constants
    for token in tokens:
        each = [x.double() if number in constants else x[:, token].double() for number, x in enumerate(inputs)]
        out, state = step(kind, state, each)
    return out, state


def name_of(kind):
    return kind.split()[0]


def some_state(kind, inputs):
    """The state behind nine tokens."""
    state = initial_state(name_of(kind), inputs, B)
    return walk(kind, inputs_of(kind, 9), state, range(9))[1].float()


def stash_of(kind, inputs):
    shapes = stash_shapes(name_of(kind), inputs)
    return [torch.zeros(*(() if is_shared else (B,)), *shape, dtype=dtype) for shape, dtype, is_shared in shapes]


def tree_of(shape, nodes):
    """parents [1, nodes]"""
    if shape == "chain":
        return torch.arange(-1, nodes - 1)[None]
    if shape == "star":
        return torch.tensor([[-1] + [0] * (nodes - 1)])
    return torch.tensor([[-1] + [int(torch.randint(max(node - 5, 0), node, ())) for node in range(1, nodes)]])


ALL = ["convolution", "decay", "delta", "delta by channel", "selective", "gated", "wkv"]
VALID = torch.full((B,), 64)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "shape, nodes", [("chain", 1), ("chain", 17), ("star", 5), ("random", 7), ("random", 33), ("random", 64)]
)
def test_trees_and_commits(kind, shape, nodes):
    inputs = inputs_of(kind, nodes)
    state, stash = some_state(kind, inputs), stash_of(kind, inputs)
    before = state.clone()
    parents = tree_of(shape, nodes).expand(B, -1)
    ancestors, depth = ancestry(parents)
    out = advance_or_look(name_of(kind), inputs, state, stash, VALID, ancestors)
    assert torch.equal(state, before) and out.dtype == torch.float32
    paths = [[j for j in range(nodes) if int(ancestors[0, i]) >> j & 1] for i in range(nodes)]
    for node in {0, nodes // 2, nodes - 1, int(depth[0].argmax())}:
        expected = walk(kind, inputs, before, paths[node])[0]
        torch.testing.assert_close(out[:, node].double(), expected, rtol=1e-4, atol=2e-5)

    # Row 0 gains the deepest path, row 1 nothing: its bits stay.
    deepest = paths[int(depth[0].argmax())]
    path = torch.zeros(B, nodes, dtype=torch.int64)
    path[:, : len(deepest)] = torch.tensor(deepest)
    commit(name_of(kind), [state], stash, path, torch.tensor([len(deepest), 0]))
    expected = walk(kind, inputs, before, deepest)[1]
    torch.testing.assert_close(state[0].double(), expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(state[1], before[1])


@pytest.mark.parametrize("kind", ALL)
def test_chunks_carry_the_state_over(kind):
    """Chunks of 2, 70 and 60 tokens, of which row 0 counts all and row 1 stops inside the second, then in none."""
    inputs, constants = inputs_of(kind, 132), KINDS[name_of(kind)].constants
    state = initial_state(name_of(kind), inputs, B)
    outputs = []
    for first, last, valid in ((0, 2, [2, 2]), (2, 72, [70, 31]), (72, 132, [60, 0])):
        chunk = [x if number in constants else x[:, first:last] for number, x in enumerate(inputs)]
        outputs.append(advance_or_look(name_of(kind), chunk, state, [], torch.tensor(valid), None))
    out = torch.cat(outputs, dim=1)
    for token in (0, 1, 2, 66, 71, 131):
        expected = walk(kind, inputs, initial_state(name_of(kind), inputs, B), range(token + 1))[0]
        row = slice(0, 2 if token < 33 else 1)
        torch.testing.assert_close(out[row, token].double(), expected[row], rtol=1e-4, atol=2e-5)
    for row, length in enumerate((132, 33)):
        expected = walk(kind, inputs, initial_state(name_of(kind), inputs, B), range(length))[1]
        torch.testing.assert_close(state[row].double(), expected[row], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(recurrence(name_of(kind), inputs)[0], out[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("decay, beta", [(0.0, 0.98), (0.0, 2.0), (40.0, 1.0), (1e-4, 1.0)])
def test_the_delta_rule_where_it_is_hard(decay, beta):
    """Near-equal keys without decay, which an inverse by squaring does not survive; decays that differences lose."""
    q, k, v, g, _ = inputs_of("delta", 64, decay)
    k = torch.nn.functional.normalize(k[:, :1] + 0.01 * k, dim=-1)
    inputs = [q, k, v, g, torch.full_like(g, beta)]
    state = some_state("delta", inputs)
    chain = ancestry(tree_of("chain", 64).expand(B, -1))[0]
    out = advance_or_look("delta", inputs, state, stash_of("delta", inputs), VALID, chain)
    expected, after = walk("delta", inputs, state, range(64))
    torch.testing.assert_close(out[:, -1].double(), expected, rtol=1e-4, atol=1e-4)
    advance_or_look("delta", inputs, state, [], VALID, None)
    torch.testing.assert_close(state.double(), after, rtol=1e-4, atol=1e-4)


def test_siblings_have_windows_of_their_own():
    """The predecessors of a node are its ancestors, then what was committed, and never a node beside it."""
    x = torch.arange(1.0, 6.0)[None, :, None].expand(B, -1, 6)
    parents = torch.tensor([[-1, 0, 0, 1, 2]]).expand(B, -1)
    inputs = [x.contiguous(), torch.tensor([1e3, 1e2, 1e1, 1.0]).expand(6, -1)]
    state = torch.tensor([6.0, 7.0, 8.0, 9.0])[None, :, None].expand(B, -1, 6).contiguous()
    out = advance_or_look("convolution", inputs, state, stash_of("convolution", inputs), VALID, ancestry(parents)[0])
    assert out[0, :, 0].tolist() == [7891.0, 8912.0, 8913.0, 9124.0, 9135.0]


@pytest.mark.sweep("convolution selective")
@pytest.mark.parametrize("kind", ["convolution", "delta", "selective"])
def test_one_compilation_serves_every_number_of_nodes(kind):
    """As a round on a GPU is compiled, whose guards are dropped."""
    torch._dynamo.reset()
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    look = torch.compile(advance_or_look, backend="aot_eager", dynamic=True, fullgraph=True, options=options)
    state = None
    for nodes in (37, 5, 64):
        inputs = inputs_of(kind, nodes)
        state = some_state(kind, inputs) if state is None else state
        ancestors = ancestry(tree_of("random", nodes).expand(B, -1))[0]
        if nodes == 37:
            varying = [x for number, x in enumerate(inputs) if number not in KINDS[name_of(kind)].constants]
            for tensor in (*varying, ancestors):
                torch._dynamo.mark_dynamic(tensor, 1)
        stashes = stash_of(kind, inputs), stash_of(kind, inputs)
        with torch.compiler.set_stance("default" if nodes == 37 else "fail_on_recompile"):
            out = look(name_of(kind), inputs, state, stashes[0], VALID, ancestors)
        expected = advance_or_look(name_of(kind), inputs, state, stashes[1], VALID, ancestors)
        torch.testing.assert_close(out, expected)
        assert all(torch.equal(*pair) for pair in zip(*stashes))
