"""Modules of multi-token prediction of each family: they compute their definitions, and answers stay the target's."""

import mtp_checkpoints
import numpy as np
import pytest
import torch
from draft_checkpoints import V, save
from draft_rounds import drafted, followed, generated, prompts, tree_of
from mtp_checkpoints import MTP, write_mtp
from mtp_formulas import FORMULAS
from mtp_rounds import checked, last_states

from spec_compile import speculate
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.passes.outputs import FINAL

H = mtp_checkpoints.H


@pytest.fixture
def write(tmp_path):
    def write(name):
        if MTP[name].target is None:
            pytest.skip("this version of transformers has no such model")
        return write_mtp(name, tmp_path / name)

    return write


@pytest.mark.parametrize("name", MTP)
@torch.no_grad()
def test_modules_compute_their_definition(write, name):
    written = write(name)
    head = load_head(None, written.target, "mtp")
    tensors = {key: value.numpy().astype(np.float64) for key, value in written.tensors.items()}
    embedding = written.target.get_input_embeddings().weight.numpy().astype(np.float64)
    ids, positions = torch.randint(0, V, (2, 12)), torch.arange(12) + torch.tensor([[0], [5]])
    state = torch.randn(2, 12, H)
    modules = [head, *head.further]
    assert len(modules) == MTP[name].modules
    for number, module in enumerate(modules):
        recycled, normed = module(ids, positions, state)
        for row in range(2):
            given = ids[row].numpy(), positions[row].numpy(), state[row].numpy().astype(np.float64)
            expected = FORMULAS[name](tensors, embedding, *given, number)
            assert np.abs(normed[row].numpy() - expected).max() < 2e-5
        if name == "step3p7":
            assert torch.equal(module.norm(recycled), normed)
        else:
            assert torch.equal(recycled, state if name == "mimo_v2" else normed)


def speculating(written, **options):
    return speculate(written.target, "mtp", compile=False, check=False, adaptive=False, max_cache_len=200, **options)


@pytest.mark.sweep("mimo_v2")
@pytest.mark.parametrize("name", MTP)
@torch.no_grad()
def test_drafts_of_whole_rounds(write, name):
    """The trees are those of modules without caches, and the answer is plain decoding's."""
    written, modules = write(name), MTP[name].modules
    system, ids = speculating(written, num_steps=max(2, modules), topk=2), prompts(2)
    head = system.speculation.engine.runtime.algorithm.head
    answer = checked(system, head, written.target, ids, 6)[0] if modules > 1 else generated(system, ids, 6)
    assert torch.equal(answer, generated(written.target, ids, 6))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
@torch.no_grad()
def test_an_indexer_drafts_over_its_cache(write, name):
    """Each tree is that of the module without a cache, after texts of more tokens than are chosen."""
    written = write(name)
    system = speculating(written, num_steps=3, topk=2)
    algorithm = system.speculation.engine.runtime.algorithm

    def look(session, row, text):
        tokens, parents = drafted("mtp", algorithm.head, written.target, algorithm.schedule, text)
        assert tree_of(session, row, tokens.shape[1]) == (tokens[0].tolist(), parents[0].tolist())

    answer, count = followed(system, prompts(2), look, 8)
    assert torch.equal(answer, generated(written.target, prompts(2), 8)) and count > 8


REFERENCES = {
    "deepseek_v3": ({}, {}),
    "mellum": ({}, {}),
    "step3p7": (
        {"transformer.shared_head.norm": "shared_head.norm"},
        {"mtp_per_layer_config": {number: {"num_attention_heads": mtp_checkpoints.STEP_HEADS} for number in (0, 2)}},
    ),
    "bailing_hybrid": (
        {"final_layernorm": "shared_head.norm"},
        {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]},
    ),
}
"""transformers' names of some tensors, and what it needs in the config. In Step it reads the state after the final
norm, and shares the target's output matrix."""


@pytest.mark.parametrize("name", REFERENCES)
@torch.no_grad()
def test_chains_are_those_of_transformers(write, name):
    """Of ``generate(use_mtp=True)``: one token from each layer of `MtpModel`. Its positions begin with 1."""
    layers = pytest.importorskip("transformers.modeling_layers")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    if not hasattr(layers, "MtpModel") or not mtp_checkpoints.HAS_MODULES:
        pytest.skip("this version of transformers does not predict several tokens")
    written, modules = write(name), MTP[name].modules
    tensors = {}
    for key, value in written.tensors.items():
        for theirs, hf in REFERENCES[name][0].items():
            key = key.replace(theirs, hf)
        tensors[key] = value
    save(written.folder, None, tensors)
    model, config = written.target, mtp_checkpoints.text_config(written.target)
    model.config.dtype = torch.float32
    for key, value in dict(num_mtp_layers=modules, **REFERENCES[name][1]).items():
        setattr(config, key, value)
    if name != "mellum":  # transformers knows the numbers of the layers in the published models
        numbers = [str(config.num_hidden_layers + number) for number in range(modules)]
        model._keys_to_ignore_on_load_unexpected = [rf"layers\.({'|'.join(numbers)})\."]
    reference = layers.MtpModel.from_pretrained(model).eval()
    save(written.folder, None, written.tensors)
    overrides = dict(taps=(FINAL,), recycle_normed=True) if name == "step3p7" else {}
    head = load_head(None, written.target, "mtp", **overrides)
    ids = prompts(1)
    states, slots = last_states(written.target, ids, head.taps)[:, :-1], torch.arange(ids.shape[1] - 1)[None]
    cache = cache_utils.MtpCache(config=written.target.config.get_mtp_config())
    expected, logits, _ = reference(ids[:, 1:], states, None, slots + 1, cache)
    tokens = ids[:, 1:]
    for number, module in enumerate([head, *head.further]):
        states, normed = module(tokens, slots + 1, states)
        ours = normed[:, -1] @ written.target.get_output_embeddings().weight.T
        assert (ours - logits[:, number]).abs().max() < 1e-4
        tokens = torch.cat([tokens[:, 1:], ours.argmax(dim=-1, keepdim=True)], dim=1)
    assert torch.equal(tokens[:, -modules:], expected)


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("hy_v3", "model.layers.2.mlp.shared_mlp.up_proj.weight"),
        ("bailing_hybrid", "model.layers.2.attention.dense.weight"),
        ("mimo_v2", "model.mtp.layers.1.pre_mlp_layernorm.weight"),
        ("ernie4_5_moe", "model.mtp_emb_norm.0.weight"),
        ("step3p7", "model.layers.4.transformer.shared_head.output.weight"),
        ("nemotron_h", "mtp.layers.1.mixer.experts.2.up_proj.weight"),
        ("longcat_flash", "model.mtp.embed_tokens.weight"),
    ],
)
def test_missing_and_unknown_tensors_are_named(write, name, victim):
    written = write(name)
    tensors = {key: value for key, value in written.tensors.items() if key != victim}
    save(written.folder, None, tensors)
    with pytest.raises(ValueError, match=f"has no {victim}"):
        load_head(None, written.target, "mtp")
    stray = victim.removesuffix("weight") + "stray"
    save(written.folder, None, {**written.tensors, stray: torch.ones(3)})
    with pytest.raises(ValueError, match=f"does not know: {stray}"):
        load_head(None, written.target, "mtp")


def test_an_embedding_of_their_own(write):
    written = write("longcat_flash")
    head = load_head(None, written.target, "mtp")
    assert torch.equal(head.embedding, written.tensors["model.mtp.embed_tokens.weight"])
    assert head.report[-1] == "output matrix: the target's"


@torch.no_grad()
def test_output_matrices_of_their_own(write):
    """With a list of tokens, each module has the rows of its own matrix."""
    written, ids = write("step3p7"), [7, 3, 11]
    head = load_head(None, written.target, "mtp", token_map=ids)
    for number, module in enumerate([head, *head.further]):
        own = written.tensors[f"model.layers.{3 + number}.transformer.shared_head.output.weight"]
        assert torch.equal(module.head_weight, own[ids]) and module.draft_to_target.tolist() == ids
    head.further[0].all_rows[0].zero_()
    head.refresh()
    assert not head.further[0].head_weight.any() and head.further[1].head_weight.any()
    assert "embedding: the target's" in head.report
    shared = load_head(None, write("mimo_v2").target, "mtp", token_map=ids)
    assert all(module.head_weight is shared.head_weight for module in shared.further)
