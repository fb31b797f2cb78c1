"""The ``torch.compile`` backend "spec", which runs our passes on a forward that Dynamo has traced, then Inductor."""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor, fx
from torch._dynamo.eval_frame import OptimizedModule
from torch._inductor.compile_fx import compile_fx

from . import kernels
from .compat import INDUCTOR_OPTIONS, backend_of, brief_operators, use_own_caches
from .compile.replay import Replays
from .config import parse_options
from .errors import log
from .graph import PassReport, calls
from .kernels.linear import linear_layers
from .passes.apply import apply
from .passes.forward import ForwardGraph, ForwardSettings, NotLowered, bind, lower, use_grouped_attention
from .passes.fuse_norms import fuse_norms, fuse_residuals
from .passes.linears import fuse_swiglu, merge_linears, use_linear_forms
from .passes.tidy import tidy

PIPELINE = [
    tidy, merge_linears, use_grouped_attention, use_linear_forms, fuse_swiglu, fuse_norms, fuse_residuals,
]  # fmt: skip
"""The passes, in order."""
FEW_ROWS = 64
"""Rows up to which products take the time of reading weights, so that the kernels of `speculate` serve."""
MODES = (None, "default", "reduce-overhead")
GENERATE = (
    'torch.compile(model, backend="spec").generate() runs transformers\' loop on the model that was not compiled. '
    'spec_compile.speculate(model, algo=...).generate() speculates; model.compile(backend="spec") compiles the '
    "forward that transformers' loop calls."
)


@dataclass(frozen=True)
class BackendOptions:
    """Options of the backend, as ``torch.compile(module, backend="spec", options={...})``.

    merge_linears: one matrix product for linear layers of one input. The module's parameters become views of the
        merged storage, with equal values (a tensor that shared a parameter's old storage no longer does).
    gqa: attention over few query tokens reads each key-value head once, and on a GPU only the slots that a mask shows.
    dump: a directory that receives the readable graph before and after every pass.
    """

    merge_linears: bool = True
    gqa: bool = True
    dump: str | None = None

    def __post_init__(self):
        for name in ("merge_linears", "gqa"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name}: expected bool, got {type(value).__name__} ({value!r})")
        if self.dump is not None and not isinstance(self.dump, str | Path):
            raise TypeError(f"dump: expected the path of a directory, got {type(self.dump).__name__} ({self.dump!r})")


def spec(gm: fx.GraphModule, example_inputs: list, *, mode: str | None = None, options: dict | None = None) -> Callable:
    """Compile a graph that Dynamo has traced.

    Inference goes through our passes and Inductor. Training goes to Inductor as it is, and so does a forward that
    `lower` refuses; `reports` has the reason.

    gm: calls of torch, with parameters as placeholders. example_inputs: one for each placeholder.
    mode: "reduce-overhead" replays the forward as a CUDA graph on a GPU.
    Returns a function of those inputs.
    Raises TypeError (unknown option, option of a wrong type) or ValueError (another mode).
    """
    if mode not in MODES:
        raise ValueError(
            f'mode: expected "default" or "reduce-overhead" for backend "spec", got {mode!r}; for Inductor\'s other '
            'modes use backend="inductor"'
        )
    settings = parse_options(BackendOptions, dict(options or {}))
    use_own_caches()
    replays = mode == "reduce-overhead" and all(x.is_cuda for x in example_inputs if isinstance(x, Tensor))
    # A graph needs a backward if it turns gradients on, or if they are on and an input requires them.
    turns_on = any(node.target is torch._C._set_grad_enabled and node.args[0] for node in calls(gm))
    if turns_on or (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)):
        log.info("spec: gradients are wanted: this graph goes to Inductor as it is (use torch.no_grad())")
        return compile_fx(gm, example_inputs, config_patches=INDUCTOR_OPTIONS)
    try:
        graph = lower(gm, example_inputs)
    except NotLowered as error:
        log.info("spec: graph %d goes to Inductor as it is: %s", len(_graphs), error)
        size = len(calls(gm))
        _graphs.append([PassReport("lower", f"goes to Inductor as it is: {error}", size, size, "")])
        graphs = {"triton.cudagraphs": True} if replays else {}
        return compile_fx(gm, example_inputs, config_patches={**INDUCTOR_OPTIONS, **graphs})
    if graph.device.type == "cuda":
        kernels.load(graph.device)
    rewrite(graph, settings)
    _graphs.append(graph.log)

    def compile_graph(gm: fx.GraphModule, inputs: list, kept: list[int]) -> Callable:
        with brief_operators():
            forward = compile_fx(gm, inputs, config_patches=INDUCTOR_OPTIONS)
        return Replays(forward, kept, len(example_inputs) - len(graph.places)) if replays else forward

    return bind(graph, list(example_inputs), compile_graph)


def rewrite(graph: ForwardGraph, options: BackendOptions, pipeline=None) -> ForwardGraph:
    """Run the passes on `graph`, in place. Its ``log`` says what each of them changed."""
    index = len(_graphs)  # the graph's number, in the log and in names of files
    dumps = options.dump is not None
    if dumps:
        _dump(options.dump, f"forward{index}_0_before", graph.gm.print_readable(print_output=False))

    def on_report(report: PassReport) -> None:
        log.info("spec: graph %d: %s: %s", index, report.name, report.summary)
        if dumps:
            _dump(options.dump, f"forward{index}_{len(graph.log)}_{report.name}", report.code)

    rows = max((math.prod(node.meta["val"].shape[:-1]) for node in linear_layers(graph)), default=0)
    few = rows <= FEW_ROWS and (rows > 1 or graph.device.type == "cuda")  # of one row Inductor's own is the fastest
    settings = ForwardSettings(options.merge_linears, options.gqa, "verify" if few else "forward")
    with torch.inference_mode(False), torch.no_grad():  # merged weights can still be trained
        apply(graph, settings, PIPELINE if pipeline is None else pipeline, keep_code=dumps, on_report=on_report)
    return graph


def reports() -> list[list[PassReport]]:
    """The passes' reports: a list for each graph compiled for inference since the start or `torch._dynamo.reset`.

    A report's ``code`` is filled only with the option ``dump``.
    """
    return [list(graph) for graph in _graphs]


_graphs: list[list[PassReport]] = []
spec.reset = _graphs.clear  # called by torch._dynamo.reset()


def _dump(directory: str | Path, name: str, code: str) -> None:
    """Write a graph's code to ``name.py``."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.py").write_text(code + "\n")


class _Generate:
    """``generate`` of the module that ``torch.compile(model)`` returns: the model's own, after a warning for "spec".

    For other backends, and for modules without a generate(), it raises AttributeError. Python then asks the module's
    ``__getattr__``, as if this attribute did not exist.
    """

    warned: WeakSet = WeakSet()
    """Modules whose user was warned."""

    def __get__(self, module, owner=None):
        if module is None or module in self.warned or backend_of(module) is not spec:
            raise AttributeError("generate")
        model = module._orig_mod
        generate = model.generate  # raises AttributeError if the model has none
        if getattr(model, "speculation", None) is not None or model._compiled_call_impl is not None:
            raise AttributeError("generate")  # no warning: the loop is ours, or calls what model.compile() compiled

        @functools.wraps(generate)
        def warn_once(*args, **kwargs):
            if module not in self.warned:
                self.warned.add(module)
                warnings.warn(GENERATE, UserWarning, stacklevel=2)
            return generate(*args, **kwargs)

        return warn_once


OptimizedModule.generate = _Generate()  # torch.compile imports this module when it looks up the backend's name
