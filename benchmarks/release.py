"""All measurements behind README.md and docs/benchmarks.md again, one after another, each into its file of results.

    python -m benchmarks.release --on gpu --model FOLDER ... --heads FOLDER [--only NAME ...]
    python -m benchmarks.release --on cpu --model FOLDER ... [--only NAME ...]

--model: folders of the real models. --heads: has a folder for each of them, of its name, with the head in "eagle3".
--folder and --workloads: prompts that no head was trained on (default: those of benchmarks/prompts). On a GPU it needs
vllm, on a CPU gguf and llama-cpp-python. A command that succeeds leaves in its file only rows of this commit. The
exit status is 1 if a command failed; the others run all the same. Commit results after all machines were measured, as
the commit of the results is another one. `python -m benchmarks.tables --write` makes the tables.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import PROMPTS, RESULTS, ROOT, command_line, commit, write_json

WORKLOADS = ["code_editing", "code_completion", "maths", "chat"]
DRAFTS = ["plain", "n-gram", "EAGLE-3", "EAGLE-3 + n-gram"]
IN_FLIGHT = "--prompt-tokens 512 --new-tokens 128 --in-flight 1 32 64 128".split()
ROUNDS = ("llama-8b", "qwen3-0.6b", "smollm2-135m", "llama-8b-fp8", "llama-8b-int4", "qwen3-30b-a3b-fp8",
          "gpt-oss-20b-mxfp4")  # fmt: skip
"""The shapes whose rounds are measured; the first also token by token, with every draft."""
CPU_ENGINES = ["ours", "llama_cpp", "transformers"]
"""Engines with weights that are not rounded."""
Commands = list[tuple[str, str, list[str]]]
"""For each command its name, the file of its results, and module with arguments."""


def on_gpu(options: argparse.Namespace) -> Commands:
    found: Commands = []
    for model in options.model:
        heads = ["--heads", str(options.heads / model.name)] if options.heads else []
        compare = ["benchmarks.peers.compare", "--model", str(model), "--device", "cuda", *heads]
        ours = [*prompts(options, 10), "--engines", "ours", "vllm", "--drafts", *DRAFTS, "--repeats", "2"]
        found.append(("peers", "peers", [*compare, *ours, "--settings", "2"]))
        # Transformers takes 25 times as long as others, so that few prompts take as many seconds.
        theirs = [*prompts(options, 3), "--engines", "transformers", "--drafts", "plain", "--repeats", "1"]
        found.append(("peers", "peers", [*compare, *theirs]))
    for model in options.model:
        start = ["benchmarks.host.first_token", "--model", str(model), "--device", "cuda"]
        found.append(("start", "first_token", [*start, "--systems", "ours", "transformers", "vllm"]))
    serving = ["benchmarks.serving", "--shape", "llama-8b", *IN_FLIGHT]
    found.append(("requests", "serving", serving))
    found.append(("requests", "serving", ["benchmarks.peers.requests_on_vllm", "--shape", "llama-8b", *IN_FLIGHT]))
    for shape in ROUNDS:
        rounds = ["benchmarks.gpu", "--shapes", shape, "--contexts", "1024", "--sizes", "1", "4", "16", "64"]
        is_first = shape == ROUNDS[0]
        more = ["--batches", "1", "4", "--baselines", "--drafts"] if is_first else ["--batches", "1"]
        found.append(("shape" if is_first else "rounds", "gpu", rounds + more))
    return found


def on_cpu(options: argparse.Namespace) -> Commands:
    found: Commands = []
    for weights, engines in (("int4", ["ours", "llama_cpp"]), ("int8", ["ours", "llama_cpp"]), ("none", CPU_ENGINES)):
        for model in options.model:
            compare = ["benchmarks.peers.compare", "--model", str(model), "--device", "cpu", *prompts(options, 3)]
            compare += ["--weights", weights, "--engines", *engines, "--drafts", "plain", "n-gram"]
            found.append(("peers", "peers_cpu", [*compare, "--new-tokens", "64", "--repeats", "2", "--settings", "1"]))
    for model in options.model:
        found.append(("start", "first_token", ["benchmarks.host.first_token", "--model", str(model)]))
    return found


def prompts(options: argparse.Namespace, count: int) -> list[str]:
    return ["--folder", str(options.folder), "--workloads", *options.workloads, "--prompts", str(count)]


def of_commit(value, name: str):
    """Results without the rows whose stamp names another commit, and without what is empty then.

    name: a commit; "4acf351" is also the commit 4acf3517.
    """
    if isinstance(value, dict) and "stamp" in value:
        other = value["stamp"].get("commit", "")
        return value if other and (other.startswith(name) or name.startswith(other)) else None
    if isinstance(value, dict):
        kept = {key: of_commit(one, name) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one} or None
    if isinstance(value, list):
        return [one for one in (of_commit(one, name) for one in value) if one] or None
    return None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--on", choices=["gpu", "cpu"], required=True)
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--folder", type=Path, default=PROMPTS)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--only", nargs="+", choices=["peers", "start", "requests", "shape", "rounds"])
    parser.add_argument("--show", action="store_true", help="print the commands and run none")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options, begin, failed = parse(arguments), time.perf_counter(), 0
    for name, file, command in {"gpu": on_gpu, "cpu": on_cpu}[options.on](options):
        if options.only and name not in options.only:
            continue
        print(f"{time.perf_counter() - begin:5.0f} s: python -m {' '.join(command)}", flush=True)
        if options.show:
            continue
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode:
            print(f"failed: {name}", flush=True)
            failed = 1
        elif (path := RESULTS / f"{file}.json").exists():
            write_json(path, of_commit(json.loads(path.read_text()), commit()) or {})
    sys.exit(failed)


if __name__ == "__main__":
    main()
