"""Everything that needs GPUs, tests included, in parallel on the GPUs of a machine, each job with a log and results.

    python -m benchmarks.on_gpus --out FOLDER [--phases tests sanitizer rounds quiet together] [--jobs NAME ...]
                                 [--model FOLDER --prompts FOLDER [--heads FOLDER]] [--minutes 10]

The phases run one after another:
tests: the tests marked gpu
sanitizer: tests of kernels under compute-sanitizer's memcheck and racecheck
rounds: rounds of all shapes, drafts, quantised kernels; they build and compile in parallel and take turns to time (see
    `timers.alone`)
quiet: benchmarks that the host limits, one job a GPU; with --model a real model's answers, throughput, quantised forms
together: benchmarks that take two GPUs at once

A job starts when its gigabytes are free on a GPU. Jobs that have not ended after --minutes are stopped; the lines of
each log that match `TOLD` are printed at the end.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import PROMPTS, ROOT

PHASES = "tests", "sanitizer", "rounds", "quiet", "together"
TOLD = re.compile(r" ms|passed|failed|FAILED|Error|ERROR SUMMARY|tokens/s|[0-9]/[0-9]|peak of|us$|kernels;")
"""Lines of a log that are printed."""
PYTEST = "-m pytest -m gpu -q -o addopts=--import-mode=importlib -p no:cacheprovider"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2"
AT_ONCE = 8
"""Jobs that share a GPU."""
WAVE = 5
"""Seconds within which the jobs of "rounds" that share a GPU begin; a later one would delay the timing of all."""
ONE = "--contexts 1024 --batches 1 --families --sizes"
SIZES, FEW = f"{ONE} 1 16 64", f"{ONE} 1 4 16"
TREE = "EAGLE-3, tree of 16 in 5 steps"
KERNELS = "kernels", "ngram", "passes", "drafters"
"""Folders whose tests run as one job, and all others as another."""
SANITIZED = {
    "attention": "--every 10 tests/kernels/test_attention.py -k 'bfloat16 and not 100000 and not graph'",
    "matmul": "--every 10 tests/kernels/test_matmul.py -k 'not graph and not 128256'",
    "norm": "--every 10 tests/kernels/test_norm.py -k 'bfloat16 and not graph'",
    "append": "--every 8 tests/kernels/test_append.py",
    "experts": "--every 4 tests/kernels/test_experts.py",
    "quantised": "--every 3 tests/quantised/test_packed_products.py",
    "rest": "--every 10 tests/ngram/test_match.py tests/kernels/test_top_logits.py tests/kernels/test_lattice.py "
            "tests/kernels/test_copy_row.py -k 'not graph and not never_waits and not models'",
}  # fmt: skip
"""Tests under compute-sanitizer: one in so many of a file; no captured graphs, whose memory must come from PyTorch's
pools; and no test that takes minutes."""


class Job(NamedTuple):
    """Arguments of Python; in the phase "sanitizer" a tool and tests.

    gigabytes: most memory of the GPU that it takes
    """

    phase: str
    name: str
    command: str
    gigabytes: int = 19


def rounds(name: str, shape: str, more: str, gigabytes: int = 19) -> Job:
    return Job("rounds", name, f"-m benchmarks.gpu --shapes {shape} {more} --json OUT/{name}.json", gigabytes)


def paths(kernels: bool) -> str:
    """The files of tests of kernels, or all others."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return " ".join(str(file) for file in files if (file.parent.name in KERNELS) == kernels)


def jobs(options: argparse.Namespace) -> list[Job]:
    """All of them, the largest first."""
    made = [
        Job("tests", f"tests-{half}", f"{PYTEST} -n 12 --dist worksteal {names}", 60)
        for half, names in (("kernels", paths(True)), ("others", paths(False)))
    ]
    for tool in ("memcheck", "racecheck"):
        made += [Job("sanitizer", f"{tool}-{name}", f"{tool} {tests}", 9) for name, tests in SANITIZED.items()]
    made += [
        rounds("qwen3-next", "qwen3-next-80b", SIZES, 125),
        rounds("llama-8b", "llama-8b", "--contexts 1024 8192 32768 --batches 1 --families --sizes 1 16 64", 24),
        rounds("eagle3", "llama-8b", f"{ONE} 16 --drafts '{TREE}' '{TREE}, with n-grams'"),
        rounds("batch-4", "llama-8b", "--contexts 1024 --batches 4 --sizes 1 16 64"),
        rounds("draft-model", "llama-8b", f"{ONE} 4 --drafts 'draft model of 1B, 5 steps'", 24),
        rounds("qwen3-8b", "qwen3-8b", f"{SIZES} --drafts"),
        Job("rounds", "invariance", "-m benchmarks.rounds.invariance --sizes 1 16 64 --batches 1 4 "
            "--json OUT/invariance.json"),
        rounds("small", "llama-1b qwen3-0.6b smollm2-135m", SIZES, 8),
        rounds("fp8", "llama-8b-fp8", SIZES), rounds("int4", "llama-8b-int4", SIZES),
        rounds("nf4", "llama-8b-nf4", SIZES),
        rounds("gpt-oss", "gpt-oss-20b-mxfp4", FEW, 30), rounds("mixtral", "mixtral-8x7b", FEW, 100),
        rounds("qwen3-30b", "qwen3-30b-a3b", FEW, 68), rounds("qwen3-30b-fp8", "qwen3-30b-a3b-fp8", FEW, 68),
        rounds("falcon-h1", "falcon-h1-7b", SIZES), rounds("nemotron-h", "nemotron-h-8b", SIZES),
        rounds("hybrids", "lfm2-1.2b qwen3.5-9b", SIZES),
        Job("quiet", "call", "-m benchmarks.call --device cuda --model qwen3-0.6b --json OUT/call.json"),
        Job("quiet", "matmul", "-m benchmarks.kernels.matmul --json OUT/matmul.json"),
        Job("quiet", "attention", "-m benchmarks.kernels.attention --output OUT/attention.json"),
        Job("quiet", "training", "-m benchmarks.training.train --json OUT/training.json", 60),
        Job("together", "two-gpus", f"{TORCHRUN} tests/support/several_gpus.py"),
        Job("together", "all-reduce", f"{TORCHRUN} -m tests.support.all_reduce_on_gpus"),
        Job("together", "tensor-parallel", "-m benchmarks.rounds.tensor_parallel --gpus 2 --cases llama-8b "
            "--json OUT/tensor_parallel.json --logs OUT/tensor_parallel"),
    ]  # fmt: skip
    if options.model:
        shared, files = f"--model {options.model} --dtype bfloat16", sorted(options.prompts.glob("*.jsonl"))
        texts, names = " ".join(map(str, files)), " ".join(path.stem for path in files)
        heads = f"--heads {options.heads}" if options.heads else "--algorithms ngram draft"
        made += [
            Job("quiet", "bits", f"-m benchmarks.quality.bits {shared} --device cuda --prompts {texts} {heads} --exact "
                "bits --sampled --workers 7 --minutes 2 --json OUT/bits.json"),
            Job("quiet", "requests", f"-m benchmarks.quality.bits --requests {shared} --device cuda --prompts {texts} "
                "--algorithms ngram --exact request --sampled --json OUT/requests.json", 60),
            Job("quiet", "serving", f"-m benchmarks.serving {shared} --chat --prompts {options.prompts} "
                f"--workloads {names} --in-flight 1 16 64 --times --shape llama-8b --json OUT/serving.json", 60),
            Job("quiet", "quantised", f"-m benchmarks.quality.quantised --model {options.model} --as-chat "
                "--json OUT/quantised.json"),
        ]  # fmt: skip
    return [job for job in made if job.phase in options.phases and (not options.jobs or job.name in options.jobs)]


def arguments(job: Job, options: argparse.Namespace) -> list[str]:
    """The command line of a job."""
    words = shlex.split(job.command.replace("OUT/", f"{options.out.resolve()}/"))
    if job.phase == "sanitizer":
        tests = [sys.executable, *shlex.split(PYTEST), "-n0", "-v", *words[1:]]
        return ["compute-sanitizer", "--tool", words[0], "--report-api-errors", "no", "--error-exitcode", "9", *tests]
    return [sys.executable, *words]


class Runner:
    """Processes on GPUs, until a deadline."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.begin, self.running = options, time.monotonic(), {}
        facts = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        self.gigabytes = [
            each.total_memory / 1e9 - 14 for each in facts
        ]  # the buffers that measure the speed of memory
        self.ids = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(facts))))).split(",")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def start(self, job: Job, gpu: int) -> None:
        imported = [*map(str, (ROOT, ROOT / "tests" / "support")), os.environ.get("PYTHONPATH", "")]
        more = {"PYTHONPATH": ":".join(imported), "OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1"}
        if job.phase != "together":
            more["CUDA_VISIBLE_DEVICES"] = self.ids[gpu]
        if job.phase == "sanitizer":
            more["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # one allocation a tensor, so that its bounds are checked
        if job.phase == "rounds":
            more |= {"BENCHMARK_TURNS": f"/tmp/turns-{self.ids[gpu]}", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
        log = open(self.options.out / f"{job.name}.txt", "w")
        command, environment = arguments(job, self.options), os.environ | more
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.running[job] = process, gpu, self.seconds

    def reap(self) -> None:
        for job, (process, _, since) in list(self.running.items()):
            if process.poll() is not None:
                took = self.seconds - since
                print(f"{self.seconds:4.0f} s: {job.name}, exit status {process.returncode}, {took:.0f} s", flush=True)
                del self.running[job]

    def place(self, job: Job) -> int | None:
        """The GPU with the fewest jobs of those with room for this job, or None."""
        if job.phase == "together":
            return None if self.running else 0
        on: list[list[Job]] = [[] for _ in self.gigabytes]
        for other, (_, gpu, _) in self.running.items():
            on[gpu].append(other)
        first = [min([self.running[other][2] for other in others], default=self.seconds) for others in on]
        limit = 1 if job.phase in ("tests", "quiet") else AT_ONCE
        free = [
            gpu for gpu, others in enumerate(on)
            if len(others) < limit and (job.phase != "rounds" or self.seconds - first[gpu] <= WAVE)
            and sum(other.gigabytes for other in others) + job.gigabytes <= self.gigabytes[gpu]
        ]  # fmt: skip
        return min(free, key=lambda gpu: len(on[gpu]), default=None)

    def run(self, waiting: list[Job]) -> None:
        """Run all jobs of a phase."""
        while waiting or self.running:
            for job in [*waiting]:
                if (gpu := self.place(job)) is not None:
                    waiting.remove(job)
                    self.start(job, gpu)
            time.sleep(0.5)
            self.reap()
            if self.seconds > 60 * self.options.minutes:
                for job, (process, _, _) in self.running.items():
                    os.killpg(process.pid, 9)
                    print(f"{self.seconds:4.0f} s: {job.name} was stopped")
                sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--jobs", nargs="+", help="run only these")
    parser.add_argument("--model", type=Path, help="a real model for the jobs bits, serving and quantised")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="folder of JSON-lines files for it")
    parser.add_argument("--heads", type=Path, help="folder of its heads")
    parser.add_argument("--minutes", type=float, default=10)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    every, runner = jobs(options), Runner(options)
    try:
        for phase in PHASES:
            runner.run([job for job in every if job.phase == phase])
    finally:
        for path in (options.out / f"{job.name}.txt" for job in every):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            told = [line for line in lines if TOLD.search(line) and "Warning" not in line]
            print(f"== {path.stem}", *(line[:200] for line in told[-20:]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
