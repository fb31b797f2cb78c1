"""What the benchmarks share: prompts, machine facts, pinned threads."""

import json
import os
import platform
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
DEMO_MODEL = HERE.parent / "examples" / "tiny_coder"


def pin(threads: int) -> None:
    """Run on `threads` cores and no others."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def read_prompts(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a JSON-lines file (fields `prompt`, or `turns` of which the first)."""
    with open(path) as file:
        rows = [json.loads(line) for line, _ in zip(file, range(count))]
    return [row["prompt"] if "prompt" in row else row["turns"][0] for row in rows]


def read_bandwidth() -> float:
    """Bytes a second that this process reads from memory (the best of a few sums over 1 GiB)."""
    data = torch.ones(1 << 28)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begin)
    return data.numel() * 4 / best


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device | None = None) -> dict:
    """Names and versions that belong beside every figure; of a GPU, too, if that is the device."""
    import transformers

    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = names[0] if names else cpu
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device is not None and device.type == "cuda" else {}
    return {
        **gpu,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
