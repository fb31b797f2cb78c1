"""Rounds on a GPU against the byte floor, and a token of generate() against transformers: shapes with random weights.

    python benchmarks/gpu.py [--shapes llama-8b qwen3-8b llama-1b qwen3-0.6b smollm2-135m] [--contexts 1024 8192 32768]
                             [--batches 1 4 8] [--prompts 8192 32768] [--baselines] [--drafts [NAME ...]] [--demo]
                             [--json FILE]

Two kinds of times, that are not to be mixed:
"rounds" are replays of the captured graph of one round, without the host, beside the floor: the time in which the bytes
it must read (weights once, keys and values of the context once) pass at the speed of a large copy, or of a large read.
"steps" (--baselines) are tokens of generate(), the host included, of transformers' own ways and of ours alike: the
difference of the times of two lengths by that of the tokens, medians of at least three runs in turn (see steps.py).

Prompts are tokens of real text (benchmarks/prompts), and the trees of n-gram rounds have all nodes and the form of one
proposed there. Since the weights are random, what is accepted is not meaningful:
the figure of ours to compare is that of plain steps, and that with drafts is given with its accept length. "simulated"
rates are an accept length that is assumed, not measured, by the time of a round. Of mixtures, the nodes of a round are
unlike tokens, and the floor counts the experts that they choose, which are printed beside those expected of choices
that are independent. Nodes of real text have more experts in common. "wrapping" is the peak of memory from the built
model until warm-up ends, beside the bytes of weights and cache: measure each shape in a process of its own, or the last
one's rest may count.
"loop" is how much longer a round takes in generate() than its graph alone: over plain steps, where nothing is drafted
and text that repeats itself changes nothing, and with --demo over rounds with drafts on real text; both say how many
rounds.
Rows of earlier runs that this one does not measure stay in the file, with their own stamps. Several runs may share a
GPU, each with a file of its own, if the environment variable BENCHMARK_TURNS names one file for all: they build and
compile side by side, and what is timed runs alone.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from functools import partial
from pathlib import Path

import drafts
import torch
from common import DEMO_MODEL, HERE, RESULTS, floors, merge_rows, prompts_of, stamp, write_json
from kernel_families import families
from quantised_shapes import QUANTISED
from rounds import rounds
from shapes import DENSE, SHAPES, build, distinct_experts, read_bytes, stored_bytes, text_tokens, weight_bytes
from steps import LENGTHS, PLAIN, steps
from timers import alone, bandwidth, call_ms
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from spec_compile.runtime.prefill_chunks import FIXED, chunks

DRAFT_MODEL = "llama-1b"
"""The shape of draft models."""
SIMULATED = 3.0
"""Accept length assumed for the simulated rates."""


def loop(fast, ids: torch.Tensor, new: int) -> dict[str, float]:
    """How much longer a round takes in generate() than its captured graph alone, and what is launched and awaited.

    The time of a round's graph is that of its size at this context.
    """
    from torch.profiler import ProfilerActivity, profile

    def generate():
        fast.speculation.ngram.reset()  # an answer that is known already would be accepted whole
        fast.generate(ids, max_new_tokens=new, do_sample=False)

    generate()
    stats = fast.speculation.stats
    alone = rounds(fast, ids.shape[1] + new // 2, 1, list(fast.speculation.engine.runtime.sizes))
    gap = []
    for _ in range(5):
        stats.reset()
        generate()
        seconds = stats.seconds["verify"] + stats.seconds["host"]
        graphs = sum(count * alone[size] for size, count in stats.nodes.items()) / 1e3
        gap.append((seconds - graphs) / stats.rounds)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        stats.reset()
        generate()
    names = [event.name for event in seen.events()]
    session = fast.speculation.engine.session(1)
    steps = chunks(ids.shape[1] - 1, session.steps.prefill_sizes, FIXED["cuda"])
    prompt = sum(session._prefill_key(size) > 0 for size in steps)  # those that are captured
    return {
        "gap_us": statistics.median(gap) * 1e6,
        "graph_launches_per_round": (sum("GraphLaunch" in name for name in names) - prompt) / stats.rounds,
        "synchronisations_per_call": sum("Synchronize" in name for name in names),
        "rounds": stats.rounds,
        "accept_length": stats.accept_length,
    }


def prompts(fast, model, lengths: list[int]) -> list[dict[str, float]]:
    """Tokens a second of prompts of these lengths, the first new token included, here and in transformers, in turn."""
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
    """A row for each batch, context and size: the captured graph of a round alone, beside the floors."""
    rows = []
    for batch, context in itertools.product(batches, contexts):
        if batch > 1 and context > 8192:
            continue
        counts: dict[int, list[int]] = {}
        for nodes, ms in rounds(fast, context, batch, sizes, counts=counts).items():
            count = statistics.mean(counts[nodes]) if nodes in counts else None
            read = read_bytes(fast, context, batch, nodes, count)
            row = dict(batch=batch, context=context, nodes=nodes, ms=ms, **floors(read, speeds, ms))
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
    """A token of generate(), of transformers' ways and of ours (see steps.py), at a context of about 1,024."""
    ids, tuning = text_tokens(2048, model.config.vocab_size)[None].to(model.device).split(1024, dim=1)
    rows = steps(model, plain, fast, ids, [tuning], options.repeats)
    context = ids.shape[1] + sum(LENGTHS) // 2
    read = read_bytes(fast, context)
    for row in rows:
        if row["system"] == PLAIN:
            row |= floors(read, speeds, row["ms"])
        more = f", accept length {row['accept_length']:.2f} (random weights)" if "accept_length" in row else ""
        print(f"  a token of {row['system']}: {row['ms']:.3f} ms{more}", flush=True)
    return rows


def wrapping(fast, weights: int) -> dict[str, int]:
    """The peak of the GPU's memory since the model was built, beside the bytes of its weights then and of the cache."""
    peak = torch.cuda.max_memory_allocated()
    cache = sum(buffer.nbytes for buffer in fast.speculation.engine.session(1).state.kv.buffers())
    print(
        f"  peak of wrapping {peak / 1e9:.2f} GB: weights {weights / 1e9:.2f}, cache {cache / 1e9:.2f}, "
        f"{peak / (weights + cache):.3f} times both", flush=True,
    )  # fmt: skip
    return {"peak_bytes": peak, "weight_bytes": weights, "cache_bytes": cache}


def measure(name: str, options) -> dict:
    """All that `options` asks for of one shape: parts, each a row or a list of rows; and the speed of memory."""
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
    with alone():
        speeds = bandwidth()
    print(", ".join(f"{name} {speed / 1e12:.2f} TB/s" for name, speed in speeds.items()))
    result["bandwidth"] = speeds
    result["rounds"] = round_rows(fast, options.batches, options.contexts, options.sizes, speeds)
    for nodes in sorted({1, 16, max(options.sizes)} & set(options.sizes)) if options.families else []:
        rounds(fast, 1024, 1, [nodes], 3)
        with alone():
            spent, kernels = families(fast, nodes)
        result.setdefault("families", []).append({"nodes": nodes, "kernels": kernels, "microseconds": spent})
        print(f"  N={nodes}: {kernels} kernels; " + ", ".join(f"{f} {us:.0f} us" for f, us in spent.items()))
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
        result["drafts"] = drafts.measure(name, options.drafts, model, SHAPES[DRAFT_MODEL][1], read, speeds, rounds)
    if options.baselines:  # last, as it drops all that torch.compile has made
        result["steps"] = step_rows(model, fast, plain, options, speeds)
    return result


def demo_loop() -> dict:
    """The loop of rounds with n-gram drafts, of the demo model: its text, an answer to a question, hardly repeats."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16).cuda().eval()
    fast = spec_compile.speculate(model)
    fast.speculation.warmup()
    return loop(fast, prompts_of("chat", HERE / "prompts", 1, tokenizer, 1024)[0].cuda(), LENGTHS[1])


KEYS = {
    "rounds": ("batch", "context", "nodes"),
    "steps": ("system",),
    "families": ("nodes",),
    "prompts": ("tokens",),
    "drafts": ("name",),
}
"""Parts that are lists of rows, and what a row is known by."""


def merged(before: dict, result: dict, stamped: dict) -> dict:
    """The parts of a shape after a run: its own with the stamp, and those of earlier runs that it did not measure."""
    after = dict(before)
    for part, rows in result.items():
        if part in KEYS:
            rows = [{**row, "stamp": stamped} for row in rows]
            after[part] = merge_rows(before.get(part, []), rows, KEYS[part])
        else:
            after[part] = {**rows, "stamp": stamped}
    return after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(DENSE), choices=list(SHAPES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[], help="also the speed of prompts of these lengths")
    parser.add_argument("--baselines", action="store_true", help="also a token of generate(), transformers' and ours")
    parser.add_argument("--repeats", type=int, default=3, help="of each length of --baselines, in turn")
    parser.add_argument("--families", action="store_true", help="also what each family of kernels takes in a round")
    parser.add_argument("--drafts", nargs="*", help="also draft heads and models, or those named (see drafts.py)")
    parser.add_argument("--warm", action="store_true", help="only the seconds until ready, in a second process")
    parser.add_argument("--demo", action="store_true", help="also the loop of the demo model's rounds")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json")
    options = parser.parse_args()
    if (options.baselines or options.prompts) and {*options.shapes} & {*QUANTISED}:
        parser.error("--baselines, --prompts: transformers cannot run quantised shapes without their libraries")
    stamped = stamp(torch.device("cuda"))
    print(torch.cuda.get_device_name())
    report = json.loads(options.json.read_text()) if options.json.exists() else {}
    shapes = report.setdefault("shapes", {})
    for name in options.shapes:
        shapes[name] = merged(shapes.get(name, {}), measure(name, options), stamped)
        write_json(options.json, report)
    if options.demo:
        report["demo_loop"] = {**demo_loop(), "stamp": stamped}
    write_json(options.json, report)


if __name__ == "__main__":
    main()
