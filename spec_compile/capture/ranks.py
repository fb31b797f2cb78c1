"""Ranks of tensor parallelism: the facts that they agree on before they share a model, and models already spread."""

import copy
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..inventory import held_parameters, held_tensors
from ..kernels import all_reduce
from ..parallel.ranks import Alone
from ..parallel.start import ADVICE
from .replaced import PREFIX

SAMPLES = 1024
"""Numbers of each parameter that go into the checksum."""


def facts(model: PreTrainedModel, algorithm: str, options: dict[str, Any]) -> dict[str, Any]:
    """The facts that must be the same on all ranks, by name: model, weights, draft, options and libraries.

    UnsupportedModelError if the model is spread over devices.
    """
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"tensor_parallel: {type(model).__name__} was loaded with a device_map over {', '.join(sorted(devices))}, "
            "and every rank needs the model on a device of its own: load it without device_map, or with "
            f"device_map={{'': int(os.environ['LOCAL_RANK'])}}; {ADVICE}"
        )
    draft = options.get("draft")
    return {
        "algo": algorithm,
        **{name: value for name, value in options.items() if name not in ("draft", "tensor_parallel")},
        "the model": (type(model).__name__, sorted(model.config.to_dict().items(), key=lambda item: item[0])),
        "the weights": checksum(model),
        "the draft": checksum(draft) if isinstance(draft, nn.Module) else draft,
        "the versions of torch and transformers": (torch.__version__, transformers.__version__),
    }


def share_memory(ranks: Alone, device: torch.device) -> None:
    """Let the ranks' GPUs add up sums by a kernel over memory that they share, if they can share memory."""
    if ranks.size == 1 or device.type != "cuda":
        return
    reason = all_reduce.prepare(ranks.group, device)
    ranks.find_missing = partial(all_reduce.missing_rank, ranks.name)
    ranks.notes = [f"sums over ranks: {'by our kernel' if reason is None else f'by NCCL, because {reason}'}"]


@torch.no_grad()
def checksum(module: nn.Module) -> bytes:
    """Bytes of the shapes, dtypes and samples of all tensors. A change of a few numbers may leave them the same."""
    parts, shapes = [], []
    for tensor in held_tensors(module):
        shapes.append((tuple(tensor.shape), str(tensor.dtype)))
        if isinstance(tensor, DTensor):
            continue
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLES)].double()
        parts.append((sample * torch.arange(1, len(sample) + 1, device=sample.device)).sum())
    sums = torch.stack(parts).cpu() if parts else torch.zeros(0)
    return repr(shapes).encode() + sums.numpy().tobytes()


# Models whose parameters transformers has spread over ranks as DTensors: a copy is traced and given their tensors.


Fake = tuple[PreTrainedModel, FakeTensorMode]


def is_sharded(model: nn.Module) -> bool:
    """True if ranks hold parts of the parameters of a model."""
    return any(isinstance(parameter, DTensor) for parameter in held_parameters(model))


def fake_copy(model: PreTrainedModel) -> Fake:
    """A model of the same class and configuration, and the mode in which its tensors were made. They have whole shapes
    and devices, and no memory.

    The sharded model itself cannot be traced, because transformers has replaced its forwards.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device(model.device):
        copied = type(model)(copy.deepcopy(model.config)).eval()
        fakes: dict[int, nn.Parameter] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            owner, _, name = path.replace(PREFIX, "").rpartition(".")
            if id(parameter) not in fakes:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                fakes[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            copied.get_submodule(owner)._parameters[name] = fakes[id(parameter)]
    return copied, mode


def bind(gm: fx.GraphModule, model: PreTrainedModel) -> None:
    """Replace the tensors of a copy by the sharded model's, in the graph `gm` that was traced from the copy.

    UnsupportedModelError if the graph reads a tensor that is no parameter or buffer of the model.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    tensors = {path.replace(PREFIX, ""): tensor for path, tensor in tensors.items()}
    for node in [node for node in gm.graph.nodes if node.op == "get_attr"]:
        path, _, name = node.target.rpartition(".")
        owner = gm.get_submodule(path)
        if not isinstance(getattr(owner, name).data, FakeTensor):
            continue
        tensor = tensors.get(node.target.removeprefix("model."))
        if tensor is None:
            raise UnsupportedModelError(
                f"model: {type(model).__name__} computes with {node.target}, which is no parameter or buffer; load it "
                "whole on each rank, without tp_plan"
            )
        holder = owner._parameters if name in owner._parameters else owner._buffers
        holder[name] = tensor
