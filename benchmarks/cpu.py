"""Tokens a second on a CPU: HF greedy, HF prompt lookup, ours without drafts, ours with n-gram drafts.

    python -m benchmarks.cpu [--threads 2] [--prompts 10] [--new-tokens 128] [--repeats 3] [--json FILE]
    python -m benchmarks.cpu --model FOLDER --as-chat [--dtype bfloat16] --folder FOLDER --workloads NAME ...

All four answer every prompt in turn, in one process, --repeats times; a figure is the median over the repeats of (all
tokens of a workload) / (all seconds). The trie is emptied before every answer, so that only the prompt is known.
Transformers' prompt lookup has the fastest of its settings (--lookup-tokens; n-grams of 2 or 3) on prompts of the
workload that are not measured. "random" prompts are uniformly random token ids. The floor is the time to read the
weights. In bfloat16 answers may differ at two nearly equal logits; in float32 they must not. After that, the prompts of
one workload are answered in batches of 1, 2, 4 and 8 rows, and sampled one by one.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from benchmarks import common

WORKLOADS = ("code_editing", "bug_fixing", "code_completion", "maths", "chat", "random")
TUNING = 2
"""Prompts of each workload that choose the setting of prompt lookup."""
console = Console(stderr=True)


def batches(model, fast, tokenizer, texts: list[str], sizes: list[int], fixed: dict, repeats: int) -> dict:
    """Tokens a second of HF greedy and ours for the same prompts, in left-padded batches of each size."""
    tokenizer.padding_side = "left"
    rates = {}
    for size in sizes:
        fast.speculation.warmup(size)
        groups = [texts[first : first + size] for first in range(0, len(texts) - size + 1, size)]
        shape = dict(return_tensors="pt", padding=True, truncation=True, max_length=512)
        inputs = [tokenizer(group, **shape) for group in groups]
        seconds = {"HF greedy": [0.0] * repeats, "ours, n-gram": [0.0] * repeats}
        tokens = identical = 0
        for repeat in range(repeats):
            for group in inputs:
                outputs = []
                for name, system in (("HF greedy", model), ("ours, n-gram", fast)):
                    fast.speculation.ngram.reset()
                    output, spent = common.elapsed(partial(system.generate, **group, **fixed), model.device)
                    outputs.append(output)
                    seconds[name][repeat] += spent
                if repeat == 0:
                    width = group.input_ids.shape[1]
                    tokens += int((outputs[0][:, width:] != fixed["pad_token_id"]).sum())
                    identical += torch.equal(*outputs)
        rates[size] = {name: statistics.median(tokens / s for s in times) for name, times in seconds.items()}
        rates[size]["identical"] = [identical, len(inputs)]
        console.print(f"batch {size}: " + ", ".join(f"{name} {rate}" for name, rate in rates[size].items()))
    return rates


def workload_rows(
    model, ours: dict, prompts: tuple[list, list], fixed: dict, repeats: int,
    lookups: list[dict] = common.LOOKUPS,
) -> tuple[dict, int]:  # fmt: skip
    """Figures of one workload, and the number of prompts whose answers of ours all equal HF greedy.

    ours: name -> wrapped model
    prompts: to measure, and to choose one of `lookups`, the settings of prompt lookup
    """
    lookup, tried = common.best_lookup(model, prompts[1], fixed, lookups)
    systems = {
        "HF greedy": partial(model.generate, **fixed),
        common.LOOKUP: partial(model.generate, **fixed, **lookup),
        **{name: partial(wrapped.generate, **fixed) for name, wrapped in ours.items()},
    }
    answers, rates = common.answer_in_turn(systems, ours, prompts[0], repeats)
    identical = 0
    for greedy, *others in zip(answers["HF greedy"], *(answers[name] for name in ours)):
        identical += all(torch.equal(greedy, other) for other in others)
    stats = ours["ours, n-gram"].speculation.stats
    row = {
        "tokens": sum(map(len, answers["HF greedy"])), "prompts": len(prompts[0]), "tokens_per_second": rates,
        "accept_length": stats.accept_length, "nodes": dict(stats.nodes), "seconds": dict(stats.seconds),
        "lookup": lookup, "tried": tried, "identical": identical,
    }  # fmt: skip
    return row, identical


def sampled(model, fast, prompts: list[torch.Tensor], fixed: dict, settings: dict, repeats: int) -> dict:
    """Tokens a second with sampling."""
    fast.speculation.warmup(do_sample=True)
    seconds, tokens = {"HF sampling": [0.0] * repeats, "ours, n-gram": [0.0] * repeats}, {}
    for repeat in range(repeats):
        for name, system in (("HF sampling", model), ("ours, n-gram", fast)):
            count = 0
            for number, ids in enumerate(prompts):
                fast.speculation.ngram.reset()
                torch.manual_seed(number)
                options = {**fixed, "do_sample": True, **settings}
                out, spent = common.elapsed(partial(system.generate, ids, **options), model.device)
                seconds[name][repeat] += spent
                count += out.shape[1] - ids.shape[1]
            tokens[name] = count
    return {name: statistics.median(tokens[name] / s for s in times) for name, times in seconds.items()}


def main() -> None:
    parser = common.command_line(__doc__, results="cpu.json", threads=2)
    parser.add_argument("--model", default=str(common.DEMO_MODEL))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--as-chat", action="store_true", help="prompts in the form of the tokenizer's chat template")
    parser.add_argument(
        "--lookup-tokens", type=int, nargs="+", default=[10, 16, 24], help="of prompt lookup; all are tried"
    )
    parser.add_argument("--prompts", type=int, default=10, help="first prompts of each workload")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), help="names of JSON-lines files in --folder")
    parser.add_argument("--folder", type=Path, default=common.PROMPTS)
    parser.add_argument("--num-draft-tokens", type=int, default=16)
    parser.add_argument(
        "--batches", type=int, nargs="*", default=[1, 2, 4, 8], help="rows of batches of code_completion"
    )
    parser.add_argument("--sampling", action=argparse.BooleanOptionalAction, default=True, help="also sampled answers")
    options = parser.parse_args()
    common.pin(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()

    begin = time.perf_counter()
    plain = spec_compile.speculate(model, algo="ngram", num_draft_tokens=1)
    fast = spec_compile.speculate(model, algo="ngram", num_draft_tokens=options.num_draft_tokens)
    for name, wrapped in (("without drafts", plain), ("n-gram", fast)):
        wrapped.speculation.warmup(progress=lambda line, name=name: console.print(f"[dim]{name}: {line}"))
    ready = time.perf_counter() - begin

    fixed = dict(do_sample=False, max_new_tokens=options.new_tokens, pad_token_id=tokenizer.pad_token_id)
    ours = {"ours, no drafts": plain, "ours, n-gram": fast}
    bandwidth = common.read_bandwidth()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    longest = model.config.max_position_embeddings - options.new_tokens
    lookups = [
        dict(prompt_lookup_num_tokens=tokens, max_matching_ngram_size=size)
        for tokens in options.lookup_tokens for size in (2, 3)
    ]  # fmt: skip
    results, identical, answers, facts = {}, 0, 0, common.stamp()
    for workload in options.workloads:
        prompts = common.split_prompts(
            workload, options.folder, options.prompts, TUNING, tokenizer, longest, options.as_chat
        )  # fmt: skip
        row, same = workload_rows(model, ours, prompts, fixed, options.repeats, lookups)
        results[workload], rates = {**row, "stamp": facts}, row["tokens_per_second"]
        identical, answers = identical + same, answers + len(prompts[0])
        if same < len(prompts[0]):
            console.print(f"[red]{workload}: {len(prompts[0]) - same} answers differ from HF greedy")
        console.print(f"{workload}: " + ", ".join(f"{name} {rate:.0f}/s" for name, rate in rates.items()))

    texts = common.read_prompts(common.PROMPTS / "code_completion.jsonl", 16) if options.batches else []
    batch_rates = batches(model, fast, tokenizer, texts, options.batches, fixed, options.repeats)
    settings = dict(temperature=0.7, top_p=0.9, top_k=50)
    few = common.prompts_of(options.workloads[0], options.folder, options.prompts, tokenizer, longest, options.as_chat)
    sampling_rates = sampled(model, fast, few, fixed, settings, options.repeats) if options.sampling else {}

    title = f"tokens/s, {options.new_tokens} new tokens, batch 1, {options.dtype}, {options.threads} threads"
    cells = []
    for workload, result in results.items():
        rates = result["tokens_per_second"]
        ratios = (f"{rates['ours, n-gram'] / rates[name]:.2f}×" for name in ("HF greedy", common.LOOKUP))
        speeds = (f"{rate:.0f}" for rate in rates.values())
        cells.append((workload, *speeds, f"{result['accept_length']:.2f}", *ratios))
    common.show(("workload", *rates, "accept length", "vs HF greedy", "vs HF lookup"), cells, title)
    for size, rates in batch_rates.items():
        print(f"batch of {size}: " + ", ".join(f"{name} {rates[name]:.0f}/s" for name in ("HF greedy", "ours, n-gram")))
    print(f"{options.workloads[0]}, {settings}: " + ", ".join(f"{n} {r:.0f}/s" for n, r in sampling_rates.items()))
    floor = weights / bandwidth
    print(f"floor of a plain step: {floor * 1e3:.2f} ms ({weights / 1e6:.1f} MB, {bandwidth / 1e9:.1f} GB/s)")
    print(f"identical to HF greedy: {identical} of {answers} answers; ready (capture and compile) after {ready:.1f} s")
    settings |= {"workload": options.workloads[0]}
    report = {
        "machine": {"ready_seconds": ready, "read_bandwidth": bandwidth, "weight_bytes": weights, "stamp": facts},
        "workloads": results,
        "batches": {size: {**rates, "stamp": facts} for size, rates in batch_rates.items()},
        "sampling": {**settings, **sampling_rates, "stamp": facts},
    }
    common.write_json(options.json, report)
    if options.dtype == "float32" and identical != answers:
        sys.exit(1)


if __name__ == "__main__":
    main()
