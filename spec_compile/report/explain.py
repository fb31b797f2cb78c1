"""`explain` and `dump`: readable accounts of the rewritten model."""

import dataclasses
import importlib.util
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import passes
from ..config import Options
from ..graph import ModelGraph
from ..kernels import attention
from ..kernels.card import card_of, launches_early
from ..kernels.linear import skinny_gemm
from ..passes.row_invariance import variant_parts
from ..runtime.engine import Engine
from ..runtime.round import PREFILL_SIZES
from ..runtime.session import StepKind
from ..stats import Stats
from . import html


def explain(speculation) -> str:
    """A readable account of the captured model, the passes and the round."""
    engine = speculation.engine
    graph = engine.runtime.verify
    lines = [
        f"{type(speculation.original).__name__}: {_layers(graph)}, vocabulary {graph.vocab_size}, "
        f"{graph.dtype}".replace("torch.", ""),
        f"started {_stages(speculation)}",
        f"algorithm {engine.name}, rounds over {', '.join(map(str, engine.runtime.sizes))} nodes",
        f"attention: {_backends(engine)}",
        *speculation.options.ranks.notes,
        *_bits(variant_parts(graph), variant_parts(engine.runtime.prefill)),
        *_card(graph.device),
        *_plans(graph),
        *([] if engine.runtime.cold_start is None else [engine.runtime.cold_start.describe()]),
        *_drafts(engine),
        *_chunks(engine.runtime),
        engine.prefix_budget.describe(),
        "passes (call nodes before -> after):",
    ]
    for report in graph.log:
        lines.append(f"  {report.name:16} {report.nodes_before:5} -> {report.nodes_after:5}  {report.summary}")
    return "\n".join([*lines, *engine.runtime.algorithm.explain()])


def _drafts(engine) -> list[str]:
    """The choice between drafts and plain rounds, a line for each batch size so far."""
    lines = []
    for session in engine.sessions.values():
        if text := session.policies[StepKind.ROUND].describe():
            lines.append(f"drafts in calls of batch size {session.batch}: {text}")
    return lines


def _chunks(runtime) -> list[str]:
    """A line about chunks of prompts with fixed ends, which only a CPU needs."""
    if not runtime.has_fixed_chunks:
        return []
    return [
        "chunks of a prompt are the same under any load, and prefixes are copied in multiples of "
        f"{PREFILL_SIZES['cpu'][0]} tokens; in rounds libraries' sums depend on the numbers of nodes and rows"
    ]


def _stages(speculation) -> str:
    """The source of a start, and the seconds of its stages."""
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in speculation.seconds.items())
    source = "from an artefact" if speculation.is_from_artefact else "without an artefact"
    return f"{source} in {sum(speculation.seconds.values()):.2f} s ({stages})"


def _layers(graph: ModelGraph) -> str:
    """The number of layers and of their heads."""
    layers = f"{graph.decoder_layers} layers"
    if not graph.layers:
        return f"{layers}, none attends"
    if graph.recurrences:
        layers = f"{layers}, {len(graph.layers)} attend"
    layer = graph.layers[0]
    text = f"{layers}, {layer.heads} query and {layer.kv_heads} key-value heads of {layer.key_dim}"
    indexed = sum(each.indexed for each in graph.layers)
    if indexed:
        topk = max(spec.topk for spec in graph.indexes)
        text += f", {indexed} attend to at most {topk} tokens chosen by {len(graph.indexes)} indexers"
    return text


def _backends(engine) -> str:
    """The attention backend of each role."""
    graphs = zip(attention.ROLES, (engine.runtime.prefill, engine.runtime.verify, engine.runtime.algorithm.graph))
    return ", ".join(f"{role} by {graph.backend or 'none'}" for role, graph in graphs if graph is not None)


def _bits(in_rounds: list[str], in_prompts: list[str]) -> list[str]:
    """Lines that say if a token has the same bits in any tree, and in any request, or which parts prevent it."""
    more, where = [part for part in in_prompts if part not in in_rounds], "in any chunk, batch or prefix"
    if in_rounds and not more:
        return [*_promise("whatever is drafted", in_rounds), f"same bits {where}: not promised either"]
    return [*_promise("whatever is drafted", in_rounds), *_promise(where, more)]


def _promise(where: str, parts: list[str]) -> list[str]:
    if not parts:
        return [f"same bits {where}: yes"]
    return [f"same bits {where}: not promised, because of", *(f"  {part}" for part in parts)]


def _card(device: torch.device) -> list[str]:
    """Lines about a GPU that lacks something of a newer one."""
    card = card_of(device)
    losses = card.losses(device.type == "cuda" and launches_early(device))
    if device.type != "cuda" or not losses:
        return []
    return [f"{card.name} (compute capability {card.number}) lacks", *(f"  {loss}" for loss in losses)]


def _plans(graph) -> list[str]:
    """A line about the source of the plans of matrix products, on a GPU that runs their kernels."""
    if skinny_gemm.lack_of_device(graph.device) is not None:
        return []
    return [f"plans of matrix products: {skinny_gemm.source_of_plans(graph.device)}"]


def dump(model, directory) -> list[Path]:
    """Write the readable graph after every pass of a speculative `model` to `directory`; returns the files.

    With depyf installed, its view of the compiled round (graphs, kernels) is written, too.
    """
    speculation = getattr(model, "speculation", None)
    if speculation is None:
        raise TypeError(f"model: expected the result of spec_compile.speculate, got {type(model).__name__}")
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"directory: {directory} is a file; expected a folder, which is made where there is none")
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for purpose, settings in speculation.engine.settings.items():
        rewritten = passes.run(speculation.engine.captured, settings, keep_code=True)
        for number, report in enumerate(rewritten.log):
            path = directory / f"{purpose}_{number}_{report.name}.py"
            path.write_text(f"# {report.summary}\n{report.code}\n")
            files.append(path)
    if importlib.util.find_spec("depyf") is not None:
        import depyf  # loaded only here, because it patches private parts of torch

        with depyf.prepare_debug(str(directory / "depyf")), torch.no_grad():
            speculation.engine.compile_anew()
        files += sorted(path for path in (directory / "depyf").rglob("*") if path.is_file())
    return files


# `Accounts`: the methods by which a `Speculation` describes itself and recorded answers.


class Accounts:
    """The methods of `Speculation` that change nothing."""

    engine: Engine
    options: Options
    original: PreTrainedModel

    def __repr__(self) -> str:
        """The algorithm, options that are not at their default (such as the draft), the device and the dtype."""
        parts = [f"algo={self.engine.name!r}"]
        for field in dataclasses.fields(self.options):
            value = getattr(self.options, field.name)
            if value is not field.default and (type(value) is not type(field.default) or value != field.default):
                parts.append(f"{field.name}={_short(value)}")
        parts += [f"device={str(self.engine.runtime.device)!r}", f"dtype={self.engine.described.dtype}"]
        return f"Speculation({', '.join(parts)})"

    @property
    def stats(self) -> Stats:
        """Counters since the start or ``stats.reset()``."""
        return self.engine.runtime.stats

    @property
    def online(self) -> Any:
        """The training of the draft while it serves, which `train_while_serving` began; None if there is none."""
        return self.engine.online

    def explain(self) -> str:
        """A readable account of the changes by each pass, and of a round."""
        return explain(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which generate() records every tree that it verifies, for `report`. The last call is kept."""
        before, self.engine.records = self.engine.records, True
        try:
            yield
        finally:
            self.engine.records = before

    def report(self, path: str | Path, tokenizer: Any = None) -> Path:
        """Write an HTML page about the last generate() that was recorded, and return its path.

        It shows text by rounds, accept lengths, times, and every tree with its accepted nodes. It needs no network.
        With n-grams the trees show parts of other calls' texts, unless these ran with ``share_text=False``.

        path: of the file.
        tokenizer: the model's, to show text in place of token ids.

        Raises RuntimeError if nothing was recorded, and TypeError if `tokenizer` cannot decode.
        """
        if self.engine.recording is None:
            raise RuntimeError(
                "no generate() was recorded; run it inside `with model.speculation.recording():`, then call report()"
            )
        return html.write(self.engine.recording, path, tokenizer, type(self.original).__name__, self.engine.name)


def _short(value: Any) -> str:
    """A value in one line: texts and numbers in full, lists shortened, and the class of any other object."""
    if isinstance(value, str | Path | bool | int | float):
        return repr(str(value) if isinstance(value, Path) else value)
    return reprlib.repr(value) if isinstance(value, list | tuple | dict) else f"<{type(value).__name__}>"
