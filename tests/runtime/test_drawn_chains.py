"""Block verification of drawn chains: against the formulas of the paper, one row at a time; the exact distribution of
what it gives and how much it accepts; what is drawn on the host, and that it is what a round draws."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from spec_compile.runtime.answer import Answer
from spec_compile.runtime.verify.host import HostAcceptor
from spec_compile.runtime.verify.sample import accept_chain, draw
from spec_compile.tree import Tree

LAST = 1 - 2.0**-52
"""The largest number that `uniform` gives."""


# --- the formulas


def block_verification(target, draft, tokens, real, u):
    """Algorithm 2 of Sun et al. 2024 for one row: the number of accepted drafts, and the next token.

    target, draft: [N, V]. tokens: [N], the root first. u: [N], of which the first one draws.
    """
    draft = (draft.double() / draft.double().sum(dim=1, keepdim=True)).tolist()
    drafts, p, accepted = int(real.sum()) - 1, [1.0], 0
    rows = target.tolist()
    for i in range(1, drafts + 1):
        big, small = rows[i - 1][tokens[i]], draft[i - 1][tokens[i]]
        p.append(min(p[-1] * big / small, 1.0) if small > 0 else float(p[-1] * big > 0))
        if i < drafts:
            s = sum(max(p[i] * m - q, 0.0) for m, q in zip(rows[i], draft[i]))
            h = s / (s + 1 - p[i]) if s > 0 else 0.0
        else:
            h = p[i]
        if u[i] < h:
            accepted = i
    weights = target[accepted]
    if accepted < drafts:
        rest = torch.tensor([max(p[accepted] * m - q, 0.0) for m, q in zip(rows[accepted], draft[accepted])])
        weights = rest.double() if rest.sum() > 0 else weights
    return accepted, int(draw(weights[None], u[:1])[0])


def chains(batch, nodes, vocab, spread=1.5):
    """Random target, draft, drawn tokens, nodes in use, and numbers."""
    draft = (2 * torch.randn(batch, nodes, vocab)).softmax(dim=2)
    target = (draft.log() + spread * torch.randn(batch, nodes, vocab)).double().softmax(dim=2)
    tokens = draft.flatten(0, 1).multinomial(1).view(batch, nodes).roll(1, dims=1)
    real = torch.arange(nodes) < torch.randint(1, nodes + 1, (batch, 1))
    return target, draft, tokens, real, torch.rand(batch, nodes, dtype=torch.float64)


@given(st.integers(0, 100_000), st.integers(1, 30), st.integers(1, 8), st.integers(2, 9))
def test_accept_chain_is_the_paper(seed, batch, nodes, vocab):
    torch.manual_seed(seed)
    target, draft, tokens, real, u = chains(batch, nodes, vocab, spread=(0.0, 0.5, 2.0)[seed % 3])
    target = target.where(torch.rand(target.shape) > 0.2, 0) + 1e-3 * target
    if seed % 2:
        target = target.where(torch.rand(target.shape) > 0.2, 0)
        target[..., 0] += 1e-2
        draft = draft.where(torch.rand(draft.shape) > 0.2, 0)
        draft[..., -1] += 1e-2
    target = target / target.sum(dim=2, keepdim=True)
    draft = draft * (1 + seed % 3)
    accepted = accept_chain(target, draft, tokens, real, u)
    for row in range(batch):
        length, token = block_verification(target[row], draft[row], tokens[row].tolist(), real[row], u[row])
        assert accepted.count[row] == length + 1
        assert accepted.path[row, : length + 1].tolist() == [*range(length + 1)]
        assert accepted.tokens[row, : length + 1].tolist() == [*tokens[row, 1 : length + 1].tolist(), token]


# --- the exact distribution


def bisect(holds, shape):
    """The share [*shape] of [0, 1) at whose start `holds` is true; holds: numbers [*shape] -> bool [*shape]."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    for _ in range(50):
        middle = (low + high) / 2
        inside = holds(middle)
        low, high = torch.where(inside, middle, low), torch.where(inside, high, middle)
    return torch.where(holds(torch.zeros(shape, dtype=torch.float64)), high, 0.0)


def tables(drafts, vocab, draw_table):
    """{prefix: distribution [V]} for all prefixes of up to `drafts` tokens."""
    prefixes = [p for length in range(drafts + 1) for p in itertools.product(range(vocab), repeat=length)]
    return {prefix: draw_table(prefix) for prefix in prefixes}


def exact(big, small, drafts, vocab, accept=accept_chain):
    """What `accept` gives for chains of `drafts`, over all chains and all numbers.

    big, small: tables of the target and of the draft. -> the distribution [V, ...] of the first drafts + 1 tokens, if
    later tokens come from the target; and the expected number of accepted drafts.
    """
    paths = [*itertools.product(range(vocab), repeat=drafts)]
    target = torch.stack([torch.stack([big[path[:i]] for i in range(drafts + 1)]) for path in paths])
    draft = torch.stack([torch.stack([small[path[:i]] for i in range(drafts + 1)]) for path in paths])
    tokens = torch.tensor([[0, *path] for path in paths])
    chance, rows = draft[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0].prod(dim=1), len(paths)

    def run(u):
        return accept(target, draft, tokens, torch.ones(rows, drafts + 1, dtype=torch.bool), u)

    def numbers(given):
        """LAST everywhere, but what is given by place."""
        u = torch.full((rows, drafts + 1), LAST, dtype=torch.float64)
        for place, values in given.items():
            u[:, place] = values
        return u

    # A draft passes for numbers below a bound. A later draft that always passes makes the bound irrelevant.
    passes = torch.zeros(rows, drafts + 1, dtype=torch.float64)
    passes[:, 0] = 1
    for i in range(1, drafts + 1):
        passes[:, i] = bisect(lambda x, i=i: run(numbers({i: x})).count > i, (rows,))
    passing = [{}, *({i: 0.0} for i in range(1, drafts + 1))]
    total, length = torch.zeros([vocab] * (drafts + 1), dtype=torch.float64), 0.0
    for i in range(drafts + 1):
        here = chance * passes[:, i] * (1 - passes[:, i + 1 :]).prod(dim=1)
        length += i * float(here.sum())
        below = [torch.zeros(rows, dtype=torch.float64)]
        for token in range(vocab):
            below.append(bisect(lambda x, i=i, t=token: run(numbers({0: x} | passing[i])).tokens[:, i] <= t, (rows,)))
        for row, path in enumerate(paths):
            if here[row] <= 1e-13:
                continue
            for token in range(vocab):
                text = (*path[:i], token)
                after = here[row] * (below[token + 1] - below[token])[row]
                for rest in itertools.product(range(vocab), repeat=drafts - i):
                    whole = text + rest
                    follows = math.prod(float(big[whole[:k]][whole[k]]) for k in range(i + 1, drafts + 1))
                    total[whole] += after * follows
    return total, length


def texts_of(big, drafts, vocab):
    """The target's own distribution of drafts + 1 tokens."""
    total = torch.zeros([vocab] * (drafts + 1), dtype=torch.float64)
    for text in itertools.product(range(vocab), repeat=drafts + 1):
        total[text] = math.prod(float(big[text[:k]][text[k]]) for k in range(drafts + 1))
    return total


def by_token(big, small, drafts, vocab):
    """The expected number of drafts that tests of single tokens accept: the sum over prefixes of the product of the
    lesser probabilities (Leviathan et al. 2023)."""
    prefixes = [p for length in range(1, drafts + 1) for p in itertools.product(range(vocab), repeat=length)]
    return sum(
        math.prod(min(float(big[p[:k]][p[k]]), float(small[p[:k]][p[k]])) for k in range(len(p))) for p in prefixes
    )


def weights(vocab, zeros):
    x = torch.rand(vocab, dtype=torch.float64) ** 2
    if zeros:
        x = x * (torch.rand(vocab) < 0.6)
        x[torch.randint(vocab, ())] += 0.1
    return x / x.sum()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("zeros", [False, True], ids=["", "zeros"])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_texts_are_distributed_as_the_targets_and_more_is_accepted(drafts, zeros):
    gains = []
    for _ in range(6):
        big, small = (tables(drafts, 3, lambda _: weights(3, zeros)) for _ in range(2))
        total, length = exact(big, small, drafts, 3)
        torch.testing.assert_close(total, texts_of(big, drafts, 3), rtol=0, atol=1e-11)
        assert (total[texts_of(big, drafts, 3) == 0] == 0).all()
        gains.append(length - by_token(big, small, drafts, 3))
    assert min(gains) > -1e-9 and (drafts == 1 or max(gains) > 1e-3)
    assert drafts > 1 or max(gains) < 1e-9  # then both tests are the same


def test_the_example_of_the_paper():
    """Section 2 of Sun et al. 2024."""
    big = tables(2, 2, lambda _: torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    small = tables(2, 2, lambda _: torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    total, length = exact(big, small, 2, 2)
    torch.testing.assert_close(total, texts_of(big, 2, 2), rtol=0, atol=1e-11)
    assert abs(length - 11 / 9) < 1e-9 and abs(by_token(big, small, 2, 2) - 10 / 9) < 1e-9


def test_a_chain_may_end_where_its_prefix_says():
    """After token 0 the chain has ended, and so does it where there is no distribution."""
    big, small = (tables(2, 3, lambda _: weights(3, False)) for _ in range(2))

    def cut_after(target, draft, tokens, real, u):
        return accept_chain(target, draft, tokens, real & (torch.cumsum(tokens == 0, 1).roll(1, 1) < 2), u)

    assert (exact(big, small, 2, 3, cut_after)[0] - texts_of(big, 2, 3)).abs().max() < 1e-11


# --- edges


def test_equal_distributions_are_accepted_to_the_end():
    draft = (3 * torch.randn(50, 6, 7)).softmax(dim=2)
    tokens = draft.flatten(0, 1).multinomial(1).view(50, 6).roll(1, dims=1)
    target = draft.double() / draft.sum(dim=2, keepdim=True, dtype=torch.float64)
    real = torch.arange(6) < torch.randint(1, 7, (50, 1))
    accepted = accept_chain(target, draft, tokens, real, torch.full((50, 6), LAST, dtype=torch.float64))
    assert torch.equal(accepted.count, real.sum(dim=1))
    assert (target.gather(2, accepted.tokens[:, :, None])[torch.arange(50), accepted.count - 1] > 0).all()


def test_a_draft_that_the_target_cannot_give_is_never_accepted():
    """Nor one after it, even by the least numbers. One that the draft cannot give is accepted."""
    target, draft, tokens, _, _ = chains(40, 5, 6)
    target = target.scatter(2, tokens.roll(-1, 1)[:, :, None], 0.0, reduce="multiply")
    accepted = accept_chain(target, draft, tokens, torch.ones(40, 5).bool(), torch.zeros(40, 5, dtype=torch.float64))
    assert (accepted.count == 1).all() and (accepted.tokens[:, 0] != tokens[:, 1]).all()
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]], dtype=torch.float64)
    draft, u = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]), torch.tensor([[0.9, LAST]], dtype=torch.float64)
    for token, count in ((0, 2), (1, 1), (2, 1)):
        accepted = accept_chain(target, draft, torch.tensor([[0, token]]), torch.ones(1, 2).bool(), u)
        assert accepted.count == count, token
    accepted = accept_chain(target, draft, torch.tensor([[0, 1]]), torch.ones(1, 2).bool(), u / 2)
    assert accepted.tokens[0].tolist() == [1, 2]


def test_a_chain_ends_where_there_is_nothing_to_draw_from():
    target = torch.tensor([0.0, 0.2, 0.8], dtype=torch.float64).repeat(3, 3, 1)
    draft = torch.tensor([0.0, 0.1, 0.9]).repeat(3, 3, 1)
    target[0, 0] = target[1, 1] = math.nan
    tokens, u = torch.tensor([[0, 1, 1]] * 3), torch.tensor([[0.5, 0.9, 0.9]] * 3, dtype=torch.float64)
    accepted = accept_chain(target, draft, tokens, torch.ones(3, 3).bool(), u)
    assert accepted.count.tolist() == [1, 2, 3]
    assert [row[:n].tolist() for row, n in zip(accepted.tokens, accepted.count)] == [[-1], [1, -1], [1, 1, 2]]


def test_rows_do_not_depend_on_each_other():
    values = chains(9, 5, 11)
    every = accept_chain(*values)
    for row in range(9):
        own = accept_chain(*(part[row : row + 1] for part in values))
        assert own.count == every.count[row] and torch.equal(own.tokens[0], every.tokens[row])


# --- the host


class Seen(LogitsProcessor):
    """Remembers the prefixes that it gets. The walk does not know it."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(input_ids[0].tolist())
        return scores


def one_row(processors, logits, draft, eos=(), tokens=(3, 1, 2, 4)):
    """The answer and the accepted nodes of one chain of four nodes."""
    tree = Tree(torch.tensor([tokens]), torch.tensor([[-1, 0, 1, 2]]), torch.ones(1, 4).bool(), draft)
    answer = Answer(torch.tensor([[5, 3]]), 2 + 5, [*eos], 0)
    return answer, HostAcceptor(answer, LogitsProcessorList(processors), seed=2)(tree, logits)


def test_nodes_are_processed_with_their_prefixes(monkeypatch):
    """Down to a draft that the target cannot give; if rows go in lockstep, no further than plain decoding goes."""
    draft = torch.full((1, 4, 6), 1 / 6)
    logits = torch.zeros(1, 4, 6)
    seen, call = [], RepetitionPenaltyLogitsProcessor.__call__
    monkeypatch.setattr(
        RepetitionPenaltyLogitsProcessor, "__call__",
        lambda self, ids, scores: seen.append(ids[0].tolist()) or call(self, ids, scores),
    )  # fmt: skip
    one_row([RepetitionPenaltyLogitsProcessor(1.1)], logits, draft)
    assert seen == [[5, 3], [5, 3, 1], [5, 3, 1, 2], [5, 3, 1, 2, 4]]
    seen.clear()
    one_row([SuppressTokensLogitsProcessor([2], device="cpu"), RepetitionPenaltyLogitsProcessor(1.1)], logits, draft)
    assert seen == [[5, 3], [5, 3, 1]]
    for _ in range(4):
        watcher = Seen()
        logits = torch.randn(1, 4, 6)
        answer, accepted = one_row([watcher], logits, draft)
        text = [5, 3, *answer.rows[0]]
        assert watcher.prefixes == [text[: 2 + length] for length in range(int(accepted.count))]


def test_a_row_ends_inside_its_chain():
    """Tokens after the end are dropped, and what is only looked at raises nothing."""
    draft = torch.nn.functional.one_hot(torch.tensor([[1, 2, 4, 0]]), 6).float()
    logits = draft.log().clamp(min=-50.0)
    answer, accepted = one_row([], logits, draft)
    assert answer.rows == [[1, 2, 4, 0]] and accepted.count.tolist() == [4]
    answer, accepted = one_row([], logits, draft, eos=[2])
    assert answer.sequences().tolist() == [[5, 3, 1, 2]] and accepted.count.tolist() == [2]
    logits[0, 2:] = math.nan
    answer, accepted = one_row([], logits, draft, eos=[2])
    assert answer.sequences().tolist() == [[5, 3, 1, 2]]
    with pytest.raises(RuntimeError, match="cannot sample"):
        one_row([], logits, draft)
