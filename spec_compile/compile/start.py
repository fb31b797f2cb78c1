"""`StartArtefact`: all that a start found out about a model, as data in a store, and read from there by later starts.

An entry that is damaged, of another format or wrong is set aside with a line in the log, and the start is a full one.
"""

import hmac
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .. import passes
from ..capture.checks import linear_logits, on_some_text, random_ids, tree_logits
from ..capture.experts import library_tensors
from ..capture.quantised import QuantisedLinear, packed_experts, packed_layers
from ..capture.yardstick import compare_logits, compare_rounding, has_half, in_float32, in_float32_if_possible
from ..config import Options
from ..errors import UnsupportedModelError, log
from ..folders import cache_folder, user_secret
from ..graph import ModelGraph, attribute
from ..inventory import configs_of, held, held_parameters, held_tensors
from ..kernels.launching import plain_kernels
from ..passes.linears import is_kept_apart, keep_apart
from ..passes.tidy import tidy
from ..tree import ancestry
from .cache import ABOUT, COMPILED, ArtefactCache
from .key import about, artefact_key
from .serialise import bound, data_of

ITEM, DRAFT = "start", "draft"
"""Names of items: what a start has found, and the graph of a draft."""
SIGNATURE = 32
"""Bytes before a part."""
PURPOSES = ("verify", "prefill")
PREFIX = 17
"""Tokens of the quick check before its tree."""
PARENTS = [-1, 0, 0, 1, 2, 3, 4]
"""Its tree: two paths of four nodes, 0, 1, 3, 5 and 0, 2, 4, 6."""


@dataclass
class Start:
    """The findings of a start.

    graphs: the rewritten graph for each of `PURPOSES`.
    reads: for each config of the model the names that were read while it was captured.
    served_batches: see `runtime.served.Engine`.
    """

    graphs: dict[str, ModelGraph]
    reads: list[tuple[Any, set[str]]]
    served_batches: str


class StoredParts:
    """The compiled parts of a start, in the places where it looks for findings.

    Loading a part runs code. So each is signed with a secret of this user, and one without this signature is not read.
    """

    def __init__(self, stores: list[ArtefactCache], cache: ArtefactCache, key: str, trusts_carried: bool = False):
        """stores: where parts are read, in this order. cache: where they are kept.

        trusts_carried: parts of folders that were carried here are read whoever has signed them.
        """
        self.stores, self.cache, self.key, self.trusts_carried = stores, cache, key, trusts_carried

    def read(self, name: str) -> bytes | None:
        """The bytes that were written; None if there are none, or none that are whole and signed."""
        for store in self.stores:
            data = store.read(self.key, f"{name}{COMPILED}")
            if data is None:
                continue
            signature, data = data[:SIGNATURE], data[SIGNATURE:]
            is_trusted = store.is_carried and self.trusts_carried
            if is_trusted or hmac.compare_digest(signature, self._sign(name, data)):  # guard: signatures
                return data
            store.tell_once(
                "signature", f"{store.folder}: compiled code that this user did not write on this machine is compiled "
                "anew; trust_artefact=True loads that of artefact=, which runs with your rights",
            )  # fmt: skip
        return None

    def write(self, name: str, data: bytes) -> None:
        """Keep a part in the cache. A folder that was carried here stays as it is."""
        if self.cache.folder is not None:
            self.cache.write(self.key, f"{name}{COMPILED}", self._sign(name, data) + data)

    def _sign(self, name: str, data: bytes) -> bytes:
        try:
            folder = cache_folder()
        except RuntimeError:  # this user has no home
            folder = None
        return hmac.digest(user_secret(folder), f"{self.key}/{name}:".encode() + data, "sha256")


_opened: ContextVar["list[StartArtefact] | None"] = ContextVar("opened", default=None)
"""Where the artefacts are listed that are opened now; see `opened_artefacts`."""


@contextmanager
def opened_artefacts() -> Iterator[list["StartArtefact"]]:
    """A context that lists the artefacts that are opened inside it: a draft's graph has another key, for example.

    So a start knows all that it rests on when it is saved.
    """
    found: list[StartArtefact] = []
    token = _opened.set(found)
    try:
        yield found
    finally:
        _opened.reset(token)


class StartArtefact:
    """The place of a start's findings between processes.

    model, draft: the target, and the draft's module.
    name: the algorithm's.
    seconds: the times of stages are added here.
    drafts: artefacts that were opened while the draft was built; `save` copies them, too.
    """

    def __init__(
        self, model: nn.Module, draft: nn.Module | None, options: Options, name: str, seconds: dict[str, float],
        drafts: Iterable["StartArtefact"] = (),
    ):  # fmt: skip
        if (found := _opened.get()) is not None:
            found.append(self)
        self.further = [each.key for each in drafts if each.key is not None]
        self.model, self.draft, self.options, self.name, self.seconds = model, draft, options, name, seconds
        carried = [] if options.artefact is None else [ArtefactCache(options.artefact, is_carried=True)]
        self.cache = ArtefactCache(options.cache)
        self.stores = [store for store in (*carried, self.cache) if store.folder is not None]
        self.key: str | None = None
        self.why_not = "was started with cache=False"
        """The reason why there is no artefact, a sentence without its subject; "" if there may be one."""
        if not self.stores:
            return
        # Find the key, or the reason why there is none.
        with timed(seconds, "load"):
            self.why_not = next(self._reasons(), "")
            try:
                self.key = None if self.why_not else artefact_key((model, draft), options, name)
            except Exception as error:
                self.why_not = f"cannot be described ({error!r})"
        if self.key is None:
            self.why_not = self.why_not or "has hooks that may change values"
            log.debug("%s starts without an artefact: it %s", type(model).__name__, self.why_not)

    def _reasons(self) -> Iterator[str]:
        """The reasons why a model cannot have an artefact."""
        model, options = self.model, self.options
        tensors = [*held_tensors(model)]
        if options.max_loras:
            yield "chooses an adapter for each row"
        if options.ranks.size > 1:
            yield "is shared out among ranks"
        layers = map(model.get_submodule, packed_layers(model))
        are_ours = all(isinstance(layer, QuantisedLinear) for layer in layers)
        if not are_ours or packed_experts(model) or library_tensors(model):
            yield "is quantised"
        if any(type(tensor.data) is not Tensor for tensor in tensors):
            yield "has tensors of a class of their own"
        if is_kept_apart(tensors):
            yield "has offloaded weights, or some that an earlier speculate(merge_linears=False) reads where they lie"

    def read(self) -> Start | None:
        """The findings of an earlier start, bound to the model and checked with its weights; None if there are none."""
        found = (self._checked(self.key, store) for store in self.stores if self.key is not None)
        start = next((each for each in found if each is not None), None)
        if start is None and self.options.artefact is not None:
            log.warning(
                "artefact: nothing in %s fits this start of %s (%s), which is a full one",
                self.options.artefact, type(self.model).__name__, self.why_not or "another model, machine or option",
            )  # fmt: skip
        return start

    def write(self, start: Start) -> None:
        """Keep findings for later starts, as far as possible."""
        if self.key is None or self.cache.folder is None:
            return
        try:
            with timed(self.seconds, "save"):
                self._write(self.key, self.cache, start)
        except Exception as error:
            self.why_not = f"cannot be stored ({error})"
            log.debug("%s leaves no artefact: it %s", type(self.model).__name__, self.why_not)

    def parts(self) -> StoredParts | None:
        """The store of this start's compiled parts; None if there is no artefact."""
        trusts = self.options.trust_artefact
        return None if self.key is None else StoredParts(self.stores, self.cache, self.key, trusts)

    def recall(self, name: str) -> bytes | None:
        """The data that `keep` has stored under a name; None if there is none."""
        found = (store.read(self.key, name) for store in self.stores if self.key is not None)
        return next((data for data in found if data is not None), None)

    def keep(self, name: str, data: bytes) -> None:
        """Store data under a name, in addition to a start and as far as possible."""
        if self.key is not None:
            self._put(self.key, self.cache, name, data)

    def save(self, start: Start, folder: Path | str) -> None:
        """Copy findings, and all else that the stores have of this start and of its draft, to a folder.

        ValueError if there is no artefact of this model. OSError if the folder cannot be written.
        """
        if self.key is None:
            raise ValueError(
                f"save: there is no artefact of this {type(self.model).__name__}, because it {self.why_not}"
            )
        try:
            for key, store in itertools.product((self.key, *self.further), self.stores):
                store.export(key, folder)
            is_written = self._write(self.key, ArtefactCache(folder, float("inf")), start)
        except Exception as error:
            raise ValueError(f"save: this {type(self.model).__name__} cannot be stored ({error})") from error
        if not is_written:
            raise OSError(f"save: {folder} cannot be written; the log has the reason")

    def _write(self, key: str, store: ArtefactCache, start: Start) -> bool:
        content = {
            "graphs": {purpose: data_of(start.graphs[purpose], held(self.model)) for purpose in PURPOSES},
            "reads": [sorted(names) for _, names in start.reads],
            "served_batches": start.served_batches,
        }
        return self._put(key, store, ITEM, json.dumps(content, separators=(",", ":")).encode())

    def _put(self, key: str, store: ArtefactCache, name: str, data: bytes) -> bool:
        """Write an item, and the facts that a list of artefacts shows. False if they cannot be written."""
        facts = about(type(self.model).__name__, next(held_parameters(self.model)).device)
        return store.write(key, name, data) and store.write(key, ABOUT, json.dumps(facts).encode())

    def _checked(self, key: str, store: ArtefactCache) -> Start | None:
        """A store's findings if they compute what the model does. Otherwise the entry is taken out of the store."""
        if (data := store.read(key, ITEM)) is None:
            return None
        try:
            with timed(self.seconds, "load"):
                start = self._bound(json.loads(data))
            with timed(self.seconds, "checks"):
                quick_check(self.model, *(start.graphs[purpose] for purpose in reversed(PURPOSES)))  # guard: quick-look
            return start
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            log.warning(
                "the artefact of %s in %s is not used, because it does not fit (%s: %s); the start is a full one",
                type(self.model).__name__, store.folder, type(error).__name__, reason,
            )  # fmt: skip
            store.drop(key)
            return None

    def _bound(self, content: dict[str, Any]) -> Start:
        graphs = {purpose: bound(content["graphs"][purpose], held(self.model)) for purpose in PURPOSES}
        if not self.options.merge_linears:
            for purpose, graph in graphs.items():
                keep_apart(graph.gm, (attribute(graph.gm, name) for name in content["graphs"][purpose]["tensors"]))
        configs = [config for config in configs_of(self.model) if isinstance(config, PreTrainedConfig)]
        reads = [(config, set(names)) for config, names in zip(configs, content["reads"], strict=True)]
        return Start(graphs, reads, str(content["served_batches"]))


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """A context whose time is added to a stage's time."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - begin


@torch.no_grad()
def quick_check(model: nn.Module, prefill: ModelGraph, verify: ModelGraph) -> None:
    """Compare graphs from an artefact with the model's own forward, by their logits: a text of 24 tokens runs through
    both graphs, its end as a tree, and the tree's two paths through the forward.

    The limits are the same as after capture. Operators have their plain meaning: an artefact has graphs and no
    kernels, so none is compiled for this. UnsupportedModelError if the logits differ by more.
    """
    name, part = type(model).__name__, "an artefact"
    ancestors, depth = ancestry(torch.tensor([PARENTS], device=verify.device))
    prefix = min(PREFIX, (verify.position_limit or PREFIX + len(PARENTS)) - len(PARENTS))

    def check(seed: int) -> None:
        ids = random_ids(verify, 1, prefix + len(PARENTS), seed).to(verify.device)

        def own() -> Tensor:
            run = lambda texts: model(input_ids=texts, use_cache=False).logits  # noqa: E731
            return linear_logits(run, ids, prefix, ancestors[0].tolist())

        def tree(dtype: torch.dtype) -> Tensor:
            kept = replace(verify, dtype=dtype, cache_dtype=None)
            return tree_logits((prefill, verify), kept, ids, prefix, ancestors, depth, [])

        if not has_half(verify):
            with in_float32():
                return compare_logits(name, part, tree(verify.dtype), own())
        wide = in_float32_if_possible(part, lambda: tree(torch.float32))
        exact = in_float32_if_possible("the model's own forward", own, model)
        if wide is not None and exact is not None:
            compare_logits(name, part, wide, exact)
        reference = wide if exact is None else exact
        if reference is None:
            raise UnsupportedModelError(f"model: {name}: {part} cannot be checked, because nothing runs in float32")
        compare_rounding(name, part, tree(verify.dtype), own(), reference)

    with plain_kernels():
        on_some_text(verify, check)


def draft_graph(draft: nn.Module, options: Options, trace: Callable[[], ModelGraph]) -> ModelGraph:
    """The graph of a head or a draft model, over its tensors: captured in the first process, read by later ones.

    options: name the folder.
    trace: captures the draft, if there is no artefact of one like it. A stored graph that is wrong in spite of its key
        would cost accepted drafts, never an answer.

    The graph is tidied before it is stored, because a stored graph lacks values of weights, strides and devices, at
    which `tidy` looks. So the passes make the same of it in every process, and later ones find its compiled parts.
    """
    artefact, name = StartArtefact(draft, None, options, DRAFT, {}), type(draft).__name__
    data = artefact.recall(DRAFT)
    if data is not None:
        try:
            return bound(json.loads(data), held(draft))
        except Exception as error:
            log.warning("the graph of %s in its artefact does not fit (%r); the draft is captured anew", name, error)
    graph = passes.run(trace(), passes.Settings(), [tidy])
    if artefact.key is not None:
        try:
            artefact.keep(DRAFT, json.dumps(data_of(graph, held(draft)), separators=(",", ":")).encode())
        except Exception as error:
            log.debug("the graph of %s cannot be stored (%r)", name, error)
    return graph
