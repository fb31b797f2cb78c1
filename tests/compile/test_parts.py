"""Parts: compiled from data, saved as bytes, and loaded by a process that never saw the function."""

import json
import os
import subprocess
import sys
import time

import models
import pytest
import torch
from parts import described, job
from torch import nn

from spec_compile import kernels, speculate
from spec_compile.compat import CPU_OPTIONS, GPU_OPTIONS
from spec_compile.compile.part import PartCompiler, Parts, compile_part, counts, digest_of, job_of, load_part
from spec_compile.compile.trace import trace
from spec_compile.compile.workers import CompileWorkers
from spec_compile.kernels import copies  # noqa: F401, defines an operator

PRIMES = (5, 37, 41)
LOAD = """
import sys, torch
from spec_compile import kernels
from spec_compile.compile.part import load_part
from spec_compile.kernels import copies
sys.argv[4] == "cuda" and kernels.load(torch.device("cuda"))
part = load_part(open(sys.argv[1], "rb").read())
torch.save([(part(*inputs), inputs[0]) for inputs in torch.load(sys.argv[2])], sys.argv[3])
"""
DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


def moved(caches, lengths, path, count, slots):
    """Kernels of Inductor, an op that writes its arguments, numbers of the host, and a size that varies."""
    torch.ops.spec_compile.compact([caches], lengths, path, count)
    sums = torch.softmax(caches[:, :, :slots].float(), 2).sum((1, 3)) + torch.arange(slots, device=caches.device)
    sums[:, 0] = -1
    return sums, (lengths + count).clamp(max=slots)


def inputs(device, rows, slots, seen):
    caches = torch.randn(rows, 2, slots, 64, device=device, dtype=torch.bfloat16)
    lengths, count = torch.randint(0, slots - 4, (rows,)).to(device), torch.randint(1, 4, (rows,)).to(device)
    return caches, lengths, torch.tensor([[0, 2, 3, 3]], device=device).repeat(rows, 1), count, seen


def traced_on(device):
    """The trace of `moved`, and its job."""
    if device == "cuda":
        kernels.load(torch.device("cuda"))
    with torch.no_grad():
        found = trace(
            moved, inputs(device, 5, 37 * 8, 41), lambda size: any(size % prime == 0 for prime in PRIMES),
            torch.device(device, 0) if device == "cuda" else torch.device(device),
        )  # fmt: skip
    return found, job(found, GPU_OPTIONS if device == "cuda" else CPU_OPTIONS)


@pytest.fixture(scope="module", params=DEVICES)
def compiled(request):
    """A device, the trace, its job, and the compiled part."""
    traced, text = traced_on(request.param)
    return request.param, traced, text, compile_part(text)


ON_GPU = pytest.mark.parametrize("compiled", DEVICES[1:], indirect=True)


def check(traced, part, arguments):
    own = arguments[0].clone(), *arguments[1:]
    sums, ends = described(traced).write(part(*described(traced).read(arguments, [])))
    want_sums, want_ends = moved(*own)
    assert torch.equal(arguments[0], own[0]) and torch.equal(ends, want_ends)
    torch.testing.assert_close(sums, want_sums, rtol=1e-3, atol=1e-3)


def test_a_loaded_part_serves_all_sizes(compiled):
    device, traced, _, data = compiled
    part = load_part(data)
    for rows, slots, seen in ((5, 296, 41), (2, 128, 8), (17, 1000, 999)):
        check(traced, part, inputs(device, rows, slots, seen))


def test_a_part_runs_in_another_process(compiled, tmp_path):
    """One with empty caches, which compiles nothing again, and computes the same bits."""
    device, traced, _, data = compiled
    (tmp_path / "part").write_bytes(data)
    given = [inputs(device, rows, slots, seen) for rows, slots, seen in ((5, 296, 41), (3, 256, 100))]
    torch.save([described(traced).read(each, []) for each in given], tmp_path / "inputs")
    paths = [str(tmp_path / name) for name in ("part", "inputs", "outputs")]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", LOAD, *paths, device], check=True, env=environment)
    part = load_part(data)
    for arguments, (there, caches) in zip(given, torch.load(tmp_path / "outputs"), strict=True):
        here = part(*described(traced).read(arguments, []))
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
        assert torch.equal(arguments[0], caches)


def test_the_key_is_that_of_graph_specs_and_options():
    _, text = traced_on("cpu")
    assert traced_on("cpu")[1] == text
    rows, specs, options, threads = map(json.loads(text).get, ("rows", "specs", "options", "threads"))
    others = [
        job_of(rows[:-1], specs, options, threads),
        job_of(rows, [[[7, *specs[0][0][1:]], *specs[0][1:]], *specs[1:]], options, threads),
        job_of(rows, specs, {**options, "max_autotune": True}, threads),
        job_of(rows, specs, options, threads + 1),
    ]
    assert len({*map(digest_of, [text, *others])}) == 5


NOT_PERMITTED = job_of([["", [], {}], ["os.system", ["true"], {}]], [[[2], [1], [], "int64", "cpu"]], {}, 1)


@pytest.mark.parametrize("text", ["{}", "[]", "7", "", '{"rows": 1}', "{", NOT_PERMITTED])
def test_texts_of_no_job_are_refused(text):
    with pytest.raises(ValueError, match="operator: expected" if text == NOT_PERMITTED else ""):
        compile_part(text)


@ON_GPU
def test_a_loaded_part_is_captured_in_a_cuda_graph(compiled):
    device, traced, _, data = compiled
    part, arguments = load_part(data), inputs(device, 4, 256, 200)
    given = described(traced).read(arguments, [])
    clean, stream = arguments[0].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            part(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = part(*given)
    for _ in range(3):
        arguments[0].copy_(clean)
        arguments[1].copy_(torch.randint(0, 200, (4,)))
        own = arguments[0].clone(), *arguments[1:]
        graph.replay()
        torch.testing.assert_close(described(traced).write(results)[0], moved(*own)[0], rtol=1e-3, atol=1e-3)
        assert torch.equal(arguments[0], own[0])


@ON_GPU
def test_a_child_compiles_beside_the_model(compiled):
    device, traced, text, _ = compiled
    children = CompileWorkers(1)
    try:
        children.submit("part", text)
        found = {}
        begin = time.monotonic()
        while not found and time.monotonic() < begin + 300:
            found = {key: data for key, data, _ in children.collect(["part"])}
            time.sleep(0.1)
    finally:
        children.close()
    check(traced, load_part(found["part"]), inputs(device, 6, 384, 300))


@pytest.mark.gpu
def test_a_wrapping_from_a_store_compiles_nothing():
    class Memory(dict):
        read, write = dict.get, dict.__setitem__

    model, store, answers = models.ADMITTED["llama"]().to("cuda", torch.bfloat16), Memory(), []
    ids = torch.randint(3, models.VOCAB, (2, 30), device="cuda")
    for _ in range(2):
        fast = speculate(model, num_draft_tokens=4, max_cache_len=256)
        runtime = fast.speculation.engine.runtime
        runtime.parts = Parts(store)
        if runtime.cold_start is not None:
            runtime.cold_start.parts = runtime.parts
        before = counts["compiled"]
        answers.append(fast.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0))
        del fast, runtime
    assert counts["compiled"] == before and counts["loaded"] > 0 and torch.equal(*answers)


@pytest.mark.gpu
def test_a_constant_of_the_host_is_made_on_the_gpu():
    class Owner(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("parents", torch.zeros(5, 8, dtype=torch.int64, device="cuda"))

        def root(self):
            self.parents[:, :1] = -1
            return self.parents + 0

    owner = Owner()
    part = PartCompiler(torch.device("cuda", 0), "test", PRIMES, 5, 41, exact=False)(owner.root, "root")
    part()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        result = part()
    owner.parents.fill_(3)
    graph.replay()
    assert result[:, 0].eq(-1).all() and result[:, 1:].eq(3).all()
