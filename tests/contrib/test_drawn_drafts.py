"""Drawn drafts in whole rounds: they are accepted as often as the distributions of target and draft overlap."""

import bigrams
import dflash_drafts as dflash
import draft_rounds as rounds
import models
import pytest
import torch
import two_tokenizers as two
from distributions import FITS, p_value

HEAT = 1.5
DRAWN = dict(draft_sample_method="probabilistic")
HOW = dict(compile=False, check=False, max_cache_len=40)
IDS = rounds.prompts(1, 12)


def of_logits(logits):
    return (logits / HEAT).double().softmax(-1)


def with_dflash():
    model, draft = rounds.target("llama"), dflash.trained("llama")
    system = models.speculate_captured(model, "dflash", draft=draft, block_size=2, **DRAWN, **HOW)
    ids = dflash.texts("llama")[:1, :12]
    return system, ids, of_logits(torch.from_numpy(dflash.logits_after(draft, model, ids[0].tolist(), 2)[1]))


def with_dspark():
    draft = bigrams.table()
    system = models.speculate_captured(bigrams.target(), "dspark", draft=draft, num_draft_tokens=2, **DRAWN, **HOW)
    return system, IDS, of_logits(draft.transition.markov_w2(draft.transition.markov_w1(IDS[0, -1])))


def with_pard():
    draft = bigrams.pard(0.7)
    system = models.speculate_captured(bigrams.target(), "pard", draft=draft, num_steps=1, **DRAWN, **HOW)
    return system, IDS, of_logits(draft(IDS).logits[0, -1])


def with_two_tokenizers():
    """A sharper draft, which draws from the tokens in common."""
    system = two.fast(dict(num_steps=1, **DRAWN), two.LACKING, sharpness=1.5)
    mapping = system.speculation.engine.runtime.algorithm.mapping
    q = of_logits(two.draft(1.5)(mapping.read(IDS)).logits[0, -1, mapping.columns])
    return system, IDS, q.new_zeros(models.VOCAB).index_copy(0, mapping.draft_to_target, q)


@pytest.mark.parametrize("made", [with_dflash, with_dspark, with_pard, with_two_tokenizers])
@torch.no_grad()
def test_drawn_drafts_are_accepted_as_often_as_the_distributions_overlap(made):
    """Leviathan et al. 2023, section 3.2: the chance is the sum of the lesser probabilities."""
    rows, (system, ids, q) = 1000, made()
    model = bigrams.target() if made in (with_dspark, with_pard) else rounds.target("llama")
    drawn = rounds.generated(system, ids, 2, do_sample=True, temperature=HEAT, top_k=0, num_return_sequences=rows)
    first = of_logits(model(ids).logits[0, -1])
    chance = torch.minimum(first, q).sum().item()
    accepted = sum(gained == 2 for gained in system.speculation.stats.trace[0])
    assert 0.1 < chance < 0.9 and abs(accepted - rows * chance) < 4 * (rows * chance * (1 - chance)) ** 0.5
    texts = torch.cat([ids.expand(models.VOCAB, -1), torch.arange(models.VOCAB)[:, None]], dim=1)
    second = of_logits(model(texts).logits[:, -1])
    counts = drawn[:, -1].bincount(minlength=models.VOCAB)
    assert p_value(counts[None], rows * (first @ second)[None]) > FITS
