"""Rows that are drawn with settings of their own: each as transformers' processors have it."""

import functools

import pytest
import torch
from places import GPU
from transformers import LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spec_compile.runtime.state import State
from spec_compile.runtime.verify.sample import DrawInRound, DrawRows, RowSettings
from spec_compile.tree import Tree, ancestry

DEVICE = torch.device("cuda" if GPU else "cpu")
ROWS = {
    "plain": (1.0, []),
    "greedy": (0.0, []),
    "temperature": (0.7, [TemperatureLogitsWarper(0.7)]),
    "top-k": (1.0, [TopKLogitsWarper(5)]),
    "one": (1.0, [TopKLogitsWarper(1)]),
    "top-p": (1.3, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.8)]),
    "min-p": (1.0, [MinPLogitsWarper(0.1)]),
    "all": (0.9, [TemperatureLogitsWarper(0.9), TopKLogitsWarper(40), TopPLogitsWarper(0.95), MinPLogitsWarper(0.02)]),
}
"""By name, the temperature and the processors of a row."""


def make_state(graph, names, vocab):
    """A state whose rows have these settings, seeds and numbers of their own, and a token gained more than the last."""
    state = State(graph, len(names), 256, DEVICE)
    state.is_eos = torch.zeros(len(names), vocab, dtype=torch.bool, device=DEVICE)
    for row, name in enumerate(names):
        temperature, processors = ROWS[name]
        numbers = dict(seed=[*ROWS].index(name) << 40, numbers=7 * row + 1, temperature=temperature, lengths=9 + row)
        state.enter(row, [*range(9)], [], **numbers, **vars(RowSettings.of(processors)))
    return state


@pytest.mark.parametrize("alike", [False, True])
def test_rows_are_drawn_as_by_their_own_processors(captured, alike):
    _, graph = captured("llama")
    vocab, nodes = 700, 5
    for trial in range(20 if GPU else 5):
        torch.manual_seed(trial)
        logits = 2 * torch.randn(len(ROWS), nodes, vocab)
        logits = (logits.round() if alike else logits).to(DEVICE)
        tokens = torch.randint(vocab, (len(ROWS), nodes), device=DEVICE)
        tokens[:, 1:] = logits.argmax(dim=2)[:, :-1]
        parents = torch.arange(-1, nodes - 1, device=DEVICE).expand(len(ROWS), nodes).contiguous()
        tree = Tree(tokens, parents, torch.ones_like(tokens, dtype=torch.bool))
        ancestors, depth = ancestry(parents)
        state = make_state(graph, [*ROWS], vocab)
        settings = functools.reduce(RowSettings.merge, (RowSettings.of(processors) for _, processors in ROWS.values()))
        together = DrawRows(settings)(state, tree, ancestors, depth, logits)
        for row, (name, (_, processors)) in enumerate(ROWS.items()):
            one = slice(row, row + 1)
            alone = make_state(graph, [name], vocab)
            alone.lengths.fill_(9 + row)
            alone.numbers.fill_(7 * row + 1)
            own = Tree(tokens[one], parents[one], tree.real[one])
            draw = DrawInRound(processors if name != "greedy" else [TopKLogitsWarper(1)])
            expected = draw(alone, own, ancestors[one], depth[one], logits[one])
            count = int(expected.count)
            if name == "greedy":
                expected.tokens[:] = logits[one].argmax(dim=2).gather(1, expected.path)
                count = min(count, int(together.count[row]))
            assert torch.equal(together.tokens[row, :count], expected.tokens[0, :count]), name


def test_what_rows_cannot_have_is_left_to_the_host():
    for processors in (
        [EpsilonLogitsWarper(0.01)],
        [RepetitionPenaltyLogitsProcessor(1.2)],
        [TopKLogitsWarper(5, min_tokens_to_keep=2)],
        [TopPLogitsWarper(0.5, filter_value=-5.0)],
        [TopPLogitsWarper(0.5), TopKLogitsWarper(5)],
        [TopKLogitsWarper(5), TopKLogitsWarper(3)],
    ):
        assert RowSettings.of(LogitsProcessorList(processors)) is None


def test_a_round_depends_on_which_settings_there_are_and_not_on_their_values():
    keys = {DrawRows(RowSettings(top_k=k)).key for k in (3, 4)}
    assert len(keys) == 1
    assert len({DrawRows(setting).key for setting in (RowSettings(), RowSettings(3), RowSettings(0, 0.5))}) == 3
