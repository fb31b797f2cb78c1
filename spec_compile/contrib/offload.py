"""Models that accelerate has offloaded: a ``device_map`` has left parts of them in the host's memory or on disk.

accelerate's hooks bring a module's weights to a device for each of its forwards. Graphs run no hooks. So a copy of the
model is served that holds the values themselves: those in the host's memory, and files on disk, mapped into memory. The
user's model keeps its hooks.

On a GPU the matrices of layers stay in pinned memory of the host. A graph fetches each of them once in a layer, so a
round over many drafted tokens reads no more than a step of one token. All else gets its place on the GPU.
"""

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from ..capture import admit, copies
from ..capture.quantised import refuse
from ..capture.replaced import PREFIX
from ..graph import LAYER, ModelGraph, attribute, calls, layer_of
from ..inventory import configs_of
from ..kernels.card import card_of
from ..passes import linears, register, row_invariance

ADDED = ("_hf_hook", "hf_device_map", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
"""Attributes that accelerate adds to modules, besides their forwards."""
PLACES = WeakIdKeyDictionary()
"""Parameter of a copy -> where its values are: "in the host's memory" or "on disk"."""


class Offloaded(NamedTuple):
    """A parameter or buffer without values. part: its module. path: the module's. value, place: what its hook reads."""

    part: nn.Module
    path: str
    name: str
    value: Tensor
    place: str


@torch.library.custom_op("spec_compile::fetch", mutates_args=())
def fetch(held: Tensor, device: str) -> Tensor:
    """A copy on a device. From pinned memory it is made in the order of the stream, also by a CUDA graph."""
    return held.to(device, non_blocking=True, copy=True)


@fetch.register_fake
def _(held, device):
    return torch.empty_like(held, device=device)


FETCH = torch.ops.spec_compile.fetch.default
row_invariance.FUNCTIONS.add(FETCH)


class _Fetches:
    """Put in front of a module's class, gives its code the parameters named in `fetched` on the device `fetches_to`."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return fetch(value, self.__dict__["fetches_to"]) if name in self.__dict__.get("fetched", ()) else value


@functools.cache
def _fetching(cls: type) -> type:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (_Fetches, cls), names)


# The copy.


def without_hooks(model: Any, fetches: bool = False) -> Any:
    """The copy of an offloaded model that is served in its place; any other object unchanged.

    fetches: fetch on a CPU, too, what a GPU would.
    Raises UnsupportedModelError, before any change, if a hook is of an unknown kind, if offloaded weights are quantised
    or gone, if layers are on several GPUs, or if there is too little memory for what has to be in it.
    """
    if not isinstance(model, PreTrainedModel):
        return model
    hooks = hooks_of(model)
    if not any(getattr(hook, "offload", False) for _, hook in hooks):
        return model
    device = _device_of(model, [hook for _, hook in hooks])
    opened = functools.cache(partial(safe_open, framework="pt", device="cpu"))  # one mapping of each file
    found = [each for path, hook in hooks if hook.offload for each in _offloaded(model, path, hook, opened)]
    fetched = _matrices(model, found) if fetches or device.type == "cuda" else []
    if device.type == "cuda":
        _check_memory(model, found, fetched, device)
    copied = unhooked(model)
    _place(copied, found, fetched, device)
    copies.ORIGINS[copied] = model
    return copied


copies.STAND_INS.append(without_hooks)


def hooks_of(model: nn.Module) -> list[tuple[str, Any]]:
    """The hooks of accelerate on a model's modules, each with the path of its module."""
    hooked = [(path, vars(part).get("_hf_hook")) for path, part in model.named_modules()]
    return [(path, each) for path, hook in hooked if hook for each in getattr(hook, "hooks", [hook])]


def unhooked(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model without accelerate's hooks, which shares its tensors and notices changes of its values."""
    # The configs are shared, so that changes of them are noticed.
    shared: dict[int, Any] = {id(each): each for each in [*configs_of(model), model.generation_config]}
    shared |= {id(hook): hook for part in model.modules() if (hook := vars(part).get("_hf_hook")) is not None}
    copied = copies.shared_copy(model, shared)
    originals = {path.replace(PREFIX, ""): part for path, part in model.named_modules()}
    for path, part in copied.named_modules():
        attributes = vars(part)
        for name in ADDED:
            attributes.pop(name, None)
        if (own := attributes.pop("_old_forward", None)) is not None:
            del attributes["forward"]
            if getattr(own, "__func__", None) is not type(part).forward:
                attributes["forward"] = own
        # Where all tensors have values, the dictionary is shared, so that a tensor in another's place is noticed.
        for name in ("_parameters", "_buffers"):
            holder = vars(originals[path])[name]
            if not any(tensor is not None and tensor.is_meta for tensor in holder.values()):
                attributes[name] = holder
    return copied


def _device_of(model: PreTrainedModel, hooks: list[Any]) -> torch.device:
    """The device on which the hooks run the model."""
    check_known(model, hooks)
    if getattr(model, "hf_quantizer", None) is not None:
        refuse(model, f"has quantised weights that accelerate has offloaded; {admit.LOAD}")
    if any(hasattr(part, "_rescale_layers") for part in model.modules()):
        refuse(model, f"is offloaded by accelerate, and it changes its weights while it runs; {admit.LOAD}")
    devices = {device for device in map(device_of, hooks) if device is not None}
    if len(devices) != 1:
        refuse(model, f"is spread over {', '.join(sorted(map(str, devices)))}; {admit.SEVERAL}")
    device = devices.pop()
    admit.admit_device(model, device)
    return device


def check_known(model: PreTrainedModel, hooks: list[Any]) -> None:
    """UnsupportedModelError if a hook does anything else than to bring tensors to a device."""
    unknown = sorted({type(hook).__name__ for hook in hooks} - {"AlignDevicesHook"})
    if unknown:
        refuse(model, f"has hooks of accelerate that are not known here, {', '.join(unknown)}; {admit.LOAD}")


def device_of(hook: Any) -> torch.device | None:
    """The device that a hook brings tensors to; None if it brings them nowhere."""
    given = hook.execution_device
    if given is None:
        return None
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _offloaded(model: PreTrainedModel, path: str, hook: Any, opened: Callable) -> Iterator[Offloaded]:
    """The tensors that one hook brings to its device. opened: opens a file of safetensors."""
    hooked = model.get_submodule(path)
    for inner, part in hooked.named_modules() if hook.place_submodules else [("", hooked)]:
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is None or not tensor.is_meta:
                continue
            inside = ".".join(filter(None, [inner, name]))
            try:
                value, place = _value(hook.weights_map, inside, opened)
            except (OSError, RuntimeError, KeyError, SafetensorError) as error:
                refuse(model, f"has lost the weights of {path}.{inside}, which were offloaded ({error}); load it again")
            if value.shape != tensor.shape or type(tensor) not in (nn.Parameter, Tensor):
                refuse(model, f"has offloaded other weights than {path}.{inside} takes; load it again")
            full = ".".join(filter(None, [path, inner])).replace(PREFIX, "")
            yield Offloaded(part, full, name, value.to(tensor.dtype), place)


def _value(weights: Any, name: str, opened: Callable) -> tuple[Tensor, str]:
    """The values under a name in a hook's map, and their place. Files are mapped into memory and not read."""
    while hasattr(weights, "prefix"):
        weights, name = weights.dataset, f"{weights.prefix}{name}"
    entry = None if name in getattr(weights, "state_dict", ()) else getattr(weights, "index", {}).get(name)
    if entry is None:
        return weights[name].detach(), "in the host's memory"
    dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else None
    if entry.get("safetensors_file") is not None:
        value = opened(entry["safetensors_file"]).get_tensor(entry.get("weight_name", name))
        return value.to(dtype or value.dtype), "on disk"
    path, shape = os.path.join(weights.save_folder, f"{name}.dat"), entry["shape"]
    return torch.from_file(path, shared=False, size=math.prod(shape), dtype=dtype).view(shape), "on disk"


def _matrices(model: PreTrainedModel, found: list[Offloaded]) -> list[Offloaded]:
    """The matrices of layers, which a graph fetches. Embeddings and the head stay on the GPU, because a step reads few
    rows of the one, and because drafts share both."""
    first, ends = next(model.parameters()), (model.get_input_embeddings(), model.get_output_embeddings())
    return [
        each
        for each in found
        if isinstance(held := each.part._parameters.get(each.name), nn.Parameter)
        and held is not first
        and held.dim() == 2
        and not isinstance(each.part, nn.Embedding)
        and each.part not in ends
    ]


def _check_memory(
    model: PreTrainedModel, found: list[Offloaded], fetched: list[Offloaded], device: torch.device
) -> None:  # fmt: skip
    """UnsupportedModelError if the GPU cannot hold what it must, or the host what has to be pinned."""
    if card_of(device).lacks_tensor_cores and model.dtype == torch.bfloat16:
        refuse(model, f"is in bfloat16 and offloaded, on a GPU that does not compute it; {admit.LOAD}")
    layers, pinned = Counter[str](), 0
    for each in fetched:
        match = LAYER.search(f".{each.path}.")
        layers[match[1] if match else ""] += each.value.nbytes
        pinned += 0 if each.value.is_pinned() else each.value.nbytes
    resident = sum(each.value.nbytes for each in found) - layers.total()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    for what, needed, free in (
        ("the GPU", resident + max(layers.values(), default=0), torch.cuda.mem_get_info(device)[0] + unused),
        ("the host, for pinned memory,", pinned, psutil.virtual_memory().available),
    ):
        if needed > free:
            refuse(model, f"is offloaded and needs {needed / 1e9:.2f} GB of {what} which has {free / 1e9:.2f} GB free")


def _place(copied: PreTrainedModel, found: list[Offloaded], fetched: list[Offloaded], device: torch.device) -> None:
    """Give a copy the values. Tied weights become one parameter."""
    made: dict[tuple, Tensor] = {}
    ids = {id(each) for each in fetched}
    for each in found:
        part, value = copied.get_submodule(each.path), each.value
        holder = part._parameters if each.name in part._parameters else part._buffers
        key = value.data_ptr(), value.shape
        if key not in made:
            if device.type == "cuda" and id(each) not in ids:
                value = value.to(device)
            elif device.type == "cuda" and not value.is_pinned():
                value.data = value.pin_memory()  # what the user's hooks read, too
            old = holder[each.name]
            made[key] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        holder[each.name] = made[key]
        if id(each) in ids:
            vars(part).update(fetched=(*vars(part).get("fetched", ()), each.name), fetches_to=str(device))
            part.__class__ = part.__class__ if isinstance(part, _Fetches) else _fetching(type(part))
        if id(each) in ids or device.type == "cpu":
            PLACES[made[key]] = each.place
    for pair in (getattr(copied, "all_tied_weights_keys", None) or {}).items():  # each may have a file
        ends = [(copied.get_submodule(path)._parameters, name) for path, _, name in (x.rpartition(".") for x in pair)]
        one, other = (holder.get(name) for holder, name in ends)
        ours = [any(each is x for x in made.values()) for each in (one, other)]
        if one is None or other is None or not any(ours):
            continue
        if one.device == other.device and torch.equal(one, other):
            (holder, name), kept = (ends[0], other) if ours[0] else (ends[1], one)
            holder[name] = kept
    names = [name for name, parameter in copied.named_parameters() if parameter in PLACES]
    linears.keep_apart(copied, names)  # merging them would copy them
    admit.ELSEWHERE.update(dict.fromkeys(map(partial(attribute, copied), names), device))


# The pass.


def share_fetches(graph: ModelGraph, settings) -> str:
    """Let all readers in a layer share the first fetch of a weight."""
    first: dict[tuple, torch.fx.Node] = {}
    for node in calls(graph.gm, FETCH):
        other = first.setdefault((node.args[0].target, layer_of(node)), node)
        if other is not node:
            node.replace_all_uses_with(other)
            graph.gm.graph.erase_node(node)
    sizes = Counter[str]()
    read = [attribute(graph.gm, name) for name in {n.target for n in graph.gm.graph.find_nodes(op="get_attr")}]
    for tensor in {id(each): each for each in read if isinstance(each, Tensor)}.values():
        if tensor in PLACES:
            sizes[PLACES[tensor]] += tensor.nbytes
    text = " and ".join(f"{size / 1e9:.3f} GB {place}" for place, size in sorted(sizes.items()))
    return f"a round reads {text}, with {len(first)} fetches" if text else "nothing is offloaded"


register(share_fetches, after="fuse_residuals")
