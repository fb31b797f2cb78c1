"""Wrong calls of the n-gram trie: every one is refused by name, and none reaches memory that is not the caller's."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
import trie_calls
from torch._subclasses.fake_tensor import FakeTensorMode
from tries import grown, make, outputs

from spec_compile import extensions
from spec_compile.ngram import trie as trie_module

MODULE = Path(trie_module.__file__).with_name("trie.cpp")


def test_wrong_calls_of_the_core():
    number, accepted = trie_calls.accepted_bad_calls(extensions.load("ngram._ngram_trie").Core)
    assert number > 350 and accepted == []


def ids_without_memory():
    with FakeTensorMode():
        fake = torch.zeros(3, dtype=torch.int64)
    eye = torch.eye(3, dtype=torch.int64)[0]
    return {
        "meta": torch.zeros(3, dtype=torch.int64, device="meta"), "fake": fake, "sparse": eye.to_sparse(),
        "nested": torch.nested.nested_tensor([eye, eye], layout=torch.jagged),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["meta", "fake", "sparse", "nested"])
def test_tensors_without_memory_are_refused_by_name(kind):
    trie, tensor = make(vocab_size=50), ids_without_memory()[kind]
    stream = trie.open()
    for call in (lambda: trie.add(tensor), lambda: trie.extend(stream, tensor), lambda: trie.documents([tensor])):
        with pytest.raises(TypeError, match=r"^ids(\[0\])? must be a plain tensor with memory"):
            call()
    arguments = [torch.tensor([stream]), torch.ones(1, 4, dtype=torch.int64), torch.tensor([4]), *outputs(1, 3)]
    names = "streams tokens committed out_tokens out_parents out_count out_match".split()
    for place, name in enumerate(names):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            trie.advance(*arguments[:place], tensor, *arguments[place + 1 :])
    assert trie.length(stream) == 0


@pytest.mark.parametrize("stream", [None, "0", 1.0, True, 2**63, -(2**70), torch.tensor(0), np.array([0])], ids=repr)
def test_streams_that_are_no_numbers_are_refused_by_name(stream):
    trie = make()
    grown(trie, [1, 2, 3])
    for call in (trie.close, trie.length, lambda it: trie.extend(it, [1]), lambda it: trie.propose(it, 4)):
        with pytest.raises((TypeError, ValueError), match=r"^stream must be"):
            call(stream)


def test_a_row_may_not_name_the_stream_of_another():
    trie = make()
    stream = trie.open()
    rows = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"streams holds {stream} twice"):
        trie.advance(torch.tensor([stream, stream]), rows, torch.tensor([4, 2]), *outputs(2, 3))
    assert trie.length(stream) == 0


@pytest.mark.slow
def test_random_calls_under_sanitizers(tmp_path):
    """Right and wrong calls, and changed snapshots, of a trie that is compiled with sanitizers."""
    nanobind = pytest.importorskip("nanobind", reason="pip install nanobind")
    folder, module = Path(nanobind.include_dir()).parent, tmp_path / "trie.so"
    headers = [folder / "include", folder / "ext/robin_map/include", sysconfig.get_path("include")]
    sources = [MODULE, folder / "src/nb_combined.cpp"]
    options = "-std=c++20 -g -O1 -shared -fPIC -fvisibility=hidden -fno-strict-aliasing -fsanitize=address,undefined"
    flags = [*options.split(), "-fno-sanitize-recover=undefined", *(f"-I{each}" for each in headers)]
    subprocess.run(["g++", *flags, *sources, "-o", module], check=True)
    names = [f"-print-file-name={name}" for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    libraries = [subprocess.run(["g++", name], capture_output=True, text=True).stdout.strip() for name in names]
    environment = os.environ | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, trie_calls.__file__, module, "0", "100000"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    assert not re.search("Sanitizer|runtime error", run.stderr)
    counts = json.loads(run.stdout)
    print(counts)
    assert counts.pop("accepted") == [] and min(counts.values()) > 350
