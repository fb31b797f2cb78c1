"""Everything that a change of structure must leave as it is, of this tree and of another commit, in the same run.

    python -m benchmarks.record [--against COMMIT|FOLDER] [--repeats 3] [--parts bits call ...] [--device cuda]
        [--model FOLDER] [--json FILE]

The parts are measured in processes of their own, which take turns between the two trees:
import: seconds of `import spec_compile` after torch and transformers
start: seconds from speculate() to the first token, with empty caches and with what that start left
call: milliseconds of a call for one token, by the width of the prompt
rounds: milliseconds of a round by its number of nodes, host included
never_slower: tokens a second on random prompts and on code edits, over plain steps
serving: tokens a second of a manager with 1, 4 and 16 requests in flight
bits: answers of every algorithm, greedy and sampled, that both trees give token for token

Each part also has the peak of its process's memory ("peak MB"), on a GPU that of the device's tensors. Figures are
medians of --repeats; the last column is this tree's over the other's. Only public names and those of
benchmarks/common.py are used, so that trees of another structure can be compared. Another commit is checked out into a
temporary folder, with this tree's compiled modules, so their sources must be equal; a folder has a tree that is built.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import spec_compile
from benchmarks.common import DEMO_MODEL, PROMPTS, RESULTS, elapsed, load_model, pin, prompts_of, save_rows, show, stamp

ROOT = Path(__file__).resolve().parents[1]
DEMO = "demo"
COMPILED = "_ngram_trie.*.so", "_cpu_gemm.*.so", "_cpu_attention.*.so", "_cpu_trees.*.so"
HEADS = DEMO_MODEL / "heads"
WORKLOADS = ("chat", "code_editing", "docstrings", "maths", "code_completion", "bug_fixing")
ALGORITHMS: dict[str, dict] = {
    "n-grams": dict(algo="ngram"),
    "EAGLE-3, chain": dict(algo="eagle3", draft=HEADS / "eagle3", num_steps=5),
    "EAGLE-3, tree": dict(algo="eagle3", draft=HEADS / "eagle3", num_steps=5, topk=4, num_draft_tokens=16),
    "MTP": dict(algo="mtp", draft=HEADS / "mtp", num_steps=3),
    "DFlash": dict(algo="dflash", draft=HEADS / "dflash"),
}
"""The algorithms of "bits"; those with a head need the demo model."""
WIDTHS, SIZES, IN_FLIGHT = (16, 512), (1, 16, 64), (1, 4, 16)
NEW_TOKENS = 96


class Measured:
    """What one process measures of one tree, over one model."""

    def __init__(self, options: argparse.Namespace):
        self.device, self.is_demo = torch.device(options.device), options.model == DEMO
        if self.device.type == "cpu":
            pin(options.threads)
        path = DEMO_MODEL if self.is_demo else options.model
        self.model = load_model(path, options.device)
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    def _prompts(self, workload: str, count: int, longest: int = 300) -> list:
        prompts = prompts_of(workload, PROMPTS, count, self.tokenizer, longest)
        return [ids.to(self.device) for ids in prompts]

    def _fast(self, algo: str = "ngram", **options):
        return spec_compile.speculate(self.model, algo, compile=True, **options)

    def _seconds(self, fast, ids, repeats: int = 1, **settings) -> list[float]:
        """Seconds of calls for the same answer, after one that does not count."""
        asked = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0) | settings
        fast.generate(ids, **asked)
        fast.speculation.stats.reset()
        return [elapsed(partial(fast.generate, ids, **asked), self.device)[1] for _ in range(repeats)]

    def _rate(self, fast, prompts: list) -> float:
        """Tokens a second."""
        return NEW_TOKENS * len(prompts) / sum(self._seconds(fast, ids)[0] for ids in prompts)

    def start(self) -> dict[str, float]:
        """Seconds until the first token, with the caches that the environment names."""
        ids = self._prompts("code_editing", 1)[0]
        begin = time.perf_counter()
        fast = spec_compile.speculate(self.model, "ngram")
        seconds = time.perf_counter() - begin
        elapsed(lambda: fast.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0), self.device)
        return {"speculate s": seconds, "first token s": time.perf_counter() - begin}

    def call(self) -> dict[str, float]:
        """Milliseconds of a call for one token."""
        fast, ids, told = self._fast(), self._prompts("random", 1)[0].repeat(1, 3), {}
        for width in WIDTHS:
            seconds = self._seconds(fast, ids[:, :width], 30, max_new_tokens=1)
            told[f"{width} tokens ms"] = 1e3 * statistics.median(seconds)
        return told

    def rounds(self) -> dict[str, float]:
        """Milliseconds of a round with a fixed number of nodes, over text that n-grams draft much of."""
        told = {}
        for nodes in SIZES:
            fast = self._fast(num_draft_tokens=nodes, adaptive=False)
            ids = self._prompts("random", 1)[0][:, :40].repeat(1, 6)
            seconds = sum(self._seconds(fast, ids, 3))
            told[f"{nodes} nodes ms"] = 1e3 * seconds / fast.speculation.stats.steps
            fast.speculation.release()
        return told

    def never_slower(self) -> dict[str, float]:
        """Tokens a second with adaptive drafts over those of plain steps."""
        plain, told = self._fast(num_draft_tokens=1), {}
        workloads = {name: self._prompts(name, 3) for name in ("random", "code_editing")}
        base = {name: self._rate(plain, prompts) for name, prompts in workloads.items()}
        plain.speculation.release()
        fast = self._fast()
        for name, prompts in workloads.items():
            rate = self._rate(fast, prompts)
            told |= {f"{name} tokens/s": rate, f"{name} over plain": rate / base[name]}
        return told

    def serving(self) -> dict[str, float]:
        """Tokens a second of requests in flight."""
        prompts = [ids[0].tolist() for name in WORKLOADS for ids in self._prompts(name, 4)]
        config = ContinuousBatchingConfig(max_requests_per_batch=max(IN_FLIGHT))
        manager = self._fast().init_continuous_batching(continuous_batching_config=config)
        manager.warmup()
        manager.start()
        told = {}
        for count in IN_FLIGHT:
            seconds = [self._answer_all(manager, prompts[: 6 * count][:24], count) for _ in range(2)]
            told[f"{count} in flight tokens/s"] = NEW_TOKENS * len(prompts[: 6 * count][:24]) / seconds[-1]
        manager.stop(block=True)
        return told

    def _answer_all(self, manager, prompts: list[list[int]], count: int) -> float:
        """Seconds until all prompts are answered, `count` at a time."""
        waiting, missing, begin = list(prompts), len(prompts), time.perf_counter()
        for _ in range(count):
            manager.add_request(waiting.pop(), max_new_tokens=NEW_TOKENS, eos_token_id=-1)
        while missing:
            output = manager.get_result(timeout=60)
            if output is None or output.error is not None:
                raise RuntimeError(f"a request got no answer: {output}")
            missing -= 1
            if waiting:
                manager.add_request(waiting.pop(), max_new_tokens=NEW_TOKENS, eos_token_id=-1)
        return time.perf_counter() - begin

    def bits(self) -> dict[str, list[int]]:
        """The tokens of all answers by their name."""
        told = {}
        for name, options in ALGORITHMS.items() if self.is_demo else [*ALGORITHMS.items()][:1]:
            fast = self._fast(**options)
            for workload in WORKLOADS:
                for number, ids in enumerate(self._prompts(workload, 3)):
                    for mode in ("greedy", "sampled"):
                        torch.manual_seed(number)
                        asked = dict(max_new_tokens=64, do_sample=mode == "sampled", pad_token_id=0)
                        answer = fast.generate(ids, **asked)[0, ids.shape[1] :]
                        told[f"{name}, {workload} {number}, {mode}"] = answer.tolist()
            fast.speculation.release()
        return told


PARTS = ("import", "start", "call", "rounds", "never_slower", "serving", "bits")


FOREIGN = "import sys\nsys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in type(each).__module__]\n"
"""Takes away the finders of editable installs, which would find this tree before that of PYTHONPATH."""
MEASURE = f"import runpy\nrunpy.run_path({__file__!r}, run_name='__main__')"
IMPORT = """
import json, resource, time
import torch, transformers
begin = time.perf_counter()
import spec_compile
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}))
"""


def measure_here(part: str, options: argparse.Namespace) -> None:
    """Measure one part of the tree that PYTHONPATH names, and print it as JSON."""
    tree = Path(os.environ["PYTHONPATH"])
    if not Path(spec_compile.__file__).is_relative_to(tree):
        raise RuntimeError(f"expected spec_compile of {tree}, got {spec_compile.__file__}")
    told = getattr(Measured(options), part)()
    if options.device == "cuda":
        told["peak MB"] = torch.cuda.max_memory_allocated() / 1e6
    else:
        told["peak MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps(told))


def in_process(part: str, tree: Path, options: argparse.Namespace, caches: str) -> dict:
    """What a new process measures of a part of a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "SPEC_COMPILE_CACHE": f"{caches}/starts"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    arguments = ["--device", options.device, "--model", options.model, "--threads", str(options.threads), "--one", part]
    # -P and FOREIGN keep this tree's packages away from a measurement of the other one.
    code = ("" if tree == ROOT else FOREIGN) + (IMPORT if part == "import" else MEASURE)
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=caches)
    if done.returncode:
        raise RuntimeError(f"{part} of {tree}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check_out(commit: str, folder: Path) -> Path:
    """A tree of another commit, with this tree's compiled modules. ValueError if their sources differ."""
    subprocess.run(["git", "worktree", "add", "--detach", "--quiet", folder, commit], cwd=ROOT, check=True)
    sources = ["*.cpp", "*.h", "CMakeLists.txt"]
    if subprocess.run(["git", "diff", "--quiet", commit, "--", *sources], cwd=ROOT).returncode:
        raise ValueError(
            f"--against: the C++ of {commit} differs from this tree's; build that tree, and name its folder here"
        )
    for place in map(Path, importlib.import_module("spec_compile").__path__):
        for pattern in COMPILED:
            for module in place.rglob(pattern):
                target = folder / "spec_compile" / module.relative_to(place)
                if target.parent.is_dir() and not target.exists():
                    target.write_bytes(module.read_bytes())
    return folder


def compare(part: str, trees: dict[str, Path], options: argparse.Namespace, folder: str) -> list[dict]:
    """The rows of a part: each figure of each tree, as the median of the repeats."""
    if part == "bits":
        answers = {name: in_process(part, tree, options, folder) for name, tree in trees.items()}
        first = answers["here"]
        for each in answers.values():
            each.pop("peak MB")
        figure = f"of {len(first)} answers equal"
        return [
            {"part": part, "tree": name, "figure": figure, "value": sum(each.get(key) == first[key] for key in first)}
            for name, each in answers.items()
        ]
    found: dict[tuple[str, str], list[float]] = {}
    if part == "import":
        for tree in trees.values():  # leaves bytecode
            in_process(part, tree, options, folder)
    for repeat in range(options.repeats):
        for name, tree in trees.items() if repeat % 2 == 0 else reversed(trees.items()):
            caches = f"{folder}/{name}" + (f"/{part}{repeat}" if part == "start" else "")
            os.makedirs(caches, exist_ok=True)
            for state in ("cold ", "warm ") if part == "start" else ("",):
                for figure, value in in_process(part, tree, options, caches).items():
                    found.setdefault((name, state + figure), []).append(value)
    return [
        {"part": part, "tree": name, "figure": figure, "value": round(statistics.median(values), 3)}
        for (name, figure), values in found.items()
    ]


def table(rows: list[dict]) -> None:
    """Print a line for each figure, and this tree's over the other's."""
    trees = [*dict.fromkeys(row["tree"] for row in rows)]
    lines: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        lines.setdefault((row["part"], row["figure"]), {})[row["tree"]] = row["value"]
    ratio: Callable = lambda each: f"{each[trees[0]] / each[trees[-1]]:.3f}" if len(trees) > 1 else ""  # noqa: E731
    show(
        ["part", "figure", *trees, "ratio"],
        [[part, figure, *(f"{each[name]:g}" for name in trees), ratio(each)] for (part, figure), each in lines.items()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT|FOLDER", help="another tree that is measured, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2, help="threads of a CPU")
    parser.add_argument("--model", default=DEMO, help="a folder; the default is the demo model")
    parser.add_argument("--json", type=Path, default=RESULTS / "record.json")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure_here(options.one, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        trees, is_commit = {"here": ROOT}, options.against and not Path(options.against).is_dir()
        try:
            if options.against:
                built = Path(options.against).absolute()
                trees[options.against] = check_out(options.against, Path(folder) / "tree") if is_commit else built
            rows = []
            for part in options.parts:
                rows += compare(part, trees, options, folder)
                table([row for row in rows if row["part"] == part])
        finally:
            if is_commit:
                subprocess.run(["git", "worktree", "remove", "--force", f"{folder}/tree"], cwd=ROOT, check=False)
    facts = {"device": options.device, "model": Path(options.model).name}
    save_rows(options.json, [facts | row for row in rows], (*facts, "part", "tree", "figure"), stamp())


if __name__ == "__main__":
    main()
