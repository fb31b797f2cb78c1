"""Seconds from the start of a process until the first token: ours, transformers and vLLM, each in a new process.

    python -m benchmarks.host.first_token --model FOLDER [--systems ours transformers vllm] [--device cuda]
        [--repeats 1] [--json FILE]

Each process imports its engine, loads model and tokenizer from the folder in bfloat16, and answers one prompt with one
token, with the engine's defaults; the clock starts when the process is started. "cold" has empty caches of compilers
and engines, "warm" the caches that the cold start left. Before, a process imports the engine and reads the model's
files, so that no system waits for the disk. The median of the repeats is told.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SYSTEMS = ("ours", "transformers", "vllm")
PROMPT = "The three largest cities of Europe are"
SAID = "first token:"
SCRIPT = "benchmarks.host.first_token"


def imported(system: str) -> str:
    """Import a system. Returns its version."""
    module = __import__({"ours": "spec_compile"}.get(system, system))
    return module.__version__


def ours_or_transformers(system: str, folder: str, device: str) -> int:
    """The token, after the lines that a user of transformers writes, and with ours one more."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    if system == "ours":
        import spec_compile

        model = spec_compile.speculate(model)
    inputs = tokenizer(PROMPT, return_tensors="pt").to(device)
    return int(model.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1])


def vllm(folder: str) -> int:
    """The token of vLLM."""
    from vllm import LLM, SamplingParams

    (output,) = LLM(model=folder, dtype="bfloat16").generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))
    return output.outputs[0].token_ids[0]


def start(system: str, options: argparse.Namespace, cache: str, only_import: bool = False) -> tuple[float, str]:
    """A new process of a system, whose caches are in the folder `cache`: the seconds until it said its first token,
    and what it said. RuntimeError if it ends without."""
    places = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "SPEC_COMPILE_CACHE": "starts",
        "VLLM_CACHE_ROOT": "vllm", "FLASHINFER_WORKSPACE_BASE": "flashinfer", "CUDA_CACHE_PATH": "cuda",
    }  # fmt: skip
    environment = os.environ | {name: f"{cache}/{place}" for name, place in places.items()}
    command = [sys.executable, "-m", SCRIPT, "--model", str(options.model), "--device", options.device]
    command += ["--one", system] + ["--only-import"] * only_import
    with open(f"{cache}/errors", "w+") as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            line = next((line for line in process.stdout or () if line.startswith(SAID)), None)
            seconds = time.perf_counter() - begin
            if line is None:
                errors.seek(0)
                raise RuntimeError(f"{system} said no token: {errors.read()[-2000:]}")
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=120)  # what an engine keeps for the next start, it may write at the end
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return seconds, line.removeprefix(SAID).strip()


def measure(system: str, options: argparse.Namespace) -> list[dict]:
    """The row of a cold and of a warm start."""
    spent: dict[str, list[float]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as cache:
        _, version = start(system, options, cache, only_import=True)
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as cache:
            for state, seconds in spent.items():
                taken, said = start(system, options, cache)
                seconds.append(taken)
                print(f"{system} {version}, {state}: {taken:.2f} s, token {said}", flush=True)
    facts = {"model": options.model.name, "device": options.device, "system": system, "version": version}
    return [facts | {"cache": state, "seconds": statistics.median(values)} for state, values in spent.items()]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    from benchmarks.common import RESULTS  # here, so that a measured process does not import it

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder for from_pretrained()")
    parser.add_argument("--systems", nargs="+", default=["ours", "transformers"], choices=SYSTEMS)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULTS / "first_token.json", help="the file of the rows")
    return parser.parse_args(arguments)


def one(arguments: list[str]) -> None:
    """What a measured process does."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--device", "--one"):
        parser.add_argument(name)
    parser.add_argument("--only-import", action="store_true")
    options = parser.parse_args(arguments)
    if options.only_import:
        for file in Path(options.model).glob("*.safetensors"):
            file.read_bytes()
        said: object = imported(options.one)
    elif options.one == "vllm":
        said = vllm(options.model)
    else:
        said = ours_or_transformers(options.one, options.model, options.device)
    print(SAID, said, flush=True)


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--one" in arguments:
        one(arguments)
        return
    options = parse(arguments)
    import torch

    from benchmarks.common import save_rows, stamp

    facts = stamp(torch.device(options.device))
    for system in options.systems:
        keys = ("model", "device", "system", "cache")
        save_rows(options.json, measure(system, options), keys, facts)


if __name__ == "__main__":
    main()
