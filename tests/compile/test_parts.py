"""Parts: compiled from data, saved as bytes, and loaded by a process that never saw the function."""

import json
import subprocess
import sys

import pytest
import torch
from parts import described, job

from spec_compile.compile.part import compile_part, digest_of, job_of, load_part
from spec_compile.compile.trace import trace
from spec_compile.kernels import copies  # noqa: F401, defines an operator

LOAD = """
import sys, torch
from spec_compile.compile.part import load_part
from spec_compile.kernels import copies
part = load_part(open(sys.argv[1], "rb").read())
torch.save([part(*inputs) or inputs for inputs in torch.load(sys.argv[2])], sys.argv[3])
"""


def moved(caches, lengths, path, count, slots):
    """An operator that writes its arguments, a size that varies, and an integer that does."""
    torch.ops.spec_compile.compact([caches], lengths, path, count)
    return caches[:, :, :slots].sum((1, 3)) + torch.arange(slots)


def inputs(rows, slots, seen):
    caches, lengths = torch.randn(rows, 2, slots, 4), torch.randint(0, slots - 4, (rows,))
    path, count = torch.tensor([[0, 2, 3, 3]]).expand(rows, -1).contiguous(), torch.randint(1, 4, (rows,))
    return caches, lengths, path, count, seen


def a_job():
    example = inputs(5, 37 * 3, 41)
    traced = trace(moved, example, lambda size: any(size % prime == 0 for prime in (5, 37, 41)), torch.device("cpu"))
    return traced, job(traced)


@pytest.mark.slow
def test_a_part_runs_in_another_process(tmp_path):
    traced, text = a_job()
    data = compile_part(text)
    (tmp_path / "part").write_bytes(data)
    given = [inputs(rows, slots, seen) for rows, slots, seen in ((5, 111, 41), (2, 64, 8), (7, 300, 299))]
    torch.save([described(traced).read(each, []) for each in given], tmp_path / "inputs")
    paths = [str(tmp_path / name) for name in ("part", "inputs", "outputs")]
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True)
    here = load_part(data)
    for arguments, (there,) in zip(given, torch.load(tmp_path / "outputs"), strict=True):
        own = arguments[0].clone(), *arguments[1:]
        want = moved(*own)
        assert torch.allclose(there, want, atol=1e-5)
        assert torch.allclose(described(traced).write(here(*described(traced).read(arguments, []))), want, atol=1e-5)
        assert torch.equal(arguments[0], own[0]), "it writes its arguments as the function does"


def test_the_key_is_that_of_graph_specs_and_options():
    _, text = a_job()
    assert a_job()[1] == text
    rows, specs, options, threads = map(json.loads(text).get, ("rows", "specs", "options", "threads"))
    others = [
        job_of(rows[:-1], specs, options, threads),
        job_of(rows, [[[7, *specs[0][0][1:]], *specs[0][1:]], *specs[1:]], options, threads),
        job_of(rows, specs, {**options, "max_autotune": True}, threads),
        job_of(rows, specs, options, threads + 1),
    ]
    assert len({*map(digest_of, [text, *others])}) == 5


@pytest.mark.parametrize("text", ["{}", "[]", "7", "", '{"rows": 1}', "{"])
def test_texts_of_no_job_are_refused(text):
    with pytest.raises(ValueError):
        compile_part(text)


def test_no_permitted_operator_no_part():
    with pytest.raises(ValueError, match="operator: expected"):
        compile_part(job_of([["", [], {}], ["os.system", ["true"], {}]], [[[2], [1], [], "int64", "cpu"]], {}, 1))
