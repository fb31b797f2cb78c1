"""Every causal LM class of the installed transformers, tiny and random: served with the same answer, refused, or wrong?

    python -m benchmarks.quality.architectures [CLASS ...] [--json FILE] [--markdown] [--timeout 180] [--jobs 1]

Each class has small sizes and random weights in float32 (tests/support/tiny_models.py). It answers one prompt and a
left-padded batch with transformers' greedy generate(), then through `speculate(model, compile=False)`. A first
difference at two nearly equal logits counts as equal and is shown. Classes run in a separate process, which is killed
if a class gives no answer in time. Exits with 1 if a class is broken, different or hangs. --markdown prints the table
of docs/models.md from the JSON of an earlier run. If classes are named, the others stay in an existing JSON file.
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

from benchmarks.common import ROOT, command_line, machine

TESTS = ROOT / "tests" / "support"
BAD = ("broken", "different", "hangs")
SUFFIXES = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "WithLMHeadModel", "Model")
GROUPS = {
    "recurrent state": "recurrent state",
    "has layers of type": "other layer types (linear or hybrid attention, convolutions)",
    "attention through": "attention outside transformers' interface",
    "the captured graph differs": "other logits in one graph, mostly because the class counts positions for itself",
    "the tree attention": "other logits in one graph, mostly because the class counts positions for itself",
    "generate(), over its cache": "a cache that forgets what the mask shows",
    "could not be captured": "control flow that depends on the data or the length",
    "attention mask of its own": "masks or arguments of attention of their own",
    "to attention, which is unknown": "masks or arguments of attention of their own",
    "several output heads": "several output heads",
    "RoPE of type": "RoPE that changes with the length",
}
"""Part of a reason for a refusal -> its words in the table of docs/models.md."""
NOT_CLASSES = [
    (
        "also refused",
        "encoder-decoders of other classes than [these](#encoder-decoders), such as Switch Transformers; RoPE "
        "that changes with the length, models on several GPUs, models in training mode with dropout or other noise",
    ),
    (
        "run by transformers' own loop, with a warning",
        "classes outside transformers with their own `_sample`, `prepare_inputs_for_generation`, "
        "`_update_model_kwargs_for_generation` or loop in `generate`",
    ),
    (
        "any other causal LM",
        "admitted if the captured graph, a small token tree and a few steps of its own `generate()`, padding included, "
        "give the same logits, refused otherwise",
    ),
]  # fmt: skip
"""Rows of that table that do not come from a sweep."""


class Worker:
    """A process that examines one class after another."""

    def __init__(self):
        self.process: subprocess.Popen | None = None

    def examine(self, name: str, timeout: float) -> dict:
        """The outcome of a class, as `tiny_models.Outcome` names its fields."""
        if self.process is None:
            command = [sys.executable, "-m", "benchmarks.quality.architectures", "--worker"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=environment, cwd=ROOT,
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
        """End the process if it runs."""
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def work() -> None:
    """Examine the classes named on the standard input, and write a line of JSON for each."""
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
    """Outcomes of the classes, each printed as soon as it is known."""
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
    """An outcome in one line."""
    notes = [outcome["reason"]] if outcome.get("reason") else []
    if outcome.get("padded") == "aside":
        notes.append("batches with padding: transformers' own loop")
    if outcome.get("near_ties"):
        notes.append(f"{outcome['near_ties']} rows part at a near-tie")
    return f"{outcome['verdict']:<10} {outcome['name']:<40} {'; '.join(notes)}"


def table(outcomes: list[dict], version: str) -> str:
    """The table of supported and refused classes in docs/models.md."""
    by_verdict: dict[str, list[dict]] = {}
    for outcome in outcomes:
        by_verdict.setdefault(outcome["verdict"], []).append(outcome)
    served = by_verdict.get("served", [])
    everywhere = [outcome["name"] for outcome in served if outcome["padded"] == "equal"]
    unpadded = [outcome["name"] for outcome in served if outcome["padded"] == "aside"]
    groups: dict[str, list[str]] = {}
    for outcome in by_verdict.get("refused", []):
        reason = next((text for key, text in GROUPS.items() if key in outcome["reason"]), "other reasons")
        groups.setdefault(reason, []).append(outcome["name"])
    equal = f"the same tokens as `generate()` of transformers {version} ({len(everywhere)} classes)"
    rows = [(equal, _short(everywhere))]
    if unpadded:
        text = "the same tokens; batches with padding by transformers' own loop, with a warning"
        rows.append((text, _short(unpadded)))
    refused = "; ".join(f"**{reason}**: {_short(names)}" for reason, names in sorted(groups.items()))
    rows.append((f"refused by name, with the reason ({len(by_verdict.get('refused', []))} classes)", refused))
    for verdict in ("aside", *BAD):
        if verdict in by_verdict:
            rows.append((verdict, _short([outcome["name"] for outcome in by_verdict[verdict]])))
    if "not built" in by_verdict:
        names = [outcome["name"] for outcome in by_verdict["not built"]]
        rows.append(("not tried: no tiny model runs in transformers itself", _short(names)))
    rows += NOT_CLASSES
    return "\n".join(["| | |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)])


def _short(names: list[str]) -> str:
    """Names of classes without their usual ends (`SUFFIXES`)."""
    shortened = []
    for name in names:
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
        shortened.append(name.removesuffix(suffix))
    return ", ".join(sorted(shortened, key=str.lower))


def main() -> None:
    parser = command_line(__doc__, results="architectures.json")
    parser.add_argument("names", nargs="*", help="classes (default: all)")
    parser.add_argument("--markdown", action="store_true", help="print the table of an earlier run's --json")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each class")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work()
    sys.path.insert(0, str(TESTS))
    import tiny_models

    if options.markdown:
        record = json.loads(options.json.read_text())
        return print(table(record["outcomes"], record["machine"]["transformers"]))
    outcomes = sweep(options.names or tiny_models.classes(), options.jobs, options.timeout)
    if options.names and options.json.exists():
        earlier = [o for o in json.loads(options.json.read_text())["outcomes"] if o["name"] not in options.names]
        outcomes = sorted(earlier + outcomes, key=lambda outcome: outcome["name"])
    counts = Counter(outcome["verdict"] for outcome in outcomes)
    record = dict(machine=machine(), counts=counts, outcomes=outcomes)
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(", ".join(f"{verdict}: {counts[verdict]}" for verdict in tiny_models.VERDICTS))
    sys.exit(1 if any(counts[verdict] for verdict in BAD) else 0)


if __name__ == "__main__":
    main()
