"""The compiled modules: those in the package's own folder, or the installed ones if they have the same sources.

Python prefers ``./spec_compile`` in the folder where it was started. In a clone nothing is compiled there, even after
``pip install .``, so the installed modules are used if they are of this version and of the same C++.
"""

import importlib.metadata
import importlib.util
import re
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
MODULES = "ngram._ngram_trie", "kernels.native._cpu_gemm", "kernels.native._cpu_attention", "contrib.kernels._cpu_trees"
"""The compiled modules. The C++ of each is what its folder has."""
BUILD = "run `pip install .` in the repository, with a C++20 compiler at hand"


class OtherSourcesError(ImportError):
    """The installed compiled modules are of another version, or of other C++, than this folder."""


def load(name: str) -> ModuleType:
    """The compiled module of a name in `MODULES`.

    Raises ModuleNotFoundError if it is compiled nowhere, and OtherSourcesError if only from other sources.
    """
    full = f"{__package__}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
    path = installed(name)
    spec = importlib.util.spec_from_file_location(full, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return sys.modules.setdefault(full, module)


def load_if_built(name: str, without: str) -> ModuleType | None:
    """`load`; None if the module is compiled nowhere, or only from other sources, of which a warning tells.

    without: the consequence, for the warning.
    """
    try:
        return load(name)
    except OtherSourcesError as error:
        warnings.warn(f"{without}: {error}", stacklevel=3)
    except ImportError:  # the package was not built
        pass
    return None


def installed(name: str, here: Path = HERE) -> Path:
    """The file of the compiled module in the installed distribution; see `load` for what is raised.

    here: the folder of the package that wants it.
    """
    parts = name.split(".")
    missing = ModuleNotFoundError(f"{__package__}.{name} is not compiled: {BUILD}", name=f"{__package__}.{name}")
    try:
        distribution = importlib.metadata.distribution(__package__)
    except importlib.metadata.PackageNotFoundError:
        raise missing from None
    folder = Path(str(distribution.locate_file(__package__))).joinpath(*parts[:-1])
    path = next((path for end in EXTENSION_SUFFIXES if (path := folder / f"{parts[-1]}{end}").is_file()), None)
    if path is None:
        raise missing
    ours, theirs = map(sources, (here.joinpath(*parts[:-1]), folder))
    version = re.search(r'^__version__ = "(.+)"$', (here / "__init__.py").read_text(), re.MULTILINE)[1]
    if ours != theirs or version != distribution.version:  # guard: other-cpp
        raise OtherSourcesError(
            f"{__package__} {version} is imported from the source tree {here.parent}, where it is not compiled, and "
            f"the installed {__package__} {distribution.version} is of another version or was compiled from other C++: "
            f"{BUILD}, or start Python in another folder to use what is installed"
        )
    return path


def sources(folder: Path) -> dict[str, bytes]:
    """The C++ of a folder, by the names of its files."""
    return {path.name: path.read_bytes() for end in ("*.h", "*.cpp") for path in folder.glob(end)}
