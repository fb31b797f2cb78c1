"""Blocks and parallel drafts on a GPU: what is drafted and answered is what the CPU drafts and answers."""

import copy

import bigrams
import changed_drafts as changed
import dflash_drafts as dflash
import draft_rounds as rounds
import pytest
import torch
from draft_checkpoints import CANDIDATES

from spec_compile import speculate

TREE = dict(topk=CANDIDATES, num_draft_tokens=12)
PARALLEL = [dict(num_steps=4), dict(num_steps=4, topk=3, num_draft_tokens=12)]
CASES = [(name, options) for name in ("dflash2", "dspark", "dspark_rnn", "domino") for options in ({}, TREE)]
CASES += [(name, options) for name in ("pard", "p_eagle") for options in PARALLEL]
CASES += [("dflash", options) for options in dflash.SCHEDULES.values()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", dflash.MODES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_drafts_and_tokens_are_the_cpus(tmp_path, name, options, mode):
    if name == "dflash":
        algorithm, model, draft = name, rounds.target("llama"), dflash.trained("llama")
        texts = [dflash.texts("llama")[:batch, :8] for batch in (1, 3)]
    else:
        algorithm = name if name == "pard" else changed.EVERY[name].algorithm
        written = None if name == "pard" else changed.write(tmp_path, name)
        model, draft = (written.target, tmp_path) if written else (bigrams.target(), bigrams.pard())
        texts = [rounds.prompts(3, 9)]
    traces = []
    for device, how in (("cuda", dflash.MODES[mode]), ("cpu", dict(compile=False))):
        there, smaller = copy.deepcopy((model, draft))  # together, so that they go on sharing embeddings
        smaller = smaller.to(device) if isinstance(smaller, torch.nn.Module) else smaller
        options = dict(options, draft=smaller, adaptive=False, max_cache_len=200)
        system = speculate(there.to(device), algorithm, **options, **how)
        for ids in texts:
            assert torch.equal(rounds.generated(system, ids.to(device)).cpu(), rounds.generated(model, ids))
            traces.append(system.speculation.stats.trace)
    # The stores of a GPU and of a CPU learn at other times.
    assert traces[: len(texts)] == traces[len(texts) :] or "ngram" in options
