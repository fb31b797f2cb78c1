"""How many requests and pages there is memory for."""

from types import SimpleNamespace

import pytest
from batch_requests import config
from transformers.generation.continuous_batching.utils import WorkloadHints

from spec_compile.batching import pages
from spec_compile.batching.pages import Sizes, choose_sizes
from spec_compile.cache import PAGE
from spec_compile.config import Options

TOKEN = 1 << 17
"""Bytes of a token's keys and values."""
KEPT = 10**8
"""Bytes of kept prefixes in host memory."""


FREE = {"bytes": 50e9}


def runtime(device="cuda", max_cache_len=None, token_bytes=TOKEN):
    """A runtime as far as its sizes count: trees of 16 nodes, and rows of 8,192 tokens."""
    return SimpleNamespace(
        device=SimpleNamespace(type=device), on_gpu=device == "cuda", sizes=(1, 16), token_bytes=token_bytes,
        algorithm=SimpleNamespace(plan=SimpleNamespace(lookahead_slots=3)), mixes=False,
        options=Options(max_cache_len=max_cache_len, prefix_cache_host_bytes=KEPT),
        capacity=lambda slots: max_cache_len or 8192, free_bytes=FREE["bytes"],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Free are 50 GB, and a row takes 10 MB besides its pages."""
    monkeypatch.setitem(FREE, "bytes", 50e9)
    monkeypatch.setattr(pages, "row_bytes", lambda runtime, capacity: 10e6)
    return FREE


def chosen(*arguments, hints=None, device="cuda", max_cache_len=None, token_bytes=TOKEN, **options):
    return choose_sizes(runtime(device, max_cache_len, token_bytes), config(**options), hints)


def test_a_gpu_has_pages_for_the_share_of_its_memory(memory):
    found = chosen()
    assert found == Sizes(256, 8192, 4, int((0.8 * 50e9 - 272 * 10e6) / (PAGE * TOKEN)), 0)
    half = chosen(max_memory_percent=0.4)
    assert half.pages == int((0.4 * 50e9 - 272 * 10e6) / (PAGE * TOKEN))
    assert chosen(token_bytes=TOKEN // 5).prefill_rows == 8
    memory["bytes"] = 4e9
    few = chosen()
    assert few.slots == int(0.25 * 0.8 * 4e9 / 10e6) - 16 and few.prefill_rows == 4
    assert chosen(max_requests_per_batch=200).slots == 200


def test_pages_for_rows_and_for_kept_prefixes():
    """A GPU has as many again if there is memory, and a CPU what its memory for prefixes holds."""
    needed = -(-(8192 + 2 * 16 + 3) // PAGE)
    assert chosen(max_requests_per_batch=4) == Sizes(4, 8192, 4, 1 + 8 * needed, 0)
    assert chosen(hints=WorkloadHints(num_requests=3)) == Sizes(4, 8192, 4, 1 + 8 * needed, 0)
    assert chosen(token_bytes=0).pages == 1 + 512 * needed  # a model without attention
    on_cpu = -(-(8192 + 16 + 3) // PAGE)
    assert chosen(device="cpu") == Sizes(16, 8192, 1, 1 + 16 * on_cpu + KEPT // (PAGE * TOKEN), 0)


def test_the_user_says_how_many_tokens():
    assert chosen(num_blocks=1000, page_size=256).pages == 1 + 1000 * 256 // PAGE
    assert chosen(num_blocks=1000, page_size=100, device="cpu").pages == 1 + 100_000 // PAGE
    assert pages.wanted_tokens(SimpleNamespace(num_blocks=3, block_size=100)) == 300  # transformers 5.17


def test_rows_are_as_long_as_the_pool_holds(memory):
    memory["bytes"] = 1e9
    found = chosen(max_requests_per_batch=2)
    assert found.capacity < 8192
    assert pages.row_pages(runtime(), found.capacity) == found.pages - 1
    needed = pages.row_pages(runtime(), 8192)
    words = f"max_cache_len: a row of 8192 tokens takes {needed} pages .* memory for {found.pages - 1}"
    with pytest.raises(ValueError, match=words):
        chosen(max_requests_per_batch=2, max_cache_len=8192)
