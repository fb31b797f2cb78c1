"""The option ``tensor_parallel``: the processes that share a model."""

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..inventory import held_parameters
from .ranks import ALONE, Alone, Ranks

TIMEOUT = datetime.timedelta(minutes=10)
"""A rank that waits so long for another gives up. The death of one is noticed at once."""
ADVICE = "start the script by torchrun --standalone --nproc-per-node N"


def find_ranks(option: Any, model: Any) -> Alone:
    """The ranks that the option ``tensor_parallel`` of `speculate` names, or that transformers has spread a model over.

    All ranks call this.

    option: None; "auto" for all processes that torchrun started; their number; a process group; or a device mesh of one
    dimension.
    model: the user's.

    Raises TypeError or ValueError, naming the option, if there are no such processes.
    """
    if isinstance(option, Alone):
        return option
    parameters = held_parameters(model) if isinstance(model, nn.Module) else ()
    spread = next((each for each in parameters if isinstance(each, DTensor)), None)
    option = spread.device_mesh if option is None and spread is not None else option
    if option is None:
        return ALONE
    device = getattr(model, "device", torch.device("cpu"))
    count = None
    if isinstance(option, int) and not isinstance(option, bool):
        count = option
        if count < 1:
            raise ValueError(f"tensor_parallel: expected at least 1 process, got {count}")
    elif hasattr(option, "get_group"):
        option = option.get_group()
    elif option != "auto" and not isinstance(option, dist.ProcessGroup):
        raise TypeError(
            f"tensor_parallel: expected None, 'auto', a number of processes, a process group or a device mesh, got "
            f"{option!r}"
        )
    group = option if isinstance(option, dist.ProcessGroup) else _world(device)
    size = 1 if group is None else group.size()
    if count is not None and count != size:
        raise ValueError(f"tensor_parallel: {count} processes were asked for and there are {size}; {ADVICE}")
    if size == 1:
        return ALONE
    members = dist.get_process_group_ranks(group)
    talk = dist.new_group(members, backend="gloo", timeout=TIMEOUT, use_local_synchronization=True)
    return Ranks(group, talk, gpu_of(device))


def gpu_of(device: torch.device) -> str:
    """The id of a GPU, which no other GPU of the host has; "" for a CPU."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_device(device)  # the collectives' streams and memory are those of the current device
    return str(torch.cuda.get_device_properties(device).uuid)


def _world(device: torch.device) -> dist.ProcessGroup | None:
    """The group of all processes. It is made here if torchrun has started several and nobody has made it."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return None
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # else captured collectives take streams of their own
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    return dist.group.WORLD
