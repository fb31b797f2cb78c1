"""`PrefixBudget`: the memory for keys and values of earlier requests' texts."""

from dataclasses import dataclass

import psutil

from .runtime import Runtime

SHARE, MOST = 0.1, 4_000_000_000
"""The default for host memory: this share of it, and at most so many bytes."""


@dataclass(frozen=True)
class PrefixBudget:
    """device, host: bytes. denial: the reason why nothing is kept although there would be memory; None if there is
    none."""

    device: int
    host: int
    denial: str | None = None

    @classmethod
    def of(cls, runtime: Runtime) -> "PrefixBudget":
        """The budget that the options give. ValueError if they ask for more than the machine has."""
        options, memory = runtime.options, psutil.virtual_memory().total
        device, host = options.prefix_cache_bytes, options.prefix_cache_host_bytes
        in_host = (0 if runtime.on_gpu else device) + (host or 0)
        if in_host > memory:
            name = "prefix_cache_bytes" if device > memory else "prefix_cache_host_bytes"
            raise ValueError(f"{name}: {in_host / 1e9:.2f} GB, the machine has {memory / 1e9:.2f} GB; ask for less")
        if options.ranks.size > 1:
            return cls(0, 0, "the ranks of tensor parallelism would have to keep the same")
        return cls(device, min(MOST, int(SHARE * memory)) if host is None else host)

    def describe(self) -> str:
        """A line for ``speculation.explain()``."""
        if self.denial is not None:
            return f"prefixes of earlier requests: reused as long as their rows live, because {self.denial}"
        if not self.device + self.host:
            return "prefixes of earlier requests: reused as long as their rows live"
        return f"prefixes of earlier requests: {_gb(self.device)} on the device, {_gb(self.host)} in host memory"


def _gb(number: int) -> str:
    return f"{number / 1e9:.2f} GB"
