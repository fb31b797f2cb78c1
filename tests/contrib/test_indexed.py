"""Models whose layers have an indexer (DeepSeek sparse attention): the same tokens as transformers' generate().

Their indexers choose 8 tokens, and texts have up to 72.
"""

import functools

import models
import pytest
import torch
from transformers import GenerationConfig
from transformers.models.llama import modeling_llama

from spec_compile import UnsupportedModelError
from spec_compile.capture import modules
from spec_compile.capture.checks import check_capture
from spec_compile.capture.trace import capture
from spec_compile.contrib.indexed import capture as indexed
from spec_compile.graph import IndexSpec

OFTEN = {"glm_moe_dsa"}
CASES = [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in models.INDEXED]
ROWS, IDS, MASK = models.prompts()


@pytest.fixture(scope="module", params=CASES)
def pair(request):
    """A model, and what `speculate` makes of it."""
    return served(request.param)


@functools.cache
def served(name):
    """A model that no test changes, and what `speculate` makes of it."""
    if name not in models.INDEXED:
        pytest.skip(f"this transformers has no {name}")
    model = models.INDEXED[name]()
    return model, models.speculate_captured(model, compile=False)


def both(pair, ids, mask=None, new=40, **options):
    """Tokens of the model's own generate(), and ours."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=None) | options
    return [model.generate(ids, **options) for model in pair]


CALLS = {
    "one row": (ROWS[0], None, {}),
    "rows padded on the left": (IDS, MASK, {}),
    "a text that becomes longer than the choice": (ROWS[0][:, :3], None, dict(new=16)),
    "a prompt in chunks": (ROWS[0], None, dict(new=12, prefill_chunk_size=5)),
    "the only token that may be drawn": (IDS, MASK, dict(new=12, do_sample=True, top_k=1)),
}


@pytest.mark.parametrize("call", CALLS)
def test_tokens_are_those_of_transformers(pair, call):
    ids, mask, options = CALLS[call]
    want, got = both(pair, ids, mask, **options)
    assert torch.equal(got, want)
    assert max(pair[1].speculation.stats.nodes) > 1, "nothing was drafted"


@pytest.mark.sweep("glm_moe_dsa")
@pytest.mark.parametrize("name", models.INDEXED)
def test_equal_scores_are_announced_and_the_earlier_tokens_chosen(name, caplog):
    """With two heads a quarter of the scores is 0, because no product is positive. transformers with a choice of the
    earlier of them gives the same tokens."""
    model = models.INDEXED[name](index_n_heads=2)
    fast = models.speculate_captured(model, compile=False)
    assert sum("scores are often equal" in message for message in caplog.messages) == 1
    options = dict(do_sample=False, max_new_tokens=24, eos_token_id=None)
    with indexed.earlier_of_equal(fast.speculation.engine.captured) as choices:
        want = model.generate(ROWS[0], **options)
    assert choices.has_changed
    assert torch.equal(fast.generate(ROWS[0], **options), want)


def test_scores_that_are_not_equal_are_not_announced(caplog):
    check_capture(glm_model := models.INDEXED["glm_moe_dsa"](), capture(glm_model))
    assert not caplog.messages


@pytest.fixture(scope="module")
def glm():
    return served("glm_moe_dsa")


def test_requests_that_share_a_prefix(glm):
    """Rows are copied, used again and begun with a kept prefix; index keys go with keys and values."""
    model, fast = glm
    text = ROWS[0][0].tolist()
    prompts = [text, text[:14] + ROWS[1][0].tolist(), text[:20], [*text, 7, 9]]
    config = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=None)
    got = fast.generate_batch(prompts, generation_config=config).values()
    for prompt, answer in zip(prompts, got):
        want = both((model,), torch.tensor([prompt]), new=10)[0][0, len(prompt) :].tolist()
        assert list(answer.generated_tokens) == want


def test_a_cache_is_left_to_transformers(glm):
    """Its layers hold index keys and latents."""
    model, fast = glm
    filled = model(input_ids=ROWS[0][:, :-1], use_cache=True)
    (cache,) = (value for value in filled.values() if hasattr(value, "update_indexer"))
    name = next(name for name, value in filled.items() if value is cache)
    with pytest.warns(UserWarning, match="only transformers' own generate"):
        out = fast.generate(ROWS[0], do_sample=False, max_new_tokens=4, eos_token_id=None, **{name: cache})
    assert torch.equal(out, both((model,), ROWS[0], new=4)[0])


def test_the_graph_and_the_page(glm):
    _, fast = glm
    graph = fast.speculation.engine.runtime.verify
    assert graph.indexes == (IndexSpec(16, 8, torch.float32),) * 2, "two layers share a choice"
    assert [layer.indexed for layer in graph.layers] == [True] * 3
    assert "3 attend to at most 8 tokens chosen by 2 indexers" in fast.speculation.explain()


@pytest.mark.slow
def test_an_indexer_that_attention_is_not_told_of(monkeypatch):
    path = "transformers.models.deepseek_v32.modeling_deepseek_v32.DeepseekV32Attention"
    monkeypatch.setitem(modules.MODULES, path, lambda module, *_: setattr(module, "forward", told_nothing(module)))
    with pytest.raises(UnsupportedModelError, match="has indexed layers that its attention is not told of"):
        capture(served("deepseek_v32")[0])


def told_nothing(module):
    """A forward that attends to all tokens."""
    own, module.indexer.forward = module.forward, lambda *_, **__: None
    return lambda *args, **named: own(*args, **{**named, "attention_mask": modules.UNREAD})


@pytest.mark.slow
def test_a_wrong_rotation_is_refused(glm, monkeypatch):
    path = "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaAttention"
    monkeypatch.setitem(modules.MODULES, path, indexed.mark)
    monkeypatch.setattr(indexed, "source_of", lambda module: modeling_llama)
    with pytest.raises(UnsupportedModelError, match="GlmMoeDsaForCausalLM: the captured graph differs"):
        check_capture(glm[0], capture(glm[0]))
