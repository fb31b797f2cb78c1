"""The option ``tensor_parallel``: the processes that share a model."""

import datetime
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat import default_store
from ..inventory import held_parameters
from .ranks import ALONE, Alone, Ranks

TIMEOUT = datetime.timedelta(minutes=10)
"""A rank that waits so long for another gives up. The death of one is noticed at once."""
LOOK = 0.1
"""Seconds between looks at who has come."""
_meetings: dict[str, int] = defaultdict(int)
"""How often the ranks of a group have come together, by its name."""
ADVICE = "start the script by torchrun --standalone --nproc-per-node N"
ONE_HOST = "tensor_parallel: the ranks have to be processes of one host; start torchrun on one"
STORE = "SPEC_COMPILE_STORE"
"""The variable with the path of a file in which the ranks meet, if no address is to be opened for it."""
LOOPBACK, INTERFACE = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
"""Where ranks meet and talk, which no other host can reach."""


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
    # Read the option; a model that transformers has spread over ranks names its mesh.
    parameters = [*held_parameters(model)] if isinstance(model, nn.Module) else []
    spread = next((each for each in parameters if isinstance(each, DTensor)), None)
    option = spread.device_mesh if option is None and spread is not None else option
    if option is None:
        return ALONE
    device = parameters[0].device if parameters else torch.device("cpu")
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
    # Find the group, or make it of all processes.
    group = option if isinstance(option, dist.ProcessGroup) else _world(device)
    size = 1 if group is None else group.size()
    if count is not None and count != size:
        raise ValueError(f"tensor_parallel: {count} processes were asked for and there are {size}; {ADVICE}")
    if size == 1:
        return ALONE
    if device.type == "cuda" and "cuda:gloo" in dist.get_backend_config(group):
        raise ValueError(
            "tensor_parallel: the model is on a GPU and its processes talk by gloo, whose sums no CUDA graph can hold; "
            'expected init_process_group("nccl"), or leave it to speculate()'
        )
    # Meet, and open a group for talk on CPUs.
    _meetings[group.group_name] += 1
    arrive(default_store(), f"{group.group_name} {_meetings[group.group_name]}", group.rank(), size)
    members = dist.get_process_group_ranks(group)
    with _gloo_on_loopback():
        talk = dist.new_group(members, backend="gloo", timeout=TIMEOUT, use_local_synchronization=True)
    return Ranks(group, talk, gpu_of(device), TIMEOUT.total_seconds())


def arrive(store: dist.Store, meeting: str, rank: int, size: int) -> None:
    """Wait for `size` ranks of this host, of which this is number `rank`.

    store: which they share. meeting: its name, the same on all of them.

    RuntimeError on all ranks, naming those that have not come, when one has waited for `TIMEOUT`. ValueError on all
    ranks if they are of several hosts.
    """
    keys, verdict = [f"spec_compile {meeting} {each}" for each in range(size)], f"spec_compile {meeting} late"
    end = time.monotonic() + TIMEOUT.total_seconds()
    try:
        store.set(keys[rank], os.uname().nodename)
        while not store.check(keys):
            if store.check([verdict]):
                break
            if time.monotonic() > end:
                store.set(verdict, ", ".join(str(each) for each in range(size) if not store.check([keys[each]])))
                time.sleep(5 * LOOK)  # this process may keep the store, in which the others read the verdict
            time.sleep(LOOK)
        late = store.get(verdict).decode(errors="replace") if store.check([verdict]) else ""
        hosts = set() if late else {store.get(each) for each in keys}
    except RuntimeError as error:  # the store does not answer
        raise _never_came("0") from error
    if late:
        raise _never_came(late)
    if len(hosts) > 1:
        raise ValueError(ONE_HOST)


def _never_came(ranks: str) -> RuntimeError:
    seconds = TIMEOUT.total_seconds()
    return RuntimeError(f"tensor_parallel: rank {ranks} has ended, or not come within {seconds:.0f} s; {ADVICE}")


def gpu_of(device: torch.device) -> str:
    """The id of a GPU, which no other GPU of the host has; "" for a CPU."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_device(device)  # collectives take streams and memory of the current device
    return str(torch.cuda.get_device_properties(device).uuid)


def _world(device: torch.device) -> dist.ProcessGroup | None:
    """The group of all processes. It is made here if torchrun has started several and nobody has made it."""
    if not dist.is_initialized():
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        if size == 1:
            return None
        if int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size:
            raise ValueError(ONE_HOST)
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")  # else captured collectives take further streams
        os.environ.setdefault("NCCL_SOCKET_IFNAME", INTERFACE)
        store = _store(rank, size)
        arrive(store, "start", rank, size)
        backend = "nccl" if device.type == "cuda" else "gloo"
        with _gloo_on_loopback():
            dist.init_process_group(backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    return dist.group.WORLD


def _store(rank: int, size: int) -> dist.Store:
    """A file, or the store of torchrun, or else one that the first rank keeps on loopback, where torch's would listen
    on all addresses.

    RuntimeError if the first rank does not come, or cannot have the port.
    """
    if path := os.environ.get(STORE):
        return dist.FileStore(path, size)
    port = int(os.environ["MASTER_PORT"])
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            host = os.environ["MASTER_ADDR"]
            return dist.TCPStore(host, port, size, False, TIMEOUT, wait_for_workers=False, multi_tenant=True)
        listener = socket.create_server((LOOPBACK, port)).detach() if rank == 0 else None
        return dist.TCPStore(
            LOOPBACK, port, size, rank == 0, TIMEOUT, wait_for_workers=False, master_listen_fd=listener
        )
    except OSError as error:
        raise RuntimeError(f"tensor_parallel: rank 0 cannot listen at MASTER_PORT {port}: {error}; {ADVICE}") from error
    except RuntimeError as error:
        raise _never_came("0") from error


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """A context in which gloo listens on loopback only, unless the user has named its interface."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
