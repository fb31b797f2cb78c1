"""Facts of a GPU: they decide which kernels run on it, and with which tiles."""

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


class Card(NamedTuple):
    """A GPU.

    capability: the compute capability, (major, minor); (0, 0) of a device that is no GPU.
    processors: multiprocessors.
    memory: bytes of shared memory that a program may take.
    """

    name: str = ""
    capability: tuple[int, int] = (0, 0)
    processors: int = 0
    memory: int = 0

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
    """The facts of a device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Card()
    facts = torch.cuda.get_device_properties(device)
    memory = facts.shared_memory_per_block_optin
    return Card(facts.name, (facts.major, facts.minor), facts.multi_processor_count, memory)


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
