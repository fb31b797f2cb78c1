"""`load_contrib`, `load_plugins` and `side`: modules that the core imports by name, and never by a statement.

An ability of contrib, or of another package, adds itself to tables when it is imported: an algorithm
(`drafters.register`), a format of drafts (`drafters.checkpoints.load.FORMATS`), a module of transformers
(`capture.modules.MODULES`), a pass (`passes.register`), and so on.
"""

import functools
import importlib
import pkgutil
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

GROUP = "spec_compile.contrib"
"""The entry points of other packages: each names a module to import."""


def load_contrib() -> None:
    """Import the files and folders of `contrib`, but not its commands. No import statement of the core names them."""
    for name in sorted({each.name for each in pkgutil.iter_modules([f"{Path(__file__).parent}/contrib"])} - {"cli"}):
        importlib.import_module(f"{__package__}.contrib.{name}")


def side(module: str) -> ModuleType:
    """The module of serve, train or tools, such as "tools.explain", which is imported when a user first asks for it."""
    return importlib.import_module(f"{__package__}.{module}")


@functools.cache
def load_plugins() -> None:
    """Import what installed packages name in `GROUP`. That takes 10 to 30 ms, so it waits for an unknown name."""
    for point in entry_points(group=GROUP):
        point.load()
