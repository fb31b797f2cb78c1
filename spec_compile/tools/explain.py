"""`explain` and `dump`: readable accounts of the rewritten model."""

import importlib.util
from pathlib import Path

import torch

from .. import passes
from ..graph import ModelGraph
from ..kernels import attention
from ..kernels.card import card_of, launches_early
from ..kernels.linear import skinny_gemm
from ..passes.row_invariance import variant_parts
from ..runtime.round import PREFILL_SIZES
from ..runtime.session import StepKind


def explain(speculation) -> str:
    """A readable account of the captured model, the passes and the round."""
    engine, runtime = speculation.engine, speculation.engine.runtime
    graph = runtime.verify
    # The model and its start.
    seconds = speculation.seconds
    stages = ", ".join(f"{stage} {taken:.2f}" for stage, taken in seconds.items())
    source = "from an artefact" if speculation.is_from_artefact else "without an artefact"
    roles = zip(attention.ROLES, (runtime.prefill, graph, runtime.algorithm.graph))
    backends = [f"{role} by {each.backend or 'none'}" for role, each in roles if each is not None]
    lines = [
        f"{type(speculation.original).__name__}: {_layers(graph)}, vocabulary {graph.vocab_size}, "
        f"{graph.dtype}".replace("torch.", ""),
        f"started {source} in {sum(seconds.values()):.2f} s ({stages})",
        f"algorithm {engine.name}, rounds over {', '.join(map(str, runtime.sizes))} nodes",
        f"attention: {', '.join(backends)}",
        *speculation.options.ranks.notes,
    ]
    # The promises of bits, and the kernels of this device.
    lines += [*_bits(variant_parts(graph), variant_parts(runtime.prefill)), *_card(graph.device)]
    if skinny_gemm.why_not_on(graph.device) is None:
        lines.append(f"plans of matrix products: {skinny_gemm.source_of_plans(graph.device)}")
    if runtime.cold_start is not None:
        lines.append(runtime.cold_start.describe())
    # The choice between drafts and plain rounds in each batch size so far, and prompts.
    for session in engine.sessions.values():
        if text := session.policies[StepKind.ROUND].describe():
            lines.append(f"drafts in calls of batch size {session.batch}: {text}")
    if runtime.has_fixed_chunks:  # on a CPU
        lines.append(
            "chunks of a prompt are the same under any load, and prefixes are copied in multiples of "
            f"{PREFILL_SIZES['cpu'][0]} tokens; in rounds libraries' sums depend on the numbers of nodes and rows"
        )
    lines += [engine.prefix_budget.describe(), "passes (call nodes before -> after):"]
    for report in graph.log:
        lines.append(f"  {report.name:16} {report.nodes_before:5} -> {report.nodes_after:5}  {report.summary}")
    return "\n".join([*lines, *runtime.algorithm.explain()])


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
