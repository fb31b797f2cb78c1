"""Parts: graphs that Inductor compiles without Dynamo, to bytes that another process loads in milliseconds."""

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config as functorch_config

from ..compat import COMPILE_LOCK, TORCH, forget_shapes, use_own_caches
from .graphs import Row, graph_of
from .specs import Spec, fakes

SAVEABLE = {"strict_autograd_cache": True, "bypass_autograd_cache_key": True, "force_autograd_cache": True}
"""Settings that Inductor needs to return something that can be saved."""


ALWAYS = {"triton.autotune_at_compile_time": False}
"""Options of every part. `standalone_compile` would time Triton's kernels while it compiles them, during other work."""


@dataclass
class PartJob:
    """All that is needed to compile a part: no weights, and no code except names of operators.

    rows, specs: its graph and the inputs of that.
    options: of Inductor.
    threads: of the process that will run it on a CPU, for so many of which Inductor writes its loops.
    """

    rows: list[Row]
    specs: list[Spec]
    options: dict[str, Any]
    threads: int

    def text(self) -> str:
        """The job as JSON, equal for equal jobs."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def part_key(job: PartJob) -> str:
    """SHA-256 of a job's text, which is also the name of the part's file."""
    return hashlib.sha256(job.text().encode()).hexdigest()


def read_job(text: str) -> PartJob:
    """The job of a text. ValueError if it is none."""
    try:
        return PartJob(**json.loads(text))
    except TypeError as error:
        raise ValueError(f"job: expected rows, specs, options and threads, got {text[:80]!r}") from error


def compile_part(job: PartJob) -> bytes:
    """The compiled part for `load_part`. ValueError if the job names an operator that is not permitted."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact, standalone_compile

    use_own_caches()
    with COMPILE_LOCK:
        gm = graph_of(job.rows)
        mode, inputs = fakes(job.specs)
        shapes: dict[str, Any] = {"dynamic_shapes": "from_example_inputs", "fake_mode": mode}
        if TORCH < (2, 13):  # it takes the mode of an output
            shapes = {"dynamic_shapes": "from_graph"}
            _show_mode(gm, inputs)
        try:
            with torch.no_grad(), functorch_config.patch(SAVEABLE):
                options = {"config_patches": {**job.options, **ALWAYS}}
                artefact = standalone_compile(gm, inputs, options=options, aot=True, **shapes)
        finally:
            forget_shapes(modes=[mode])  # guard: shapes-are-forgotten
    assert isinstance(artefact, AOTCompiledArtifact)
    return artefact.inner_fn.serialize_compile_artifacts(artefact.inner_fn)


def _show_mode(gm: fx.GraphModule, inputs: list[Any]) -> None:
    """Give the results of a graph an example, from which `standalone_compile` takes its mode. A graph without results
    returns an input."""
    number = next(number for number, value in enumerate(inputs) if isinstance(value, Tensor))
    output = gm.graph.output_node()
    if not output.args[0]:
        output.args = ((gm.graph.find_nodes(op="placeholder")[number],),)
    for node in output.args[0]:
        node.meta["example_value"] = inputs[number]


def load_part(data: bytes) -> Callable[..., list[Tensor]]:
    """The compiled part as a function of its inputs. `data` is trusted: it is run, as files of Inductor's cache are."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    use_own_caches()
    with COMPILE_LOCK:
        return AOTCompiledArtifact.deserialize(data).inner_fn.compiled_fn


@functools.cache
def get_ready_to_load(device_type: str) -> None:
    """Do what the first `load_part` of a process does besides, which takes seconds: imports, and for parts of a CPU a
    test of its instructions, in processes that import torch."""
    from torch._inductor import async_compile, cpu_vec_isa, select_algorithm  # noqa: F401

    use_own_caches()
    if device_type == "cpu":
        cpu_vec_isa.pick_vec_isa()
