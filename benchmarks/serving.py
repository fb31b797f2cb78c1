"""Throughput of many requests at once: tokens a second with so many in flight, with drafts and without, in one run.

    python -m benchmarks.serving [--model NAME] [--in-flight 1 4 16 64] [--requests 96] [--new-tokens 128]
        [--systems plain ngram] [--fixed 2 4 8 16] [--draft PATH] [--no-static] [--times]
        [--shape llama-8b [--rows 16] | --shape llama-8b --prompt-tokens 512] [--apart] [--json FILE]

--in-flight requests are under way at any time, until all are answered. Answers are greedy and have all their tokens;
end-of-sequence tokens do not end them. For comparison generate() answers the same prompts in static batches of as many
rows, which wait for their slowest; --no-static leaves these out. Each line has the median and the 99th percentile of
the seconds until a request's first token, and the 99th percentile of the seconds that it waited for a row. The first
requests of each number are a warm-up. The last lines divide rates: by that of static batches, and with drafts by that
without.

--shape also times the captured rounds of a shape with random weights over --rows sequences with 1,024 tokens each (see
gpu.py), next to two floors: the time to move their bytes, and the time of their arithmetic, both at measured speeds.
The acceptance of random weights means nothing: tokens a second are given at simulated accept lengths, and at 1.0, which
is plain steps. "model" is the shape of --model, with its weights.

--shape with --prompt-tokens answers requests of a shape with random weights in place of those of --model: prompts of
that many random tokens, three requests for each one in flight, with a cache that has room for just these. Hardly a
draft is accepted on such text, so that "ngram" shows what drafts cost where they do not pay.

--apart also answers with n-grams of each request's own text only, as the server does for clients without a name.

--fixed also drafts in every round, with trees of so many nodes; the last lines then divide the rate of adaptive
drafting by the best of all others in hindsight.
"""

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import spec_compile
from benchmarks import common
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.shapes import DENSE, build, token_bytes, weight_bytes
from benchmarks.timers import bandwidth, product_speed

LONGEST = 512
"""Most tokens of a prompt."""
WORKLOADS = ["chat", "code_editing", "docstrings", "maths", "code_completion", "bug_fixing"]
STATIC, APART = ", static batch", ", apart"
CONTEXT = 1024
"""Tokens of a sequence in the rounds of --shape."""
SIMULATED = (2.0, 3.0, 4.0)
"""Accept lengths assumed for these rounds."""


def percentile(values: list[float], share: float) -> float:
    """The value with a share `share` of `values` below it: [1, 2, 3, 4] and 0.5 give 3."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def in_flight(manager, prompts: list[list[int]], count: int, new_tokens: int, share_text: str | None = None) -> dict:
    """Answer all prompts, `count` at a time. Returns rates and waits. share_text: see `Manager.add_request`."""
    waiting, outputs, begin = list(reversed(prompts)), [], time.perf_counter()
    asked = dict(max_new_tokens=new_tokens, eos_token_id=-1, share_text=share_text)
    for _ in range(min(count, len(prompts))):
        manager.add_request(waiting.pop(), **asked)
    while len(outputs) < len(prompts):
        output = manager.get_result(timeout=1)
        if output is None:
            assert manager.is_running(), manager.background_thread_status.fatal_error
            continue
        assert output.error is None, output.error
        outputs.append(output)
        if waiting:
            manager.add_request(waiting.pop(), **asked)
    seconds = time.perf_counter() - begin
    steps = sum(output.speculation.steps for output in outputs)
    first = [output.first_token_time - output.created_time for output in outputs]
    return {
        "tokens_per_s": sum(len(output.generated_tokens) for output in outputs) / seconds,
        "tokens_per_step": sum(len(output.generated_tokens) for output in outputs) / steps,
        "first_token_s": statistics.median(first),
        "first_token_p99_s": percentile(first, 0.99),
        "wait_p99_s": percentile([output.lifespan[0] - output.created_time for output in outputs], 0.99),
    }


def static(fast, tokenizer, prompts: list[list[int]], count: int, new_tokens: int) -> dict:
    """The same with generate(), in batches of `count` rows."""
    asked = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=tokenizer.pad_token_id)

    def answer() -> None:
        for index in range(0, len(prompts), count):
            some = {"input_ids": prompts[index : index + count]}
            batch = tokenizer.pad(some, return_tensors="pt", padding_side="left")
            fast.generate(**batch.to(fast.device), **asked)

    return {"tokens_per_s": new_tokens * len(prompts) / common.elapsed(answer, fast.device)[1]}


class Times:
    """Seconds by name of a manager's thread, and of the clients' threads in `add_request`, summed from now on.

    A GPU computes meanwhile; it is the limit if most of the time is "wait".
    """

    def __init__(self, manager):
        self.seconds, self._decoder = Counter(), manager.scheduler.decoder
        scheduler, prefill = manager.scheduler, manager.scheduler.prefill
        for name, owner, methods in (
            ("admit", scheduler, ["_change"]),
            ("prompts", prefill, ["step", "move"]),
            ("launch", self._decoder, ["launch"]),
            ("collect", self._decoder, ["collect"]),
            ("compact", self._decoder, ["compact"]),
            ("leave", self._decoder, ["leave"]),
            ("check", scheduler, ["_check_model"]),
            ("deliver", manager, ["_deliver"]),
            ("add_request", manager, ["add_request"]),
        ):
            for method in methods:
                setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, function):
        def timed(*args, **kwargs):
            if name == "collect":
                launched = self._decoder.pipeline._rounds[0]
                launched.read = self._timed("wait", launched.read)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return timed

    def text(self, rounds: int) -> str:
        """A line with the microseconds of each round. Resets the sums."""
        self.seconds["collect"] -= self.seconds["wait"]
        parts = ", ".join(f"{name} {seconds / rounds * 1e6:.0f}" for name, seconds in self.seconds.most_common())
        self.seconds.clear()
        return f"{'':24} {rounds} rounds, microseconds of each: {parts}"


def forget(fast) -> None:
    """Drop the texts of all requests, which would help later ones."""
    fast.speculation.refresh()
    if fast.speculation.engine.name == "ngram":
        fast.speculation.ngram.reset()


def measure(name: str, fast, tokenizer, prompts: list[list[int]], options) -> list[dict]:
    """The rows of one system. tokenizer: None with --prompt-tokens."""
    rows = []
    slots = ContinuousBatchingConfig(max_requests_per_batch=max(options.in_flight))
    config = GenerationConfig(do_sample=False, pad_token_id=0 if tokenizer is None else tokenizer.pad_token_id)
    manager = fast.init_continuous_batching(config, slots)
    begin = time.perf_counter()
    manager.warmup()
    print(f"{name}: warm after {time.perf_counter() - begin:.1f} s", flush=True)
    times = Times(manager) if options.times else None
    manager.start()
    try:
        for count in options.in_flight:
            asked = prompts if tokenizer is not None else prompts[: 3 * count]
            in_flight(manager, asked[:count], count, min(16, options.new_tokens))
            forget(fast)
            rounds = manager.metrics()["rounds_total"]
            if times:
                times.seconds.clear()
            share_text = "" if name.endswith(APART) else None
            result = in_flight(manager, asked, count, options.new_tokens, share_text)
            rows.append({"system": name, "in_flight": count, "requests": len(asked), **result})
            print(row_text(rows[-1]), flush=True)
            if times:
                print(times.text(manager.metrics()["rounds_total"] - rounds), flush=True)
    finally:
        manager.destroy()
    for count in options.in_flight if options.static else ():
        last = prompts[-(count + len(prompts) % count) :]  # batches of all sizes
        static(fast, tokenizer, last, count, min(16, options.new_tokens))
        forget(fast)
        result = static(fast, tokenizer, prompts, count, options.new_tokens)
        rows.append({"system": name + STATIC, "in_flight": count, **result})
        print(row_text(rows[-1]), flush=True)
    return rows


def read_requests(options, tokenizer) -> list[list[int]]:
    """Token ids of `options.requests` prompts from the workloads in turn, in a fixed random order."""
    sets = [
        common.prompts_of(name, options.prompts, options.requests, tokenizer, LONGEST, options.chat)
        for name in options.workloads
    ]
    in_turn = [ids[0].tolist() for some in zip_longest(*sets) for ids in some if ids is not None]
    if len(in_turn) < options.requests:
        print(f"--requests: {options.requests} asked for, the workloads have {len(in_turn)}")
    prompts = in_turn[: options.requests]
    random.Random(0).shuffle(prompts)
    return prompts


def random_requests(options, vocab_size: int) -> list[list[int]]:
    """Prompts of --prompt-tokens random tokens, three times as many as the most in flight."""
    draw, size = random.Random(0), options.prompt_tokens
    return [[draw.randrange(vocab_size) for _ in range(size)] for _ in range(3 * max(options.in_flight))]


def round_rows(name: str, options, model) -> list[dict]:
    """Rounds of `options.rows` sequences, without the host, and the floors of bytes and arithmetic."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    model = model if name == "model" else build(name, device.type)
    speed = bandwidth()["copy"] if on_gpu else common.read_bandwidth()
    arithmetic = product_speed(device, model.dtype, 8192 if on_gpu else 1024)
    fast = spec_compile.speculate(
        model, num_draft_tokens=max(options.nodes), max_cache_len=CONTEXT + 1024, compile=not options.eager, check=False
    )
    fast.speculation.warmup()
    weights, rows = weight_bytes(model), []
    kv = token_bytes(model) * CONTEXT * options.rows
    for nodes, ms in rounds(fast, CONTEXT, options.rows, options.nodes, 30 if on_gpu else 3).items():
        operations = 2 * weights / model.dtype.itemsize * options.rows * nodes
        floors = {"bytes_ms": (weights + kv) / speed * 1e3, "arithmetic_ms": operations / arithmetic * 1e3}
        lengths = [1.0] if nodes == 1 else [length for length in SIMULATED if length <= nodes]
        rates = {f"{length:.1f}": options.rows * length / ms * 1e3 for length in lengths}
        row = {"shape": name, "rows": options.rows, "nodes": nodes, "ms": ms, **floors, "simulated_tokens_per_s": rates}
        rows.append({**row, "context": CONTEXT, "bytes_per_s": speed, "operations_per_s": arithmetic})
        at = ", ".join(f"{rate:.0f} tokens/s at {length}" for length, rate in rates.items())
        print(
            f"{name}: {options.rows} rows of {nodes} nodes {ms:.3f} ms, bytes {floors['bytes_ms']:.3f} ms, arithmetic "
            f"{floors['arithmetic_ms']:.3f} ms; {at} (accept lengths simulated)", flush=True,
        )  # fmt: skip
    return rows


def systems_of(options) -> dict[str, dict]:
    """The options of `speculate` for each system, by its name."""
    draft, systems = {} if options.draft is None else {"draft": options.draft}, {}
    for name in options.systems:
        if name == "plain":
            systems[name] = dict(algo="ngram", num_draft_tokens=1)
            continue
        systems[name] = dict(algo=name, **draft)
        for nodes in options.fixed:
            systems[f"{name}, {nodes} nodes"] = dict(algo=name, adaptive=False, num_draft_tokens=nodes, **draft)
    if options.apart:
        systems |= {name + APART: settings for name, settings in systems.items() if name != "plain"}
    return systems


def ratios(rows: list[dict]) -> list[str]:
    """A line for each system and number in flight: its rate divided by that of static batches, and of plain steps."""
    rates = {(row["system"], row["in_flight"]): row["tokens_per_s"] for row in rows}
    lines = []
    for (name, count), rate in rates.items():
        if name.endswith(STATIC):
            continue
        bases = {"the static batch": (name + STATIC, count)}
        if name != "plain":
            bases["plain"] = ("plain", count)
        told = [f"{rate / rates[key]:.2f}x {base}" for base, key in bases.items() if key in rates]
        if told:
            lines.append(f"{name}, {count} in flight: " + ", ".join(told))
    return lines


def over_best(rows: list[dict], adaptive: list[str]) -> list[str]:
    """A line for each adaptive system and number in flight: its rate over the best of plain and fixed settings."""
    lines = []
    for row in (row for row in rows if row["system"] in adaptive):
        others = {
            other["system"]: other["tokens_per_s"]
            for other in rows
            if other["in_flight"] == row["in_flight"] and other["system"].split(",")[0] in ("plain", row["system"])
        }
        told = common.hindsight(others | {"adaptive": others.pop(row["system"])})
        row |= told
        lines.append(
            f"{row['system']}, {row['in_flight']} in flight: {told['over best']:.3f} of the best in hindsight, "
            f"{told['best']}"
        )
    return lines


def row_text(row: dict) -> str:
    """A line of the table."""
    line = f"{row['system']:24} {row['in_flight']:4} in flight {row['tokens_per_s']:10.1f} tokens/s"
    if "wait_p99_s" in row:
        line += (
            f"  {row['tokens_per_step']:5.2f} a step, first token {row['first_token_s'] * 1e3:7.1f} ms "
            f"(p99 {row['first_token_p99_s'] * 1e3:7.1f}), wait p99 {row['wait_p99_s'] * 1e3:7.1f} ms"
        )
    return line


def main(arguments: list[str] | None = None) -> None:
    parser = common.command_line(__doc__, results="serving.json", threads=2)
    parser.add_argument("--model", default=str(common.DEMO_MODEL))
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--prompts", type=Path, default=common.PROMPTS, help="folder of the workloads' files")
    parser.add_argument("--chat", action="store_true", help="prompts in the form of the chat template")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--systems", nargs="+", default=["plain", "ngram"], help="plain steps, and algorithms")
    parser.add_argument("--fixed", type=int, nargs="*", default=[], help="also draft so many nodes in every round")
    parser.add_argument("--apart", action="store_true", help="also n-grams of each request's own text only")
    parser.add_argument("--draft", default=None, help="draft of the algorithms that need one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-cache-len", type=int, default=1024)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--static", action=argparse.BooleanOptionalAction, default=True, help="also static batches")
    parser.add_argument("--times", action="store_true", help="also the parts of a round's time")
    parser.add_argument("--shape", choices=["model", *DENSE], help="time rounds of this shape, too")
    parser.add_argument("--rows", type=int, default=16, help="sequences of these rounds")
    parser.add_argument("--prompt-tokens", type=int, help="answer random prompts of this length with the shape instead")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 16], help="nodes of each sequence")
    options = parser.parse_args(arguments)
    device = common.device_for(options.threads)
    if options.prompt_tokens:
        if options.shape in (None, "model"):
            parser.error("--prompt-tokens needs the --shape of a model with random weights")
        tokenizer, model = None, build(options.shape, device)
        prompts, options.model = random_requests(options, model.config.vocab_size), options.shape
        options.max_cache_len, options.static = options.prompt_tokens + options.new_tokens + 64, False
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(device).eval()
        prompts = read_requests(options, tokenizer)
    print(f"{len(prompts)} requests of {options.new_tokens} tokens, no prompt twice")
    shared = dict(compile=not options.eager, max_cache_len=options.max_cache_len)
    rows = []
    for name, settings in systems_of(options).items():
        fast = spec_compile.speculate(model, **settings, **shared)
        rows += measure(name, fast, tokenizer, prompts, options)
        fast.destroy_cached_continuous_batching_manager()
        del fast
    print(*ratios(rows), sep="\n")
    if options.fixed:
        print(*over_best(rows, [name for name in options.systems if name != "plain"]), sep="\n")
    stamped = common.stamp(model.device)
    facts = {"model": Path(options.model).name, "requests": len(prompts), "new_tokens": options.new_tokens}
    rows = [facts | row for row in rows]
    common.save_rows(options.json, rows, ("model", "system", "in_flight"), stamped)
    if options.shape and not options.prompt_tokens:
        timed = round_rows(options.shape, options, model)
        common.save_rows(options.json, timed, ("shape", "rows", "nodes"), stamped, "rounds")


if __name__ == "__main__":
    main()
