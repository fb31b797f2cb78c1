"""Every causal LM class of the installed transformers, tiny and random: served with the same answer, refused, or wrong?

    python benchmarks/architectures.py [CLASS ...] [--json FILE] [--markdown] [--timeout 180] [--jobs 1]

Each class is built with small sizes and random weights in float32 (tests/tiny_models.py), answers one prompt and a
batch padded on the left with transformers' greedy generate(), then again through `speculate(model, compile=False)`. A
first difference at two nearly equal logits counts as equal, and is shown. Classes run in a process of their own, which
is ended if a class gives no answer in time. Exits with 1 if a class is broken, different or hangs. --markdown prints
the table of the README from the JSON of an earlier run.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
BAD = ("broken", "different", "hangs")


class Worker:
    """A process that examines one class after the other."""

    def __init__(self):
        self.process: subprocess.Popen | None = None

    def examine(self, name: str, timeout: float) -> dict:
        """The outcome of a class, as `tiny_models.Outcome` names its fields."""
        if self.process is None:
            command = [sys.executable, __file__, "--worker"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=environment,
            )  # fmt: skip
        timer = threading.Timer(timeout, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        in_time = timer.is_alive()
        timer.cancel()
        if line:
            return json.loads(line)
        self.close()
        reason = f"the process ended with {self.process.returncode}" if in_time else f"no answer in {timeout:.0f} s"
        self.process = None
        return {"name": name, "verdict": "broken" if in_time else "hangs", "reason": reason}

    def close(self) -> None:
        """End the process, if it runs."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def work() -> None:
    """Examine the classes named on the standard input; write an outcome, a line of JSON, for each."""
    sys.path.insert(0, str(TESTS))
    out, sys.stdout = sys.stdout, sys.stderr  # models may print
    import tiny_models
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for line in sys.stdin:
        outcome = tiny_models.examine(line.strip())
        print(json.dumps(asdict(outcome)), file=out, flush=True)


def sweep(names: list[str], jobs: int, timeout: float) -> list[dict]:
    """Outcomes of the classes, each printed as soon as it is there."""
    todo: queue.Queue[str] = queue.Queue()
    for name in names:
        todo.put(name)
    outcomes: list[dict] = []

    def run() -> None:
        worker = Worker()
        while True:
            try:
                name = todo.get_nowait()
            except queue.Empty:
                break
            outcome = worker.examine(name, timeout)
            outcomes.append(outcome)
            print(line_of(outcome), flush=True)
        worker.close()

    threads = [threading.Thread(target=run) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(outcomes, key=lambda outcome: outcome["name"])


def line_of(outcome: dict) -> str:
    """One outcome in one line."""
    notes = [outcome["reason"]] if outcome.get("reason") else []
    if outcome.get("padded") == "aside":
        notes.append("batches with padding: transformers' own loop")
    if outcome.get("near_ties"):
        notes.append(f"{outcome['near_ties']} rows part at a near-tie")
    return f"{outcome['verdict']:<10} {outcome['name']:<40} {'; '.join(notes)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes (default: all)")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "architectures.json")
    parser.add_argument("--markdown", action="store_true", help="print the table of an earlier run's --json")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each class")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    sys.path.insert(0, str(TESTS))
    import tiny_models

    outcomes = sweep(options.names or tiny_models.classes(), options.jobs, options.timeout)
    options.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    counts = Counter(outcome["verdict"] for outcome in outcomes)
    print(", ".join(f"{verdict}: {counts[verdict]}" for verdict in tiny_models.VERDICTS))
    sys.exit(1 if any(counts[verdict] for verdict in BAD) else 0)


if __name__ == "__main__":
    main()
