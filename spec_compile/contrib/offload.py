"""Models that accelerate has offloaded: a ``device_map`` has left parts of them in the host's memory or on disk.

accelerate's hooks bring a module's weights to a device for each of its forwards. Graphs run no hooks. So a copy of the
model is served that holds the values themselves: those in the host's memory, and files on disk, mapped into memory. The
user's model keeps its hooks.

On a GPU the matrices and the routed experts of layers stay in pinned memory of the host. A graph fetches each matrix
once in a layer, so a round over many drafted tokens reads no more than a step of one token. It fetches each expert that
one of its tokens has chosen, also once. All else gets its place on the GPU.
"""

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from ..capture import admit, copies, yardstick
from ..capture.quantised import refuse
from ..capture.replaced import PREFIX
from ..graph import LAYER, ModelGraph, attribute, calls, layer_of
from ..inventory import configs_of
from ..kernels import experts
from ..kernels.card import card_of
from ..kernels.launching import new_op, on_gpu, op_with_kernel
from ..passes import linears, register, row_invariance
from ..quantised.codes import class_path

ADDED = ("_hf_hook", "hf_device_map", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
"""Attributes that accelerate adds to modules, besides their forwards."""
PLACES = WeakIdKeyDictionary()
"""Parameter of a copy -> where its values are: "in the host's memory" or "on disk"."""

HOST = "the host, for pinned memory,"
MEMORY = re.compile("MemoryError|out of memory|allocate memory|not enough memory", re.IGNORECASE)
"""In errors of PyTorch and of CUDA that tell of too little memory."""
CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
READ_EARLY = {
    "transformers.models.aria.modeling_aria.AriaExperts",
    "transformers.models.aria.modeling_aria.AriaGroupedExpertsGemm",
    "transformers.models.dbrx.modeling_dbrx.DbrxExpertGLU",
}
"""Modules whose weights capture reads before it traces, see `capture.experts.MODULES`; they get a place on the GPU."""


class Offloaded(NamedTuple):
    """A parameter or buffer without values. part: its module. path: the module's. value, place: what its hook reads.
    is_fetched: True if a graph fetches it."""

    part: nn.Module
    path: str
    name: str
    value: Tensor
    place: str
    is_fetched: bool = False


@new_op("fetch", lambda held, device: torch.empty_like(held, device=device))
def fetch(held: Tensor, device: str) -> Tensor:
    """A copy on a device. From pinned memory it is made in the order of the stream, also by a CUDA graph."""
    return room_for(held, device).copy_(held, non_blocking=True)


def room_for(held: Tensor, device: str | torch.device) -> Tensor:
    """An empty tensor like `held` on a device. torch.OutOfMemoryError, with the device and the bytes, if it is full."""
    try:
        return torch.empty_like(held, device=device, requires_grad=False)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{device} has no {held.nbytes / 1e9:.3f} GB left for offloaded weights that a layer fetches; free some of "
            "its memory, or pass a smaller max_cache_len"
        ) from error


@op_with_kernel("fetch_experts", lambda held, ids: torch.empty_like(held, device=ids.device))
def fetch_experts(held: Tensor, ids: Tensor) -> Tensor:
    """held [E, ...] in the host's memory, ids [T, k] int64 -> a tensor like it where the ids are, with the values of
    the experts ids. All others hold anything."""
    out, chosen = room_for(held, ids.device), ids.unique()
    out[chosen] = held[chosen.to(held.device)].to(ids.device)
    return out


@on_gpu(fetch_experts)
def launch(held, ids) -> Tensor:
    """`fetch_experts` by the kernel."""
    from .kernels import fetch_kernel  # needs Triton

    out = room_for(held, ids.device)
    fetch_kernel.fetch(held, ids, out)
    return out


FETCH, FETCH_EXPERTS = torch.ops.spec_compile.fetch.default, torch.ops.spec_compile.fetch_experts.default
row_invariance.FUNCTIONS |= {FETCH, FETCH_EXPERTS}
yardstick.SELECTIONS |= {FETCH, FETCH_EXPERTS}


class _Fetches:
    """Put in front of a module's class, gives its code the parameters named in `fetched` on the device `fetches_to`."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)  # type: ignore[misc]
        return fetch(value, self.__dict__["fetches_to"]) if name in self.__dict__.get("fetched", ()) else value


@functools.cache
def behind(front: type, cls: type) -> type:
    """A class like `cls` with another in front of it."""
    return type(cls.__name__, (front, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


# The copy.


def without_hooks(model: Any, fetches: bool = False) -> Any:
    """The copy of an offloaded model that is served in its place; any other object unchanged.

    fetches: fetch on a CPU, too, what a GPU would.
    Raises UnsupportedModelError, and leaves all as it was, if a hook is of an unknown kind, if offloaded weights are
    quantised or gone, if layers are on several GPUs, or if there is too little memory for what has to be in it.
    """
    if not isinstance(model, PreTrainedModel):
        return model
    hooks = hooks_of(model)
    if not any(getattr(hook, "offload", False) for _, hook in hooks):
        return model
    device = _device_of(model, [hook for _, hook in hooks])
    opened = functools.cache(partial(safe_open, framework="pt", device="cpu"))  # one mapping of each file
    found = [each for path, hook in hooks if hook.offload for each in _offloaded(model, path, hook, opened)]
    found = to_fetch(model, found) if fetches or device.type == "cuda" else found
    if device.type == "cuda":
        _check_memory(model, found, device)
    values = moved(model, found, device)
    copied = unhooked(model)
    _place(copied, found, values, device)
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
        return weights[name], "in the host's memory"
    dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else None
    if entry.get("safetensors_file") is not None:
        value = opened(entry["safetensors_file"]).get_tensor(entry.get("weight_name", name))
        return value.to(dtype or value.dtype), "on disk"
    path, shape = os.path.join(weights.save_folder, f"{name}.dat"), entry["shape"]
    return torch.from_file(path, shared=False, size=math.prod(shape), dtype=dtype).view(shape), "on disk"


def to_fetch(model: PreTrainedModel, found: list[Offloaded]) -> list[Offloaded]:
    """The same; a graph fetches the matrices and experts of layers. Embeddings and the head stay on the GPU, because a
    step reads few rows of the one, and because drafts share both."""
    first, ends = next(model.parameters()), (model.get_input_embeddings(), model.get_output_embeddings())

    def is_fetched(each: Offloaded) -> bool:
        held, part = each.part._parameters.get(each.name), each.part
        is_matrix = isinstance(held, nn.Parameter) and held is not first and held.dim() in (2, 3)
        is_whole = isinstance(part, (nn.Embedding, *CONVOLUTIONS)) or class_path(part) in READ_EARLY or part in ends
        return is_matrix and not is_whole

    return [each._replace(is_fetched=is_fetched(each)) for each in found]


def _check_memory(model: PreTrainedModel, found: list[Offloaded], device: torch.device) -> None:
    """UnsupportedModelError if the GPU cannot hold what it must, or the host what has to be pinned."""
    if card_of(device).lacks_tensor_cores and model.dtype == torch.bfloat16:
        refuse(model, f"is in bfloat16 and offloaded, on a GPU that does not compute it; {admit.LOAD}")
    needs = needed(found)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + unused, psutil.virtual_memory().available
    for what, need, there in zip((f"{device},", HOST), needs, free):
        if need > there:
            refuse(model, f"is offloaded and needs {need / 1e9:.2f} GB of {what} which has {there / 1e9:.2f} GB free")


def needed(found: list[Offloaded]) -> tuple[int, int]:
    """Bytes of the GPU, for what stays there and the layer with the most, and bytes of the host that are to be pinned.

    PyTorch pins blocks of powers of 2: 117 MB take 134 MB.
    """
    layers, pinned = Counter[str](), 0
    for each in (each for each in found if each.is_fetched):
        match = LAYER.search(f".{each.path}.")
        layers[match[1] if match else ""] += each.value.nbytes
        pinned += 0 if each.value.is_pinned() else 1 << (each.value.nbytes - 1).bit_length()
    resident = sum(each.value.nbytes for each in found) - layers.total()
    return resident + max(layers.values(), default=0), pinned


def moved(model: PreTrainedModel, found: list[Offloaded], device: torch.device) -> list[Tensor]:
    """The values of `found` where graphs read them. Tied weights become one tensor.

    UnsupportedModelError if memory runs out. Then, and after any other error, no value stays moved.
    """
    needs = needed(found)
    made: dict[tuple, Tensor] = {}
    values, pinned = list[Tensor](), list[Tensor]()
    try:
        for value, pins in [(each.value, each.is_fetched) for each in found]:
            key = value.data_ptr(), value.shape
            if key not in made:
                if device.type == "cuda" and pins and not value.is_pinned():
                    value.data = value.data.pin_memory()  # what the user's hooks read, too
                    pinned.append(value)
                made[key] = value.detach() if pins else value.detach().to(device)
            values.append(made[key])
    except BaseException as error:
        made.clear()
        values.clear()
        for value in pinned:
            value.data = value.data.clone()
        release_unused()
        if MEMORY.search(f"{type(error).__name__}: {error}"):
            what, need = (f"{device},", needs[0]) if isinstance(error, torch.OutOfMemoryError) else (HOST, needs[1])
            refuse(model, f"is offloaded and needs {need / 1e9:.2f} GB of {what} which has run out of memory")
        raise
    return values


def release_unused() -> None:
    """Give memory that PyTorch keeps for later, on the GPU and pinned on the host, back to the system."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()


def _place(copied: PreTrainedModel, found: list[Offloaded], values: list[Tensor], device: torch.device) -> None:
    """Give a copy the values of `found`. Tied weights become one parameter."""
    made: dict[int, Tensor] = {}
    for each, value in zip(found, values):
        part = copied.get_submodule(each.path)
        holder = part._parameters if each.name in part._parameters else part._buffers
        old = holder[each.name]
        if id(value) not in made:
            made[id(value)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        holder[each.name] = placed = made[id(value)]
        if each.is_fetched:
            vars(part).update(fetched=(*vars(part).get("fetched", ()), each.name), fetches_to=str(device))
            part.__class__ = part.__class__ if isinstance(part, _Fetches) else behind(_Fetches, type(part))
        if each.is_fetched or device.type == "cpu":
            PLACES[placed] = each.place
    for pair in (getattr(copied, "all_tied_weights_keys", None) or {}).items():  # each may have a file
        ends = [(copied.get_submodule(path)._parameters, name) for path, _, name in (x.rpartition(".") for x in pair)]
        one, other = (holder.get(name) for holder, name in ends)
        ours = [any(each is x for x in made.values()) for each in (one, other)]
        if one is None or other is None or not any(ours):
            continue
        if one.device == other.device and torch.equal(one, other):
            (holder, name), kept = (ends[0], other) if ours[0] else (ends[1], one)
            holder[name] = kept
    # named_parameters() reads what a module holds; its attributes would fetch.
    held = [parameter for _, parameter in copied.named_parameters() if parameter in PLACES]
    linears.keep_apart(copied, held)  # merging them would copy them
    admit.ELSEWHERE.update(dict.fromkeys(held, device))


# The pass.


def share_fetches(graph: ModelGraph, settings) -> str:
    """Let all readers in a layer share the first fetch of a weight, and fetch only those experts that are chosen."""
    first: dict[tuple, fx.Node] = {}
    for node in calls(graph.gm, FETCH):
        other = first.setdefault((node.args[0].target, layer_of(node)), node)
        if other is not node:
            node.replace_all_uses_with(other)
            graph.gm.graph.erase_node(node)
    held = [(node, attribute(graph.gm, node.args[0].target)) for node in first.values()]
    chosen = {id(tensor) for node, tensor in held if fetch_chosen(node)}
    sizes, of_experts = Counter[str](), Counter[str]()
    read = [attribute(graph.gm, name) for name in {n.target for n in graph.gm.graph.find_nodes(op="get_attr")}]
    for tensor in {id(each): each for each in read if isinstance(each, Tensor)}.values():
        if tensor in PLACES:
            (of_experts if id(tensor) in chosen else sizes)[PLACES[tensor]] += tensor.nbytes
    text = " and ".join(f"{size / 1e9:.3f} GB {place}" for place, size in sorted(sizes.items()))
    if not sizes and not of_experts:
        return "nothing is offloaded"
    text = f"a round reads {text or 'no matrix'}, with {len(first) - len(chosen)} fetches"
    for place, size in sorted(of_experts.items()):
        text += f", and the chosen ones of {size / 1e9:.3f} GB of experts {place}"
    return text


def fetch_chosen(node: fx.Node) -> bool:
    """Let products of experts fetch the experts of their tokens. node: a fetch, which nobody reads then. False, and no
    change, if another node reads it."""
    readers = [*node.users]
    if not all(each.target in experts.PRODUCTS and node in each.args[-2] for each in readers):
        return False
    for reader in readers:
        with node.graph.inserting_before(reader):
            some = node.graph.call_function(FETCH_EXPERTS, (node.args[0], reader.args[1]))
        some.meta = dict(node.meta)
        reader.replace_input_with(node, some)
    node.graph.erase_node(node)
    return True


register(share_fetches, after="fuse_residuals")
