"""Parts on a GPU: their Triton kernels travel with them, and loaded parts are captured in CUDA graphs."""

import os
import subprocess
import sys
import time

import models
import pytest
import torch
from parts import described, job
from torch import nn

import spec_compile.kernels
from spec_compile import speculate
from spec_compile.compat import GPU_OPTIONS
from spec_compile.compile.part import PartCompiler, Parts, compile_part, counts, load_part
from spec_compile.compile.trace import trace
from spec_compile.compile.workers import CompileWorkers

pytestmark = pytest.mark.gpu
PRIMES = (5, 37, 41)
LOAD = """
import sys, torch
import spec_compile.kernels
from spec_compile.compile.part import load_part
spec_compile.kernels.load(torch.device("cuda"))
part = load_part(open(sys.argv[1], "rb").read())
torch.save([(part(*inputs), inputs[0]) for inputs in torch.load(sys.argv[2])], sys.argv[3])
"""


def moved(caches, lengths, path, count, slots):
    """Kernels of Inductor, an op that writes its arguments, numbers of the host, and a size that varies."""
    torch.ops.spec_compile.compact([caches], lengths, path, count)
    sums = torch.softmax(caches[:, :, :slots].float(), 2).sum((1, 3)) + torch.arange(slots, device=caches.device)
    sums[:, 0] = -1
    return sums, (lengths + count).clamp(max=slots)


def inputs(rows, slots, seen):
    caches = torch.randn(rows, 2, slots, 64, device="cuda", dtype=torch.bfloat16)
    lengths, count = torch.randint(0, slots - 4, (rows,)).cuda(), torch.randint(1, 4, (rows,)).cuda()
    return caches, lengths, torch.tensor([[0, 2, 3, 3]], device="cuda").repeat(rows, 1), count, seen


def varies(size):
    return any(size % prime == 0 for prime in PRIMES)


@pytest.fixture(scope="module")
def compiled():
    spec_compile.kernels.load(torch.device("cuda"))
    with torch.no_grad():
        traced = trace(moved, inputs(5, 37 * 8, 41), varies, torch.device("cuda", 0))
    text = job(traced, GPU_OPTIONS)
    return traced, text, compile_part(text)


def check(traced, part, arguments):
    own = arguments[0].clone(), *arguments[1:]
    sums, ends = described(traced).write(part(*described(traced).read(arguments, [])))
    want_sums, want_ends = moved(*own)
    assert torch.equal(arguments[0], own[0]) and torch.equal(ends, want_ends)
    torch.testing.assert_close(sums, want_sums, rtol=1e-3, atol=1e-3)


def test_a_loaded_part_serves_all_sizes(compiled):
    traced, _, data = compiled
    part = load_part(data)
    for rows, slots, seen in ((5, 296, 41), (2, 128, 8), (17, 1000, 999)):
        check(traced, part, inputs(rows, slots, seen))


def test_kernels_travel_with_the_part(compiled, tmp_path):
    """A process with empty caches compiles no Triton kernel of Inductor's again, and computes the same bits."""
    traced, _, data = compiled
    (tmp_path / "part").write_bytes(data)
    given = [inputs(rows, slots, seen) for rows, slots, seen in ((5, 296, 41), (3, 256, 100))]
    torch.save([described(traced).read(each, []) for each in given], tmp_path / "inputs")
    paths = [str(tmp_path / name) for name in ("part", "inputs", "outputs")]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True, env=environment)
    part = load_part(data)
    for arguments, (there, caches) in zip(given, torch.load(tmp_path / "outputs"), strict=True):
        here = part(*described(traced).read(arguments, []))
        assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
        assert torch.equal(arguments[0], caches)


def test_a_loaded_part_is_captured_in_a_cuda_graph(compiled):
    traced, _, data = compiled
    part, arguments = load_part(data), inputs(4, 256, 200)
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


def test_a_child_compiles_beside_the_model(compiled):
    traced, text, _ = compiled
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
    check(traced, load_part(found["part"]), inputs(6, 384, 300))


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
