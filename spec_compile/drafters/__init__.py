"""Drafters, which propose trees. A new one is one file and one entry in `ALGORITHMS`; `contrib` has more of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..capture.admit import Inventory
from ..config import Options, describe
from ..drafting import Algorithm
from ..errors import did_you_mean
from ..registry import load_plugins
from . import dflash, draft_model, heads, ngram, recycle, union
from .options import DraftOptions, UnionOptions


class Entry(NamedTuple):
    """An algorithm that ``algo=`` can name.

    options: the class of its options.
    build: makes it for a model.
    needs: describes the module that ``draft=`` must name; empty if it can be left out.
    other: names the algorithm that drafts with a given ``draft=`` in its place, or None.
    """

    options: type[Options]
    build: Callable[[Inventory, Options], Algorithm]
    needs: str = ""
    other: Callable[[Any], str | None] = lambda draft: None


ALGORITHMS = {
    "ngram": Entry(ngram.NgramOptions, recycle.build),
    "eagle": Entry(heads.HeadOptions, partial(heads.build, "eagle"), "an EAGLE head"),
    "eagle3": Entry(heads.HeadOptions, partial(heads.build, "eagle3"), "an EAGLE-3 head"),
    "mtp": Entry(heads.NaiveOptions, partial(heads.build, "mtp")),
    "naive_eagle": Entry(heads.NaiveOptions, partial(heads.build, None)),
    "draft_model": Entry(DraftOptions, draft_model.build, "a smaller model"),
    "dflash": Entry(dflash.DFlashOptions, dflash.build, "a DFlash draft"),
}
ALIASES = {"lookahead": "ngram", "nextn": "mtp", "standalone": "draft_model"}


def describe_options() -> str:
    """The options of `speculate` with types, defaults and meanings: first the common ones, then by algorithm."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, entry in ALGORITHMS.items():
        groups.setdefault(tuple(describe(entry.options, Options)), []).append(name)
    parts = [("Options of every algorithm:", describe(Options))]
    parts += [
        (f"Options of {', '.join(f'algo={name!r}' for name in names)}:", lines) for lines, names in groups.items()
    ]
    return "\n\n".join("\n".join([title, *lines]) for title, lines in parts)


def build(name: str, target: Inventory, options: Options) -> Algorithm:
    """The algorithm of that name for `target`, joined with n-grams if `options` say so."""
    if not isinstance(options, UnionOptions) or options.joined is None:
        return ALGORITHMS[name].build(target, options)
    ngrams = ngram.build(target, options.joined)  # first, because it takes no time to refuse
    head = ALGORITHMS[name].build(target, options)
    return union.Union(head, ngrams, options.budget(head.plan.nodes), target.device)


def check_draft(algo: str, options: Options) -> None:
    """ValueError, with an example, if `options` name no draft and the algorithm that a user named needs one."""
    needs = ALGORITHMS[parse_algorithm(algo)].needs
    if needs and getattr(options, "draft", None) is None:
        raise ValueError(
            f"draft: algo={algo!r} needs {needs}: pass its folder or its name on the hub, as in "
            f"speculate(model, algo={algo!r}, draft='FOLDER'). `python -m spec_compile train` trains heads; "
            "algo='ngram' needs no draft"
        )


def parse_algorithm(algo: str, draft: Any = None) -> str:
    """The algorithm that a user named for `draft`, in any case or by an alias; ValueError if there is none."""
    if not isinstance(algo, str):
        raise TypeError(f"algo: expected a string, got {type(algo).__name__}")
    name = algo.lower()
    if name not in {*ALGORITHMS, *ALIASES}:
        load_plugins()
    known = sorted({*ALGORITHMS, *ALIASES})
    if name not in known:
        raise ValueError(f"algo: expected one of {', '.join(known)}, got {algo!r}." + did_you_mean(name, known))
    name = ALIASES.get(name, name)
    return ALGORITHMS[name].other(draft) or name
