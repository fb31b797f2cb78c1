"""Rounds of models at published sizes, with random weights, shared by the GPUs of one host.

    python -m benchmarks.rounds.tensor_parallel [--cases llama-70b llama-8b] [--gpus 4 2] [--minutes 8] [--json FILE]

Each case is measured by a group of processes (see `of_ranks`), which make their parts of the weights on their GPUs.
Groups that fit into the memory of the GPUs build and compile at the same time, and take turns to time (see
`timers.alone`); groups on other GPUs do not wait for each other. Each row is written when it comes. Processes that end
early are started again for what is left after the measurement that ended them. The numbers of GPUs share the minutes
equally; what takes longer is stopped.

--tiny, or a host without GPUs: a few small layers, which are not compiled.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from benchmarks.common import RESULTS, ROOT, merge_rows, stamp, write_json
from benchmarks.rounds.of_ranks import CONTEXT, REQUESTS, SYSTEMS, TOLD, Selection
from benchmarks.rounds.shards import CASES

KEYS = "shape", "gpus", "system", "context", "requests", "expert_parallel"
"""Rows with the same values of these are one row."""
OTHERS = 10
"""Gigabytes that a process takes besides weights: caches, a draft, kernels, buffers of sums."""
PATIENCE = 150
"""Seconds that a group waits for its turn before it goes on without."""
PAUSE = 0.5
"""Seconds between looks at the processes; twice as long after one of them has failed, because others may end, too."""
COMMAND = sys.executable, "-m", "benchmarks.rounds.of_ranks"


class Group:
    """The processes that measure a case.

    case, size: name of the shape, and number of GPUs.
    selection: what they measure.
    folder: for their rows and their log.

    Attributes: gigabytes (that it takes of each GPU), gpus (their numbers, once it has started), rows (that came).
    """

    def __init__(self, case: str, size: int, selection: Selection, folder: Path):
        self.case, self.size, self.selection = case, size, selection
        self.gigabytes = CASES[case].gigabytes_of(size) + OTHERS
        self.file, self.log = (folder / f"{case}-{size}.{suffix}" for suffix in ("jsonl", "txt"))
        self.gpus: list[int] = []
        self.rows: list[dict] = []
        self.processes: list[psutil.Popen] = []

    def start(self, gpus: list[int], turns: Path) -> None:
        """Start the processes for what is not measured yet.

        turns: the file by which groups on these GPUs take turns.
        """
        self.gpus, self.began = gpus, time.monotonic()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(gpus) + 1)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = os.environ | dict(
            CUDA_VISIBLE_DEVICES=",".join(visible.split(",")[gpu] for gpu in gpus), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), WORLD_SIZE=str(self.size), OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="3",
            PYTHONUNBUFFERED="1", BENCHMARK_TURNS=str(turns), BENCHMARK_PATIENCE=str(PATIENCE),
        )  # fmt: skip
        command = [*COMMAND, "--case", self.case, "--rows", str(self.file)]
        command += self.selection.arguments(skip=len(self.rows))
        with open(self.log, "a") as log:
            where = dict(cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            self.processes = [
                psutil.Popen(command, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **where)
                for rank in range(self.size)
            ]

    def read(self) -> list[dict]:
        """The rows that came since the last call."""
        complete = self.file.read_text().split("\n")[:-1] if self.file.exists() else []
        rows = [json.loads(line) for line in complete[len(self.rows) :]]
        self.rows += rows
        return rows

    def has_ended(self) -> bool:
        """True if all processes have ended. If one has failed, the others are stopped."""
        codes = [process.poll() for process in self.processes]
        if any(codes) and None in codes:
            time.sleep(2 * PAUSE)
            self.stop()
        return None not in codes or bool(any(codes))

    def stop(self) -> None:
        """Kill the processes, and those that they have started."""
        hung = [process for process in self.processes if process.poll() is None]
        for process in hung:
            process.send_signal(signal.SIGUSR1)  # the log gets its stack
        if hung:
            time.sleep(PAUSE)
        for process in hung:
            try:
                for each in [*process.children(recursive=True), process]:
                    each.kill()
            except psutil.NoSuchProcess:
                pass
            process.wait()

    def fail(self, reason: str) -> None:
        """Add a row for the measurement that was under way, if the processes have not told its error themselves."""
        pairs = self.selection.pairs()
        if len(self.rows) == len(pairs) or any(process.poll() == TOLD for process in self.processes):
            return
        system, requests = pairs[len(self.rows)]
        errors = [line for line in self.log.read_text(errors="replace").splitlines() if "Error" in line]
        row = {"shape": self.case, "gpus": self.size, "context": CONTEXT, "system": system, "requests": requests}
        row |= {"error": "; ".join([reason, *errors[-1:]])[:600], "stamp": stamp()}
        row |= {"expert_parallel": True} if self.selection.expert_parallel else {}
        with open(self.file, "a") as file:
            file.write(json.dumps(row) + "\n")


class Runner:
    """Groups of one size after another, until a deadline.

    memory: gigabytes of each GPU.
    """

    def __init__(self, options: argparse.Namespace, memory: list[float], folder: Path):
        self.options, self.memory, self.folder, self.begin = options, memory, folder, time.monotonic()
        self.running: list[Group] = []

    def place(self, group: Group) -> list[int] | None:
        """The GPUs with the fewest groups among those with room for this one; None: it has to wait.

        Groups of 2 on 4 GPUs are placed on 0 and 1, or on 2 and 3.
        """
        blocks = [range(first, first + group.size) for first in range(0, len(self.memory) - group.size + 1, group.size)]
        on = {block: [other for other in self.running if other.gpus == [*block]] for block in blocks}
        free = [
            block for block, others in on.items()
            if len(others) < self.options.at_once
            and sum(other.gigabytes for other in others) + group.gigabytes <= self.memory[block[0]]
        ]  # fmt: skip
        return [*min(free, key=lambda block: len(on[block]))] if free else None

    def run(self, size: int, until: float) -> None:
        """Measure all cases on `size` GPUs each, until so many seconds have passed."""
        options = self.options
        selection = Selection(options.systems, options.requests, options.tiny, options.expert_parallel)
        waiting = [Group(case, size, selection, self.folder) for case in options.cases]
        while waiting or self.running:
            for group in [*waiting]:
                if not self.running and self.place(group) is None:
                    waiting.remove(group)
                    self.say(group, f"does not fit: it takes {group.gigabytes:.0f} GB a GPU")
                elif (gpus := self.place(group)) is not None:
                    waiting.remove(group)
                    self.running.append(group)
                    group.start(gpus, self.folder / f"turns-{gpus[0]}")
            time.sleep(PAUSE)
            is_late = time.monotonic() - self.begin > until
            for group in [*self.running]:
                self.save(group)
                if is_late or group.has_ended():
                    group.stop()
                    self.running.remove(group)
                    self.save(group)
                    group.fail(f"stopped after {until:.0f} s" if is_late else "its processes ended")
                    self.save(group)
                    left = len(group.selection.pairs()) - len(group.rows)
                    self.say(group, f"ended, {left} measurements left")
                    waiting += [group] if left and not is_late else []
            if is_late:
                for group in waiting:
                    self.say(group, "not begun, or not ended: no time")
                return

    def save(self, group: Group) -> None:
        """Write a group's new rows."""
        if rows := group.read():
            path = self.options.json
            report = json.loads(path.read_text()) if path.exists() else {}
            write_json(path, report | {"rows": merge_rows(report.get("rows", []), rows, KEYS)})
        for row in rows:
            self.say(group, f"{row['system']}, {row['requests']} requests: {told(row)}")

    def say(self, group: Group, text: str) -> None:
        print(f"{time.monotonic() - self.begin:4.0f} s: {group.case} on {group.size}: {text}", flush=True)


def told(row: dict) -> str:
    """A line about a row: the error; or the milliseconds at each number of nodes, and how many floors they are."""
    if "error" in row:
        return row["error"]
    times = ((nodes, ms, row["over_floor"][nodes]) for nodes, ms in row["ms"].items())
    return ", ".join(f"N={nodes} {ms:.3f} ms ({over:.2f} floors)" for nodes, ms, over in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 2], help="GPUs that share a model")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--requests", type=int, nargs="+", choices=REQUESTS, default=REQUESTS)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--at-once", type=int, default=5, help="groups that share GPUs")
    parser.add_argument("--tiny", action="store_true", help="small models that are not compiled")
    parser.add_argument("--expert-parallel", action="store_true", help="share out experts by their number")
    parser.add_argument("--json", type=Path, default=RESULTS / "tensor_parallel.json")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the groups; by default a temporary one")
    options = parser.parse_args()
    on_gpus, count = torch.cuda.is_available(), torch.cuda.device_count()
    options.tiny = options.tiny or not on_gpus
    memory = [torch.cuda.get_device_properties(gpu).total_memory / 1e9 for gpu in range(count)]
    memory = memory if on_gpus else [float("inf")] * max(options.gpus)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="tensor_parallel_"))
    folder.mkdir(parents=True, exist_ok=True)
    runner = Runner(options, memory, folder)
    print(f"logs in {folder}", flush=True)
    try:
        for number, size in enumerate(options.gpus):
            runner.run(size, 60 * options.minutes * (number + 1) / len(options.gpus))
    finally:
        for group in runner.running:
            group.stop()


if __name__ == "__main__":
    main()
