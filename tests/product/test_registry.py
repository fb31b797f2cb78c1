"""Abilities that register themselves: those of `contrib`, and those of other packages."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from spec_compile import registry
from spec_compile.drafters import ALGORITHMS, parse_algorithm

ROOT = Path(__file__).parents[2]
WITHOUT = """
import pkgutil, sys
walk = pkgutil.iter_modules
pkgutil.iter_modules = lambda path=None, prefix="": [] if "contrib" in str(path) else walk(path, prefix)
import torch, spec_compile
from spec_compile.drafters import ALGORITHMS, ALIASES
from transformers import AutoConfig, AutoModelForCausalLM
assert not [name for name in sys.modules if name.startswith("spec_compile.contrib")]
assert {"assistant", "p_eagle", "pard", "dspark", "jetspec"}.isdisjoint({*ALGORITHMS, *ALIASES})
torch.manual_seed(0)
config = AutoConfig.from_pretrained("examples/tiny_coder", num_hidden_layers=2)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
fast = spec_compile.speculate(model, compile=False)
ids = torch.arange(8)[None]
assert torch.equal(*(each.generate(ids, do_sample=False, max_new_tokens=8) for each in (model, fast)))
"""


def test_the_core_runs_without_contrib():
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, cwd=ROOT)


def test_an_installed_package_adds_an_algorithm(monkeypatch):
    asked = []

    def entry_points(group):
        asked.append(group)
        return [SimpleNamespace(load=lambda: monkeypatch.setitem(ALGORITHMS, "theirs", ALGORITHMS["ngram"]))]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    registry.load_plugins.cache_clear()
    assert parse_algorithm("ngram") == "ngram" and not asked
    assert parse_algorithm("theirs") == "theirs" and asked == ["spec_compile.contrib"]
    with pytest.raises(ValueError, match=r"expected one of .* theirs, got 'ours'"):
        parse_algorithm("ours")
    assert len(asked) == 1
    registry.load_plugins.cache_clear()
