"""Drafts whose attention sees the ends of a text alone: what they draft against heads without a cache, answers against
plain decoding's, and options that contradict the cache or the checkpoint."""

from unittest import mock

import draft_rounds as rounds
import models
import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.kernels import ops

CODER = "examples/tiny_coder"
SINKS, SIZE = 2, 6
ENDS = dict(draft_window_size=SIZE, draft_sink_size=SINKS)


def system(algorithm, schedule, compile=False, **options):
    draft = rounds.head(algorithm, "llama")
    options = dict(draft=draft, adaptive=False, compile=compile, check=False, max_cache_len=200) | options
    return models.speculate_captured(rounds.target("llama"), algorithm, **rounds.SCHEDULES[schedule], **options)


def sees_ends(committed, begin):
    """Attention in place of the op's. The last slot sees the first slots and the last ones before `committed`, or if it
    is committed itself before `begin`, where the round began that committed it."""

    def attend(q, k, v, sinks, scale, window, softcap, layer):
        last = q.shape[2] - 1
        edge = committed if last >= committed else begin
        slots = torch.arange(last + 1)
        seen = (slots[:, None] >= slots) & ((slots < SINKS) | (slots >= edge - SIZE) | (slots[:, None] < last))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


@pytest.mark.parametrize(
    ("algorithm", "schedule"), [("eagle3", "tree"), pytest.param("eagle", "chain", marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_heads_draft_from_the_ends_of_a_text(algorithm, schedule):
    """What is drafted is what the head drafts without any cache, where a mask hides the middle; tokens are plain's."""
    fast, model, begin = system(algorithm, schedule, **ENDS), rounds.target("llama"), {}
    heads = fast.speculation.engine.runtime.algorithm

    def look(session, row, text):
        length = len(text) - 1
        with mock.patch.object(ops, "attention", sees_ends(length, begin.get(row, rounds.prompts(3).shape[1] - 1))):
            tokens, parents = rounds.drafted(algorithm, heads.head, model, heads.schedule, text)
        assert rounds.tree_of(session, row, tokens.shape[1]) == (tokens[0].tolist(), parents[0].tolist())
        begin[row] = length

    answer, checked = rounds.followed(fast, rounds.prompts(3), look)
    assert torch.equal(answer, rounds.plain("llama", 3))
    assert checked > 20
    assert "sees the first 2 tokens of a text and its last 6" in fast.speculation.explain()


def test_a_window_as_long_as_the_text_changes_no_draft():
    traces = []
    for options in ({}, dict(draft_window_size=64)):
        fast = system("eagle3", "tree", **options)
        rounds.generated(fast, rounds.prompts(3))
        traces.append(fast.speculation.stats.trace)
    assert traces[0] == traces[1]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_compiled_rounds_draft_the_same(algorithm):
    model = AutoModelForCausalLM.from_pretrained(CODER, dtype="float32")
    options = dict(draft=f"{CODER}/heads/{algorithm}", adaptive=False, check=False, **ENDS)
    ids = torch.randint(3, 4000, (2, 40))
    rounds.same_when_compiled(lambda compile: speculate(model, algorithm, compile=compile, **options), ids)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(draft_window_size=0), ValueError, "draft_window_size must be from 1"),
        (dict(draft_window_size=8, draft_sink_size=-1), ValueError, "draft_sink_size must be from 0"),
        (dict(draft_window_size="8"), TypeError, "draft_window_size: expected int, got str"),
        (dict(draft_sink_size=4), ValueError, "draft_sink_size: it is of the window in draft_window_size"),
        (dict(draft_window_size=197), ValueError, "window of 197 and 4 sinks are more than max_cache_len, 200,"),
        (dict(draft_window_size=509, max_cache_len=None), ValueError, "the tokens that LlamaFor.* holds, 512,"),
    ],
)  # fmt: skip
def test_windows_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        system("eagle3", "chain", **options)


def test_drafts_that_take_no_window():
    """Those that have one already, and draft models."""
    head = rounds.head("eagle", "llama")
    with (
        mock.patch.object(head.blocks[0].self_attn, "window", 7),
        pytest.raises(ValueError, match="of their own, of 7"),
    ):
        system("eagle", "one", draft=head, **ENDS)
    with pytest.raises(TypeError, match="unknown option 'draft_window_size'"):
        speculate(rounds.target("llama"), "draft_model", draft=rounds.target("llama"), **ENDS)
