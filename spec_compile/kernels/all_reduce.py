"""Sums and rows that the ranks of tensor parallelism exchange: the ops, and the memory through which GPUs do it.

The ops go through torch.distributed, unless the group has an entry in `EXCHANGES`. `prepare` makes one where the GPUs
of a group can share memory. It is called before a graph is captured, and the memory stays until `release`, because
captured graphs hold its addresses.
"""

import functools
import hashlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from ..compat import gather_parts
from .launching import new_op

try:
    from . import all_reduce_kernel
except ImportError:  # no GPU
    all_reduce_kernel = None

WORDS = 1 << 20
"""Float32 numbers of a rank's part that one launch sums; more are summed in several."""
WARM_UP_SECONDS = 600.0
"""How long a rank waits for another before `set_deadline`: kernels are compiled in the meantime."""
HOP_BYTES = 400_000
"""Bytes that a rank sends in the time that a second shot takes in addition: the bound of `bytes_saved` from which two
shots are faster. By NVLink it lies between 262,144 and 524,288 on two H200s, between 245,760 and 491,520 on four
(``python -m benchmarks.kernels.all_reduce``); for more ranks it is an estimate."""


@new_op("all_reduce", lambda x, group_name: torch.empty_like(x, memory_format=torch.contiguous_format))
def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of all ranks' x, of any shape, in x's dtype.

    The partial sums are added in float32 (float64 stays as it is) in the order of the ranks and rounded once, so that
    all ranks have the same bits. group_name: of a process group of torch.distributed.
    """
    exchange = EXCHANGES.get(group_name)
    if exchange is not None and all_reduce_kernel.supports(exchange, x):
        return all_reduce_kernel.all_reduce(exchange, x)
    return sum_of_parts(x, group_name)


def sum_of_parts(x: Tensor, group_name: str) -> Tensor:
    """`all_reduce` by torch.distributed."""
    parts = gather_parts(x, group_name)
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(x.dtype)


@new_op("all_gather", lambda x, size, group_name: x.new_empty(*x.shape[:-1], size * x.shape[-1]))
def all_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    """The last dimensions of all ranks' x [..., C] side by side, in the order of the ranks: [..., size * C].

    size: ranks of the group.
    """
    return torch.cat(gather_parts(x, group_name).unbind(), dim=-1)


@dataclass(frozen=True)
class Exchange:
    """A rank's memory for the all-reduces of its group.

    slots: [2, ranks + 1, words] int32; peers store their parts here, and in the last the sums of two shots; -1 is a
        missing word.
    state: [3] int64; the turn, the programs that are done with it, and how many nanoseconds a missing part may take.
    late: [2] int64, pinned; 1 + the rank whose part was missing, or 0, and the turn.
    """

    rank: int
    ranks: int
    slots: Tensor
    peers: tuple[int, ...]  # the addresses of all ranks' slots in this process
    state: Tensor
    late: Tensor
    handle: object  # keeps the peers' memory mapped

    @property
    def words(self) -> int:
        return self.slots.shape[2]

    def shots(self, count: int) -> int:
        """1 or 2, whichever sums `count` numbers sooner, see `all_reduce_kernel`."""
        return 2 if bytes_saved(self.ranks, count) > HOP_BYTES else 1


def bytes_saved(ranks: int, count: int) -> float:
    """Bytes that a rank sends less in two shots than in one.

    One shot sends ``(ranks - 1) * count * 4`` bytes. Two shots send one in `ranks` of these, and then half as many of
    sums in 16 bits. 4096 numbers and 4 ranks: 49,152 and 12,288 + 6,144, so 30,720 are saved.
    """
    return (ranks - 1) * count * (4 - 6 / ranks)


EXCHANGES: dict[str, Exchange] = {}
"""The exchanges of this process, by the group's name."""


def prepare(group: dist.ProcessGroup, device: torch.device, words: int = WORDS) -> str | None:
    """Make the group's memory on this rank's GPU; all ranks call it at the same time. -> Why it cannot be had, or None.

    From then on `all_reduce` and `product_to_stream` of the group use it. All ranks get the same answer, but for the
    reason's words; without the memory the ops go through torch.distributed.
    """
    if group.group_name in EXCHANGES:
        return None
    reason, shape = _why_not_here(group, device), (2, group.size() + 1, words)
    slots = handle = None

    # Each step succeeds on all ranks or on none, so that all get the same answer.
    if reason is None:
        empty = functools.partial(symmetric_memory.empty, shape, dtype=torch.int32, device=device)
        slots, reason = _on_all_ranks(empty, group, device)
    if reason is None:
        meet = functools.partial(symmetric_memory.rendezvous, slots, group.group_name)
        handle, reason = _on_all_ranks(meet, group, device)
    if reason is not None:
        return reason

    # All ranks' slots have the same offset in their memory.
    offset = slots.data_ptr() - handle.buffer_ptrs[handle.rank]
    exchange = make_exchange(slots, handle.rank, [address + offset for address in handle.buffer_ptrs], handle)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody sends before all slots are empty
    torch.cuda.synchronize(device)
    EXCHANGES[group.group_name] = exchange
    return None


def make_exchange(slots: Tensor, rank: int, addresses: list[int], handle=None) -> Exchange:
    """An exchange of empty slots [2, ranks + 1, words].

    addresses: where all ranks' slots lie in this process. handle: what keeps them mapped.
    """
    device = slots.device
    slots.fill_(-1)
    state = torch.tensor([0, 0, int(WARM_UP_SECONDS * 1e9)], device=device)
    late = torch.zeros(2, dtype=torch.int64, pin_memory=slots.is_cuda)
    return Exchange(rank, len(addresses), slots, tuple(addresses), state, late, handle)


def release(group_name: str) -> None:
    """Let go of a group's memory. No graph that was captured with it may run any more."""
    EXCHANGES.pop(group_name, None)


def set_deadline(group_name: str, seconds: float) -> None:
    """From now on, captured graphs included, a part that is missing for so long ends the kernel with an error."""
    EXCHANGES[group_name].state[2] = int(seconds * 1e9)


def missing_rank(group_name: str) -> int | None:
    """After an error of the device: the rank whose part did not come in time, if that was it."""
    late = int(EXCHANGES[group_name].late[0]) if group_name in EXCHANGES else 0
    return late - 1 if late else None


def _why_not_here(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks' GPUs cannot share memory, as far as their places tell."""
    if all_reduce_kernel is None:
        return "Triton is not installed"
    # Every rank tells its host and its GPU, as numbers that can be gathered.
    names = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
    here = torch.tensor([int.from_bytes(each, "big", signed=True) for each in digests], device=device)
    heard = [torch.empty_like(here) for _ in range(group.size())]
    dist.all_gather(heard, here, group=group)
    places = [tuple(each.tolist()) for each in heard]
    if len({host for host, _ in places}) > 1:
        return "the ranks are on several hosts"
    if len(set(places)) < len(places) and not os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"):
        return "ranks share a GPU"
    return None


def _on_all_ranks(action: Callable, group: dist.ProcessGroup, device: torch.device) -> tuple:
    """The result of `action`, and None if it succeeds on all ranks, else the reason."""
    result = reason = None
    try:
        result = action()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
    failed = torch.tensor(int(reason is not None), device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
    return result, reason or ("it failed on another rank" if failed else None)
