"""Drafters: what proposes trees. A new one is one file here and one entry in `ALGORITHMS`."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedModel

from ..config import Options
from ..drafting import Algorithm
from ..errors import did_you_mean
from . import dflash, draft_model, heads, ngram, p_eagle, pard, union
from .options import DraftOptions, ParallelOptions, UnionOptions


class Entry(NamedTuple):
    """What there is to know of an algorithm: the class of its options, and what makes it for a model."""

    options: type[Options]
    build: Callable[[PreTrainedModel, Options], Algorithm]


ALGORITHMS = {
    "ngram": Entry(ngram.NgramOptions, ngram.build),
    "eagle": Entry(heads.HeadOptions, partial(heads.build, "eagle")),
    "eagle3": Entry(heads.HeadOptions, partial(heads.build, "eagle3")),
    "mtp": Entry(heads.NaiveOptions, partial(heads.build, "mtp")),
    "naive_eagle": Entry(heads.NaiveOptions, partial(heads.build, None)),
    "p_eagle": Entry(p_eagle.ParallelHeadOptions, p_eagle.build),
    "draft_model": Entry(DraftOptions, draft_model.build),
    "pard": Entry(ParallelOptions, pard.build),
    "dflash": Entry(dflash.DFlashOptions, dflash.build),
}
ALIASES = {
    "lookahead": "ngram", "nextn": "mtp", "standalone": "draft_model", "peagle": "p_eagle",
    **dict.fromkeys(("jetspec", "dflash2", "dspark", "domino"), "dflash"),
}  # fmt: skip


def build(name: str, model: PreTrainedModel, options: Options) -> Algorithm:
    """The algorithm of that name for `model`, joined with n-grams if `options` say so."""
    joined = options.joined if isinstance(options, UnionOptions) else None
    if joined is None:
        return ALGORITHMS[name].build(model, options)
    ngrams = ngram.build(model, joined)  # first, because it takes no time to refuse
    return union.Union(ALGORITHMS[name].build(model, options), ngrams, options, model.device)


def parse_algorithm(algo: str) -> str:
    """The algorithm a user named, whatever the case or alias; ValueError if there is none."""
    if not isinstance(algo, str):
        raise TypeError(f"algo: expected a string, got {type(algo).__name__}")
    name = algo.lower()
    known = sorted({*ALGORITHMS, *ALIASES})
    if name not in known:
        raise ValueError(f"algo: expected one of {', '.join(known)}, got {algo!r}." + did_you_mean(name, known))
    return ALIASES.get(name, name)
