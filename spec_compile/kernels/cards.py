"""`Card`: the facts of a GPU that decide how its kernels are best cut, and those of well-known cards.

The driver knows all of them, so a card that no table names has them, too.
"""

import functools
from typing import NamedTuple

import torch

REGISTERS = 65_536
"""Registers of 4 bytes in a multiprocessor of every card from compute capability 7.0 on."""
SHARE = 30e9
"""Bytes a second of memory for each multiprocessor where the driver does not tell the memory's clock."""
CLOCK = 1.7e9
"""The clock where the driver does not tell it."""


class Card(NamedTuple):
    """The facts of a GPU.

    capability: the compute capability.
    processors: multiprocessors.
    memory: the most bytes of shared memory that a program may take.
    shared: bytes of shared memory in a multiprocessor.
    threads: that a multiprocessor holds.
    bandwidth: bytes a second between memory and chip, nominal.
    cache: bytes of the L2 cache.
    clock: of a multiprocessor, in hertz.
    """

    capability: tuple[int, int]
    processors: int
    memory: int
    shared: int
    threads: int
    bandwidth: float
    cache: int
    clock: float

    @property
    def has_groups(self) -> bool:
        """True if groups of four warps share an instruction of the tensor cores, as on Hopper (wgmma) and on the
        Blackwell of servers (tcgen05). Other cards have only instructions of single warps."""
        return self.capability[0] in (9, 10)


def _card(capability: tuple[int, int], processors: int, gigabytes: float, megabytes: int, gigahertz: float) -> Card:
    """A `Card` by its data sheet; what a multiprocessor holds follows from the capability."""
    kib, threads = {(7, 5): (64, 1024), (8, 0): (164, 2048), (9, 0): (228, 2048), (10, 0): (228, 2048)}.get(
        capability, (100, 1536)
    )
    reserved = 0 if capability == (7, 5) else 1024  # of each program, by the driver
    return Card(
        capability, processors, (kib << 10) - reserved, kib << 10, threads, gigabytes * 1e9, megabytes << 20,
        gigahertz * 1e9,
    )  # fmt: skip


CARDS = {
    "T4": _card((7, 5), 40, 320, 4, 1.59),
    "A100": _card((8, 0), 108, 2039, 40, 1.41),
    "RTX 3090": _card((8, 6), 82, 936, 6, 1.70),
    "L4": _card((8, 9), 58, 300, 48, 2.04),
    "RTX 4090": _card((8, 9), 128, 1008, 72, 2.52),
    "H100": _card((9, 0), 132, 3350, 50, 1.98),
    "H200": _card((9, 0), 132, 4917, 60, 1.98),
    "B200": _card((10, 0), 148, 8000, 126, 1.97),
    "RTX 5090": _card((12, 0), 170, 1792, 96, 2.41),
}
"""Cards as their drivers or data sheets have them. `card_of` asks the driver: an A100 with 40 GB is another card."""


@functools.cache
def card_of(device: torch.device) -> Card:
    """The facts of a CUDA device, as its driver tells them."""
    facts = torch.cuda.get_device_properties(device)
    beats = getattr(facts, "memory_clock_rate", 0) * 1e3  # the memory sends twice a beat
    return Card(
        (facts.major, facts.minor),
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,
        facts.shared_memory_per_multiprocessor,
        facts.max_threads_per_multi_processor,
        2 * beats * getattr(facts, "memory_bus_width", 0) / 8 or SHARE * facts.multi_processor_count,
        facts.L2_cache_size,
        getattr(facts, "clock_rate", 0) * 1e3 or CLOCK,
    )
