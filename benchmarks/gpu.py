"""Rounds on a GPU against the byte floor, and against transformers: for model shapes with random weights.

    python benchmarks/gpu.py [--shapes llama-8b qwen3-8b llama-1b qwen3-0.6b] [--contexts 1024 8192 32768]
                             [--batches 1 4 8] [--prompts 8192 32768] [--baselines] [--drafts] [--demo] [--json FILE]

The floor of a round is the time in which the bytes it must read (weights once, keys and values of the context once)
pass at the bandwidth that a large copy reaches here. Prompts are tokens of real text (benchmarks/prompts); since
the weights are random, what is accepted is not meaningful and nothing is reported of it, except for the
demo model (--demo), whose acceptance is real. "simulated" rates are 1 / (time of a round) times an accept length that
is assumed, not measured.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import drafts
import torch
from common import DEMO_MODEL, HERE, machine, read_prompts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import spec_compile
from spec_compile.runtime.chunks import FIXED, chunks

LLAMA_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                  original_max_position_embeddings=8192)  # fmt: skip
SHAPES = {
    "llama-8b": ("llama", dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, vocab_size=128256,
                               num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
                               rope_parameters=dict(rope_theta=500000.0, **LLAMA_ROPE))),
    "qwen3-8b": ("qwen3", dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, vocab_size=151936,
                               num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                               max_position_embeddings=40960,
                               rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "llama-1b": ("llama", dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, vocab_size=128256,
                               num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
                               max_position_embeddings=131072,
                               rope_parameters=dict(rope_theta=500000.0, **{**LLAMA_ROPE, "factor": 32.0}))),
    "qwen3-0.6b": ("qwen3", dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, vocab_size=151936,
                                 num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                                 tie_word_embeddings=True, max_position_embeddings=40960,
                                 rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
}  # fmt: skip
FAMILIES = {
    "norms": ("rsqrt", "rms_norm"),
    "attention": ("_attention", "_merge"),
    "matrix products": ("skinny", "gemm", "cutlass", "nvjet", "splitk", "gemv", "cublas"),
    "rotary embedding, activations": ("triton_poi", "triton_red", "triton_per"),
    "n-gram": ("ngram",),
    "compaction": ("compact",),
    "copies and fills": ("memcpy", "memset", "elementwise"),
}
DRAFT_MODEL = "llama-1b"
"""The shape of draft models."""
SIMULATED = 3.0
"""Accept length assumed for the simulated rates."""


def build(name: str) -> torch.nn.Module:
    """A model of the named shape with small random weights, in bfloat16 on the GPU."""
    kind, sizes = SHAPES[name]
    config = AutoConfig.for_model(kind, **sizes)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def bandwidth() -> dict[str, float]:
    """Bytes a second of a large read and of a large copy (read plus written)."""
    data, other = torch.empty(2, 1 << 32, dtype=torch.uint8, device="cuda")
    read = median_ms(lambda: data.view(torch.int64).max(), 10)
    copy = median_ms(lambda: other.copy_(data), 10)
    return {"read": data.numel() / read * 1e3, "copy": 2 * data.numel() / copy * 1e3}


def median_ms(function, repeats: int, warm: int = 3) -> float:
    """Milliseconds of a call on the GPU, between events."""
    for _ in range(warm):
        function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def text_tokens(count: int, vocab: int) -> torch.Tensor:
    """Tokens of the benchmark's own prompts, by the demo model's tokenizer, end to end."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    texts = "\n".join(text for file in sorted((HERE / "prompts").glob("*.jsonl")) for text in read_prompts(file, 100))
    ids = torch.tensor(tokenizer(texts, verbose=False).input_ids)
    return ids.repeat(-(-count // len(ids)))[:count] % vocab


def rounds(fast, context: int, batch: int, sizes: list[int], repeats: int = 30) -> dict[int, float]:
    """Median milliseconds of a captured round at each size, with `context` tokens committed in every row."""
    speculation = fast.speculation
    engine = speculation._engine
    session = engine.session(batch)
    state = session.state
    ids = text_tokens(context, engine.verify.vocab_size).tolist()
    out = {}
    for nodes in sizes:
        with torch.no_grad():
            step = session.step("round", nodes)
            state.reset([ids] * batch, [0] * batch, [state.capacity - 1000] * batch, [])
            session.drafter.begin(state, [ids] * batch, [])
            state.lengths.copy_(state.prompt_lengths - 1)
            state.root()
            session.drafter.propose(state, 128)
            out[nodes] = median_ms(lambda step=step: step(128), repeats)
            session.drafter.end([])
    return out


def families(fast, nodes: int, repeats: int = 5) -> tuple[dict[str, float], int]:
    """Microseconds of each kernel family in one round, and the number of kernels.

    Kernels may begin before the last one ends and wait there, so each counts from the end of the one before to its own.
    """
    from torch.profiler import ProfilerActivity, profile

    step = fast.speculation._engine.session(1).step("round", nodes)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            step(128)
        torch.cuda.synchronize()
    spent = defaultdict(float)
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.device_time > 0]
    events.sort(key=lambda event: event.time_range.end)
    last = events[0].time_range.start
    for event in events:
        name = event.name.lower()
        family = next((f for f, words in FAMILIES.items() if any(w in name for w in words)), "all the rest")
        spent[family] += (event.time_range.end - last) / repeats
        last = event.time_range.end
    return dict(spent), len(events) // repeats


def loop(fast, ids: torch.Tensor, new: int) -> dict[str, float]:
    """How much longer a round takes in generate() than its captured graph alone, and what is launched and awaited.

    The time of a round's graph is that of its size at this context; random weights accept next to nothing.
    """
    from torch.profiler import ProfilerActivity, profile

    def generate():
        fast.generate(ids, max_new_tokens=new, do_sample=False)

    generate()
    stats = fast.speculation.stats
    alone = rounds(fast, ids.shape[1] + new // 2, 1, list(fast.speculation._engine.sizes))
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
    session = fast.speculation._engine.session(1)
    steps = chunks(ids.shape[1] - 1, session.prefill_sizes, FIXED["cuda"])
    prompt = sum(session._prefill_key(size) > 0 for size in steps)  # those that are captured
    return {
        "gap_us": statistics.median(gap) * 1e6,
        "graph_launches_per_round": (sum("GraphLaunch" in name for name in names) - prompt) / stats.rounds,
        "synchronisations_per_call": sum("Synchronize" in name for name in names),
        "rounds": stats.rounds,
    }


def baselines(model, ids: torch.Tensor, new: int) -> dict[str, float]:
    """Milliseconds a token of transformers' own ways."""
    def per_token(count=new, **options):
        def run():
            return model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count, **options)

        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out = run()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / (out.shape[1] - ids.shape[1]) * 1e3

    out = {"HF eager": per_token(), "HF prompt lookup": per_token(prompt_lookup_num_tokens=10)}
    begin = time.perf_counter()
    out["HF static + compile"] = per_token(cache_implementation="static")
    out["HF static + compile, seconds to the first"] = time.perf_counter() - begin
    torch._dynamo.reset()
    return out


def prompts(fast, model, lengths: list[int]) -> list[dict[str, float]]:
    """Tokens a second of prompts of these lengths, the first new token included, here and in transformers."""
    rows = []
    for length in lengths:
        ids, row = text_tokens(length, model.config.vocab_size)[None].cuda(), {"tokens": length}
        for name, system in (("ours", fast), ("HF", model)):
            repeats = 3 if length <= 32768 else 1
            call = partial(system.generate, ids, max_new_tokens=1, do_sample=False)
            ms = median_ms(call, repeats, repeats - 1)
            row[name] = length / ms * 1e3
        rows.append(row)
        print(f"  prompt of {length}: {row['ours']:.0f} tokens/s, HF {row['HF']:.0f}", flush=True)
    return rows


def measure(name: str, options, speeds: dict[str, float]) -> dict:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(name)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if not model.config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel() * 2  # only rows of it are read
    begin = time.perf_counter()
    longest = max(options.contexts + options.prompts)
    fast = spec_compile.speculate(model, num_draft_tokens=max(options.sizes), max_cache_len=longest + 1024)
    fast.speculation.warmup(progress=lambda line: print(f"  {time.perf_counter() - begin:5.1f} s: {line}", flush=True))
    ready = time.perf_counter() - begin
    if options.warm:
        return {"ready_warm_seconds": ready}
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 * 2
    result = {"weight_bytes": weights, "ready_seconds": ready, "rounds": []}
    print(f"\n{name}: {weights / 1e9:.2f} GB of weights read a round, ready after {ready:.1f} s")
    for batch in options.batches:
        for context in options.contexts:
            if batch > 1 and context > 8192:
                continue
            floor = (weights + token_bytes * context * batch) / speeds["copy"] * 1e3
            for nodes, ms in rounds(fast, context, batch, options.sizes).items():
                row = dict(batch=batch, context=context, nodes=nodes, ms=ms, floor_ms=floor, ratio=ms / floor)
                result["rounds"].append(row)
                simulated = batch * SIMULATED / ms * 1e3
                print(
                    f"  B={batch} context {context:6} N={nodes:2}: {ms:7.3f} ms, floor {floor:.3f}: {ms / floor:.2f}; "
                    f"{simulated:.0f} tokens/s at a simulated accept length of {SIMULATED}", flush=True,
                )  # fmt: skip
    for nodes in sorted({1, 16, max(options.sizes)} & set(options.sizes)):
        rounds(fast, 1024, 1, [nodes], 3)
        spent, kernels = families(fast, nodes)
        result.setdefault("families", {})[nodes] = {"kernels": kernels, **spent}
        print(f"  N={nodes}: {kernels} kernels; " + ", ".join(f"{f} {us:.0f} us" for f, us in spent.items()))
    ids = text_tokens(1024, config.vocab_size)[None].cuda()
    result["loop"] = loop(fast, ids, 64)
    print("  loop: " + ", ".join(f"{k} {v:.2f}" for k, v in result["loop"].items()))
    result["peak_bytes"] = torch.cuda.max_memory_allocated()
    if options.prompts:
        result["prompts"] = prompts(fast, model, options.prompts)
    if options.drafts and name in drafts.DRAFTS:
        read = weights + token_bytes * 1024
        result["drafts"] = drafts.measure(name, model, SHAPES[DRAFT_MODEL][1], read, speeds["copy"], rounds)
    if options.baselines:
        result["baselines"] = baselines(model, ids, 64)
        print("  " + ", ".join(f"{k} {v:.2f}" for k, v in result["baselines"].items()), flush=True)
    return result


def demo(options) -> dict:
    """Real acceptance: the demo model on code editing prompts, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).cuda().eval()
    fast = spec_compile.speculate(model)
    fast.speculation.warmup()
    fixed = dict(do_sample=False, max_new_tokens=128, pad_token_id=0)
    lookup = dict(prompt_lookup_num_tokens=10)
    systems = {"HF greedy": (model, {}), "HF prompt lookup": (model, lookup), "ours": (fast, {})}
    seconds, same, tokens = defaultdict(float), 0, 0
    texts = read_prompts(HERE / "prompts" / "code_editing.jsonl", 10)
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, -1900:].cuda()
        outputs = {}
        for name, (system, more) in systems.items():
            system.generate(ids, **{**fixed, "max_new_tokens": 4}, **more)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            outputs[name] = system.generate(ids, **fixed, **more)
            torch.cuda.synchronize()
            seconds[name] += time.perf_counter() - begin
        tokens += outputs["ours"].shape[1] - ids.shape[1]
        same += torch.equal(outputs["ours"], outputs["HF greedy"])
    stats = fast.speculation.stats
    result = {name: tokens / s for name, s in seconds.items()}
    result |= {"identical": [same, len(texts)], "accept_length": stats.accept_length, "nodes": stats.nodes}
    print("\ndemo model, code editing, tokens/s:", result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[], help="also the speed of prompts of these lengths")
    parser.add_argument("--baselines", action="store_true", help="also transformers' own ways, which take a while")
    parser.add_argument("--drafts", action="store_true", help="also draft heads and models (see drafts.py)")
    parser.add_argument("--warm", action="store_true", help="only the seconds until ready, in a second process")
    parser.add_argument("--demo", action="store_true", help="also the demo model, with real acceptance")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "gpu.json")
    options = parser.parse_args()
    speeds = bandwidth()
    print(torch.cuda.get_device_name(), ", ".join(f"{k} {v / 1e12:.2f} TB/s" for k, v in speeds.items()))
    report = json.loads(options.json.read_text()) if options.json.exists() else {"shapes": {}}
    report |= {"machine": machine(torch.device("cuda")), "bandwidth": speeds}
    for name in options.shapes:
        found = measure(name, options, speeds)
        known = report["shapes"].get(name, {})
        if "rounds" in found:  # those of other contexts are kept
            rows = {(r["batch"], r["context"], r["nodes"]): r for r in known.get("rounds", []) + found["rounds"]}
            found["rounds"] = list(rows.values())
        commands = known.get("commands", {}) | dict.fromkeys(found, " ".join(sys.argv))
        report["shapes"][name] = {**known, **found, "commands": commands}  # parts not run: kept
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.demo:
        report["demo"] = demo(options)
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
