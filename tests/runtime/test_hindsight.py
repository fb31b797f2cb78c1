"""Hindsight: what the text followed of trees that nobody verified."""

import torch

from spec_compile.graph import ModelGraph
from spec_compile.runtime.draft_record import Hindsight
from spec_compile.runtime.state import State

VOCAB = 50


def texts(batch):
    graph = ModelGraph(torch.fx.GraphModule({}, torch.fx.Graph()), (), VOCAB, 8, torch.float32, None, "")
    state = State(graph, batch, 128, torch.device("cpu"))
    state.reset([[1, 2, 3]] * batch, [0] * batch, [100] * batch, [])
    state.lengths.fill_(2)
    return state, Hindsight(state)


def draft(state, rows):
    """rows: (tokens, parents, hint) of each row's tree, root left out."""
    state.root()
    for row, (tokens, parents, hint) in enumerate(rows):
        state.tree_tokens[row, 1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        state.tree_parents[row, 1 : 1 + len(tokens)] = torch.tensor(parents, dtype=torch.int64)
        state.tree_count[row], state.tree_hint[row] = 1 + len(tokens), hint


def write(state, row, tokens):
    end = int(state.lengths[row])
    state.tokens[row, end + 1 : end + 1 + len(tokens)] = torch.tensor(tokens)
    state.lengths[row] += len(tokens)


def test_a_tree_is_told_of_when_the_text_leaves_it():
    state, hindsight = texts(1)
    draft(state, [([4, 5, 6, 7], [0, 0, 2, 3], 9)])  # root -> 4; root -> 5 -> 6 -> 7
    assert hindsight.look() == []
    draft(state, [([], [], 0)])
    write(state, 0, [5])
    assert hindsight.look() == []
    write(state, 0, [6])
    assert hindsight.look() == []
    write(state, 0, [8])
    assert hindsight.look() == [(9, [2, 3])]
    assert hindsight.look() == []


def test_the_end_of_a_branch_ends_it_at_once():
    state, hindsight = texts(1)
    draft(state, [([4, 5], [0, 0], 1)])
    hindsight.look()
    draft(state, [([7], [0], 2)])
    write(state, 0, [5])
    assert hindsight.look() == [(1, [2])]
    write(state, 0, [8, 9, 10])  # several tokens in one round
    assert hindsight.look() == [(2, [])]


def test_several_trees_are_followed_at_once():
    state, hindsight = texts(1)
    draft(state, [([4, 5, 6], [0, 1, 2], 1)])
    hindsight.look()
    draft(state, [([5, 7], [0, 1], 2)])
    write(state, 0, [4])
    hindsight.look()
    draft(state, [([], [], 0)])
    write(state, 0, [5, 6])
    assert hindsight.look() == [(1, [1, 2, 3]), (2, [1])]


def test_rows_are_apart_and_a_new_text_forgets_the_trees():
    state, hindsight = texts(2)
    draft(state, [([4], [0], 1), ([4, 5], [0, 1], 2)])
    hindsight.look()
    draft(state, [([], [], 0)] * 2)
    write(state, 0, [9])
    write(state, 1, [4])
    assert hindsight.look() == [(1, [])]
    state.reset([[1]] * 2, [0] * 2, [100] * 2, [])
    assert hindsight.look() == []
    write(state, 1, [5, 5, 5, 5, 5])
    assert hindsight.look() == []
