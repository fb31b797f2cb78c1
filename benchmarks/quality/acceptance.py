"""Every way of drafting on real prompts: accept length and tokens a second, against transformers' own ways.

    python -m benchmarks.quality.acceptance [--device cuda] [--dtype bfloat16] [--draft-model FOLDER]
        [--algos eagle3 dflash] [--model FOLDER] [--heads FOLDER] [--trained-on FILE ...] [--as-chat]
        [--systems NAME ...] [--workloads docstrings] [--folder DIR] [--prompts 8] [--repeats 3] [--json FILE]

Greedy, one prompt at a time. All systems answer every prompt in turn, in one process, --repeats times; a rate is the
median over the repeats of (all tokens of a workload) / (all seconds of generate(), prompts included). All systems are
compiled and called before; the trie is emptied before every answer. Transformers' prompt lookup has the fastest of six
settings (10, 16, 24 tokens; n-grams of 2 or 3) on prompts of the workload that are not measured. Transformers has
neither prompt lookup nor assistants for models that keep recurrent states.

Accept length: tokens a round, the target's own included. By depth: the share of the rounds with drafts at depth 1, 2,
3 and 4 that accepted one there. First token: the time until generate() returns one, prompt and call included. A token:
the time of each further one; its inverse is the output tokens a second of a user.

Systems whose head is not in --heads or whose options this version lacks are left out, unless --systems names them.
Prompts that occur in a file of --trained-on are refused.

Answers are compared with HF greedy, token for token. In float32 a difference fails the run. In bfloat16 two nearly
equal logits may swap, so every answer that differs is audited, and the run fails only if it is no near-tie.

Rows of systems and workloads that a run leaves out stay in the file, with their own stamps.

FR-Spec is left out, because the EAGLE-3 head already drafts only 3,072 of the model's 4,096 tokens.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import spec_compile
from benchmarks import common

WORKLOADS = ("code_completion", "code_editing", "docstrings")
TREE = dict(topk=4, num_draft_tokens=16)
OURS = {
    "plain steps": ("ngram", None, dict(num_draft_tokens=1)),
    "n-gram, 16 nodes": ("ngram", None, dict(num_draft_tokens=16, recycle=0)),
    "n-gram and recycled, 16 nodes": ("ngram", None, dict(num_draft_tokens=16)),
    "EAGLE-3, chain of 5": ("eagle3", "eagle3", dict(num_steps=5)),
    "EAGLE-3, tree of 16": ("eagle3", "eagle3", dict(num_steps=5, **TREE)),
    "EAGLE-3 and n-gram, tree of 16": ("eagle3", "eagle3", dict(num_steps=5, ngram=True, **TREE)),
    "DFlash, chain": ("dflash", "dflash", {}),
    "DFlash, tree of 16": ("dflash", "dflash", TREE),
    "DFlash and n-gram, tree of 16": ("dflash", "dflash", dict(ngram=True, **TREE)),
    "JetSpec, chain": ("jetspec", "jetspec", {}),
    "JetSpec, tree of 16": ("jetspec", "jetspec", TREE),
    "JetSpec, tree of 64": ("jetspec", "jetspec", dict(topk=8, num_draft_tokens=64)),
    "MTP, 3 steps": ("mtp", "mtp", dict(num_steps=3)),
    "MTP and n-gram, tree of 16": ("mtp", "mtp", dict(num_steps=3, num_draft_tokens=16, ngram=True)),
    "naive EAGLE": ("naive_eagle", "eagle3", {}),
    "draft model, chain": ("draft_model", "model", dict(num_steps=5)),
}
"""Name -> algorithm, the draft (a folder of --heads, or "model": that of --draft-model), options."""
TUNING = 2
"""Prompts of each workload that choose the setting of prompt lookup."""
console = Console(stderr=True)


def hf_systems(model: PreTrainedModel, draft: PreTrainedModel | None, fixed: dict) -> dict[str, Callable]:
    """Transformers' own ways. The static cache, whose forward transformers compiles, is tried on a GPU only."""
    ways = {common.GREEDY: {}}
    if draft is not None and not model._is_stateful:
        ways["HF assistant"] = dict(assistant_model=draft)
    if model.device.type == "cuda":
        ways["HF static + compile"] = dict(cache_implementation="static")
    return {name: partial(model.generate, **fixed, **options) for name, options in ways.items()}


def wrap(model: PreTrainedModel, names: list[str], heads: Path, draft: PreTrainedModel | None, **more) -> dict:
    """Our systems by name, not compiled yet. more: options that all of them get."""
    ours = {}
    for name, (algo, source, options) in OURS.items():
        if name in names and (source != "model" or draft is not None):
            head = {"draft": draft if source == "model" else str(heads / source)} if source else {}
            ours[name] = spec_compile.speculate(model, algo, **head, **options, **more)
    return ours


def measure(
    systems: dict[str, Callable],
    ours: dict,
    model: PreTrainedModel,
    prompts: tuple[list[Tensor], list[Tensor]],
    repeats: int,
    fixed: dict,
) -> dict:
    """Figures of each system, and of prompt lookup, over one workload. prompts: to measure, and for tuning."""
    prompts, tuning = prompts
    if not model._is_stateful:
        lookup, tried = common.best_lookup(model, tuning, fixed)
        systems = systems | {common.LOOKUP: partial(model.generate, **fixed, **lookup)}
    answers, rates = common.answer_in_turn(systems, ours, prompts, repeats)
    counted = {name: deepcopy(fast.speculation.stats) for name, fast in ours.items()}
    first = first_tokens(systems, prompts, repeats)
    best = max(rate for name, rate in rates.items() if name not in ours)
    results = {}
    for name, rate in rates.items():
        same = [torch.equal(*pair) for pair in zip(answers[name], answers[common.GREEDY])]
        tokens = sum(map(len, answers[name]))
        further = (tokens / rate - first[name] * len(prompts)) / max(tokens - len(prompts), 1)
        row = {"tokens_per_second": rate, "over_greedy": rate / rates[common.GREEDY], "identical": sum(same)}
        row |= {"first_token_s": first[name], "further_token_s": further}
        if common.PLAIN in rates:
            row["over_plain"] = rate / rates[common.PLAIN]
        if name == common.LOOKUP:
            row |= {"lookup": lookup, "tried": tried}
        if name in ours:
            stats = counted[name]
            row |= {"over_best_of_hf": rate / best, "accept_length": stats.accept_length}
            row |= {"acceptance_by_depth": stats.acceptance_by_depth, "nodes": dict(stats.nodes)}
            row |= {"seconds": dict(stats.seconds)}
            differing = [ids for ids, equal in zip(prompts, same) if not equal]
            if differing:
                row["audit"] = verdicts(name, ours[name], differing, fixed)
        results[name] = row
    facts = {"tokens": sum(map(len, answers[common.GREEDY])), "prompts": len(prompts), "repeats": repeats}
    return {"systems": {name: {**facts, **row} for name, row in results.items()}}


def first_tokens(systems: dict[str, Callable], prompts: list[Tensor], repeats: int) -> dict[str, float]:
    """Seconds of generate() for one token, by system: the mean over the prompts, the median of the repeats."""
    seconds = {name: [] for name in systems}
    for _ in range(repeats):
        for name, generate in systems.items():
            spent = [common.timed(partial(generate, max_new_tokens=1), ids)[1] for ids in prompts]
            seconds[name].append(statistics.mean(spent))
    return {name: statistics.median(spent) for name, spent in seconds.items()}


def verdicts(name: str, fast: PreTrainedModel, prompts: list[Tensor], fixed: dict) -> dict[str, int]:
    """The verdicts of `audit` on answers that differed, and how often each occurs."""
    report = spec_compile.audit(fast, prompts, logits=False, **fixed)
    console.print(f"{name}: answers that differ from {common.GREEDY}\n{report}", highlight=False, markup=False)
    return dict(Counter(row.verdict for row in report.greedy))


def failures(workloads: dict, exact: bool) -> list[str]:
    """A line for each workload and system whose answers must not differ and do."""
    lines = []
    for workload, result in workloads.items():
        for name, row in result["systems"].items():
            audited = row.get("audit", {})
            count = sum(audited.values()) if exact else audited.get("DIFFERENT", 0)
            if count:
                lines.append(f"{workload}, {name}: {count} of {row['prompts']} answers differ from {common.GREEDY}")
    return lines


def table(workload: str, result: dict) -> Table:
    """A row for each system."""
    rows, tokens = [], result["systems"][common.GREEDY]["tokens"]
    columns = ("system", "accept length", "by depth", "tokens/s", "vs greedy", "vs plain", "vs best HF",
               "first token", "a token", "same")  # fmt: skip
    for name, row in result["systems"].items():
        drafts, best = ["", ""], ""
        if "accept_length" in row:
            depths = " ".join(f"{share:.0%}" for share in row["acceptance_by_depth"][:4])
            drafts, best = [f"{row['accept_length']:.2f}", depths], f"{row['over_best_of_hf']:.2f}×"
        plain = f"{row['over_plain']:.2f}×" if "over_plain" in row else ""
        rates = f"{row['tokens_per_second']:.0f}", f"{row['over_greedy']:.2f}×", plain
        times = (f"{row[key] * 1e3:.2f} ms" for key in ("first_token_s", "further_token_s"))
        same = f"{row['identical']} of {row['prompts']}"
        rows.append((name, *drafts, *rates, best, *times, same))
    return common.draw(columns, rows, f"{workload}, {tokens} tokens")


def save(path: Path, workloads: dict, facts: dict) -> None:
    """Write the rows with their stamp; rows of earlier runs stay."""
    report = json.loads(path.read_text()) if path.exists() else {"workloads": {}}
    for workload, result in workloads.items():
        rows = report["workloads"].setdefault(workload, {"systems": {}})["systems"]
        rows |= {name: {**row, "stamp": facts} for name, row in result["systems"].items()}
    common.write_json(path, report)


def parse() -> argparse.Namespace:
    parser = common.command_line(__doc__, threads=2)
    algos = sorted({algo for algo, _, _ in OURS.values()})
    parser.add_argument("--model", default=str(common.DEMO_MODEL))
    parser.add_argument("--heads", type=Path, help="folder with eagle3, dflash and mtp (default: heads of the model)")
    parser.add_argument("--draft-model", help="a smaller model of the same tokenizer (default: none, left out)")
    parser.add_argument("--algos", nargs="+", default=algos, choices=algos)
    parser.add_argument("--systems", nargs="+", choices=OURS, help="our systems (default: all that can run)")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), help="names of files in --folder")
    parser.add_argument("--folder", type=Path, default=common.PROMPTS)
    parser.add_argument("--prompts", type=int, default=8, help="first prompts of each workload")
    parser.add_argument("--as-chat", action="store_true", help="prompts in the form of the chat template")
    parser.add_argument("--trained-on", type=Path, nargs="+", default=[], help="files that the heads were trained on")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--eager", action="store_true", help="do not compile ours")
    parser.add_argument("--json", type=Path, help="default: results/acceptance_cpu.json or acceptance_gpu.json")
    options = parser.parse_args()
    options.device = torch.device(options.device)
    options.heads = options.heads or Path(options.model) / "heads"
    hardware = "gpu" if options.device.type == "cuda" else "cpu"
    options.json = options.json or common.RESULTS / f"acceptance_{hardware}.json"
    asked, names = options.systems is not None, options.systems or OURS
    options.systems = [name for name in names if OURS[name][0] in options.algos]
    absent = {name: reason for name in options.systems if (reason := common.lacking(OURS[name], options.heads))}
    if asked and absent:
        parser.error("; ".join(f"{name}: {reason}" for name, reason in absent.items()) + "; name other --systems")
    for name, reason in absent.items():
        console.print(f"[yellow]{name}: left out, {reason}")
    options.systems = [name for name in options.systems if name not in absent]
    return options


def main() -> None:
    start, options = time.perf_counter(), parse()
    if options.device.type == "cpu":
        common.pin(options.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    load = partial(AutoModelForCausalLM.from_pretrained, dtype=getattr(torch, options.dtype))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = load(options.model).to(options.device).eval()
    draft = load(options.draft_model).to(options.device).eval() if options.draft_model else None
    if draft is None and "draft model, chain" in options.systems:
        console.print("[yellow]draft model, HF assistant: left out (--draft-model FOLDER names one)")
    room = model.config.max_position_embeddings - options.new_tokens
    prompts = {}
    for workload in options.workloads:
        common.refuse_trained(options.folder / f"{workload}.jsonl", options.prompts, options.trained_on)
        both = common.split_prompts(workload, options.folder, options.prompts, TUNING, tokenizer, room, options.as_chat)
        prompts[workload] = tuple([ids.to(options.device) for ids in some] for some in both)

    fixed = dict(do_sample=False, max_new_tokens=options.new_tokens, pad_token_id=tokenizer.pad_token_id)
    ours = wrap(model, options.systems, options.heads, draft, compile=not options.eager)
    systems = hf_systems(model, draft, fixed)
    longest_prompt = max((ids for some, _ in prompts.values() for ids in some), key=lambda ids: ids.shape[1])
    for generate in systems.values():
        generate(longest_prompt)
    for name, fast in ours.items():
        fast.speculation.warmup(progress=lambda line, name=name: console.print(f"[dim]{name}: {line}"))
        systems[name] = partial(fast.generate, **fixed)
        systems[name](longest_prompt)
    ready = time.perf_counter() - start

    workloads = {}
    for workload, both in prompts.items():
        workloads[workload] = measure(systems, ours, model, both, options.repeats, fixed)
        console.print(f"[dim]{time.perf_counter() - start:.0f} s: {workload} measured")
    facts = common.stamp(options.device)
    seconds, where = time.perf_counter() - start, facts.get("gpu", f"{facts['cpu']}, {facts['threads']} threads")
    print(f"{options.new_tokens} new tokens, batch 1, {options.dtype}, {where}")
    for workload, result in workloads.items():
        Console(width=170).print(table(workload, result))
    rows = [row for result in workloads.values() for row in result["systems"].values()]
    audited = sum((Counter(row.get("audit")) for row in rows), start=Counter())
    if audited:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in audited.items())
        print(f"answers of ours that differ from {common.GREEDY}, audited: {counts}")
    print(f"ready (capture, compile, first calls) after {ready:.0f} s, all measured after {seconds:.0f} s")
    facts |= {"dtype": options.dtype, "new_tokens": options.new_tokens, "draft_model": options.draft_model}
    save(options.json, workloads, facts)
    wrong = failures(workloads, exact=options.dtype == "float32")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
