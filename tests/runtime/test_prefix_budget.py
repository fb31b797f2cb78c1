"""The memory for prefixes of earlier requests, as the options say it."""

from types import SimpleNamespace

import models
import psutil
import pytest

from spec_compile import speculate
from spec_compile.config import Options
from spec_compile.runtime.runtime import PrefixBudget

MEMORY = psutil.virtual_memory().total


def budget(on_gpu=False, **options):
    runtime = SimpleNamespace(options=Options(**options), on_gpu=on_gpu)
    return PrefixBudget.of(runtime)


def test_the_default_is_a_share_of_the_host(monkeypatch):
    assert 0 < budget().device == budget().host <= min(4e9, MEMORY / 10)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=10**9))
    assert budget() == PrefixBudget(10**8, 10**8)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=10**12))
    assert budget() == PrefixBudget(4 * 10**9, 4 * 10**9) and budget(on_gpu=True) == PrefixBudget(None, 4 * 10**9)


def test_what_is_asked_for_is_given():
    assert budget(True, prefix_cache_bytes=5, prefix_cache_host_bytes=7) == PrefixBudget(5, 7)
    assert budget(prefix_cache_bytes=5, prefix_cache_host_bytes=7) == PrefixBudget(12, 7)
    assert budget(prefix_cache_host_bytes=0).host == 0


@pytest.mark.parametrize("name", ["prefix_cache_bytes", "prefix_cache_host_bytes"])
def test_more_than_the_machine_has(name):
    with pytest.raises(ValueError, match=f"{name}: .* ask for less"):
        speculate(models.ADMITTED["llama"](), compile=False, check=False, **{name: MEMORY + 1})
    with pytest.raises(ValueError, match=f"{name}: expected 0 bytes or more, got -1"):
        Options(**{name: -1})
    with pytest.raises(TypeError, match=f"{name}: expected int"):
        Options(**{name: 0.1})


def test_the_memory_of_a_gpu_is_not_the_host_s():
    assert budget(on_gpu=True, prefix_cache_bytes=MEMORY + 1, prefix_cache_host_bytes=3) == PrefixBudget(MEMORY + 1, 3)
    with pytest.raises(ValueError, match="prefix_cache_host_bytes"):
        budget(on_gpu=True, prefix_cache_host_bytes=MEMORY + 1)


def test_explain_says_what_is_kept():
    def explained(**options):
        text = speculate(models.ADMITTED["llama"](), compile=False, check=False, **options).speculation.explain()
        return next(line for line in text.splitlines() if line.startswith("prefixes"))

    assert explained(prefix_cache_bytes=10**7, prefix_cache_host_bytes=2 * 10**7).endswith(
        "pages of 0.03 GB besides the rows' own, 0.02 GB of the host for copies and states"
    )
    assert explained(prefix_cache_host_bytes=0).endswith("as long as their rows live")
