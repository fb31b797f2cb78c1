"""Rounds on a GPU against the byte floor, and a token of generate() against transformers: shapes with random weights.

    python -m benchmarks.gpu [--shapes llama-8b qwen3-8b llama-1b qwen3-0.6b smollm2-135m]
        [--contexts 1024 8192 32768] [--batches 1 4 8] [--prompts 8192 32768] [--baselines] [--drafts [NAME ...]]
        [--demo] [--json FILE]

There are two kinds of times, which must not be mixed:
"rounds" are replays of the captured graph of one round, without the host. The floor is the time to move the bytes that
it must read (weights once, keys and values of the context once) at the speed of a large copy, or of a large read.
"steps" (--baselines) are tokens of generate(), the host included, of transformers' own ways and of ours: the difference
of the times of two lengths divided by that of the tokens, medians of at least three runs in turn (see
rounds/token_times.py).

Prompts are tokens of real text (benchmarks/prompts); the trees of n-gram rounds have all nodes and the form of a tree
of real text. Weights are random, so acceptance means nothing: compare our plain steps; the row with drafts has its
accept length. "simulated" rates divide an assumed accept length by the time of a round. The nodes of a mixture's round
are different tokens; the floor counts the experts that they choose, printed next to the number that independent choices
would give. Nodes of real text have more experts in common.
"wrapping" is the peak of memory from the built model until warm-up ends, next to the bytes of weights and cache.
Measure each shape in a separate process, or memory of the previous one may count.
"loop" is the time of a round in generate() beyond that of its graph: over plain steps, which draft nothing, so that
repetitive text changes nothing, and with --demo over rounds with drafts on real text. Both have the number of rounds.

Rows of earlier runs that this one does not measure stay in the file, with their own stamps.
"""

import gc
import itertools
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from benchmarks import common
from benchmarks.rounds import drafts
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.quantised_shapes import QUANTISED
from benchmarks.rounds.shapes import (
    DENSE,
    SHAPES,
    build,
    distinct_experts,
    read_bytes,
    stored_bytes,
    text_tokens,
    weight_bytes,
)
from benchmarks.rounds.token_times import LENGTHS, PLAIN, steps
from benchmarks.timers import bandwidth, call_ms
from spec_compile.runtime.round import STEP_COST, chunks

SIMULATED = 3.0
"""Accept length assumed for the simulated rates."""


def loop(fast, ids: torch.Tensor, new: int) -> dict[str, float]:
    """The time of a round in generate() beyond that of its captured graph, and the launches and waits.

    The graph's time is that of the round's size at this context.
    """
    from torch.profiler import ProfilerActivity, profile

    def generate():
        fast.speculation.ngram.reset()  # a known answer would be accepted as a whole
        fast.generate(ids, max_new_tokens=new, do_sample=False)

    generate()
    stats = fast.speculation.stats
    graph_ms = rounds(fast, ids.shape[1] + new // 2, 1, list(fast.speculation.engine.runtime.sizes))
    gap = []
    for _ in range(5):
        stats.reset()
        generate()
        seconds = stats.seconds["verify"] + stats.seconds["host"]
        graphs = sum(count * graph_ms[size] for size, count in stats.nodes.items()) / 1e3
        gap.append((seconds - graphs) / stats.rounds)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        stats.reset()
        generate()
    names = [event.name for event in seen.events()]
    session = fast.speculation.engine.session(1)
    steps = chunks(ids.shape[1] - 1, session.prefill_sizes, STEP_COST["cuda"])
    prompt = sum(session._prefill_key(size) > 0 for size in steps)  # captured ones only
    return {
        "gap_us": statistics.median(gap) * 1e6,
        "graph_launches_per_round": (sum("GraphLaunch" in name for name in names) - prompt) / stats.rounds,
        "synchronisations_per_call": sum("Synchronize" in name for name in names),
        "rounds": stats.rounds,
        "accept_length": stats.accept_length,
    }


def prompts(fast, model, lengths: list[int]) -> list[dict[str, float]]:
    """Tokens a second of prompts of these lengths, the first new token included, ours and transformers', in turn."""
    rows = []
    for length in lengths:
        ids, repeats = text_tokens(length, model.config.vocab_size)[None].to(model.device), 3 if length <= 32768 else 1
        calls = {
            name: partial(system.generate, ids, max_new_tokens=1, do_sample=False)
            for name, system in (("ours", fast), ("HF", model))
        }
        turns = [{name: call_ms(call) for name, call in calls.items()} for _ in range(1 + repeats)][1:]
        row = {name: length / statistics.median(turn[name] for turn in turns) * 1e3 for name in calls}
        row |= {"tokens": length, "repeats": repeats}
        rows.append(row)
        print(f"  prompt of {length}: {row['ours']:.0f} tokens/s, HF {row['HF']:.0f}", flush=True)
    return rows


def round_rows(fast, batches: list[int], contexts: list[int], sizes: list[int], speeds: dict) -> list[dict]:
    """A row for each batch, context and size: the captured graph of a round, and its floors."""
    rows = []
    for batch, context in itertools.product(batches, contexts):
        if batch > 1 and context > 8192:
            continue
        counts: dict[int, list[int]] = {}
        for nodes, ms in rounds(fast, context, batch, sizes, counts=counts).items():
            count = statistics.mean(counts[nodes]) if nodes in counts else None
            read = read_bytes(fast, context, batch, nodes, count)
            row = dict(batch=batch, context=context, nodes=nodes, ms=ms, **common.floors(read, speeds, ms))
            rows.append(row)
            of_experts = ""
            if count is not None:
                row |= {"distinct_experts": count, "expected_experts": distinct_experts(fast, batch * nodes)}
                of_experts = f", {count:.1f} experts of a layer chosen, {row['expected_experts']:.1f} expected"
            simulated = batch * SIMULATED / ms * 1e3
            print(
                f"  B={batch} context {context:6} N={nodes:2}: {ms:7.3f} ms, {row['over_copy']:.2f} times the floor of "
                f"a copy, {row['over_read']:.2f} times that of a read; {simulated:.0f} tokens/s at a simulated accept "
                f"length of {SIMULATED}{of_experts}", flush=True,
            )  # fmt: skip
    return rows


def step_rows(model, fast, plain, options, speeds: dict) -> list[dict]:
    """A token of generate(), transformers' and ours (see rounds/token_times.py), at a context of about 1,024."""
    ids, tuning = text_tokens(2048, model.config.vocab_size)[None].to(model.device).split(1024, dim=1)
    rows = steps(model, plain, fast, ids, [tuning], options.repeats)
    context = ids.shape[1] + sum(LENGTHS) // 2
    read = read_bytes(fast, context)
    for row in rows:
        if row["system"] == PLAIN:
            row |= common.floors(read, speeds, row["ms"])
        more = f", accept length {row['accept_length']:.2f} (random weights)" if "accept_length" in row else ""
        print(f"  a token of {row['system']}: {row['ms']:.3f} ms{more}", flush=True)
    return rows


def wrapping(fast, weights: int) -> dict[str, int]:
    """The peak of the GPU's memory since the model was built, and the bytes of its weights and of the cache."""
    peak = torch.cuda.max_memory_allocated()
    cache = sum(buffer.nbytes for buffer in fast.speculation.engine.session(1).state.kv.buffers())
    print(
        f"  peak of wrapping {peak / 1e9:.2f} GB: weights {weights / 1e9:.2f}, cache {cache / 1e9:.2f}, "
        f"{peak / (weights + cache):.3f} times both", flush=True,
    )  # fmt: skip
    return {"peak_bytes": peak, "weight_bytes": weights, "cache_bytes": cache}


def measure(name: str, options) -> dict:
    """The parts that `options` asks for of one shape, each a row or a list of rows; and the speed of memory."""
    gc.collect()
    model = build(name)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    begin, weights = time.perf_counter(), stored_bytes(model)
    longest = max(options.contexts + options.prompts)
    fast = spec_compile.speculate(model, num_draft_tokens=max(options.sizes), max_cache_len=longest + 1024)
    fast.speculation.warmup(progress=lambda line: print(f"  {time.perf_counter() - begin:5.1f} s: {line}", flush=True))
    ready = time.perf_counter() - begin
    if options.warm:
        return {"ready_warm": {"seconds": ready}}
    print(f"\n{name}: {weight_bytes(model) / 1e9:.2f} GB of weights read a round, ready after {ready:.1f} s")
    result = {"ready": {"seconds": ready, "weight_bytes": weight_bytes(model)}, "wrapping": wrapping(fast, weights)}
    speeds = bandwidth()
    print(", ".join(f"{name} {speed / 1e12:.2f} TB/s" for name, speed in speeds.items()))
    result["bandwidth"] = speeds
    result["rounds"] = round_rows(fast, options.batches, options.contexts, options.sizes, speeds)
    if options.baselines:
        plain = spec_compile.speculate(model, num_draft_tokens=1, max_cache_len=4096, check=False)
        plain.speculation.warmup()
        result["loop"] = loop(plain, text_tokens(1024, model.config.vocab_size)[None].to(model.device), LENGTHS[1])
        print("  loop of plain steps: " + ", ".join(f"{name} {value:.2f}" for name, value in result["loop"].items()))
    result["memory"] = {"peak_bytes": torch.cuda.max_memory_allocated()}
    if options.prompts:
        result["prompts"] = prompts(fast, model, options.prompts)
    if options.drafts is not None and name in drafts.DRAFTS:
        read = read_bytes(fast, 1024)
        result["drafts"] = drafts.measure(name, options.drafts, model, read, speeds, rounds)
    if options.baselines:  # last, because it drops all compiled code
        result["steps"] = step_rows(model, fast, plain, options, speeds)
    return result


def demo_loop() -> dict:
    """The loop of rounds with n-gram drafts on the demo model; its text, an answer to a question, hardly repeats."""
    tokenizer = AutoTokenizer.from_pretrained(common.DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(common.DEMO_MODEL, dtype=torch.bfloat16).cuda().eval()
    fast = spec_compile.speculate(model)
    fast.speculation.warmup()
    return loop(fast, common.prompts_of("chat", common.PROMPTS, 1, tokenizer, 1024)[0].cuda(), LENGTHS[1])


KEYS = {
    "rounds": ("batch", "context", "nodes"),
    "steps": ("system",),
    "prompts": ("tokens",),
    "drafts": ("name",),
}
"""Parts that are lists of rows -> the fields that tell their rows apart."""


def merged(before: dict, result: dict, stamped: dict) -> dict:
    """The parts of a shape after a run: its own with the stamp, and the others of earlier runs."""
    after = dict(before)
    for part, rows in result.items():
        if part in KEYS:
            rows = [{**row, "stamp": stamped} for row in rows]
            after[part] = common.merge_rows(before.get(part, []), rows, KEYS[part])
        else:
            after[part] = {**rows, "stamp": stamped}
    return after


def main() -> None:
    parser = common.command_line(__doc__, results="gpu.json")
    parser.add_argument("--shapes", nargs="*", default=list(DENSE), choices=list(SHAPES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[], help="also the speed of prompts of these lengths")
    parser.add_argument("--baselines", action="store_true", help="also a token of generate(), transformers' and ours")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each length of --baselines, in turn")
    parser.add_argument(
        "--drafts", nargs="*", help="also draft heads and models, or only those named (see rounds/drafts.py)"
    )
    parser.add_argument("--warm", action="store_true", help="only the seconds until ready, for a second process")
    parser.add_argument("--demo", action="store_true", help="also the loop of the demo model's rounds")
    options = parser.parse_args()
    if (options.baselines or options.prompts) and {*options.shapes} & {*QUANTISED}:
        parser.error("--baselines, --prompts: transformers cannot run quantised shapes without their libraries")
    stamped = common.stamp(torch.device("cuda"))
    print(torch.cuda.get_device_name())
    report = json.loads(options.json.read_text()) if options.json.exists() else {}
    shapes = report.setdefault("shapes", {})
    for name in options.shapes:
        shapes[name] = merged(shapes.get(name, {}), measure(name, options), stamped)
        common.write_json(options.json, report)
    if options.demo:
        report["demo_loop"] = {**demo_loop(), "stamp": stamped}
    common.write_json(options.json, report)


if __name__ == "__main__":
    main()
