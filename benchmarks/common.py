"""What the benchmarks share: prompts, answers in turn, machine facts, pinned threads."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

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


def prompts_of(workload: str, folder: Path, count: int, tokenizer, longest: int) -> list[Tensor]:
    """The last `longest` tokens of the first prompts of a workload; of "random", random ids."""
    if workload == "random":
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(1, len(tokenizer), (1, 200), generator=generator) for _ in range(count)]
    texts = read_prompts(folder / f"{workload}.jsonl", count)
    return [tokenizer(text, return_tensors="pt").input_ids[:, -longest:] for text in texts]


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


def timed(generate: Callable, ids: Tensor) -> tuple[Tensor, float]:
    """The answer without the prompt, and the seconds until it was there."""
    synchronize(ids.device)
    begin = time.perf_counter()
    output = generate(ids)
    synchronize(ids.device)
    return output[0, ids.shape[1] :], time.perf_counter() - begin


def answer_in_turn(
    systems: dict[str, Callable], ours: dict, prompts: list[Tensor], repeats: int
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """Answers of every system to every prompt, and its tokens a second, the median of the repeats.

    ours: those of the systems that are wrapped models. Their counters are of these answers, their tries empty before
    each.
    """
    answers, seconds = {name: [] for name in systems}, {name: [0.0] * repeats for name in systems}
    for fast in ours.values():
        fast.speculation.stats.reset()
    for repeat in range(repeats):
        for ids in prompts:
            for name, generate in systems.items():
                if name in ours and ours[name].speculation.algorithm == "ngram":
                    ours[name].speculation.ngram.reset()
                output, spent = timed(generate, ids)
                seconds[name][repeat] += spent
                if repeat == 0:
                    answers[name].append(output)
    tokens = {name: sum(map(len, outputs)) for name, outputs in answers.items()}
    return answers, {name: statistics.median(tokens[name] / s for s in seconds[name]) for name in systems}


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
