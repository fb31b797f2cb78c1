"""Parts: compiled from data, saved as bytes, and loaded by a process that never saw the function."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from spec_compile.artefacts.parts import PartJob, compile_part, load_part, part_key, read_job
from spec_compile.artefacts.trace import trace
from spec_compile.compat import CPU_OPTIONS
from spec_compile.kernels import copies  # noqa: F401, defines an operator

LOAD = """
import sys, torch
from spec_compile.artefacts.parts import load_part
from spec_compile.kernels import compact
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
    return traced, PartJob(traced.rows, traced.specs, CPU_OPTIONS, torch.get_num_threads())


@pytest.mark.slow
def test_a_part_runs_in_another_process(tmp_path):
    traced, job = a_job()
    data = compile_part(read_job(job.text()))
    (tmp_path / "part").write_bytes(data)
    given = [inputs(rows, slots, seen) for rows, slots, seen in ((5, 111, 41), (2, 64, 8), (7, 300, 299))]
    torch.save([traced.form.read(each, []) for each in given], tmp_path / "inputs")
    paths = [str(tmp_path / name) for name in ("part", "inputs", "outputs")]
    subprocess.run([sys.executable, "-c", LOAD, *paths], check=True)
    here = load_part(data)
    for arguments, (there,) in zip(given, torch.load(tmp_path / "outputs"), strict=True):
        own = arguments[0].clone(), *arguments[1:]
        want = moved(*own)
        assert torch.allclose(there, want, atol=1e-5)
        assert torch.allclose(traced.form.write(here(*traced.form.read(arguments, []))), want, atol=1e-5)
        assert torch.equal(arguments[0], own[0]), "it writes its arguments as the function does"


def test_the_key_is_that_of_graph_specs_and_options():
    _, job = a_job()
    key = part_key(job)
    assert part_key(read_job(job.text())) == key and part_key(a_job()[1]) == key
    others = [
        dataclasses.replace(job, rows=job.rows[:-1]),
        dataclasses.replace(job, specs=[[[7, *job.specs[0][0][1:]], *job.specs[0][1:]], *job.specs[1:]]),
        dataclasses.replace(job, options={**job.options, "max_autotune": True}),
        dataclasses.replace(job, threads=job.threads + 1),
    ]
    assert len({key, *map(part_key, others)}) == 5


@pytest.mark.parametrize("text", ["{}", "[]", "7", "", '{"rows": 1}', "{"])
def test_texts_of_no_job_are_refused(text):
    with pytest.raises(ValueError):
        read_job(text)


def test_no_permitted_operator_no_part():
    with pytest.raises(ValueError, match="operator: expected"):
        compile_part(PartJob([["", [], {}], ["os.system", ["true"], {}]], [[[2], [1], [], "int64", "cpu"]], {}, 1))
