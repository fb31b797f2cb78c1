"""`Card`: the facts of a GPU, which its driver tells. They decide what kernels run on it and how they are best cut."""

import ctypes
import functools
import os
from typing import NamedTuple

import torch

from ..errors import log

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
    """The facts of a GPU; a device that is none has the defaults."""

    name: str = ""
    capability: tuple[int, int] = (0, 0)  # compute capability, (major, minor)
    processors: int = 0  # multiprocessors
    memory: int = 0  # the most bytes of shared memory that a program may take
    shared: int = 0  # bytes of shared memory in a multiprocessor
    threads: int = 0  # the most threads that a multiprocessor holds
    bandwidth: float = 0.0  # bytes a second between memory and chip, nominal
    cache: int = 0  # bytes of the L2 cache
    clock: float = 0.0  # a multiprocessor's clock, in hertz

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


@functools.cache
def card_of(device: torch.device) -> Card:
    """The facts of a device, as its driver tells them."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Card()
    facts = torch.cuda.get_device_properties(device)
    beats = getattr(facts, "memory_clock_rate", 0) * 1e3  # the memory sends twice a beat
    return Card(
        facts.name, (facts.major, facts.minor), facts.multi_processor_count, facts.shared_memory_per_block_optin,
        facts.shared_memory_per_multiprocessor, facts.max_threads_per_multi_processor,
        2 * beats * getattr(facts, "memory_bus_width", 0) / 8 or SHARE * facts.multi_processor_count,
        facts.L2_cache_size, getattr(facts, "clock_rate", 0) * 1e3 or CLOCK,
    )  # fmt: skip


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
