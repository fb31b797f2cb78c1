"""Models that generate fewer tokens than they read, as Apertus 1.5, or more."""

import copy
import functools

import models
import pytest
import torch
from models import VOCAB
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig

from spec_compile import speculate
from spec_compile.contrib.linked.draft import LinkedDraft
from spec_compile.contrib.linked.transitions import GatedMarkov, Selector
from spec_compile.drafters.modules.dflash import DFlashDraft
from spec_compile.drafters.modules.eagle import Eagle3Head, EagleHead
from spec_compile.drafters.modules.layers import LayerKnobs
from spec_compile.passes.outputs import FINAL
from spec_compile.runtime.state import State
from spec_compile.tree import without

FEW = 72
"""Tokens that are generated, of the 96 that are read."""
NEW = {"max_new_tokens": 16, "eos_token_id": None}
ALGORITHMS = {
    "ngram": {},
    "ngram without compilers": {"algo": "ngram", "num_draft_tokens": 8},
    "eagle": {"num_steps": 3, "topk": 3, "num_draft_tokens": 8},
    "eagle3": {"ngram": True, "num_draft_tokens": 12},
    "dflash": {},
    "dflash 2": {"algo": "dflash", "ngram": True},
    "dspark": {"algo": "dflash"},
    "draft_model": {"num_steps": 3, "topk": 2, "num_draft_tokens": 6},
    "probabilistic": {"algo": "draft_model", "num_steps": 3, "draft_sample_method": "probabilistic"},
}


@functools.cache
def model(outputs=FEW):
    return models.with_outputs(outputs)


def draft(name, target):
    """A draft with random weights."""
    if name in ("draft_model", "probabilistic"):
        return copy.deepcopy(target) if name == "draft_model" else models.ADMITTED["llama"]()
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=VOCAB,
    )  # fmt: skip
    embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "eagle":
            return EagleHead(config, embedding, head_weight=output).eval()
        if name == "eagle3":
            return Eagle3Head(config, embedding, taps=(0, 1, FINAL), feature_size=64, head_weight=output).eval()
        sizes = 64, FEW, FEW, 8
        transition = {"dflash 2": Selector(*sizes, 4), "dspark": GatedMarkov(*sizes)}.get(name)
        knobs = LayerKnobs(num_layers=1, qk_norm=True)
        how = config, embedding, output, (0, FINAL), 4, 0, knobs, True
        return (DFlashDraft(*how) if transition is None else LinkedDraft(*how, transition=transition)).eval()


@functools.cache
def fast(name):
    options = {"algo": name, "compile": False, "check": name == "ngram", "adaptive": False} | ALGORITHMS[name]
    drafts = {} if options["algo"] == "ngram" else {"draft": draft(name, model())}
    return speculate(model(), **options, **drafts)


def prompts():
    """[3, 40]: each ends with a token that has no output, and has much of itself twice."""
    ids = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    ids[:, 20:] = ids[:, :20]
    ids[:, -1] = ids[:, 19] = torch.tensor([VOCAB - 1, FEW, 80])
    return ids


@pytest.fixture(autouse=True)
def drafted(monkeypatch):
    """All tokens that are drafted."""
    tokens, tree = set(), State.tree

    def watched(self, nodes):
        made = tree(self, nodes)
        tokens.update(made.tokens[:, 1:][made.real[:, 1:]].tolist())
        return made

    monkeypatch.setattr(State, "tree", watched)
    return tokens


@pytest.mark.parametrize("name", ALGORITHMS)
def test_prompts_of_tokens_that_are_not_generated(name, drafted):
    ids = prompts()
    for rows in (ids[:1], ids):
        asked = dict(input_ids=rows, attention_mask=torch.ones_like(rows), do_sample=False, **NEW)
        expected = model().generate(**asked)
        assert torch.equal(fast(name).generate(**asked), expected)
        penalty = dict(repetition_penalty=1.2, no_repeat_ngram_size=2, suppress_tokens=[5, 7], do_sample=False)
        assert torch.equal(fast(name).generate(**asked | penalty), model().generate(**asked | penalty))
    first = expected[0].tolist()
    options = dict(max_new_tokens=16, eos_token_id=-1, do_sample=False, warmup=False)
    for turn in (ids.tolist(), [[*first, 90, 91], first]):  # the second one reuses the first
        outputs = fast(name).generate_batch(turn, **options)
        for prompt, output in zip(turn, outputs.values()):
            alone = model().generate(torch.tensor([prompt]), do_sample=False, **NEW)[0, len(prompt) :]
            assert output.error is None and output.generated_tokens == alone.tolist()
    assert drafted and max(drafted) < FEW
    sampled = fast(name).generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, **NEW)
    assert sampled[:, 40:].max() < FEW and max(drafted) < FEW


def test_texts_of_tokens_that_are_not_generated(drafted, tmp_path):
    system, ids = fast("ngram"), prompts()[:1]
    system.speculation.ngram.add(ids[0])
    system.speculation.ngram.save(tmp_path / "texts")
    system.speculation.ngram.load(tmp_path / "texts")
    asked = dict(input_ids=ids, do_sample=False, **NEW)
    assert torch.equal(system.generate(**asked, reference=ids[0].tolist()), model().generate(**asked))
    (scores,) = system.speculation.score(ids[0].tolist())
    logits = F.pad(model()(ids).logits[0].log_softmax(dim=-1), (0, VOCAB - FEW), value=-torch.inf)
    torch.testing.assert_close(scores, logits[:-1].gather(1, ids[0, 1:, None])[:, 0])
    assert scores.isinf().any() and max(drafted) < FEW


def test_what_transformers_refuses_is_refused():
    asked = dict(input_ids=prompts()[:1], do_sample=False, **NEW)
    refused = [
        dict(bad_words_ids=[[VOCAB - 1]]),
        dict(encoder_repetition_penalty=1.5),
        dict(input_ids=torch.tensor([[VOCAB]])),
    ]
    for options in refused:
        for system in (model(), fast("ngram")):
            with pytest.raises((ValueError, RuntimeError, IndexError)):
                system.generate(**asked | options)
    outputs = fast("ngram").generate_batch([[VOCAB], [VOCAB - 1]], max_new_tokens=2, warmup=False)
    assert [output.error is None for output in outputs.values()] == [False, True]


def test_a_token_that_cannot_be_read_ends_one_request_only(drafted):
    wide = models.with_outputs(VOCAB + 32)
    wide.lm_head.weight.data[VOCAB:] *= 0.02
    wide.lm_head.weight.data[-1] = 2 * wide.lm_head.weight[40]
    system = speculate(wide, "ngram", compile=False, adaptive=False)
    ids = prompts()
    asked = dict(do_sample=False, pad_token_id=0, **NEW)
    with pytest.raises(IndexError):
        wide.generate(ids[:1], **asked)
    with pytest.raises(IndexError, match=f"token id {VOCAB + 31}, and has embeddings of {VOCAB}"):
        system.generate(ids[:1], **asked)
    banned = dict(suppress_tokens=[*range(VOCAB, VOCAB + 32)])
    assert torch.equal(system.generate(ids, **asked, **banned), wide.generate(ids, **asked, **banned))
    with system.continuous_batching_context_manager(GenerationConfig(do_sample=False), warmup=False) as manager:
        manager.add_request(ids[0].tolist(), "bad", eos_token_id=-1, max_new_tokens=16)
        manager.add_request(ids[1].tolist(), "good", eos_token_id=-1, max_new_tokens=16, **banned)
        outputs = {output.request_id: output for output in (manager.get_result() for _ in range(2))}
    assert "embeddings" in outputs["bad"].error
    assert outputs["good"].generated_tokens == wide.generate(ids[1:2], **asked, **banned)[0, 40:].tolist()
    assert max(drafted) < VOCAB
    with pytest.raises(ValueError, match="draft: LlamaForCausalLM generates 128 tokens and reads only 96"):
        speculate(wide, "eagle", draft=draft("eagle", model()))


def test_trees_without_some_tokens():
    tokens = torch.tensor([[9, 5, 9, 7, 4, 3], [1, 2, 3, 4, 5, 6]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 3], [-1, 0, 1, 0, 3, 0]])
    tokens, parents, count = without(tokens, parents, torch.tensor([6, 4]), 9)
    assert count.tolist() == [4, 4]
    assert tokens[0, :4].tolist() == [9, 5, 7, 3] and parents[0, :4].tolist() == [-1, 0, 1, 2]
    assert tokens[1, :4].tolist() == [1, 2, 3, 4] and parents[1, :4].tolist() == [-1, 0, 1, 0]
