"""The page of options (docs/options.md), from the dataclasses alone: name, type, default and meaning of each.

    python docs/options.py [--write]

Without --write, exits with 1 if the page is not what the dataclasses say. The meaning of an option stands in the
docstring of its class, behind its name and a colon; several names may share one.
"""

import argparse
import sys
from pathlib import Path
from typing import get_type_hints

from spec_compile.backend import BackendOptions
from spec_compile.config import Options, added, kind, meanings
from spec_compile.drafters import ALGORITHMS, ALIASES
from spec_compile.training.options import TrainingOptions

PAGE = Path(__file__).parent / "options.md"
HEAD = """# Options

This page is made from the dataclasses by `python docs/options.py --write`.

`speculate(model, algo, **options)` takes the options of every algorithm and those of the one that is named. A name that
does not exist is a TypeError that suggests the nearest; a value out of range is an error that names the option. Both
are raised before any work starts.
"""


def table(cls: type, without: type | None = None) -> list[str]:
    """A row for each option that `without` does not have with the same default. KeyError if one has no meaning."""
    said, hints, rows = meanings(cls), get_type_hints(cls), ["| option | type | default | |", "|---|---|---|---|"]
    for field in added(cls, without):
        default = "" if field.default is None else f"`{field.default!r}`"
        meaning = said[field.name].replace("|", "\\|").rstrip(".")
        rows.append(f"| `{field.name}` | {kind(hints[field.name])} | {default} | {meaning} |")
    return rows


def render() -> str:
    """The page."""
    parts = [HEAD, "## Every algorithm", "\n".join(table(Options))]
    groups: dict[tuple[str, ...], list[str]] = {}
    ours = {name: entry for name, entry in ALGORITHMS.items() if entry.options.__module__.startswith("spec_compile.")}
    for name, entry in ours.items():  # others register themselves from outside
        rows = tuple(table(entry.options, Options))
        groups.setdefault(rows, []).append(name)
    for rows, names in groups.items():
        also = {alias: name for alias, name in ALIASES.items() if name in names}
        parts.append("## " + ", ".join(f'`"{name}"`' for name in names))
        if also:
            parts.append(" ".join(f'`"{alias}"` is another name of `"{name}"`.' for alias, name in also.items()))
        parts.append("\n".join(rows))
    parts += ["## train_draft", "\n".join(table(TrainingOptions))]
    parts += ['## torch.compile(backend="spec")', "\n".join(table(BackendOptions))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the page")
    if parser.parse_args().write:
        PAGE.write_text(render())
    elif not PAGE.exists() or PAGE.read_text() != render():
        sys.exit(f"{PAGE.name}: not what the dataclasses say; run python docs/options.py --write")


if __name__ == "__main__":
    main()
