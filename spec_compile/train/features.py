"""The target's states and logits, from which a draft learns; and CUDA graphs of targets and heads in training."""

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..capture.trace import decoder_layers
from ..compile.replay import Captured, aside, record
from ..parallel.slices import whole
from ..passes.outputs import FINAL
from .loss import likeliest

TOKENS = 1 << 15
"""Tokens that the target's layers process at a time, because transformers stores their keys and values."""
LOGITS = 1 << 30
"""Bytes of logits in memory at a time, if the target changes them after the product with its output matrix."""


@dataclass(frozen=True)
class Features:
    """The target's results for ids [B, L].

    states: [B, L, h] for each tap
    logits: a function from indices [n] int64 among the B * L positions to the logits [n, K] of the kept tokens
    choices: [B, L] int64; the likeliest next token at each position, or None
    """

    states: list[Tensor]
    logits: Callable[[Tensor], Tensor]
    choices: Tensor | None = None


class TargetFeatures:
    """Runs the frozen target over ids."""

    def __init__(
        self, model: PreTrainedModel, taps: tuple[int, ...], kept: Tensor | None = None, captures: bool = True
    ):  # fmt: skip
        """taps: as in `Head.taps`. kept: [K] int64; the tokens whose logits are wanted (None: all). captures: see
        `Trainer`."""
        self.model, self.taps, self.kept = model, taps, kept
        self._weight = whole(model.get_output_embeddings().weight, keep=True).detach()
        self._kept_weight = self._weight if kept is None or len(kept) == len(self._weight) else self._weight[kept]
        states, logits = self._run(torch.arange(2, device=model.device)[None], with_logits=True)
        # Some models scale or bound their logits after the output matrix. Other models' logits are made when needed.
        self._plain = torch.equal(F.linear(states[FINAL], self._weight).float(), logits.float())
        self._graphs: ByShape[Captured] = ByShape(type(model).__name__, model.device, captures)
        self._pool = torch.cuda.graph_pool_handle() if self._graphs.captures else None

    @torch.no_grad()
    def __call__(self, ids: Tensor, choices: bool = True) -> Features:
        """The features of ids [B, L] int64, on the target's device. choices: True to compute them, too.

        Padding on the right needs no mask, because causal layers do not see it from the tokens before it.
        """
        most = TOKENS if self._plain else LOGITS // (len(self._weight) * self.model.dtype.itemsize)
        run = self._replay if self._plain else partial(self._run, with_logits=True)
        parts = [run(rows) for rows in ids.split(max(1, most // ids.shape[1]))]
        tapped = {tap: torch.cat([states[tap] for states, _ in parts]) for tap in parts[0][0]}
        if self._plain:
            final = tapped[FINAL].flatten(0, 1)
            most_likely = likeliest([(final, self._weight)]).view(ids.shape) if choices else None
            logits = partial(_product, final, self._kept_weight)
        else:
            most_likely = torch.cat([made.argmax(dim=-1) for _, made in parts])
            kept = [made if self.kept is None else made[..., self.kept] for _, made in parts]
            logits = torch.cat(kept).flatten(0, 1).__getitem__
        return Features([tapped[tap] for tap in self.taps], logits, most_likely)

    def _replay(self, ids: Tensor) -> tuple[dict[int, Tensor], Tensor]:
        """`_run` without logits. On a GPU it is captured when ids of a shape come for the second time, because the
        launches of a small model take as long as its kernels."""
        run = partial(self._run, with_logits=False)
        graph = self._graphs.find(ids.shape, lambda: Captured(run, (ids.clone(),), self._pool))
        if graph is None:
            return run(ids)
        states, logits = graph(ids)  # the next replay overwrites them
        return {tap: state.clone() for tap, state in states.items()}, logits

    @torch.no_grad()
    def _run(self, ids: Tensor, with_logits: bool) -> tuple[dict[int, Tensor], Tensor]:
        """One forward of the target with hooks at the taps: the states of each tap and of `FINAL`, and the logits.

        Without logits the output matrix multiplies no row, and they are empty.
        """
        tapped: dict[int, Tensor] = {}

        def keep(tap: int, value: Tensor | tuple) -> None:
            tapped[tap] = value[0] if isinstance(value, tuple) else value

        def keep_final(module: nn.Module, args: tuple) -> tuple:
            keep(FINAL, args)
            return args if with_logits else (args[0][:, :0],)

        layers = decoder_layers(self.model)
        with ExitStack() as hooks:
            hooks.callback(self.model.get_output_embeddings().register_forward_pre_hook(keep_final).remove)
            for tap in {*self.taps} - {FINAL}:
                # Tap 0 is the first layer's input, tap i the output of layer i, FINAL the input of the output matrix.
                if tap == 0:
                    handle = layers[0].register_forward_pre_hook(lambda module, args: keep(0, args))
                else:
                    handle = layers[tap - 1].register_forward_hook(lambda module, args, out, tap=tap: keep(tap, out))
                hooks.callback(handle.remove)
            # Autocast would cast weights, and free the casts at its end, while a graph goes on to read them.
            hooks.enter_context(torch.autocast(ids.device.type, enabled=False))
            logits = self.model(input_ids=ids, use_cache=True).logits  # without a cache, transformers waits for the GPU
        return tapped, logits


def _product(states: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    """The logits [n, V] of rows [n] of states [R, h], in the dtype of the target, as it computes them itself."""
    with torch.autocast(states.device.type, enabled=False):
        return F.linear(states[rows], weight)


# The rollout of a head and its backward as CUDA graphs, because launching their kernels takes longer than they run.

T = TypeVar("T")


class RolloutRows:
    """Calls a function with trained parameters and returns rows of its outputs.

    On a GPU the function and its backward are captured as CUDA graphs when inputs have the same shapes for the second
    time. The graphs of all shapes share memory, so a caller must obey three rules:

    - The backward of a call ends before the next call.
    - `.grad` of a parameter is read before the next backward, which may overwrite it.
    - The loss of a call is dropped before the next call. While it is alive, autograd reuses its nodes for the
      gradients of parameters, and they run on a stream that is not captured.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], name: str, device: torch.device, captures: bool = True):
        """parameters: all that get gradients; the function's inputs get none. name, captures: see `ByShape`."""
        self.parameters = [*parameters.values()]  # none of a draft that is only compared
        self._graphs: ByShape[Graphs] = ByShape(name, device, captures)
        self._shared: Shared | None = None

    def __call__(self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Rows [R, H] of the outputs of ``function(*inputs)``, a list of [..., H].

        function: the same in every call
        rows: [R] int64, distinct; indices among the rows of all outputs, e.g. with two outputs [B, T, H] row B * T is
            the first one of the second output
        """
        shapes, capture = tuple(values.shape for values in inputs), partial(self._capture, function, inputs)
        graphs = self._graphs.find(shapes, capture) if torch.is_grad_enabled() else None
        if graphs is None:
            return torch.stack(function(*inputs)).flatten(0, -2).index_select(0, rows)
        return _Replay.apply(graphs, inputs, rows, *self.parameters)

    def _capture(self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> "Graphs":
        """The graphs for inputs of these shapes."""
        self._shared = self._shared or Shared(self.parameters)
        try:
            return Graphs(function, inputs, self._shared)
        except RuntimeError:
            self._shared = None  # frees the memory, because `ByShape` captures nothing more
            raise


class ByShape(Generic[T]):
    """Captures something for each shape of inputs when that comes for the second time.

    It captures nothing on a CPU, on several GPUs, and after a capture that fails, of which it warns.
    """

    def __init__(self, name: str, device: torch.device, captures: bool = True):
        """name: of the function, for the warning. captures: False: it captures nothing."""
        self.name, self.captures = name, captures and device.type == "cuda" and not dist.is_initialized()
        self.captured: dict[Hashable, T | None] = {}
        """For each shape that has come: None after the first time, then its capture."""

    def find(self, shape: Hashable, capture: Callable[[], T]) -> T | None:
        """The capture of this shape, which is made now if the shape comes for the second time; or None."""
        if not self.captures:
            return None
        if shape not in self.captured:
            self.captured[shape] = None
        elif self.captured[shape] is None:
            try:
                self.captured[shape] = capture()
            except RuntimeError as error:
                self.captures = False
                self.captured.clear()
                warnings.warn(
                    f"train_draft: {self.name} cannot be captured in a CUDA graph, so that its kernels are launched "
                    f"one by one, which is slower: {error}",
                    stacklevel=3,
                )
        return self.captured.get(shape)


class Shared:
    """The parts that graphs of all shapes share: a stream, a pool of memory, and buffers that outlast a graph."""

    def __init__(self, parameters: list[Tensor]):
        self.parameters, self.device = parameters, parameters[0].device
        self.pool = self.stream = None
        if self.device.type == "cuda":
            # All use one stream, because memory that a stream has freed is reused only on that stream.
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
        self._flat: dict[object, Tensor] = {}

    def lend(self, use: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer for a `use`: the same in every call, or a larger one, while older graphs keep the smaller."""
        size = torch.Size(shape).numel()
        if use not in self._flat or len(self._flat[use]) < size:
            self._flat[use] = torch.zeros(size, dtype=dtype, device=self.device)
        return self._flat[use][:size].view(shape)


class Graphs:
    """A function's forward and backward for inputs of some shapes. RuntimeError if they cannot be captured."""

    def __init__(self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], shared: Shared):
        self._shared = shared
        self._inputs = [shared.lend(n, values.shape, values.dtype) for n, values in enumerate(inputs)]
        torch._foreach_copy_(self._inputs, [*inputs])
        self._outputs: list[Tensor] = []
        # The cache of autocast holds weights in 16 bits for the rest of a step. A graph must cast them anew at each
        # replay, and nobody else may use its casts.
        try:
            self._warm_up(function)
            torch.clear_autocast_cache()
            self._replay_forward, _ = record(partial(self._forward, function), shared.pool, shared.stream)
            self._replay_backward, _ = record(self._backward, shared.pool, shared.stream)
        finally:
            torch.clear_autocast_cache()
            self._outputs = []  # frees what they have saved for the backward, so that the next capture may use it

    def _warm_up(self, function: Callable[..., list[Tensor]]) -> None:
        """Launch all twice, so that kernels are compiled and loaded, and find the parameters that take part.

        An operation that waits for the GPU, as in some mixtures of experts, raises in the second launch, and so never
        within a capture.
        """
        shared = self._shared
        with aside(shared.stream):
            for refused in (nullcontext(), waiting_refused(shared.stream)):
                torch.clear_autocast_cache()
                with refused:
                    outputs = function(*self._inputs)
                    pulls = [torch.zeros_like(output) for output in outputs]
                    grads = torch.autograd.grad(outputs, shared.parameters, pulls, allow_unused=True)
        self._used = [n for n, grad in enumerate(grads) if grad is not None]
        self._grads = [shared.lend(("gradient", n), grads[n].shape, grads[n].dtype) for n in self._used]
        shape = len(outputs), *outputs[0].shape
        self._out, self._pull = (shared.lend(use, shape, outputs[0].dtype) for use in ("outputs", "pulls"))

    def forward(self, inputs: Sequence[Tensor], rows: Tensor) -> Tensor:
        """Rows [R, H] of the outputs for these inputs."""
        torch._foreach_copy_(self._inputs, [*inputs])
        self._replay_forward()
        return self._out.flatten(0, -2).index_select(0, rows)

    def backward(self, rows: Tensor, grad: Tensor) -> list[Tensor | None]:
        """The gradient of each parameter, from the gradient of the last forward's rows [R, H]."""
        self._pull.zero_()
        self._pull.flatten(0, -2).index_copy_(0, rows, grad)
        self._replay_backward()
        grads: list[Tensor | None] = [None] * len(self._shared.parameters)
        for n, grad in zip(self._used, self._grads):
            grads[n] = grad.detach()
        return grads

    def _forward(self, function: Callable[..., list[Tensor]]) -> None:
        """The work of the first graph."""
        self._outputs = function(*self._inputs)
        torch._foreach_copy_(self._out.unbind(), [output.detach() for output in self._outputs])

    def _backward(self) -> None:
        """The work of the second graph, which reads what autograd has saved in the first."""
        parameters = [self._shared.parameters[n] for n in self._used]
        torch._foreach_copy_(self._grads, torch.autograd.grad(self._outputs, parameters, self._pull.unbind()))


class _Replay(torch.autograd.Function):
    """`Graphs` as a function of autograd."""

    @staticmethod
    def forward(ctx, graphs, inputs, rows, *parameters):
        ctx.graphs = graphs
        ctx.save_for_backward(rows)
        return graphs.forward(inputs, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, None, None, *ctx.graphs.backward(*ctx.saved_tensors, grad)


@contextmanager
def waiting_refused(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A context in which most operations that wait for the GPU raise RuntimeError. stream: None does nothing."""
    if stream is None:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that it does not notice every operation
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
