"""A token of transformers' generate() over a static cache, its forward compiled by Inductor and by backend "spec".

    python -m benchmarks.rounds.backend [--shapes llama-8b llama-1b] [--device cuda] [--dtype bfloat16] [--prompt 256]
    python -m benchmarks.rounds.backend --shapes demo --device cpu --dtype float32

Both run in transformers' own loop and mode (CUDA graphs on a GPU), in turn. The time of a token is the difference of
the times of two lengths; the median of all runs, and each of them. "floor" is the time to read the weights once.
Weights of shapes are random. In float32 both must give the same tokens as the model without a compiler, or this fails.
"""

import statistics
from functools import partial

import torch
from transformers import AutoModelForCausalLM, CompileConfig

from benchmarks import common
from benchmarks.rounds.shapes import DENSE, build, text_tokens, weight_bytes
from benchmarks.rounds.token_times import LENGTHS, step_times
from benchmarks.timers import bandwidth

EAGER, INDUCTOR, SPEC = "no compiler", "inductor", "spec"


def way(model, backend: str | None):
    """generate(ids, max_new_tokens=...) over a static cache. backend: None for no compiler."""
    options = {"do_sample": False, "cache_implementation": "static", "eos_token_id": None, "pad_token_id": 0}
    if backend is None:
        return partial(model.generate, disable_compile=True, **options)
    config = CompileConfig(backend=backend, fullgraph=False)
    config._compile_all_devices = True  # transformers compiles only for GPUs unless it is told
    return partial(model.generate, compile_config=config, **options)


def measure(model, ids: torch.Tensor, turns: int, repeats: int) -> list[dict]:
    """A row for each way."""
    ways = {EAGER: way(model, None), INDUCTOR: way(model, "inductor"), SPEC: way(model, "spec")}
    answers, times = {}, {name: [] for name in ways}
    for _ in range(turns):
        for name, generate in ways.items():
            torch._dynamo.reset()  # else each call would first try the code of the other ways
            times[name] += step_times({name: generate}, ids, repeats=repeats)[name]["runs"]
            answers[name] = generate(ids, max_new_tokens=LENGTHS[1])
    same = {name: torch.equal(answer, answers[EAGER]) for name, answer in answers.items()}
    if model.dtype == torch.float32 and not all(same.values()):
        raise AssertionError(f"answers differ in float32: {same}")
    rows = [
        {"way": name, "same_tokens": same[name], "ms": statistics.median(runs), "runs": runs}
        for name, runs in times.items()
    ]
    read = bandwidth()["read"] if ids.is_cuda else common.read_bandwidth()  # last: it changes how memory is allocated
    floor = weight_bytes(model) / read * 1e3
    return [row | {"floor_ms": floor, "over_inductor": rows[1]["ms"] / row["ms"]} for row in rows]


def main() -> None:
    parser = common.command_line(__doc__, results="backend.json", threads=1)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b", "llama-1b"], choices=["demo", *DENSE])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--turns", type=int, default=2, help="how often each way is compiled and timed")
    parser.add_argument("--repeats", type=int, default=5, help="in each turn")
    options = parser.parse_args()
    if options.device == "cpu":
        common.pin(options.threads)
    rows = []
    for shape in options.shapes:
        model = (
            AutoModelForCausalLM.from_pretrained(common.DEMO_MODEL) if shape == "demo" else build(shape, options.device)
        )
        model = model.to(options.device, getattr(torch, options.dtype)).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # weights of a mapped file are read more slowly
        ids = text_tokens(options.prompt, model.config.vocab_size)[None].to(model.device)
        for row in measure(model, ids, options.turns, options.repeats):
            rows.append({"shape": shape, "dtype": options.dtype, "device": options.device, **row})
            print(
                f"{shape} {row['way']}: {row['ms']:.3f} ms a token, floor {row['floor_ms']:.3f}, "
                f"{row['over_inductor']:.2f} times inductor, same tokens: {row['same_tokens']}",
                flush=True,
            )
        facts = common.stamp(model.device)
        del model
    common.save_rows(options.json, rows, ("shape", "dtype", "device", "way"), facts)


if __name__ == "__main__":
    main()
