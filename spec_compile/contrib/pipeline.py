"""Models that a ``device_map`` has spread over several GPUs of one host are served in place, as a pipeline.

Each layer stays on its GPU, with its keys and values. accelerate's hooks move hidden states from one GPU to the next;
graphs run no hooks, so a copy of the model without them is served, in which modules move what they are given. In a
graph each value moves to a device once. The first device, which has the embeddings, has all else: trees, texts, drafts
and logits.

    cuda:0   embeddings  layers 0 to 15   |                     |   logits, drafts, commit
    cuda:1                                |  layers 16 to 31, head  |

One CUDA graph has the work of all devices. Its capture forks to another device where the first value moves there.
"""

import functools
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from ..capture import admit, copies
from ..capture.quantised import refuse
from ..capture.trace import decoder_layers
from ..compile import replay, serialise
from ..errors import UnsupportedModelError
from ..graph import ModelGraph, attribute, calls, is_size
from ..inventory import held, held_tensors
from ..kernels import HALF, ops
from ..kernels.card import card_of
from ..kernels.launching import new_op, on_gpu
from ..passes import register, row_invariance
from .offload import behind, check_known, device_of, hooks_of, unhooked

HOMES = WeakIdKeyDictionary()
"""Parameters and buffers of models in place, each with its device as text; on a CPU it only stands for a device."""
_capture = threading.local()


# Moves.


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """x on another GPU, in the order of both devices' streams; in a capture the graph moves it."""
    if x.device == device:
        return x
    if (branches := getattr(_capture, "branches", None)) is None:
        return x.to(device, non_blocking=True)
    branches.reach(x.device)  # where only weights may be so far
    branches.reach(device)
    there = x.to(device, non_blocking=True)
    # A kernel that begins before the one before it ends (see `launching`) may depend on nothing of another GPU.
    torch.zeros(1, device=device)
    return there


@new_op("move", lambda x, device: torch.empty_like(x, device="cpu" if x.device.type == "cpu" else device))
def move(x: Tensor, device: str) -> Tensor:
    """A copy of x on a device. On a CPU, where a device's name only stands for one, it stays there."""
    return x.clone() if x.device.type == "cpu" or x.device == (to := torch.device(device)) else to_device(x, to)


def moved(x: Tensor | None, device: str) -> Tensor | None:
    """`move` of a tensor, or None of None."""
    return None if x is None else move(x, device)


MOVE = torch.ops.spec_compile.move.default
row_invariance.FUNCTIONS |= {MOVE, moved}
serialise.FUNCTIONS[__name__] = {"moved"}


class _Placed:
    """Put in front of a module's class, moves what its forward is given to the device `runs_on`, and the result to the
    device `gives_to`, if that is not None."""

    def forward(self, *args: Any, **named: Any) -> Any:
        runs_on, gives_to = vars(self)["runs_on"], vars(self)["gives_to"]
        result = super().forward(*_all_moved(args, runs_on), **_all_moved(named, runs_on))  # type: ignore[misc]
        return result if gives_to is None else _all_moved(result, gives_to)


def _all_moved(value: Any, device: str) -> Any:
    """A value with its tensors on a device. Caches, which have each layer's tensors on its device, stay as they are."""
    if isinstance(value, Tensor):
        return move(value, device)
    if type(value) is dict:
        return {name: _all_moved(part, device) for name, part in value.items()}
    return type(value)(_all_moved(part, device) for part in value) if type(value) in (list, tuple) else value


# The copy.


def in_place(model: Any, places: dict[str, str] | None = None) -> Any:
    """The copy of a model on several GPUs that is served in its place; any other object unchanged.

    places: on a CPU, in place of hooks, what stands for the device of each module, by path.
    Raises UnsupportedModelError, before any change, if a hook is of an unknown kind, if weights are quantised, if a
    layer is on two devices, or if the devices differ.
    """
    if not isinstance(model, PreTrainedModel):
        return model
    hooks = hooks_of(model)
    found = {path: device for path, hook in hooks if (device := device_of(hook)) is not None} if not places else {}
    if not places and ({device.type for device in found.values()} != {"cuda"} or len({*found.values()}) < 2):
        return model
    check_known(model, [hook for _, hook in hooks])
    if getattr(model, "hf_quantizer", None) is not None:
        refuse(model, f"has quantised weights on several GPUs; {admit.SEVERAL}")
    check_devices(model)
    places = places or {path: str(device) for path, device in found.items() if path}
    embeddings = model.get_input_embeddings()
    path = next(path for path, part in model.named_modules() if part is embeddings)
    first = _place(places, path) or str(model.device)
    copied = unhooked(model)
    for path, part in copied.named_modules():
        if path in places:
            vars(part).update(runs_on=places[path], gives_to=None)
            part.__class__ = behind(_Placed, type(part))
    head = copied.get_output_embeddings()
    if isinstance(head, _Placed):
        vars(head)["gives_to"] = first
    for each in held(copied):
        HOMES[each.tensor] = _place(places, each.path) or first
    admit.ELSEWHERE.update(dict.fromkeys(held_tensors(copied), model.device))
    if model.device.type == "cuda":
        copy_on_each_device()
    copies.ORIGINS[copied] = model
    return copied


copies.STAND_INS.append(in_place)


def _place(places: dict[str, str], path: str) -> str | None:
    """The device of the innermost module with one around a path."""
    while path and path not in places:
        path = path.rpartition(".")[0]
    return places.get(path)


def check_devices(model: PreTrainedModel) -> None:
    """UnsupportedModelError for devices that cannot be a pipeline."""
    for device in dict.fromkeys(tensor.device for tensor in held_tensors(model)):
        admit.admit_device(model, device)
        if card_of(device) != card_of(model.device):
            names = " and ".join(card_of(each).name for each in (model.device, device))
            refuse(model, f"is spread over GPUs of two kinds, {names}, whose bits may differ; {admit.LOAD}")
    for number, layer in enumerate(decoder_layers(model)):
        devices = sorted({str(tensor.device) for tensor in held_tensors(layer)})
        if len(devices) > 1:
            refuse(model, f"has layer {number} on {' and '.join(devices)}; a layer has to be on one GPU")
    if model.get_input_embeddings().weight.device != model.device:
        refuse(model, "has its embeddings behind other layers; its device_map has to put them on the first GPU")


# The passes.


def gather(graph: ModelGraph, settings) -> str:
    """Note the device of each node, and erase the moves, so that the passes see the graph of one device.

    The passes after it hand on what is noted, in ``node.meta["device"]``, to the nodes that they make.
    """
    moves = calls(graph.gm, MOVE)
    if not moves:
        return "on one device"
    refuse_others(graph, settings)
    nodes = [node for node in graph.gm.graph.nodes if isinstance(node.meta.get("val"), Tensor | list | tuple)]
    home: dict[fx.Node, str] = {}
    for node in nodes:
        read = [home[source] for source in node.all_input_nodes if source in home]
        if node.op == "placeholder":
            home[node] = _first(graph)
        elif node.op == "get_attr":
            own = HOMES.get(attribute(graph.gm, node.target))
            read = [] if own is None else [own]
        elif node.target is MOVE:
            read = [node.args[1]]
        if read:
            home[node] = read[-1]
    for node in reversed(nodes):  # what reads no tensor is made where it is read
        home.setdefault(node, next((home[user] for user in node.users if user in home), _first(graph)))
        node.meta["device"] = home[node]
    for node in moves:
        node.replace_all_uses_with(node.args[0])
        graph.gm.graph.erase_node(node)
    markers = calls(graph.gm, torch.ops.spec_compile.attention.default)
    devices = [str(node.meta["val"].device) for node in markers]
    graph.layers = tuple(replace(layer, device=device) for layer, device in zip(graph.layers, devices, strict=True))
    layers = Counter(home[node] for node in markers)
    return f"layers: {', '.join(f'{count} on {device}' for device, count in layers.items())}"


def refuse_others(graph: ModelGraph, settings) -> None:
    """UnsupportedModelError for what does not go together with several devices."""
    others = {
        "layers with states": graph.recurrences,
        "indexers": graph.indexes,
        "tensor_parallel": settings.ranks.size > 1,
        "max_loras": settings.low_rank,
    }
    # On two H200s captured rounds in 16 bits gave other tokens, and so did eager ones with many requests.
    others["16 bits"] = graph.device.type == "cuda" and graph.dtype in HALF
    for name in (name for name, has in others.items() if has):
        raise UnsupportedModelError(
            f"model: {name} and layers on several GPUs exclude each other; leave out the one, or {admit.LOAD}"
        )


def _first(graph: ModelGraph) -> str:
    """The device of the graph's inputs and results."""
    first = next(graph.gm.parameters())
    return HOMES.get(first, str(first.device))


def put_moves(graph: ModelGraph, settings) -> str:
    """Compute each node on the device of the weights that it reads, or where its module is. A value that is read on
    another device moves there once, before the first node there that follows it."""
    nodes = [*graph.gm.graph.nodes]
    if not any("device" in node.meta for node in nodes):
        return "on one device"
    first, home = _first(graph), _homes(graph)
    there: dict[tuple[fx.Node, str], fx.Node] = {}
    begin, before = nodes[0], ""
    for node in nodes:
        device = home.get(node)
        if device is None or node.op in ("placeholder", "get_attr"):
            continue
        if device != before:
            begin, before = node, device
        if "device" in node.kwargs and graph.device.type == "cuda":
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
        for source in node.all_input_nodes:
            if home.get(source, device) == device:
                continue
            if (source, device) not in there:
                if source.op == "get_attr":
                    begin.prepend(source)
                with graph.gm.graph.inserting_before(begin):
                    there[source, device] = graph.gm.graph.call_function(moved, (source, device))
                there[source, device].meta = {"val": source.meta.get("val"), "device": device}
            node.replace_input_with(source, there[source, device])
    return f"{len(there)} values move between {first} and {', '.join(sorted({*home.values()} - {first}))}"


def _homes(graph: ModelGraph) -> dict[fx.Node, str]:
    """The device of each node with tensors. Keys and values are read by their layer only, and so are missing."""
    first, cached = _first(graph), graph.layer_tensors * len(graph.layers)
    order = {node.meta["device"]: None for node in graph.gm.graph.nodes if "device" in node.meta}
    stages = {device: number for number, device in enumerate(order)}
    home: dict[fx.Node, str] = {}
    for node in graph.gm.graph.nodes:
        weights = Counter[str]()
        for each in node.all_input_nodes:
            if each.op == "get_attr" and each in home:
                weights[home[each]] += attribute(graph.gm, each.target).nbytes
        read = [home[each] for each in node.all_input_nodes if each in home]
        if is_size(node):
            continue
        if node.op in ("placeholder", "output"):
            home[node] = first
        elif node.op == "get_attr":
            value = attribute(graph.gm, node.target)
            device = str(value.device) if isinstance(value, Tensor) and value.is_cuda else node.meta.get("device")
            home |= {} if device is None else {node: device}
        elif weights:  # a product may add and norm for the next layer
            home[node] = weights.most_common(1)[0][0]
        elif node.target is operator.getitem and node.args[0].op != "placeholder" and node.args[0] in home:
            home[node] = home[node.args[0]]
        elif "device" in node.meta:
            home[node] = node.meta["device"]
        elif node.args and getattr(node.args[0], "target", None) == "cache" and node.args[0].op == "placeholder":
            home |= {node: first} if not 0 <= node.args[1] < cached else {}
        elif read:
            home[node] = max(read, key=lambda device: stages.get(device, 0))
    return home


register(gather, after="tidy")
register(put_moves, after="fuse_append")


# CUDA graphs of several devices.


class _Branches:
    """The branches of a capture to other devices.

    A branch is a stream that waits for the capture's, and for which the capture's waits in the end. Its memory comes
    from the graph's pool, because a graph's memory may be given to nobody else between its launches.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream):
        self.pool, self.stream, self.side = pool, stream, dict[torch.device, torch.cuda.Stream]()
        self._stack = ExitStack()

    def reach(self, device: torch.device) -> None:
        """Begin a branch unless there is one."""
        if device in self.side or device == self.stream.device:
            return
        side = self.side[device] = torch.cuda.Stream(device)
        side.wait_stream(self.stream)
        torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, self.pool)
        self._stack.callback(torch._C._cuda_endAllocateToPool, device.index, self.pool)
        self._stack.callback(_set_stream, torch.cuda.current_stream(device))
        _set_stream(side)

    def join(self) -> None:
        self._stack.close()
        for side in self.side.values():
            self.stream.wait_stream(side)

    def around(self, launch: Callable[[], None]) -> Callable[[], None]:
        """The launch of the graph, in order with all that is launched on the branches' devices."""
        if not self.side:
            return launch

        def launched() -> None:
            current = torch.cuda.current_stream(self.stream.device)
            for device in self.side:
                current.wait_stream(torch.cuda.current_stream(device))
            launch()
            for device in self.side:
                torch.cuda.current_stream(device).wait_stream(current)

        return launched


def _set_stream(stream: torch.cuda.Stream) -> None:
    """Make a stream the current one of its device, without a change of the current device."""
    with torch.cuda.device(torch.cuda.current_device()):
        torch.cuda.set_stream(stream)


@contextmanager
def branching(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Iterator[Callable]:
    """A context inside of a capture, which gives a function of the graph's launch."""
    before = getattr(_capture, "branches", None)
    _capture.branches = branches = _Branches(pool, stream)
    try:
        yield branches.around
    finally:
        _capture.branches = before
        branches.join()
        for device in branches.side:
            weakref.finalize(graph, torch._C._cuda_releasePool, device.index, pool).atexit = False


replay.AROUND.append(branching)


# Copies over the keys and values of all layers.


@functools.cache
def copy_on_each_device() -> None:
    """Let ops over the caches of all layers launch their kernel on each device that has some."""
    from ..kernels import copies as kernels  # needs Triton

    @on_gpu(kernels.compact)
    def compact(caches, lengths, path, count, table=None):
        for device, own in _by_device(caches):
            with torch.cuda.device(device):
                given = (None if x is None else to_device(x, device) for x in (lengths, path, count, table))
                kernels.launch(own, *given)

    @on_gpu(ops.pack_pages)
    def pack_pages(pools, packed, pages, to_pages):
        begin = 0
        for device, own in _by_device(pools):
            part = packed[:, begin : (begin := begin + sum(pool[0].numel() for pool in own))]
            with torch.cuda.device(device):
                if device == packed.device:
                    kernels.launch_pack(own, part, pages, to_pages)
                    continue
                there = to_device(part.contiguous(), device) if to_pages else torch.empty_like(part, device=device)
                kernels.launch_pack(own, there, to_device(pages, device), to_pages)
                if to_pages:
                    torch.cuda.current_stream(packed.device).wait_stream(torch.cuda.current_stream(device))
                else:
                    part.copy_(there, non_blocking=True)


def _by_device(tensors: list[Tensor]) -> list[tuple[torch.device, list[Tensor]]]:
    """Consecutive tensors of one device."""
    return [(device, [*group]) for device, group in groupby(tensors, lambda each: each.device)]
