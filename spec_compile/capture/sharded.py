"""Models whose parameters transformers has spread over ranks as DTensors: a twin is traced and given their tensors."""

import copy

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..inventory import held_parameters
from .compiled import PREFIX

Fake = tuple[PreTrainedModel, FakeTensorMode]


def is_sharded(model: nn.Module) -> bool:
    """True if ranks hold parts of the parameters of a model."""
    return any(isinstance(parameter, DTensor) for parameter in held_parameters(model))


def fake_twin(model: PreTrainedModel) -> Fake:
    """A model of the same class and configuration, and the mode in which its tensors were made. They have whole shapes
    and devices, and no memory.

    The sharded model itself cannot be traced, because transformers has replaced its forwards.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device(model.device):
        twin = type(model)(copy.deepcopy(model.config)).eval()
        fakes: dict[int, nn.Parameter] = {}
        for path, parameter in model.named_parameters(remove_duplicate=False):
            owner, _, name = path.replace(PREFIX, "").rpartition(".")
            if id(parameter) not in fakes:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                fakes[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            twin.get_submodule(owner)._parameters[name] = fakes[id(parameter)]
    return twin, mode


def bind(gm: fx.GraphModule, model: PreTrainedModel) -> None:
    """Replace the tensors of a twin by those of the sharded model, in the graph `gm` that was traced from the twin.

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
