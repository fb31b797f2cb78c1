"""The repository for the Hub's `kernels` library: it is made, and used where spec_compile cannot be imported."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = ROOT / "examples" / "hub_kernels" / "make.py"
NAME = "speculative_kernels"
ALONE = """
import importlib.util, runpy, sys
sys.modules["spec_compile"] = None
def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
"""Code by which a process without spec_compile imports a package under any name."""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "speculative-kernels"
    runpy.run_path(str(MAKE))["make"](folder)
    return folder


def run(tmp_path, code, *arguments, **environment):
    """Run code in a process of its own, away from the repository. -> what it prints."""
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": "", **environment}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_functions_are_those_of_plain_pytorch_under_another_name(repository, tmp_path):
    """Two builds in one process, each by the tests that the repository has."""
    code = (
        ALONE
        + f"""
import torch
from pathlib import Path
repository = Path(sys.argv[1])
for backend in ("cpu", "cuda"):
    module = load(repository / "build" / f"torch-{{backend}}", f"another_{{backend}}")
    sys.modules["{NAME}"] = module
    for name, test in runpy.run_path(str(repository / "tests/test_{NAME}.py")).items():
        if name.startswith("test_"):
            test()
            print(backend, name)
wide = torch.compile(module.few_rows_linear, backend="aot_eager", fullgraph=True)
x, weight = torch.randn(3, 32), torch.randn(8, 32)
assert torch.equal(wide(x, weight), module.few_rows_linear(x, weight))
"""
    )
    printed = run(tmp_path, code, repository).splitlines()
    assert len(printed) == 2 * 5 and "cuda test_trees" in printed


def test_its_kernels_run(repository, tmp_path):
    """The kernels themselves, in Triton's interpreter, against the functions on a CPU."""
    pytest.importorskip("triton")
    code = (
        ALONE
        + f"""
import torch
from pathlib import Path
package = load(Path(sys.argv[1]) / "torch-ext" / "{NAME}", "made")
from made.kernels.attention import tree_attention as attention
from made.kernels.attention.base import AttentionCall
from made.kernels.linear import skinny_gemm
from made.kernels.linear.plans import ProductTile
from made.kernels.linear.product import Product
torch.manual_seed(0)
tiling = attention.Tuning(16, 16, 32, 4, 2, most=4)
for nodes, ancestors in ((4, [[0b0001, 0b0011, 0b0101, 0b1011]] * 2), (70, None)):
    lengths, ancestors = torch.tensor([40, 7]), ancestors and torch.tensor(ancestors)
    q, k, v = (torch.randn(2, heads, nodes, 16) for heads in (4, 2, 2))
    caches = [torch.zeros(2, 2, 128, 16) for _ in range(2)]
    depth = torch.arange(70) if ancestors is None else torch.tensor([0, 1, 1, 2])
    copies = [cache.clone() for cache in caches]
    rest = lengths, ancestors, lengths[:, None] + depth, None, 0.25, None, None
    out = attention.launch(AttentionCall(q, k, v, *copies, *rest), tiling)
    expected = package.tree_attention(q, k, v, ancestors, lengths, *caches)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(copies[0], caches[0]) and torch.equal(copies[1], caches[1])
x, weight, out = torch.randn(5, 96), torch.randn(40, 96), torch.empty(5, 40)
skinny_gemm.launch(Product(x, weight), out, 2, ProductTile(32, 32, 16, 4, 2))
torch.testing.assert_close(out, package.few_rows_linear(x, weight), rtol=1e-4, atol=1e-4)
print("done")
"""
    )
    ops = repository / "torch-ext" / NAME / "_ops.py"  # as kernel-builder makes it
    assert not ops.exists()
    ops.write_text((repository / "build/torch-cpu/_ops.py").read_text().replace("_cpu_", "_test_"))
    try:
        assert run(tmp_path, code, repository, TRITON_INTERPRET="1") == "done\n"
    finally:
        ops.unlink()


def test_the_hub_s_library_loads_it(repository, tmp_path):
    kernels = pytest.importorskip("kernels")
    if not hasattr(kernels, "get_local_kernel"):
        pytest.skip("this is the folder tests/kernels, not the library")
    module = kernels.get_local_kernel(repository / "build")
    folder = repository / "build" / f"torch-{'cuda' if '_cuda_' in module.__name__ else 'cpu'}"
    assert Path(module.__file__) == folder / "__init__.py"
    metadata = kernels._rust.Metadata.read_from_file(folder / "metadata.json")
    metadata.digest.validate(kernels._rust.Digest.hash_variant(metadata.digest.algorithm, folder))
    assert kernels._rust.Build.open(repository).general.backends


def test_it_imports_from_itself_torch_and_python_alone(repository):
    for file in [*(repository / "torch-ext").rglob("*.py"), *(repository / "build").rglob("*.py")]:
        text = file.read_text()
        assert "spec_compile::" not in text and "ops.spec_compile" not in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                modules = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.split(".")[0] for name in modules} <= sys.stdlib_module_names | {"torch", "triton"}


def test_its_metadata_and_its_card(repository):
    ids = set()
    for backend in ("cpu", "cuda"):
        folder = repository / "build" / f"torch-{backend}"
        metadata = json.loads((folder / "metadata.json").read_text())
        assert (metadata["name"], metadata["backend"]) == (NAME.replace("_", "-"), {"type": backend})
        assert metadata["id"].isidentifier() and f"torch.ops.{metadata['id']}\n" in (folder / "_ops.py").read_text()
        assert metadata["digest"]["files"].keys() == {str(each.relative_to(folder)) for each in folder.rglob("*.py")}
        ids.add(metadata["id"])
    assert len(ids) == 2 and (repository / "LICENSE").exists() and (repository / "flake.nix").exists()
    card = (repository / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\n") and "license: apache-2.0\n---\n" in card
    signature = re.search(r"def tree_attention\((.*?)\) ->", (folder / "__init__.py").read_text(), re.DOTALL)[1]
    arguments = re.search(r"## `tree_attention\((.*)\)`", card)[1]
    assert re.findall(r"(\w+):", signature) == re.findall(r"\w+", arguments)


def test_a_folder_that_is_there_stays(repository):
    with pytest.raises(FileExistsError):
        runpy.run_path(str(MAKE))["make"](repository)
