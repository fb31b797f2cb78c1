"""The drop-in: what a user sees of `speculate`, and that its generate() answers as transformers' does."""

from unittest import mock

import pytest
import torch
from models import ADMITTED, captured, prompts
from transformers import LlamaForCausalLM

import spec_compile
from spec_compile import UnsupportedModelError, speculate
from spec_compile.runtime.state import State
from spec_compile.stats import Stats

NEW = 40


@pytest.fixture(scope="module")
def model():
    return ADMITTED["llama"]()


@pytest.fixture(autouse=True)
def captured_once(monkeypatch):
    """A model is captured once, however often it is made speculative."""
    monkeypatch.setattr("spec_compile.api.capture", captured)


@pytest.fixture(scope="module")
def fast(model):
    return speculate(model, compile=False)


@pytest.fixture(scope="module")
def batch():
    _, ids, mask = prompts()
    return dict(input_ids=ids, attention_mask=mask)


def both(model, fast, *args, **kwargs):
    kwargs = {"do_sample": False, "pad_token_id": 0, **kwargs}
    return model.generate(*args, **kwargs), fast.generate(*args, **kwargs)


def row(number=0):
    return torch.as_tensor(prompts()[0][number]).view(1, -1)


def test_is_the_model_in_every_visible_way(model, fast):
    assert isinstance(fast, LlamaForCausalLM) and type(fast).__name__ == "LlamaForCausalLM"
    assert type(fast).__module__ == type(model).__module__
    assert fast.config is model.config and fast.device == model.device and fast.dtype == model.dtype
    for name, value in model.state_dict().items():
        assert fast.state_dict()[name].data_ptr() == value.data_ptr()
    ids = row()
    assert torch.equal(fast(ids).logits, model(ids).logits)


def test_the_original_is_untouched():
    model = ADMITTED["qwen3"]()
    ids = row()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    answer = model.generate(ids, do_sample=False, max_new_tokens=NEW)
    attributes, implementation = set(model.__dict__), model.config._attn_implementation
    fast = speculate(model, compile=False)
    fast.generation_config.max_new_tokens = 3
    assert type(model).generate is not type(fast).generate
    assert set(model.__dict__) == attributes and model.config._attn_implementation == implementation
    assert model.generation_config.max_new_tokens is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=NEW), answer)


def test_every_row_ends_on_its_own(model, fast, batch):
    plain = model.generate(**batch, do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
    width = batch["input_ids"].shape[1]
    eos = [plain[0, width + 3].item(), plain[1, width + 17].item()]
    expected, got = both(model, fast, **batch, max_new_tokens=NEW, eos_token_id=eos, pad_token_id=3)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("input_ids", dict(input_ids=torch.zeros(1, 0, dtype=torch.int64))),
        ("input_ids", dict(input_ids=torch.tensor([[1, 96]]))),
        ("input_ids", dict(input_ids=torch.tensor([[1, -3]]))),
        ("max_new_tokens", dict(input_ids=row(), max_new_tokens=10**11)),
        ("reference", dict(input_ids=row(), reference=[3, 4, 1000])),
        ("reference", dict(input_ids=row(), reference=[[3, 4], [-1]])),
        ("reference", dict(input_ids=row(), reference="some text")),
    ],
)
def test_bad_input_is_refused_by_name(model, fast, name, arguments):
    held = fast.speculation.ngram.stats()
    with pytest.raises((TypeError, ValueError), match=name):
        fast.generate(**{"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, **arguments})
    assert fast.speculation.ngram.stats() == held
    expected, got = both(model, fast, row(), max_new_tokens=8)
    assert torch.equal(got, expected)


def test_models_that_cannot_be():
    with pytest.raises(TypeError, match="Linear"):
        speculate(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="causal"):
        speculate(ADMITTED["llama"]().model)
    with pytest.raises(UnsupportedModelError, match="float8"):
        speculate(ADMITTED["llama"]().to(torch.float8_e4m3fn))


@pytest.mark.parametrize("check", ["check_capture", "check_tree", "check_generation"])
def test_every_check_is_run(check, model, monkeypatch):
    def refuse(*arguments):
        raise UnsupportedModelError(check)

    monkeypatch.setattr(f"spec_compile.api.{check}", refuse)
    with pytest.raises(UnsupportedModelError, match=check):
        speculate(model, compile=False)
    speculate(model, compile=False, check=False)


def test_reference_text_is_copied_from(model):
    fast = speculate(model, compile=False)
    answer = model.generate(row(), do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    got = fast.generate(
        row(), reference=answer[0], do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(got, answer)
    assert fast.speculation.stats.accept_length > 4


def test_corpora_are_added_saved_and_loaded(model, tmp_path):
    answer = model.generate(row(), do_sample=False, max_new_tokens=NEW, eos_token_id=None)
    lengths = []
    for source in ("added", "loaded"):
        fast = speculate(model, compile=False)
        if source == "added":
            fast.speculation.ngram.add(answer[0])
            fast.speculation.ngram.save(tmp_path / "trie")
        else:
            fast.speculation.ngram.load(tmp_path / "trie")
        got = fast.generate(row(), do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
        assert torch.equal(got, answer)
        lengths.append(fast.speculation.stats.accept_length)
    assert lengths[0] == lengths[1] > 4


def test_private_texts_are_forgotten(model):
    """Prompt, answer and reference of a call with share_text=False: the trie is as if it had never been, and so are
    later drafts; the call itself drafts from its own texts and from what is held."""
    kwargs = dict(do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
    answer, other = model.generate(row(), **kwargs), model.generate(row(1), **kwargs)
    fast, fresh = (speculate(model, compile=False, adaptive=False) for _ in range(2))  # not by the time of rounds
    for one in (fast, fresh):
        one.speculation.ngram.add(other[0])
    before = fast.speculation.ngram.stats()
    assert torch.equal(fast.generate(row(), reference=answer[0], share_text=False, **kwargs), answer)
    assert fast.speculation.stats.accept_length > 4  # from its reference
    fast.speculation.stats.reset()
    assert torch.equal(fast.generate(row(1), share_text=False, **kwargs), other)
    assert fast.speculation.stats.accept_length > 4  # from the corpus
    assert {**fast.speculation.ngram.stats(), "bytes": 0} == {**before, "bytes": 0}
    for ids in (row(), row(1)):
        for one in (fast, fresh):
            one.speculation.stats.reset()
            one.generate(ids, **kwargs)
        assert fast.speculation.stats.accept_length == fresh.speculation.stats.accept_length
    assert fast.speculation.ngram.stats()["tokens"] > before["tokens"]


def test_share_text_has_a_default_and_is_checked(model):
    fast = speculate(model, compile=False, share_text=False)
    for share_text, grows in ((None, False), (False, False), (True, True), (None, False)):
        before = len(fast.speculation.ngram)
        fast.generate(row(), do_sample=False, max_new_tokens=4, share_text=share_text)
        assert (len(fast.speculation.ngram) > before) == grows
    with pytest.raises(TypeError, match="share_text must be True, False or None, not str"):
        fast.generate(row(), share_text="no")
    with pytest.raises(TypeError, match="share_text: expected bool"):
        speculate(model, share_text=1)
    other = speculate(model, "draft_model", draft=model, compile=False)  # it holds no texts
    kwargs = dict(do_sample=False, max_new_tokens=4)
    assert torch.equal(other.generate(row(), share_text=False, **kwargs), model.generate(row(), **kwargs))


def test_stats_add_up(model):
    fast = speculate(model, compile=False)
    out = fast.generate(row(), do_sample=False, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)
    stats = fast.speculation.stats
    assert stats.tokens == NEW == out.shape[1] - row().shape[1] == sum(sum(gains) for gains in stats.trace)
    assert stats.rounds == len(stats.trace) == stats.steps == sum(stats.nodes.values())
    assert stats.tokens == stats.steps + sum(stats.accepted)
    assert all(accepted <= offered for accepted, offered in zip(stats.accepted, stats.offered))
    assert stats.offered == sorted(stats.offered, reverse=True)
    assert f"{stats.accept_length:.2f}" in str(stats)
    stats.reset()
    assert stats.tokens == 0 and stats.acceptance_by_depth == [] and "nodes verified: -" in str(stats)
    assert stats.drafting_share == stats.mean_nodes == 0.0


def test_stats_tell_how_rounds_were_chosen():
    stats = Stats()
    for nodes, count in ((16, 8), (1, 30), (4, 2)):
        for _ in range(count):
            stats.count_round(nodes, [1, 2], 2)
    assert stats.nodes == {1: 30, 4: 2, 16: 8} and stats.drafting_share == 0.25 and stats.mean_nodes == 166 / 40
    assert "rounds × nodes verified: 30×1, 2×4, 8×16 (25% drafted, 4.2 nodes a round)" in str(stats)


def test_explain_and_dump(model, fast, tmp_path):
    text = fast.speculation.explain()
    for word in ("LlamaForCausalLM", "tidy", "merge_linears", "tree_attention", "2 layers"):
        assert word in text
    files = spec_compile.dump(fast, tmp_path / "dump")
    names = [file.name for file in files]
    assert "verify_0_tidy.py" in names and any("prefill" in name for name in names)
    [last] = [file for file in files if file.name.startswith("verify") and "use_linear_forms" in file.name]
    assert "spec_compile.cpu_attention" in last.read_text() and "spec_compile.attention.default" not in last.read_text()
    with pytest.raises(TypeError, match="speculate"):
        spec_compile.dump(model, tmp_path)


@pytest.mark.parametrize("algorithm", ["ngram", "draft_model"])
def test_a_cache_grows_once_when_a_call_needs_more(algorithm, model, caplog):
    def said():
        return [record.getMessage() for record in caplog.records if record.name == "spec_compile"]

    draft = dict(draft=ADMITTED["llama"]()) if algorithm == "draft_model" else {}
    fast = speculate(model, algorithm, compile=False, max_cache_len=40, **draft)
    expected, got = both(model, fast, row(), max_new_tokens=16, eos_token_id=None)
    assert torch.equal(got, expected) and not said()
    ids = torch.randint(3, 96, (2, 30), generator=torch.Generator().manual_seed(0))
    ends = model.generate(ids, do_sample=False, max_new_tokens=4, eos_token_id=None)[:, -1].tolist()
    expected, got = both(model, fast, ids, max_new_tokens=900, eos_token_id=ends)
    assert torch.equal(got, expected) and not said(), "the answer ended before the cache was full"
    expected, got = both(model, fast, ids, max_new_tokens=120, eos_token_id=None)
    assert torch.equal(got, expected)
    assert len(said()) == 1 and "the cache of 40 tokens a sequence is full and grows to 150" in said()[0]
    assert fast.speculation.engine.session(2).capacity == 150
    with mock.patch.object(type(fast.speculation.engine.runtime), "check_memory", side_effect=AssertionError):
        expected, got = both(model, fast, ids, max_new_tokens=120, eos_token_id=None)
    assert torch.equal(got, expected), "what a cache holds already need not be free"
    expected, got = both(model, fast, ids.repeat(1, 8), max_new_tokens=30, eos_token_id=None)
    assert torch.equal(got, expected), "a prompt that does not fit"


def test_a_growth_that_fails_leaves_the_next_call_unharmed(model):
    fast = speculate(model, compile=False, max_cache_len=40)
    with mock.patch.object(State, "resize", side_effect=MemoryError), pytest.raises(MemoryError):
        fast.generate(row(), do_sample=False, max_new_tokens=60, eos_token_id=None)
    expected, got = both(model, fast, row(), max_new_tokens=60, eos_token_id=None)
    assert torch.equal(got, expected)


def test_what_the_memory_cannot_hold_is_refused(model, fast):
    with pytest.raises(ValueError, match=r"max_new_tokens: .* GB are missing"):
        fast.generate(row(), max_new_tokens=2 * 10**9)
    learned = speculate(ADMITTED["gpt2"](), compile=False)
    with pytest.raises(ValueError, match=r"max_new_tokens: .* learned positions for 512"):
        learned.generate(row(), max_new_tokens=600)
    expected, got = both(model, fast, row(), max_new_tokens=16)
    assert torch.equal(got, expected)


def test_long_prompts_of_any_length(model, fast):
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 31, 32, 33, 129, 400):
        ids = torch.randint(3, 96, (1, length), generator=generator)
        expected, got = both(model, fast, ids, max_new_tokens=24, eos_token_id=None)
        assert torch.equal(got, expected), length
