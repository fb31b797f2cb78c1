"""The quick check passes graphs that compute what the model does, and sees small faults in either graph."""

import functools

import models
import pytest
import torch
from toy_graphs import add_to_eps

from spec_compile import passes
from spec_compile.compile.start import quick_check
from spec_compile.errors import UnsupportedModelError
from spec_compile.kernels.attention import Use

ZOO = {**models.ADMITTED, **models.HYBRIDS}
DTYPES = [torch.float32, torch.bfloat16]


@functools.cache
def graphs(name, dtype):
    model = ZOO[name]().to(dtype)
    captured = models.captured(model)
    return model, *(passes.run(captured, passes.Settings(attention=Use(role=role))) for role in ("prefill", "verify"))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen3_moe", "qwen3_next", "mamba2", "lfm2"])
def test_right_graphs_pass(name, dtype):
    quick_check(*graphs(name, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [1, 2])
def test_another_eps_of_norms_is_refused(place, dtype):
    parts = [*graphs("llama", dtype)]
    parts[place] = parts[place].copy()
    add_to_eps(parts[place].gm, 0.1)
    with pytest.raises(UnsupportedModelError, match="an artefact differs"):
        quick_check(*parts)


def test_another_mask_of_trees_is_refused():
    model, prefill, verify = graphs("llama", torch.float32)
    text = verify.gm.forward

    def causal(ids, positions, lengths, ancestors, *rest):
        return text(ids, positions, lengths, None, *rest)

    wrong = verify.copy()
    wrong.gm.forward = causal
    with pytest.raises(UnsupportedModelError, match="an artefact differs"):
        quick_check(model, prefill, wrong)
