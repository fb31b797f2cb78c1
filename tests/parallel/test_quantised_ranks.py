"""Quantised models that ranks share: their tokens are one process's, in every format."""

import re

import models
import pytest
import quantised_checkpoints as checkpoints
import torch
from packed_layers import TINY, packed
from quantised_models import build_fp8_mixture
from ranks import run_ranks

from spec_compile import load_mxfp4

PLAIN = dict(compile=False, max_cache_len=200, check=False, adaptive=False)
GREEDY = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
pytestmark = pytest.mark.xdist_group("tensor_parallel")


def answer(model, **options):
    """Greedy tokens of one prompt and of three, and the weights that explain() says are whole on each rank."""
    fast = models.speculate_captured(model, "ngram", **PLAIN | options)
    rows, ids, mask = models.prompts()
    alone, batch = fast.generate(rows[0], **GREEDY), fast.generate(ids, attention_mask=mask, **GREEDY)
    return torch.cat([alone.flatten(), batch.flatten()]), re.findall(
        "whole on each rank: ([^;]*)", fast.speculation.explain()
    )


def on_ranks(function, size, folder):
    folder.mkdir(exist_ok=True)
    results = run_ranks(size, function, rendezvous=folder / "rendezvous")
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def gives_one_processs_tokens(shared, size, folder):
    """Assert that ranks give the tokens of one process for each of some models, and cut the same layers of all."""
    expected = {name: answer(model)[0] for name, model in shared.items()}

    def on_a_rank(rank):
        return {name: answer(model, tensor_parallel="auto") for name, model in shared.items()}

    for results in on_ranks(on_a_rank, size, folder):
        for name, (tokens, whole) in results.items():
            assert torch.equal(tokens, expected[name]), name
            assert whole and whole == next(iter(results.values()))[1], name


FEW = "fp8", "ct fp8", "gptq"


@pytest.mark.parametrize(
    "names", [FEW, pytest.param([name for name in TINY if name not in FEW], marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_format_gives_one_processs_tokens(names, tmp_path):
    build = models.ADMITTED["llama"]
    plain = {"in 32 bits": build()}
    gives_one_processs_tokens(plain | {name: packed(build(), name) for name in names}, 2, tmp_path)


WIDE = dict(models.BASE, hidden_size=128, intermediate_size=128, num_attention_heads=8, head_dim=16)
"""Heads, widths and groups of 8 that 8 ranks share out; with 2 heads of keys and values, which neighbours share."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_more_ranks_give_one_processs_tokens(size, tmp_path):
    def wide(kv_heads):
        return models.build("LlamaConfig", "LlamaForCausalLM", dict(WIDE, num_key_value_heads=kv_heads))

    shared = {name: packed(wide(8), name) for name in FEW} | {"two kv heads": packed(wide(2), "ct")}
    gives_one_processs_tokens(shared, size, tmp_path)


def test_experts_by_width_give_one_processs_tokens(tmp_path):
    shared = {
        "mxfp4": load_mxfp4(checkpoints.write_mxfp4(tmp_path), dtype=torch.float32).eval(),
        "fp8": build_fp8_mixture(moe_intermediate_size=256, head_dim=128),
    }
    for name, model in shared.items():
        gives_one_processs_tokens({name: model}, 2, tmp_path / name)


FAMILIES = ["qwen3", "glm4", "gpt_neox", "olmo3", "cohere2", "deepseek_v3", "mixtral"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_one_processs_tokens(name, tmp_path):
    plain = {"in 32 bits": models.ADMITTED[name]()}
    gives_one_processs_tokens(plain | {form: packed(models.ADMITTED[name](), form) for form in FEW}, 2, tmp_path)
