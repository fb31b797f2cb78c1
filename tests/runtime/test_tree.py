"""Trees in tensors against plain Python: ancestry, masks and greedy acceptance."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_compile.graph import ModelGraph
from spec_compile.kernels.ops import tree_mask
from spec_compile.runtime.state import State
from spec_compile.runtime.verify.sample import follow
from spec_compile.tree import MAX_NODES, Tree, ancestry

VOCAB = 96


def chain(nodes):
    return list(range(-1, nodes - 1))


def star(nodes):
    return [-1] + [0] * (nodes - 1)


def comb(nodes):
    """A chain of every second node, each with one leaf."""
    return [-1, *(max(0, i - 1 - (i % 2 == 0)) for i in range(1, nodes))]


@st.composite
def trees(draw, nodes):
    """Parents of a tree, parents first: anything from a chain (reach 1) to what chance gives."""
    reach = draw(st.integers(1, MAX_NODES))
    return [-1] + [draw(st.integers(max(0, i - reach), i - 1)) for i in range(1, nodes)]


@st.composite
def batches(draw, most=MAX_NODES):
    nodes = draw(st.integers(1, most))
    return [draw(trees(nodes)) for _ in range(draw(st.integers(1, 3)))]


def climb(parents, node):
    """The nodes from `node` up to the root."""
    line = []
    while node >= 0:
        line.append(node)
        node = parents[node]
    return line


def check_ancestry(rows):
    ancestors, depth = ancestry(torch.tensor(rows))
    assert ancestors.dtype == depth.dtype == torch.int64
    for row, parents in enumerate(rows):
        for node in range(len(parents)):
            line = climb(parents, node)
            seen = {j for j in range(MAX_NODES) if int(ancestors[row, node]) >> j & 1}
            assert seen == set(line), (parents, node)
            assert depth[row, node] == len(line) - 1, (parents, node)


@given(batches())
def test_ancestry_of_random_trees(rows):
    check_ancestry(rows)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 63, 64])
@pytest.mark.parametrize("shape", [chain, star, comb])
def test_ancestry_of_extreme_trees(shape, nodes):
    check_ancestry([shape(nodes)])


# --- masks


def mask_by_loop(positions, lengths, rows, max_kv_len, window):
    """visible[b][node][slot], slot by slot."""
    batch, nodes = len(rows), len(rows[0])
    visible = torch.zeros(batch, nodes, max_kv_len, dtype=torch.bool)
    for b in range(batch):
        for node in range(nodes):
            line = climb(rows[b], node)
            for slot in range(max_kv_len):
                if slot < lengths[b]:
                    sees, position = True, slot
                else:
                    other = slot - lengths[b]
                    sees = other in line
                    position = positions[b][other] if other < nodes else 0
                near = window is None or positions[b][node] - position < window
                visible[b, node, slot] = sees and near
    return visible


@given(
    batches(most=20),
    st.lists(st.integers(0, 24), min_size=3, max_size=3),
    st.none() | st.integers(1, 30),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_tree_mask(rows, lengths, window, group, spare):
    batch, nodes = len(rows), len(rows[0])
    lengths = lengths[:batch]
    max_kv_len = max(lengths) + nodes + spare
    ancestors, depth = ancestry(torch.tensor(rows))
    positions = torch.tensor(lengths)[:, None] + depth
    mask = tree_mask(positions, torch.tensor(lengths), ancestors, max_kv_len, window, group, torch.float32)
    assert mask.shape == (batch, 1, group * nodes, max_kv_len)
    assert set(mask.unique().tolist()) <= {0.0, float("-inf")}
    want = mask_by_loop(positions.tolist(), lengths, rows, max_kv_len, window)
    got = (mask == 0).view(batch, group, nodes, max_kv_len)
    for head in range(group):
        torch.testing.assert_close(got[:, head], want, rtol=0, atol=0)


# --- acceptance


def walk(tokens, parents, count, choice, node=0):
    """Nodes accepted below and including `node`: the child that is what the target chose, and so on."""
    for child in range(1, count):
        if parents[child] == node and tokens[child] == choice[node]:
            return [node, *walk(tokens, parents, count, choice, child)]
    return [node]


def random_case(rng, nodes, batch):
    """Trees of `nodes` slots with distinct siblings, `count` in use, and the target's choice after every node.

    Half of the choices follow one of the node's children; slots not in use would match what their parent chose.
    """
    tokens, parents, counts, choices = [], [], [], []
    for _ in range(batch):
        count = rng.choice([1, nodes, rng.randint(1, nodes)])
        reach = rng.choice([1, 2, nodes])
        up = [-1] + [rng.randint(max(0, i - reach), i - 1) for i in range(1, nodes)]
        words = [rng.randrange(VOCAB)]
        for i in range(1, nodes):
            siblings = {words[j] for j in range(1, i) if up[j] == up[i]}
            words.append(rng.choice([t for t in range(VOCAB) if t not in siblings]))
        choice = [rng.randrange(VOCAB) for _ in range(nodes)]
        for node in range(nodes):
            children = [i for i in range(node + 1, nodes) if up[i] == node]
            unused = [i for i in children if i >= count]
            if children and rng.random() < 0.8:
                choice[node] = words[rng.choice(unused or children)]
        tokens.append(words)
        parents.append(up)
        counts.append(count)
        choices.append(choice)
    return tokens, parents, counts, choices


def check_accept(tokens, parents, counts, choices):
    nodes = len(tokens[0])
    parents_t, counts_t, choice = torch.tensor(parents), torch.tensor(counts), torch.tensor(choices)
    tree = Tree(torch.tensor(tokens), parents_t, torch.arange(nodes) < counts_t[:, None])
    accepted = follow(tree, *ancestry(parents_t), choice)
    deep = 0
    for row in range(len(tokens)):
        path = walk(tokens[row], parents[row], counts[row], choices[row])
        count = int(accepted.count[row])
        assert accepted.path[row, :count].tolist() == path, (tokens[row], parents[row], counts[row], choices[row])
        assert accepted.tokens[row, :count].tolist() == [choices[row][node] for node in path]
        deep = max(deep, count)
    return deep


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 16, 33, 64])
def test_follow_on_random_trees(nodes):
    rng = random.Random(nodes)
    deepest = max(check_accept(*random_case(rng, nodes, batch=8)) for _ in range(40))
    assert deepest >= min(nodes, 4)  # the cases do reach below the root


@pytest.mark.parametrize("right", [0, 1, 31, 62, 63])
def test_follow_on_a_chain_of_64(right):
    """The first `right` drafted tokens are what the target chooses, the next is not."""
    tokens = [(5 * i) % VOCAB for i in range(64)]
    choice = [tokens[i + 1] if i < right else (tokens[(i + 1) % 64] + 1) % VOCAB for i in range(64)]
    assert check_accept([tokens], [chain(64)], [64], [choice]) == right + 1


def test_slots_that_are_not_in_use_add_no_leaf():
    graph = ModelGraph(torch.fx.symbolic_trace(torch.nn.Linear(1, 1)), (), VOCAB, 8, torch.float32, None, "")
    state = State(graph, 3, 32, torch.device("cpu"))
    parents = torch.tensor([[-1, 0, 0, 1, 0, 0, 0]] * 3)
    state.propose(torch.zeros_like(parents), parents, torch.tensor([1, 4, 7]), torch.zeros(3))
    trees = state.tree(6)
    assert trees.parents.tolist() == [[-1, 0, 1, 2, 3, 4], [-1, 0, 0, 1, 3, 4], [-1, 0, 0, 1, 0, 0]]
    assert trees.real.sum(1).tolist() == [1, 4, 6]
