"""Quantised models that ranks share: their tokens are one process's, in every format."""

import os
import re
from unittest import mock

import models
import pytest
import quantised_checkpoints as checkpoints
import torch
from packed_layers import TINY, packed
from quantised_models import build_fp8_mixture, load
from ranks import run_ranks, torchrun
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from spec_compile import load_mxfp4, speculate
from spec_compile.capture.quantised import packed_layers

PLAIN = dict(compile=False, max_cache_len=200, check=False, adaptive=False)
GREEDY = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
pytestmark = pytest.mark.xdist_group("tensor_parallel")


def answer(model, **options):
    """Greedy tokens of one prompt and of three, and the weights that explain() says are whole on each rank."""
    fast = models.speculate_captured(model, "ngram", **PLAIN | options)
    rows, ids, mask = models.prompts()
    alone, batch = fast.generate(rows[0], **GREEDY), fast.generate(ids, attention_mask=mask, **GREEDY)
    whole = re.search(r"whole on each rank: ([^;\n]*)", fast.speculation.explain())
    return torch.cat([alone.flatten(), batch.flatten()]), whole and whole[1]


def gives_one_processs_tokens(shared, size, folder, **options):
    """Assert that ranks give the tokens of one process for each of some models. Returns the layers that are whole."""
    expected = {name: answer(model)[0] for name, model in shared.items()}

    def on_a_rank(rank):
        return {name: answer(model, tensor_parallel="auto", **options) for name, model in shared.items()}

    for results in run_ranks(size, on_a_rank, rendezvous=folder / "rendezvous"):
        for name, (tokens, _) in results.items():
            assert torch.equal(tokens, expected[name]), name
    return {name: whole for name, (_, whole) in results.items()}


FEW = "fp8", "ct fp8", "gptq"
"""Formats for more cases. Models are in float64 if formats round activations, because no sum in float64 is so near to
the tie of two codes that its order decides."""


@pytest.mark.parametrize("names", [FEW[1:], pytest.param(tuple(TINY), marks=pytest.mark.slow)], ids=["few", "all"])
def test_every_format_gives_one_processs_tokens(names, tmp_path):
    shared = {name: packed(models.ADMITTED["llama"]().double(), name) for name in names}
    assert set(gives_one_processs_tokens(shared, 2, tmp_path).values()) == {"nothing"}


WIDE = dict(models.BASE, hidden_size=128, intermediate_size=128, num_attention_heads=8, head_dim=16)
"""Heads, widths and groups of 8 that 8 ranks share out; with 2 heads of keys and values, which neighbours share."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_more_ranks_give_one_processs_tokens(size, tmp_path):
    def wide(kv_heads):
        return models.build("LlamaConfig", "LlamaForCausalLM", dict(WIDE, num_key_value_heads=kv_heads)).double()

    shared = {name: packed(wide(8), name) for name in FEW} | {"two kv heads": packed(wide(2), "ct")}
    assert set(gives_one_processs_tokens(shared, size, tmp_path).values()) == {"nothing"}


@pytest.mark.parametrize("by_number", [False, True])
def test_experts_in_mxfp4_give_one_processs_tokens(by_number, tmp_path):
    model = load_mxfp4(checkpoints.write_mxfp4(tmp_path), dtype=torch.float32).eval()
    whole = gives_one_processs_tokens({"mxfp4": model}, 2, tmp_path, expert_parallel=by_number)
    assert whole == {"mxfp4": "router (2)"}


@pytest.mark.slow
@pytest.mark.parametrize("by_number", [False, True])
def test_experts_in_fp8_give_one_processs_tokens(by_number, tmp_path):
    model = build_fp8_mixture(moe_intermediate_size=256, head_dim=128)
    whole = gives_one_processs_tokens({"fp8": model}, 2, tmp_path, expert_parallel=by_number)
    assert whole == {"fp8": "gate (2)"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe", "nemotron_h"])
def test_experts_by_number_give_one_processs_tokens(name, tmp_path):
    model = {**models.ADMITTED, **models.HYBRIDS}[name]()
    whole = gives_one_processs_tokens({name: model}, 2, tmp_path, expert_parallel=True)
    assert "experts" not in whole[name]


@pytest.mark.slow
def test_a_width_that_does_not_divide_is_shared_by_number(tmp_path):
    """Four ranks: a width of 64 in MXFP4 would leave 16 inputs of a group of 32."""
    model = load_mxfp4(checkpoints.write_mxfp4(tmp_path), dtype=torch.float32).eval()
    assert gives_one_processs_tokens({"mxfp4": model}, 4, tmp_path) == {"mxfp4": "router (2)"}


SHARDED = "fp8_block", "ct_w4a16", "ct_fp8_static", "ct_nvfp4_both"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(FineGrainedFP8HfQuantizer, "update_parallel_plan"), reason="it does not shard FP8")
@pytest.mark.parametrize("name", SHARDED)
def test_models_that_transformers_has_sharded(name, tmp_path):
    if name.startswith("ct"):
        pytest.importorskip("compressed_tensors")
    options, ids = dict(PLAIN, check=True), torch.arange(3, 20)[None]
    expected = speculate(load(name, tmp_path, torch.float64, size=512), "ngram", **options).generate(ids, **GREEDY)

    def on_a_rank(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None):
            model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, tp_plan="auto").eval()
        fast = speculate(model, "ngram", **options)
        held = {part.data_ptr() for part in fast.speculation.engine.runtime.verify.gm.buffers()}
        local = next(iter(packed_layers(model)["model.layers.0.mlp.down_proj"].parts.values()))._local_tensor
        return fast.generate(ids, **GREEDY), local.data_ptr() in held

    for tokens, takes_memory_once in run_ranks(2, on_a_rank, rendezvous=tmp_path / "rendezvous"):
        assert torch.equal(tokens, expected)
        assert takes_memory_once


@pytest.mark.slow
def test_a_quantised_draft_model_that_ranks_share(tmp_path):
    target, draft = models.ADMITTED["llama"](), packed(models.ADMITTED["llama"](), "ct")
    options = PLAIN | dict(draft=draft, num_steps=2)
    expected = target.generate(prompt := models.prompts()[0][0], **GREEDY)

    def on_a_rank(rank):
        fast = speculate(target, "draft_model", **options, tensor_parallel="auto", draft_tensor_parallel_size=2)
        return fast.generate(prompt, **GREEDY), fast.speculation.explain()

    for tokens, explained in run_ranks(2, on_a_rank, rendezvous=tmp_path / "rendezvous"):
        assert torch.equal(tokens, expected)
        assert "the draft is shared by 2 ranks" in explained


FAMILIES = "qwen3", "phi3", "glm4", "gpt_neox", "olmo3", "cohere2", "deepseek_v3", "mixtral", "qwen2_moe", "gpt_oss"
HYBRIDS = "qwen3_5", "falcon_h1", "nemotron_h", "lfm2", "jamba"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES + HYBRIDS)
def test_every_family_gives_one_processs_tokens(name, tmp_path):
    build = {**models.ADMITTED, **models.HYBRIDS}[name]
    shared = {"plain": build().double()} | {form: packed(build().double(), form) for form in FEW}
    assert len(set(gives_one_processs_tokens(shared, 2, tmp_path).values())) == 1  # the same layers as of plain weights


@pytest.mark.gpu
def test_two_gpus():
    assert torchrun(2, "tests/support/two_gpus_quantised.py").count("tokens are one process's") == 12
