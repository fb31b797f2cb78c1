"""DFlash: blocks are their formulas, every setting of a block matters, and blocks see the right context."""

import dataclasses
from types import SimpleNamespace

import draft_checkpoints as drafts
import numpy as np
import pytest
import torch
from dflash_drafts import BLOCK, CONTEXTS, MASK, Meaning, block_logits, difference, example, loader, our_logits

from spec_compile import speculate
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.dflash import DFlash, DFlashOptions


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    return loader(tmp_path_factory.mktemp("dflash"))


MEANINGS = {
    "dflash": Meaning(),
    "dflash_bin": Meaning(),
    "dflash_bias": Meaning(),
    "dflash_sliding": Meaning(windows=(7, None), causal=(True, False)),
    "dflash_bidirectional": Meaning(windows=(7, None)),
    "dflash_causal": Meaning(causal=(True, True)),
    "jetspec": Meaning(causal=(True, True)),
    "dflash_anchor": Meaning(anchor=True),
    "dflash_scaled": Meaning(scale=1.7, multiplier=0.6, softcap=2.0),
    "dflash_without_taps": Meaning(taps=(2, 6)),
    "dflash_mimo": Meaning(windows=(9, 9)),
    "dflash_deepspec": Meaning(taps=(0, 4, 7), anchor=True),
    "dflash_confident": Meaning(taps=(0, 4, 7), anchor=True),
    "dflash_speculators": Meaning(),
    "dflash_speculators_shifted": Meaning(anchor=True),
    "dflash_speculators_kept": Meaning(windows=(None, 7), causal=(False, True)),
    "dflash_speculators_non_causal": Meaning(windows=(7, 7)),
}


def right_logits(written, size=BLOCK, **meaning):
    """The same by the formulas. meaning: what to change in it."""
    t = written.tensors
    embedding = written.target.get_input_embeddings().weight.detach()
    output = t["lm_head.weight"] if "d2t" in t else written.target.get_output_embeddings().weight.detach()
    meaning = dataclasses.replace(MEANINGS[written.folder.name], **meaning)
    states, root = example(meaning.taps)
    return [
        block_logits(t, embedding, output, [f[b, :p] for f in states], int(root[b]), size, meaning)
        for b, p in enumerate(CONTEXTS)
    ]


@pytest.mark.sweep("dflash_sliding dflash_bias jetspec")
@pytest.mark.parametrize("name", drafts.DFLASH)
def test_blocks_are_their_formulas(load, name):
    written, draft, (logits, (tokens, parents, count, *_)) = load(name)
    meaning, right = MEANINGS[name], right_logits(written)
    assert (draft.taps, draft.sample_from_anchor, draft.causal) == (meaning.taps, meaning.anchor, meaning.causal)
    assert (draft.block_size, draft.mask_token_id) == (BLOCK, MASK)
    assert difference(logits, right) < 1e-5
    ids = drafts.draft_to_target().numpy() if name.endswith("kept") else np.arange(drafts.V)
    chosen = ids[np.stack(right).argmax(-1)][:, 0 if meaning.anchor else 1 :]
    assert tokens[:, 0].tolist() == [5, MASK, 40] and tokens[:, 1:].tolist() == chosen.tolist()
    assert parents.tolist() == [list(range(-1, chosen.shape[1]))] * 3 and count.tolist() == [tokens.shape[1]] * 3


@pytest.mark.parametrize(("name", "size"), [("dflash_sliding", 2), ("dflash_sliding", 5), ("dflash_deepspec", 3)])
def test_shorter_blocks(load, name, size):
    written, draft, _ = load(name)
    logits, (tokens, *_) = our_logits(draft, size)
    assert difference(logits, right_logits(written, size)) < 1e-5
    assert tokens.shape == (3, size + draft.sample_from_anchor)


def test_windows_shorter_than_a_block(tmp_path):
    """They see less of it if they are causal. test_refused_checkpoints.py has the others."""
    written = drafts.write("dflash_sliding", tmp_path / "dflash_sliding", sliding_window=3)
    logits, _ = our_logits(load_head(written.folder, written.target, "dflash"))
    assert difference(logits, right_logits(written, windows=(3, None))) < 1e-5


@pytest.mark.parametrize(("name", "sinks", "size"), [("dflash", 2, 5), ("jetspec", 0, 4), ("dflash", 4, 1)])
def test_blocks_see_the_ends_of_the_context(load, name, sinks, size):
    written, draft, (whole, _) = load(name)
    logits, _ = our_logits(draft, draft_window_size=size, draft_sink_size=sinks)
    assert difference(logits, right_logits(written, ends=(sinks, size))) < 1e-5
    assert difference(logits, right_logits(written, ends=(sinks, size + 1))) > 1e-3
    assert difference(logits, right_logits(written, ends=(sinks + 1, size))) > 1e-3
    for enough in (dict(draft_window_size=13, draft_sink_size=0), dict(draft_window_size=9)):
        logits, _ = our_logits(draft, **enough)
        assert torch.allclose(logits, whole, atol=1e-5)


# --- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(block_size=0), "block_size must be from 1 to 64"),
        (dict(block_size="6"), "block_size: expected int"),
        (dict(topk=17), "topk must be from 1 to 16"),
        (dict(num_draft_tokens=1), "num_draft_tokens must be from 2 to 64"),
        (dict(score_temperature=0.0), "score_temperature must be positive"),
        (dict(draft_sample_method="random"), "draft_sample_method: expected 'greedy' or 'probabilistic'"),
        (dict(draft_sample_method="probabilistic", topk=2), "topk: drafts that are drawn"),
        (dict(block_size=7), "block_size: this draft was trained with blocks of 6, not 7; lower it"),
        (dict(block_size=1), "the first slot of this draft's blocks drafts nothing; it must be at least 2"),
        (dict(num_draft_tokens=7), "num_draft_tokens must be at most 6, the drafts of a block of 6 and"),
        (dict(topk=2, block_size=3, num_draft_tokens=8), "num_draft_tokens must be at most 7"),
    ],
)
def test_options_that_are_refused(load, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        DFlash(load("dflash")[1], DFlashOptions(**options))


def test_sizes_of_blocks_and_trees(load):
    draft = load("dflash")[1]
    assert DFlashOptions().fit(draft) == (6, 6) and DFlashOptions(block_size=4).fit(draft) == (4, 4)
    assert DFlashOptions(topk=4, num_draft_tokens=30).fit(draft) == (6, 30)
    assert DFlashOptions(block_size=1).fit(load("dflash_deepspec")[1]) == (1, 2)
    assert DFlashOptions().fit(SimpleNamespace(block_size=128, first=0)) == (64, 64)


def test_what_was_loaded_is_told(load):
    written, *_ = load("dflash_sliding")
    fast = speculate(written.target, "DFlash", draft=written.folder, compile=False, max_cache_len=100)
    told = "\n".join(fast.speculation.engine.runtime.algorithm.explain())
    for part in (
        "DFlash draft from", "reads states 2, 4, 7 (target_layer_ids [1, 3, 6], outputs of layers: one more)",
        "blocks of 6, masked by token 93; slot j drafts the token of its own place", "rope_theta=20000",
        "sliding windows 7, None, 1 of them causal", "embedding: the target's; output matrix: the target's",
    ):  # fmt: skip
        assert part in told
    runtime = fast.speculation.engine.runtime
    assert runtime.algorithm.plan.nodes == 6 and runtime.sizes == (6,)
    assert "1 layers see the block causally, 1 all of it" in runtime.algorithm.graph.log[-1].summary
