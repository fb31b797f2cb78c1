"""Muse Glimmer's drafts, which transformers defines: those of its assisted generation, at every step."""

import copy
import functools
import itertools
import json

import draft_rounds as rounds
import models
import muse
import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_compile import speculate
from spec_compile.drafters import parse_algorithm
from spec_compile.drafters.checkpoints.load import load_head

pytestmark = pytest.mark.skipif(not muse.HAS_MUSE, reason="this transformers has no Muse Glimmer")
OPTIONS = dict(compile=False, adaptive=False, check=False, max_cache_len=128)
NEW = 44  # texts are longer than the windows of 8


def prompts(batch):
    return torch.randint(1, 9, (batch, 6), generator=torch.Generator().manual_seed(batch))


@functools.cache
def plain(batch):
    return rounds.generated(muse.pair()[0], prompts(batch), NEW)


@pytest.fixture
def folder(tmp_path):
    muse.pair()[1].save_pretrained(tmp_path)
    return tmp_path


def test_assisted_generation_of_transformers_has_the_same_drafts(folder):
    """The target's graph and trees are checked, too."""
    target, _ = muse.pair()
    answer, theirs = muse.assisted(prompts(1), NEW)
    fast = models.speculate_captured(target, "assistant", draft=folder, **OPTIONS | dict(check=True))
    assert fast.speculation.engine.name == "dflash"
    ours, look = {}, lambda text, tokens, parents: ours.update({len(text): tokens[1:]})
    assert torch.equal(rounds.watched(fast, prompts(1), look, new=NEW), answer)
    sizes = sorted(theirs.keys() & ours.keys())
    assert len(sizes) > 30 and [theirs[size] for size in sizes] == [ours[size] for size in sizes]
    assert sum(after - before > 1 for before, after in itertools.pairwise(sizes)) > 3  # some drafts were accepted
    assert torch.equal(answer, plain(1))


TREES = {"tree": dict(topk=3, num_draft_tokens=12), "union": dict(topk=2, num_draft_tokens=8, ngram=True)}


@pytest.mark.sweep("union")
@pytest.mark.parametrize("shape", TREES)
def test_trees_and_unions_change_no_answer(shape):
    target, draft = muse.pair()
    fast = models.speculate_captured(target, "dflash", draft=draft, **OPTIONS | TREES[shape])
    assert torch.equal(rounds.generated(fast, prompts(3), NEW), plain(3))
    assert fast.speculation.stats.accept_length > 1.1


def test_a_call_may_name_the_draft():
    target, draft = muse.pair()
    fast = models.speculate_captured(target, "ngram", **OPTIONS)
    before = fast.speculation.stats.rounds
    how = dict(assistant_model=draft, speculation_type="dflash")
    assert torch.equal(rounds.generated(fast, prompts(1), 12, **how), plain(1)[:, : 6 + 12])
    assert fast.speculation.stats.rounds > before
    (model,) = (model for _, model in fast.speculation.engine.called_drafts.values())
    assert model.speculation.engine.name == "dflash" and model.speculation.engine.options.draft is draft


# --- checkpoints


def test_a_module_is_read_as_its_folder_and_shares_its_tensors(folder):
    target, draft = muse.pair()
    wrapped, read = load_head(draft, target, "dflash"), load_head(folder, target, "dflash")
    assert read.state_dict().keys() == wrapped.state_dict().keys()
    assert all(torch.equal(value, wrapped.state_dict()[name]) for name, value in read.state_dict().items())
    assert wrapped.fc.weight.data_ptr() == draft.encoder.fc.weight.data_ptr() and draft.encoder.fc.weight.requires_grad
    assert wrapped.taps == read.taps == (1, 3) and wrapped.block_size == muse.BLOCK
    for each in (folder, draft):
        assert parse_algorithm("assistant", each) == "dflash"
    for each in (target, "examples/tiny_coder/heads/eagle3", None):
        assert parse_algorithm("assistant", each) == "assistant"


def change_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_keys_that_a_config_lacks_are_those_of_transformers(folder):
    """All layers slide, over 2,048 tokens before and after."""
    change_config(folder, lambda config: [config.pop(name) for name in ("layer_types", "sliding_window")])
    draft = load_head(folder, muse.pair()[0], "dflash")
    assert [block.self_attn.window for block in draft.blocks] == [2049, 2049] and not any(draft.causal)
    assert draft.rotary_emb.config.rope_parameters["rope_theta"] == 500000


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda config: config.update(hidden_size=40, head_dim=8), "hidden_size 40"),
        (lambda config: config.update(target_layer_ids=[0, 4]), "reads states 1, 5 of its target"),
        (lambda config: config.update(mask_token_id=12), "mask token 12"),
        (lambda config: config.update(block_size="five"), "not valid: .*block_size"),
        (lambda config: config.update(query_scale=2.0), "query_scale"),
    ],
)
def test_a_config_that_does_not_fit_is_named(folder, edit, named):
    change_config(folder, edit)
    with pytest.raises(ValueError, match=named):
        load_head(folder, muse.pair()[0], "dflash")


def test_tensors_and_modules_that_do_not_fit_are_named(folder):
    target, draft = muse.pair()
    with pytest.raises(ValueError, match=r"it is on cpu in torch\.bfloat16, the model on cpu in torch\.float32"):
        speculate(target, "assistant", draft=copy.deepcopy(draft).bfloat16())
    with pytest.raises(TypeError, match=r"unknown option 'num_steps'.* block_size"):
        speculate(target, "assistant", draft=draft, num_steps=3)
    with pytest.raises(ValueError, match="DFlash head; use algo='dflash'"):
        speculate(target, "eagle3", draft=folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.extra.weight"] = tensors.pop("encoder.output_norm_enc.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no hidden_norm\.weight"):
        load_head(folder, target, "dflash")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("schedule", [{}, dict(topk=3, num_draft_tokens=12)], ids=["chain", "tree"])
def test_answers_on_a_gpu(schedule):
    """Inside CUDA graphs, in bfloat16."""
    target, draft = (copy.deepcopy(each).to("cuda", torch.bfloat16) for each in muse.pair())
    fast = speculate(target, "assistant", draft=draft, adaptive=False, max_cache_len=256, **schedule)
    ids = prompts(3).cuda()
    assert torch.equal(rounds.generated(fast, ids, NEW), rounds.generated(fast, ids, NEW, speculation=False))
    assert fast.speculation.stats.accept_length > 1.02
