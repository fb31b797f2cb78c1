"""DFlash in whole rounds: drafts are those of a draft without a cache, and tokens are plain decoding's."""

import draft_rounds as rounds
import numpy as np
import pytest
import torch
from dflash_drafts import SCHEDULES, best_paths, difference, fast, logits_after, paths_of, texts, trained
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile.drafters.trees.propose import BlockProposer, block_tree


@pytest.mark.sweep("tree")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_are_those_of_a_draft_without_a_cache(schedule):
    system, options, draft = fast("llama", schedule), SCHEDULES[schedule], trained("llama")
    engine, stats, is_joined = system.speculation.engine, system.speculation.stats, schedule == "union"
    nodes, size = engine.runtime.algorithm.plan.nodes, options.get("block_size", 5)
    given = {}

    def look(session, row, text):
        logits = logits_after(draft, rounds.target("llama"), text, size)
        assert difference([given[len(session.state.lengths)][row]], [logits]) < 1e-4
        tokens, parents = rounds.tree_of(session, row, nodes, is_joined)
        if "topk" in options:
            right = [path for _, path in best_paths(logits[1:], options["topk"], nodes - 1)]
            assert tokens[0] == text[-1] and sorted(paths_of(tokens, parents)) == sorted(right)
        else:
            assert tokens == [text[-1], *logits[1:].argmax(-1)[: nodes - 1].tolist()]
            assert parents == list(range(-1, nodes - 1))

    stats.reset()
    ids, checked, hooks = texts("llama")[:3, :10], 0, []
    for batch in (1, 3):
        drafter = engine.session(batch).drafter
        block = (drafter.head if is_joined else drafter).block
        hooks.append(block.register_forward_hook(lambda module, arguments, out: given.update({len(out[0]): out[0]})))
    mask = (torch.arange(10) >= torch.tensor([[0], [4], [8]])).long()
    try:
        checked += (
            rounds.followed(system, ids[:1], look)[1] + rounds.followed(system, ids, look, attention_mask=mask)[1]
        )
        assert stats.accept_length > 1.1
        # Texts grow across the step by which the part looked at grows.
        checked += rounds.followed(system, rounds.prompts(1, 117), look, 14)[1]
    finally:
        for hook in hooks:
            hook.remove()
    assert checked > 30


@pytest.mark.sweep("llama-chain llama-tree mixtral-tree")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("llama", "chain"), ("llama", "tree"), ("llama", "union"), ("mixtral", "tree"), ("deepseek_v3", "chain"),
        ("qwen3", "chain"),
    ],
)  # fmt: skip
def test_tokens_are_plain_decodings(name, schedule):
    system, stats = fast(name, schedule), fast(name, schedule).speculation.stats
    for batch in (1, 4):
        stats.reset()
        ids = texts(name)[:batch, :8]
        assert torch.equal(rounds.generated(system, ids), rounds.generated(rounds.target(name), ids))
        assert stats.accept_length > 1.1
    assert torch.equal(rounds.generated(system, rounds.prompts(4)), rounds.plain(name, 4))  # texts it was not taught


# --- trees


def exhaustive(scores, tokens, count):
    """[(score, tokens)] of the `count` best paths, in float32 and from the front."""
    paths = [(np.float32(0), ())]
    for place in range(len(scores)):
        before = [found for found in paths if len(found[1]) == place]
        likeliest = list(zip(scores[place], tokens[place]))
        paths += [(np.float32(s + t), (*path, i)) for s, path in before for t, i in likeliest]
    return sorted(paths[1:], key=lambda found: -found[0])[:count]


@given(st.integers(1, 5), st.integers(2, 4), st.integers(2, 40), st.booleans(), st.integers(0, 1 << 20))
@settings(max_examples=60)
def test_trees_are_the_best_of_all_paths(places, topk, nodes, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = -torch.rand(2, places, topk, generator=generator) * 3
    if ties:
        scores = scores.round()  # and so with many equal ones, zeros too
    if seed % 5 == 0:
        scores[:, :, -1] = -torch.inf
    scores = scores.sort(dim=2, descending=True).values
    tokens = torch.stack([torch.randperm(90, generator=generator)[: places * topk] for _ in range(2)])
    tokens, root = tokens.view(2, places, topk), torch.tensor([94, 95])
    available = sum(topk**depth for depth in range(1, places + 1))
    if nodes > available + 1:
        with pytest.raises(ValueError, match=f"num_draft_tokens must be at most {available + 1}"):
            BlockProposer(places, topk, nodes, draws=False)
        return
    BlockProposer(places, topk, nodes, draws=False)
    got = block_tree(root, scores, tokens, nodes)
    assert [x.shape for x in got] == [(2, nodes)] * 3 and [x.dtype for x in got] == [torch.int64] * 2 + [torch.float32]
    for row in range(2):
        ids, parents, totals = (x[row].tolist() for x in got)
        paths, every = paths_of(ids, parents), exhaustive(scores[row].numpy(), tokens[row].tolist(), 1 << 20)
        assert (ids[0], parents[0], totals[0]) == (94 + row, -1, 0)
        assert all(parent < node for node, parent in enumerate(parents))  # parents first
        assert len(set(paths)) == nodes - 1  # siblings differ
        assert totals == sorted(totals, reverse=True)  # so that its first n nodes are the tree of n nodes
        assert [dict((path, s) for s, path in every)[path] for path in paths] == totals[1:]
        assert totals[1:] == [s for s, _ in every[: nodes - 1]]


def test_large_trees():
    """64 nodes over as many places as there are."""
    scores = torch.randn(1, 15, 16).log_softmax(-1).sort(dim=2, descending=True).values
    tokens, parents, totals = block_tree(torch.tensor([3]), scores, torch.arange(240).view(1, 15, 16), 64)
    assert len(set(paths_of(tokens[0].tolist(), parents[0].tolist()))) == 63 and bool(totals.isfinite().all())
    BlockProposer(63, 2, 64, draws=False)
