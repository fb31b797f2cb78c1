"""Where tests of kernels run, and FlashInfer where it is not installed."""

import importlib.metadata
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch


def pytest_generate_tests(metafunc):
    """An argument `place` (device, dtype) takes each of the module's PLACES, if no mark gives it other values."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "place" in metafunc.fixturenames and not any("place" in mark.args[0] for mark in marks):
        from places import places  # it looks for triton

        known = getattr(metafunc.module, "PLACES", None)
        metafunc.parametrize("place", known or places(torch.float32, torch.bfloat16))


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def fake_prefill(q, k, v, causal, sm_scale, logits_soft_cap, window_left, return_lse):
    """`flashinfer.single_prefill_with_kv_cache` as it is documented: q [N, H, D], k, v [S, Hkv, D], base-2 sums."""
    assert return_lse and all(x.stride(-1) == 1 for x in (q, k, v))
    assert causal or window_left == -1
    k, v = (x.transpose(0, 1) for x in (k, v))
    group = q.shape[1] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.transpose(1, 2) * sm_scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    back = torch.arange(q.shape[0])[:, None] + k.shape[1] - q.shape[0] - torch.arange(k.shape[1])
    if causal:
        scores = scores.masked_fill(back < 0, -math.inf)
    if window_left >= 0:
        scores = scores.masked_fill(back > window_left, -math.inf)
    lse = scores.logsumexp(2).transpose(0, 1) / math.log(2)
    return (scores.softmax(2) @ v).transpose(0, 1).to(q.dtype), lse.float()


def fake_xqa(
    q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size,
    sinks=None, q_scale=1.0, kv_layout="NHD", q_seq_len=1, mask=None,
):  # fmt: skip
    """`flashinfer.xqa.xqa` as it is documented: q and output [B, 1, N, H, D] or, for one node, [B, 1, H, D]."""
    assert kv_layout == "HND" and page_size in (128, 64, 32, 16)
    assert q.is_contiguous() and (mask is None) == (q_seq_len == 1) == (q.dim() == 4)
    assert output.shape == q.shape and not semaphores.any()
    assert (page_table.dtype, seq_lens.dtype) == (torch.int32, torch.uint32) and seq_lens.shape == (len(q), 1)
    assert sinks is None or (sinks.dtype, sinks.shape[0]) == (torch.float32, num_kv_heads)
    queries = q.view(len(q), q_seq_len, num_kv_heads, -1, q.shape[-1]).double()
    for row, (pages, length) in enumerate(zip(page_table.tolist(), seq_lens.flatten().tolist())):
        k, v = (torch.cat([cache[page] for page in pages], 1)[:, :length].double() for cache in (k_cache, v_cache))
        scores = torch.einsum("nhgd,hsd->hgns", queries[row], k) * q_scale / math.sqrt(q.shape[-1])
        if mask is not None:
            assert mask.dtype == torch.uint16 and mask.shape == (len(q), q_seq_len, (q_seq_len + 31) // 32 * 2)
            words = mask[row].int().repeat_interleave(16, 1)[:, :q_seq_len]
            seen = words >> (torch.arange(q_seq_len) % 16) & 1
            scores[..., length - q_seq_len :].masked_fill_(seen == 0, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, :, None, None].expand(*scores.shape[:3], 1)], 3)
        probabilities = scores.softmax(3)[..., :length]
        output[row] = torch.einsum("hgns,hsd->nhgd", probabilities, v).reshape(output[row].shape).to(output.dtype)


@pytest.fixture
def installed(monkeypatch):
    """Called with a version of FlashInfer, it makes this the one that is installed (None: none is)."""

    def install(version):
        def found(name):
            if name == "flashinfer-python" and version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version if name == "flashinfer-python" else original(name)

        monkeypatch.setattr(importlib.metadata, "version", found)

    original = importlib.metadata.version
    return install


@pytest.fixture
def flashinfer(monkeypatch, installed):
    """On a CPU FlashInfer's modules are ones that compute what its documentation says."""
    functions = {"flashinfer": ("single_prefill_with_kv_cache", fake_prefill), "flashinfer.xqa": ("xqa", fake_xqa)}
    for name, (function, fake) in functions.items() if not torch.cuda.is_available() else ():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, function, fake)
        monkeypatch.setitem(sys.modules, name, module)
        installed("0.6.1")
