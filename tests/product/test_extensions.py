"""A clone in which nothing is compiled uses what is installed, if it is of the same version and of the same C++."""

import importlib.machinery
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import spec_compile
from spec_compile import extensions

ROOT = Path(spec_compile.__file__).parents[1]
PACKAGE = ROOT / "spec_compile"
NAMES = {name: name.replace(".", "/") for name in extensions.MODULES}
FROM_TREE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
sys.path[:0] = ["", sys.argv.pop(1)]
"""
"""Goes before a script that shall find the package as in an environment with a plain installation, its argument."""


def compiled(name: str) -> Path:
    return Path(extensions.load(name).__file__)


@pytest.fixture
def site(tmp_path):
    """The folder of a plain installation with what is compiled here."""
    folder = tmp_path / "site"
    for name, path in NAMES.items():
        place = (folder / "spec_compile" / path).parent
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(compiled(name), place)
        for source, text in extensions.sources((PACKAGE / path).parent).items():
            (place / source).write_bytes(text)
    about = folder / f"spec_compile-{spec_compile.__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: spec_compile\nVersion: {spec_compile.__version__}\n")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_what_is_installed_is_taken(name, site, monkeypatch):
    version = spec_compile.__version__
    distribution = SimpleNamespace(version=version, locate_file=site.joinpath)
    monkeypatch.setattr(extensions.importlib.metadata, "distribution", lambda name: distribution)
    assert extensions.installed(name) == (site / "spec_compile" / NAMES[name]).with_name(compiled(name).name)
    # Another version, or other C++: an error that says what to do.
    distribution.version = "0.0.7"
    told = rf"spec_compile {version} is imported from the source tree {ROOT}, .* spec_compile 0\.0\.7 is of another ver"
    with pytest.raises(extensions.OtherSourcesError, match=told + r".*run `pip install \.`"):
        extensions.installed(name)
    distribution.version = version
    for source in extensions.sources((PACKAGE / NAMES[name]).parent):
        path = (site / "spec_compile" / NAMES[name]).parent / source
        text = path.read_text()
        path.write_text(text + "//")
        with pytest.raises(extensions.OtherSourcesError, match="was compiled from other C"):
            extensions.installed(name)
        path.unlink()
        with pytest.raises(extensions.OtherSourcesError):
            extensions.installed(name)
        path.write_text(text)
    # Nothing compiled, and nothing installed.
    extensions.installed(name).unlink()
    with pytest.raises(ModuleNotFoundError, match=rf"spec_compile\.{name} is not compiled: run `pip install \.`"):
        extensions.installed(name)
    monkeypatch.undo()
    monkeypatch.setattr(extensions, "__package__", "spec_compile_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="is not compiled"):
        extensions.installed(name)


def test_every_module_that_is_built_is_known():
    text = (ROOT / "CMakeLists.txt").read_text()
    assert set(re.findall(r"nanobind_add_module\((\w+)", text)) == {name.rpartition(".")[2] for name in NAMES}


def in_clone(folder: Path, site: Path, script: str) -> subprocess.CompletedProcess:
    """What a script does that is run in a copy of the package without compiled modules."""
    ends = [f"*{end}" for end in importlib.machinery.EXTENSION_SUFFIXES]
    shutil.copytree(PACKAGE, folder / "spec_compile", ignore=shutil.ignore_patterns("__pycache__", *ends))
    command = [sys.executable, "-c", FROM_TREE + script, str(site)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


USE = """
import spec_compile
from spec_compile.kernels.linear import cpu_gemm
assert spec_compile.__file__.startswith({folder!r}), spec_compile.__file__
print(cpu_gemm._cpu_gemm.__file__)
trie = spec_compile.NgramTrie(vocab_size=10)
trie.add([1, 2, 3])
print(len(trie), sys.modules["spec_compile.ngram._ngram_trie"].__file__)
"""


@pytest.mark.slow
def test_a_clone_uses_what_is_installed(tmp_path, site):
    done = in_clone(tmp_path / "clone", site, USE.format(folder=str(tmp_path / "clone")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(site / "spec_compile")) == 2


@pytest.mark.slow
def test_a_clone_of_other_sources_says_so(tmp_path, site):
    for path, source in (("ngram", "trie.h"), ("kernels/linear", "cpu_gemm.cpp")):
        with open(site / "spec_compile" / path / source, "a") as file:
            file.write("// changed\n")
    done = in_clone(tmp_path / "clone", site, "import spec_compile; spec_compile.NgramTrie()")
    assert "UserWarning: products on a CPU are slower: spec_compile" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the compiled n-gram trie cannot be imported") and "other C++" in last


# Installations


README = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
COMMANDS = [
    f"{command} --help" for command in ("audit", "train", "serve", "tune-kernels")
] + ["audit --model examples/tiny_coder --prompt def --max-new-tokens 2 --options '{\"compile\": false}'"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--editable"]], ids=["plain", "editable"])
def test_a_newcomer_starts_in_the_root(tmp_path, how):
    """README's lines and the commands, run in the clone that was installed."""
    clone, environment = tmp_path / "clone", tmp_path / "environment"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in (name for name in names if name and (ROOT / name).is_file()):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, clone / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    packages = next(environment.glob("lib/python3*/site-packages"))
    (packages / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")  # all that the package needs
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", *how, clone]
    subprocess.run(install, check=True)
    assert not [*clone.glob("spec_compile/**/*.so")]

    def run(*arguments: str) -> str:
        done = subprocess.run([python, *arguments], cwd=clone, capture_output=True, text=True)
        assert done.returncode in (0, 3), done.stderr  # 3: the audit has generated too little to tell
        return done.stdout

    assert str(clone) in run("-c", "import spec_compile; print(spec_compile.__file__)")
    assert "accept length" in run("-c", README.replace('algo="ngram"', 'algo="ngram", compile=False'))
    for command in COMMANDS:
        assert run("-m", "spec_compile", *shlex.split(command))
