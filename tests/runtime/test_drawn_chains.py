"""Block verification of drawn chains: against the formulas of the paper, one row at a time; the distribution of what
it gives and how much it accepts; what is drawn on the host, and that it is what a round draws."""

import math

import pytest
import torch
from distributions import FITS, PLACES, fit, joint
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

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


# --- the distribution of what is accepted


def table(has_zeros):
    """Distributions [3, 3] of the token after each token."""
    weights = torch.rand(3, 3, dtype=torch.float64) ** 2
    if has_zeros:
        weights = weights * (torch.rand(3, 3) < 0.6)
        weights.scatter_(1, torch.randint(3, (3, 1)), 0.3)
    return weights / weights.sum(dim=1, keepdim=True)


def accepted_texts(big, small, drafts, rows, ends_after_0=False):
    """Texts [rows, drafts + 1] that begin with what is accepted of chains drawn from `small` and go on as `big` has it,
    and how many drafts were accepted."""
    chain = [torch.zeros(rows, dtype=torch.int64)]
    for _ in range(drafts):
        chain.append(small[chain[-1]].multinomial(1)[:, 0])
    tokens = torch.stack(chain, dim=1)
    real = torch.cumsum(tokens == 0, 1).roll(1, 1) < 2 if ends_after_0 else torch.ones_like(tokens, dtype=torch.bool)
    real[:, 0] = True
    accepted = accept_chain(big[tokens], small[tokens], tokens, real, torch.rand(tokens.shape, dtype=torch.float64))
    texts = accepted.tokens.clone()
    for place in range(1, drafts + 1):
        after = big[texts[:, place - 1]].multinomial(1)[:, 0]
        texts[:, place] = texts[:, place].where(place < accepted.count, after)
    return texts, (accepted.count - 1).double()


@pytest.mark.parametrize("has_zeros", [False, True], ids=["", "zeros"])
@pytest.mark.parametrize("ends_after_0", [False, True], ids=["whole chains", "chains that end after a token"])
@pytest.mark.parametrize("drafts", [2, 3])
def test_texts_are_distributed_as_the_targets_and_more_is_accepted(drafts, ends_after_0, has_zeros):
    """Tests of single tokens accept the sum over prefixes of the product of the lesser probabilities (Leviathan et al.
    2023)."""
    rows = 20_000
    for _ in range(3):
        big, small = table(has_zeros), table(has_zeros)
        texts, lengths = accepted_texts(big, small, drafts, rows, ends_after_0)
        chances = joint(lambda texts, big=big: big[torch.nn.functional.pad(texts, (1, 0))[:, -1]], 3)
        assert fit(texts[None, :, :PLACES], chances[None], 3) > FITS
        by_token = sum(torch.linalg.matrix_power(torch.minimum(big, small), k)[0].sum() for k in range(1, drafts + 1))
        assert ends_after_0 or lengths.mean() > by_token - 4 * lengths.std() / rows**0.5


def test_the_example_of_the_paper():
    """Section 2 of Sun et al. 2024."""
    big, small = (torch.tensor([row] * 2, dtype=torch.float64) for row in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    _, lengths = accepted_texts(big, small, 2, 100_000)
    assert lengths.mean().item() == pytest.approx(11 / 9, abs=0.01)  # tests of single tokens accept 10 / 9


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


# --- the host


def one_row(processors, logits, draft, eos=(), tokens=(3, 1, 2, 4)):
    """The answer and the accepted nodes of one chain of four nodes."""
    tree = Tree(torch.tensor([tokens]), torch.tensor([[-1, 0, 1, 2]]), torch.ones(1, 4).bool(), draft)
    answer = Answer(torch.tensor([[5, 3]]), 2 + 5, [*eos], 0)
    return answer, HostAcceptor(answer, LogitsProcessorList(processors), seed=2)(tree, logits)


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
