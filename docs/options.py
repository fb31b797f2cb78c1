"""The page of options (docs/options.md), made only from the dataclasses: name, default and meaning of each.

    python docs/options.py [--write]

Without --write, exits with 1 if the page is not what the dataclasses say. The meaning of an option is in the docstring
of its class, after its name and a colon; several names may share one. An option that all algorithms with a draft have
is listed once; their own tables have only options that are new or differ.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from spec_compile.backend import BackendOptions
from spec_compile.config import Options, added, meanings
from spec_compile.drafters import ALGORITHMS, ALIASES
from spec_compile.train.options import OnlineOptions, TrainingOptions

PAGE = Path(__file__).parent / "options.md"
HEAD = """# Options

This page is made from the dataclasses by `python docs/options.py --write`. An option without "=" is None by default.

`speculate(model, algo, **options)` takes the options of every algorithm and those of the one that is named. A name that
does not exist is a TypeError that suggests the nearest; a value out of range is an error that names the option. Both
are raised before any work starts.
"""


Row = tuple[str, str]
"""An option with its default, and its meaning."""


def rows(cls: type, without: type | None = None) -> dict[str, Row]:
    """Name -> row of each option that `without` does not have with the same default. KeyError if one has no meaning."""
    said, made = meanings(cls), {}
    for field in added(cls, without):
        default = "" if field.default is None else f"={field.default!r}"
        made[field.name] = f"`{field.name}{default}`", said[field.name].replace("|", "\\|").rstrip(".")
    return made


def table(some: Iterable[Row]) -> str:
    """One row for neighbours that share a meaning."""
    lines = ["| option | |", "|---|---|"]
    for meaning, group in itertools.groupby(some, key=lambda row: row[1]):
        lines.append(f"| {', '.join(option for option, _ in group)} | {meaning} |")
    return "\n".join(lines)


def shared(entries: dict[str, type[Options]]) -> dict[str, Row]:
    """The rows of the options that every algorithm with a draft has, in the words of the first of them."""
    drafts = [rows(cls, Options) for cls in entries.values() if hasattr(cls, "draft")]
    return {name: row for name, row in drafts[0].items() if all(name in other for other in drafts)}


def own(cls: type[Options], entries: dict[str, type[Options]]) -> tuple[str, ...]:
    """A sentence on the options that an algorithm takes from others above it, and the rows of its own."""
    earlier = itertools.takewhile(lambda entry: entry[1] is not cls, entries.items())
    parents = [(name, parent) for name, parent in earlier if issubclass(cls, parent)]
    parent = max((parent for _, parent in parents), key=lambda parent: len(parent.__mro__), default=None)
    names = [f'`"{name}"`' for name, each in parents if each is parent]
    common = shared(entries) if hasattr(cls, "draft") else {}
    above = common | (rows(parent, Options) if parent else {})
    new = [row for name, row in rows(cls, Options).items() if above.get(name) != row]
    sources = (["every algorithm with a draft"] if common else []) + ([" and ".join(names)] if names else [])
    return f"The options of {' and of '.join(sources)}, and:" if sources else "", table(new)


def render() -> str:
    """The page."""
    ours = {name: entry for name, entry in ALGORITHMS.items() if entry.options.__module__.startswith("spec_compile.")}
    entries = {name: entry.options for name, entry in ours.items()}  # others register themselves from outside
    parts = [HEAD, "## Every algorithm", table(rows(Options).values())]
    parts += ["## Every algorithm with a draft", table(shared(entries).values())]
    for cls in dict.fromkeys(entries.values()):
        names = [name for name, other in entries.items() if other is cls]
        also = [f'`"{alias}"`' for alias, name in ALIASES.items() if name in names]
        parts.append("## " + ", ".join(f'`"{name}"`' for name in names))
        if also:
            parts.append(f"Other names: {', '.join(also)}.")
        parts += filter(None, own(cls, entries))
    parts += ["## train_draft", table(rows(TrainingOptions).values())]
    parts += ["## train_while_serving", table(rows(OnlineOptions).values())]
    parts += ['## torch.compile(backend="spec")', table(rows(BackendOptions).values())]
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
