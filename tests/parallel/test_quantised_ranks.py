"""Models that ranks share, in every format and of every family: their tokens are one process's."""

import os
import re
from unittest import mock

import draft_rounds as rounds
import models
import pytest
import quantised_checkpoints as checkpoints
import torch
from packed_layers import TINY, packed
from quantised_models import build_fp8_mixture, load
from ranks import run_ranks, torchrun
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils import logging

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


def mixture(name, folder):
    """A mixture of experts of transformers, or one whose experts are in MXFP4 or FP8."""
    if name == "mxfp4":
        return load_mxfp4(checkpoints.write_mxfp4(folder), dtype=torch.float32).eval()
    if name == "fp8":
        return build_fp8_mixture(moe_intermediate_size=256, head_dim=128)
    return {**models.ADMITTED, **models.HYBRIDS}[name]()


MIXTURES = "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen2_moe", "nemotron_h"
WHOLE = {"mxfp4": "router (2)", "fp8": "gate (2)"}


@pytest.mark.sweep("mxfp4-2-False mxfp4-2-True")
@pytest.mark.parametrize(
    ("name", "size", "by_number"),
    [
        *((name, 2, by_number) for name in WHOLE for by_number in (False, True)),
        ("mxfp4", 4, False),  # by number all the same: a width of 64 would leave 16 inputs of a group of 32
        *((name, 2, True) for name in MIXTURES),
    ],
)
def test_experts_give_one_processs_tokens(name, size, by_number, tmp_path):
    whole = gives_one_processs_tokens({name: mixture(name, tmp_path)}, size, tmp_path, expert_parallel=by_number)[name]
    assert whole == WHOLE.get(name, whole) and "experts" not in whole


SHARDED = "fp8_block", "ct_w4a16", "ct_fp8_static", "ct_nvfp4_both"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_5", *SHARDED])
def test_models_that_transformers_has_sharded(name, tmp_path):
    """Their parts are taken as they are, and once in memory."""
    if name.startswith("ct"):
        pytest.importorskip("compressed_tensors")
    if name in SHARDED:
        if not hasattr(FineGrainedFP8HfQuantizer, "update_parallel_plan"):
            pytest.skip("this transformers does not shard FP8")
        model = load(name, tmp_path, torch.float64, size=512)
    else:
        model = models.HYBRIDS[name]() if name in models.HYBRIDS else rounds.target(name)
        model.save_pretrained(tmp_path)
    algorithm, draft = ("eagle3", dict(draft=rounds.draft_of("eagle3", name))) if name == "llama" else ("ngram", {})
    options, ids = PLAIN | dict(check=True) | draft, torch.arange(3, 20)[None]
    expected = speculate(model, algorithm, **options).generate(ids, **GREEDY)

    def on_a_rank(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        logging.disable_progress_bar()
        with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=model.dtype, tp_plan="auto").eval()
        fast = speculate(loaded, algorithm, **options)
        held = {part.data_ptr() for part in fast.speculation.engine.runtime.verify.gm.buffers()}
        layer = "model.layers.0.mlp.down_proj"
        packed = packed_layers(loaded).get(layer)
        weight = next(iter(packed.parts.values())) if packed else loaded.get_submodule(layer).weight
        is_plain = name in ("deepseek_v3", "qwen3_5")  # whose matrices are joined
        return fast.generate(ids, **GREEDY), is_plain or weight._local_tensor.data_ptr() in held

    for tokens, takes_memory_once in run_ranks(2, on_a_rank, rendezvous=tmp_path / "rendezvous"):
        assert torch.equal(tokens, expected)
        assert takes_memory_once


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
    assert torchrun(2, "tests/support/several_gpus.py", "quantised").count("tokens are one process's") == 12
