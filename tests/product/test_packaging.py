"""What pyproject.toml declares: all that is imported, the versions of torch that work, one version number."""

import ast
import fnmatch
import functools
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, cpython_tags
from packaging.utils import canonicalize_name

import spec_compile
from spec_compile.contrib.terminal import demo
from spec_compile.ngram import match

ROOT = Path(spec_compile.__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOLS = PYPROJECT["project"], PYPROJECT["tool"]
WHEEL = TOOLS["scikit-build"]["wheel"]
CMAKE = (ROOT / "CMakeLists.txt").read_text()
WORKFLOWS = {file.stem: file.read_text() for file in (ROOT / ".github/workflows").iterdir()}
DISTRIBUTIONS = {
    "cuda": "cuda-bindings", "flashinfer": "flashinfer-python", "PIL": "pillow", "pydantic_core": "pydantic",
}  # fmt: skip
"""Of packages that are called otherwise than what they are installed by."""


def names(requirements) -> set[str]:
    return {canonicalize_name(Requirement(requirement).name) for requirement in requirements}


@functools.cache
def trees(folder: str):
    return [(path, ast.parse(path.read_text())) for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def imports(folder: str, everywhere: bool):
    """(file, distribution) of each import of what is neither ours nor Python's own; everywhere: in functions, too."""
    found = []
    for path, tree in trees(folder):
        for node in ast.walk(tree) if everywhere else tree.body:
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                modules = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for module in {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"spec_compile"}:
                if not any((path.parent / f"{module}{end}").exists() for end in (".py", "/__init__.py")):
                    found.append((str(path.relative_to(ROOT)), canonicalize_name(DISTRIBUTIONS.get(module, module))))
    return found


WITH_TRITON = "spec_compile/kernels/", "spec_compile/contrib/indexed/attention"
"""Files that are imported only where Triton is installed."""


def test_all_that_is_imported_is_declared():
    needed, extras = names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    sides = {"serve": names(extras["serve"]) | names(extras["ray"]), "train": names(extras["train"])}
    undeclared = [
        (file, name)
        for file, name in imports("spec_compile", everywhere=False)
        if name not in needed
        and not (name == "triton" and (file.startswith(WITH_TRITON) or file.endswith(("_kernel.py", "_kernels.py"))))
        and (name not in sides.get(file.split("/")[1], ()) or file.endswith("cli.py"))
    ]
    assert undeclared == []
    optional = needed.union(*map(names, extras.values()))
    assert [pair for pair in imports("spec_compile", everywhere=True) if pair[1] not in optional] == []
    in_examples = [pair for pair in imports("examples", everywhere=True) if pair[1] not in needed]
    extra = {"ray": "/ray_", "xgrammar": "/json_schema", "openai": "/compare_drafts"}
    assert [(file, name) for file, name in in_examples if extra.get(name, name) not in file] == []
    assert {name for _, name in imports("spec_compile", everywhere=True)} >= {"safetensors", "huggingface-hub"}


HIDDEN = "triton httpx fastapi uvicorn starlette prometheus_client ray xgrammar gguf flashinfer torchvision PIL peft"
"""Packages that only extras name, and Triton, which torch's builds for a CPU lack."""


def test_the_package_and_its_commands_start_without_extras():
    script = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN.split()})); import spec_compile.__main__"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_declared_in_vain():
    used = {name for folder in ("spec_compile", "examples") for _, name in imports(folder, everywhere=True)}
    assert names(PROJECT["dependencies"]) <= used


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0", "2.14.1", "2.15.0", torch.__version__.split("+")[0]])
def test_versions_of_torch(version):
    wanted = next(Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch"))
    assert wanted.specifier.contains(version) and not wanted.specifier.contains("2.16.0")


def test_there_is_one_version_number():
    """scikit-build-core takes it from the package by this pattern."""
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    source = (ROOT / TOOLS["scikit-build"]["metadata"]["version"]["input"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [spec_compile.__version__]


def test_what_a_wheel_has():
    """The source of the n-gram kernels, which are compiled on first use, and the marker of annotations. From Python
    3.12 on the trie is compiled for the stable ABI of 3.12, before for the one Python that builds it."""
    assert WHEEL["packages"] == ["spec_compile"] and "exclude" not in WHEEL
    assert Path(match.__file__).with_name("match.cu").is_file() and (ROOT / "spec_compile" / "py.typed").is_file()
    assert WHEEL["py-api"] == "cp312" and "STABLE_ABI" in CMAKE
    assert [file for file in TOOLS["mypy"]["files"] if not (ROOT / file).exists()] == []


def test_a_wheel_has_the_model_of_the_demo():
    """All files of the model in the examples but its heads, and what has made it; where the command looks for it."""
    rule = re.search(r"foreach\(file (.+)\)\s+install\(FILES (\S+)/\$\{file\} DESTINATION (\S+)\)", CMAKE)
    names, folder, target = rule.groups()
    model = {path.name for path in (ROOT / folder).iterdir() if path.suffix in (".json", ".safetensors")}
    assert {*names.split()} == model - {"training.json"} | {"README.md"}
    assert ROOT / target == demo.PACKAGE / "demo_model" and not (ROOT / target).exists()
    assert demo.demo_model() == ROOT / folder


def instructions(file: Path) -> list[tuple[str, str]]:
    """(name, arguments) of each instruction of a Dockerfile, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def test_the_dockerfile():
    """It serves as a user without rights, copies from its stages, and takes the package's versions of torch."""
    steps = instructions(ROOT / "Dockerfile")
    names = [name for name, _ in steps]
    assert set(names) <= {"ARG", "FROM", "RUN", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    stages = [words.split() for name, words in steps if name == "FROM"]
    known = [words[2] for words in stages if "AS" in words]
    assert all(words[0] in ("${BASE}", *known) for words in stages)
    assert {match[1] for _, words in steps if (match := re.match(r"--from=(\w+)", words))} <= set(known)
    assert [words for name, words in steps if name == "USER"] == ["server"]
    assert names.index("USER") < names.index("ENTRYPOINT") == len(names) - 1
    assert json.loads(steps[-1][1])[:4] == ["python", "-m", "spec_compile", "serve"]
    torch = next(each for each in PROJECT["dependencies"] if each.startswith("torch>"))
    assert sum(f'"{torch}"' in words for _, words in steps) == 1


@pytest.mark.slow
def test_the_image_builds_and_starts():
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("no Docker that runs")
    subprocess.run(["docker", "build", "-t", "spec_compile:test", ROOT], check=True)
    run = ["docker", "run", "--rm", "spec_compile:test", "--help"]
    assert "--slots" in subprocess.run(run, capture_output=True, text=True, check=True).stdout


def test_a_tree_without_its_extension_says_how_to_build_it(monkeypatch):
    """All else is imported without it: no module imports it when it is imported itself."""
    monkeypatch.setitem(sys.modules, "spec_compile.ngram._ngram_trie", None)
    with pytest.raises(ImportError, match=r"compiled n-gram trie.*C\+\+20 compiler"):
        spec_compile.NgramTrie()
    for _, tree in trees("spec_compile"):
        at_import = [node for node in tree.body if isinstance(node, ast.ImportFrom | ast.Try)]
        assert not any("_ngram_trie" in ast.unparse(node) for node in at_import)


def declared_pythons() -> list[str]:
    """The versions among the classifiers, from the oldest on."""
    found = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]
    return sorted(found, key=lambda version: int(version[2:]))


def unbuilt(settings: dict, pythons: list[str], machine: str) -> list[str]:
    """The versions of Python for which cibuildwheel, with these settings, makes no wheel for Linux on `machine`."""
    missing = []
    for version in pythons:
        name = f"cp{version.replace('.', '')}-manylinux_{machine}"
        is_chosen = any(fnmatch.fnmatch(name, pattern) for pattern in settings["build"].split())
        skipped = f"{settings.get('skip', '')} {settings['linux'].get('skip', '')}".split()
        if not is_chosen or any(fnmatch.fnmatch(name, pattern) for pattern in skipped):
            missing.append(version)
    return missing


def test_wheels_are_built_for_the_versions_that_are_declared():
    settings, pythons = TOOLS["cibuildwheel"], declared_pythons()
    admitted = [f"3.{minor}" for minor in range(40) if f"3.{minor}.1" in SpecifierSet(PROJECT["requires-python"])]
    assert pythons == admitted[: len(pythons)]
    for machine in ("x86_64", "aarch64"):
        assert unbuilt(settings, pythons, machine) == []
        assert f"manylinux-{machine}-image" in settings["linux"]
    fewer = settings | {"build": "cp311-* cp312-* cp313-*"}
    assert unbuilt(fewer, pythons, "x86_64") == pythons[3:]
    assert unbuilt(settings | {"skip": "cp313-*"}, pythons, "x86_64") == ["3.13"]
    script = settings["test-command"].split()[1].format(project=ROOT)
    assert Path(script).is_file()


def test_each_declared_python_takes_a_wheel():
    """3.11 its own, and every later one that of the stable ABI."""
    oldest = WHEEL["py-api"]
    for version in declared_pythons():
        number, own = (3, int(version[2:])), f"cp{version.replace('.', '')}"
        is_stable = number >= (3, int(oldest[3:]))
        wheel = Tag(oldest, "abi3", "any") if is_stable else Tag(own, own, "any")
        assert wheel in {*cpython_tags(number, [own], ["any"])}


def test_the_workflows_build_all_wheels_and_test_the_oldest_and_newest_python():
    """On machines of both kinds. No step narrows what pyproject.toml says."""
    wheels, tests = (yaml.safe_load(WORKFLOWS[name]) for name in ("wheels", "test"))
    job = wheels["jobs"]["wheels"]
    commands = [step["run"] for step in job["steps"] if "cibuildwheel" in step.get("run", "")]
    assert commands[-1] == "python -m cibuildwheel --output-dir dist"  # without --only
    assert "CIBW_" not in WORKFLOWS["wheels"]
    arm = ["arm" in machine for machine in job["strategy"]["matrix"]["machine"]]
    assert sorted(arm) == [False, True] and job["runs-on"] == "${{ matrix.machine }}"
    pythons = declared_pythons()
    assert tests["jobs"]["test"]["strategy"]["matrix"]["python"] == [pythons[0], pythons[-1]]


def test_workflows_run_pinned_actions_with_few_permissions():
    """A tag can be moved to other code, a commit cannot. Only a job that runs no code of ours may sign."""
    for text in WORKFLOWS.values():
        uses = re.findall(r"^.*\buses:.*$", text, re.MULTILINE)
        assert uses and all(re.search(r"uses: [\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line) for line in uses)
        content = yaml.safe_load(text)
        assert content["permissions"] == {}
        for job in content["jobs"].values():
            runs = any("run" in step for step in job["steps"])
            assert job["permissions"] == {"contents": "read"} if runs else "contents" not in job["permissions"]


def test_versions_with_known_holes_are_refused():
    extras = [Requirement(each) for names in PROJECT["optional-dependencies"].values() for each in names]
    bounds = {each.name: each.specifier for each in extras if each.specifier}
    holes = {"h11": "0.15.0", "jinja2": "3.1.5", "starlette": "0.49.0", "xgrammar": "0.1.31"}
    assert not [name for name, version in holes.items() if version in bounds[name]]


def test_wheels_have_the_licences_of_what_is_compiled_in():
    files = {file.name: file.read_text() for each in PROJECT["license-files"] for file in ROOT.glob(each)}
    assert files.keys() == {"LICENSE", "nanobind.txt", "robin_map.txt"}
    assert "Wenzel Jakob" in files["nanobind.txt"] and "Goetghebuer-Planchon" in files["robin_map.txt"]


def test_a_wheel_runs_on_every_processor_of_its_kind():
    """Instructions that not all have are chosen when they run; the compiler may use them in no other function."""
    flags = CMAKE + (ROOT / "pyproject.toml").read_text()
    assert not re.search(r"-m(arch|cpu|tune|avx|amx|fma)|/arch:|INTERPROCEDURAL", flags)
    core = "".join(file.read_text() for file in (ROOT / "spec_compile/kernels/native").glob("*.h"))
    features = {name for names in re.findall(r'target\("(.+?)"\)', core) for name in names.split(",")}
    assert features and features == set(re.findall(r'__builtin_cpu_supports\("(.+?)"\)', core))
