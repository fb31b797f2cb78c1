"""`Card`: the facts of a GPU, which decide what kernels run on it and how they are best cut, and those of well-known
GPUs.

The driver knows all of them, so a GPU that no table names has them, too.
"""

import ctypes
import functools
import logging
import os
from typing import NamedTuple

import torch

log = logging.getLogger("spec_compile")

OLDEST = (7, 5)
"""The first compute capability whose GPUs are served."""
AMPERE = (8, 0)
"""The first compute capability with bfloat16, with copies to shared memory in the background, and whose tensor cores
Triton uses."""
FP8 = (8, 9)
"""The first compute capability with float8_e4m3fn."""
HOPPER = (9, 0)
"""The first compute capability that reads tiles by descriptors (TMA), and that launches kernels early."""
LAUNCHES_EARLY = 12030
"""The first version of the driver's interface, 12.3, by which a CUDA graph holds kernels that are launched early."""
REGISTERS = 65_536
"""Registers of 4 bytes in a multiprocessor of every GPU from compute capability 7.0 on."""
SHARE = 30e9
"""Bytes a second of memory for each multiprocessor where the driver does not tell the memory's clock."""
CLOCK = 1.7e9
"""The clock where the driver does not tell it."""


class Card(NamedTuple):
    """A GPU.

    capability: the compute capability, (major, minor); (0, 0) of a device that is no GPU.
    processors: multiprocessors.
    memory: the most bytes of shared memory that a program may take.
    shared: bytes of shared memory in a multiprocessor.
    threads: that a multiprocessor holds.
    bandwidth: bytes a second between memory and chip, nominal.
    cache: bytes of the L2 cache.
    clock: of a multiprocessor, in hertz.
    """

    name: str = ""
    capability: tuple[int, int] = (0, 0)
    processors: int = 0
    memory: int = 0
    shared: int = 0
    threads: int = 0
    bandwidth: float = 0.0
    cache: int = 0
    clock: float = 0.0

    @property
    def has_groups(self) -> bool:
        """True if groups of four warps share an instruction of the tensor cores, as on Hopper (wgmma) and on the
        Blackwell of servers (tcgen05). Other cards have only instructions of single warps."""
        return self.capability[0] in (9, 10)

    @property
    def lacks_tensor_cores(self) -> bool:
        """True of a GPU whose tensor cores Triton does not use: kernels multiply 16 bits in float32."""
        return OLDEST <= self.capability < AMPERE

    @property
    def number(self) -> str:
        """The compute capability as text: "7.5"."""
        return "{}.{}".format(*self.capability)

    def losses(self, launches_early: bool) -> list[str]:
        """The features of a Hopper GPU that this one lacks, with the consequence, a text each."""
        lacks = {
            "bfloat16: models are served in float16 or float32": self.capability < AMPERE,
            "tensor cores in Triton: libraries multiply, so bits are not promised": self.capability < AMPERE,
            "copies in the background: kernels wait for each tile that they read": self.capability < AMPERE,
            "FP8: FP8 weights are decoded, and kv_cache_dtype is 'auto'": self.capability < FP8,
            "descriptors of tiles: the kernel for few rows multiplies prompts, too": self.capability < HOPPER,
            "early launches: a kernel begins when the one before it has ended": not launches_early,
        }
        return [text for text, is_lacking in lacks.items() if is_lacking]


def _card(
    name: str, capability: tuple[int, int], processors: int, gigabytes: float, megabytes: int, gigahertz: float
) -> Card:  # fmt: skip
    """A `Card` by its data sheet; what a multiprocessor holds follows from the capability."""
    kib, threads = {(7, 5): (64, 1024), (8, 0): (164, 2048), (9, 0): (228, 2048), (10, 0): (228, 2048)}.get(
        capability, (100, 1536)
    )
    reserved = 0 if capability == (7, 5) else 1024  # of each program, by the driver
    return Card(
        name, capability, processors, (kib << 10) - reserved, kib << 10, threads, gigabytes * 1e9, megabytes << 20,
        gigahertz * 1e9,
    )  # fmt: skip


CARDS = {
    card.name: card
    for card in (
        _card("T4", (7, 5), 40, 320, 4, 1.59),
        _card("A100", (8, 0), 108, 2039, 40, 1.41),
        _card("RTX 3090", (8, 6), 82, 936, 6, 1.70),
        _card("L4", (8, 9), 58, 300, 48, 2.04),
        _card("RTX 4090", (8, 9), 128, 1008, 72, 2.52),
        _card("H100", (9, 0), 132, 3350, 50, 1.98),
        _card("H200", (9, 0), 132, 4917, 60, 1.98),
        _card("B200", (10, 0), 148, 8000, 126, 1.97),
        _card("RTX 5090", (12, 0), 170, 1792, 96, 2.41),
    )
}
"""GPUs as their drivers or data sheets have them. `card_of` asks the driver: an A100 with 40 GB is another card."""


@functools.cache
def card_of(device: torch.device) -> Card:
    """The facts of a device, as its driver tells them."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Card()
    facts = torch.cuda.get_device_properties(device)
    beats = getattr(facts, "memory_clock_rate", 0) * 1e3  # the memory sends twice a beat
    return Card(
        facts.name,
        (facts.major, facts.minor),
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,
        facts.shared_memory_per_multiprocessor,
        facts.max_threads_per_multi_processor,
        2 * beats * getattr(facts, "memory_bus_width", 0) / 8 or SHARE * facts.multi_processor_count,
        facts.L2_cache_size,
        getattr(facts, "clock_rate", 0) * 1e3 or CLOCK,
    )


def driver_version() -> int:
    """The version of the driver's interface: 12030 is CUDA 12.3."""
    version = ctypes.c_int()
    ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


@functools.cache
def launches_early(device: torch.device) -> bool:
    """True if a kernel may begin while the one before it runs. One line is logged if only the driver is too old."""
    card = card_of(device)
    if card.capability < HOPPER:
        return False
    version = driver_version()
    if version >= LAUNCHES_EARLY:
        return True
    log.warning(
        "the driver of %s is of CUDA %d.%d, which launches no kernel of a CUDA graph early, so rounds are slower; "
        "install a driver of CUDA %d.%d or later",
        card.name, version // 1000, version % 1000 // 10, LAUNCHES_EARLY // 1000, LAUNCHES_EARLY % 1000 // 10,
    )  # fmt: skip
    return False


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """The precision in which kernels of attention multiply: one of Triton's for float32, or `partial_softmax`'s."""
    if dtype == torch.float32:
        return "ieee"
    return "wide" if card_of(device).lacks_tensor_cores else "tf32"


def multiplied_bytes(dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a number of a dtype as kernels of attention multiply it."""
    return 4 if precision(dtype, device) == "wide" else dtype.itemsize
