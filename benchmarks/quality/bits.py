"""The same answer, whatever is drafted: answers of every algorithm against plain steps of the same model.

    python -m benchmarks.quality.bits --model FOLDER [--prompts FILE ...] [--count 300] [--max-new-tokens 128]
        [--sampled] [--algorithms ngram eagle3-tree ...] [--heads FOLDER] [--draft-model FOLDER] [--transformers 30]
        [--workers 4] [--minutes M] [--device cuda] [--dtype bfloat16] [--exact bits] [--json FILE]
    python -m benchmarks.quality.bits --requests [--batches 4 64] [--exact request] and the options above

One prompt at a time. Plain steps are algo="ngram" with num_draft_tokens=1: the same kernels, nothing drafted. Greedy
answers, and with --sampled also drawn ones, with a seed for each prompt, are compared token for token. --transformers N
compares transformers' prompt lookup with its greedy decoding in the same way, over N of the prompts.

With --requests every answer is compared with the one that the same algorithm gives to its prompt by itself: in batches,
again, continued, after a common prefix, among cancelled requests.

A file of prompts has JSON lines with `prompt`, `turns` or `messages`; the tokenizer's chat template is used if it has
one. The prompts are taken from the files in turn. Heads are folders eagle3, dflash, jetspec and mtp in --heads; without
--algorithms every algorithm runs whose head exists. The draft model is by default the model itself. With --workers K, K
processes share the GPU, and each takes one algorithm after another. A system begins no further prompt of a mode after
--minutes; the answers that it gave are compared.

Exits with 1 if an answer differs where the same bits are promised (see `explain()`); --exact bits and --exact request
refuse to run where they are not. Rows that a run leaves out stay in the file, with their own stamps.
"""

import argparse
import json
import math
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

import spec_compile
from benchmarks import common
from spec_compile.config import EXACT
from spec_compile.passes.row_invariance import variant_parts
from spec_compile.tools.audit_answers import InManyWays

ALGORITHMS = {
    "ngram": ("ngram", None, dict(num_draft_tokens=16)),
    "ngram-64": ("ngram", None, dict(num_draft_tokens=64)),
    "eagle3-chain": ("eagle3", "eagle3", dict(num_steps=5)),
    "eagle3-tree": ("eagle3", "eagle3", dict(num_steps=5, topk=4, num_draft_tokens=16)),
    "eagle3-ngram": ("eagle3", "eagle3", dict(num_steps=5, topk=4, num_draft_tokens=16, ngram=True)),
    "dflash": ("dflash", "dflash", {}),
    "dflash-tree": ("dflash", "dflash", dict(topk=4, num_draft_tokens=16)),
    "jetspec": ("jetspec", "jetspec", {}),
    "jetspec-tree": ("jetspec", "jetspec", dict(topk=4, num_draft_tokens=16)),
    "mtp": ("mtp", "mtp", dict(num_steps=3)),
    "draft": ("draft_model", "model", dict(num_steps=5)),
}
"""Name -> algorithm, the draft (a folder of --heads, or "model": that of --draft-model), options."""
SYSTEMS = {common.PLAIN: ("ngram", None, dict(num_draft_tokens=1)), **ALGORITHMS}
MODES = {"greedy": dict(do_sample=False), "sampled": dict(do_sample=True, temperature=0.8, top_k=50, top_p=0.95)}
KEYS = ("model", "dtype", "options", "system", "mode", "set")
"""The fields that tell the rows of the results apart."""
REQUEST_KEYS = ("model", "dtype", "options", "system", "exact", "mode", "manner")
"""The same of --requests."""
console = Console(stderr=True)


def read_texts(path: Path) -> list[list[dict]]:
    """The first request of each line of a JSON-lines file, as messages of a chat."""
    chats = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "messages" in row:
            chats.append([message for message in row["messages"][:2] if message["role"] != "assistant"])
        else:
            chats.append([{"role": "user", "content": row["prompt"] if "prompt" in row else row["turns"][0]}])
    return chats


def read_prompts(paths: list[Path], count: int, tokenizer, longest: int) -> list[tuple[str, list[int]]]:
    """The last `longest` token ids of `count` prompts from the files in turn, each with the name of its file."""
    sets = [[(path.stem, chat) for chat in read_texts(path)] for path in paths]
    in_turn = [each for each in chain(*zip_longest(*sets)) if each is not None]
    prompts = []
    for name, messages in islice(in_turn, count):
        text = messages[-1]["content"]
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False).input_ids
        else:
            ids = tokenizer(text).input_ids
        prompts.append((name, ids[-longest:]))
    return prompts


def load(options: argparse.Namespace, path: str) -> PreTrainedModel:
    """A model in eval mode on its device."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval()


def wrap(model: PreTrainedModel, name: str, options: argparse.Namespace) -> PreTrainedModel:
    """The speculative model of a system of `SYSTEMS`."""
    algo, source, more = SYSTEMS[name]
    if source == "model":
        more = {**more, "draft": load(options, options.draft_model or options.model)}
    elif source is not None:
        more = {**more, "draft": str(options.heads / source)}
    return spec_compile.speculate(
        model, algo, compile=not options.eager, exact=options.exact, **{**more, **options.options}
    )


def answer(name: str, options: argparse.Namespace, prompts: list[list[int]], modes: list[str]) -> dict:
    """All answers of one system.

    Returns a dict. answers: by mode, a list of token ids for each prompt; seconds: by mode; and for our systems
    accept_length, and variant_parts, the parts of the graph that may differ in bits.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if options.device.type == "cpu":
        common.pin(options.threads)
    model, more, result = load(options, options.model), {}, {"answers": {}, "seconds": {}}
    if name in SYSTEMS:
        model = wrap(model, name, options)
        result["variant_parts"] = variant_parts(model.speculation.engine.runtime.verify)
    elif name == common.LOOKUP:
        more = dict(prompt_lookup_num_tokens=10)
    fixed = dict(max_new_tokens=options.max_new_tokens, pad_token_id=model.generation_config.pad_token_id or 0, **more)
    for mode in modes:
        generate = partial(model.generate, **{**fixed, **MODES[mode]})
        generate(torch.tensor([prompts[0]], device=options.device))  # compiles
        begin, answers = time.perf_counter(), result["answers"].setdefault(mode, [])
        for number, ids in enumerate(prompts):
            if time.perf_counter() > begin + 60 * options.minutes:
                break
            answers.append(_answer_one(generate, number, ids, options))
        result["seconds"][mode] = time.perf_counter() - begin
    if name in SYSTEMS:
        result["accept_length"] = model.speculation.stats.accept_length
    return result


def _answer_one(generate, number: int, prompt: list[int], options: argparse.Namespace) -> list[int]:
    torch.manual_seed(options.seed + number)
    ids = torch.tensor([prompt], device=options.device)
    return generate(ids, attention_mask=torch.ones_like(ids))[0, len(prompt) :].tolist()


def answer_all(options: argparse.Namespace, prompts: list[list[int]], pool, keep) -> tuple[dict[str, dict], list[str]]:
    """The `answer` of every system, by name, and a line with the error of each system that failed.

    pool: processes, or None. keep: called with the answers of all systems so far.
    """
    modes, theirs = [*MODES][: 1 + options.sampled], [common.GREEDY, common.LOOKUP] if options.transformers else []
    tasks = {name: (name, options, prompts, modes) for name in (common.PLAIN, *options.algorithms)}
    tasks |= {name: (name, options, prompts[: options.transformers], ["greedy"]) for name in theirs}
    results, failures = {}, []
    jobs = {name: partial(answer, *task) if pool is None else pool.submit(answer, *task).result
            for name, task in tasks.items()}  # fmt: skip
    for name, job in jobs.items():
        try:
            results[name] = job()
        except Exception as error:  # the answers of the other systems are still useful
            failures.append(f"{name}: {type(error).__name__}: {error}")
            console.print(failures[-1], highlight=False, markup=False)
            continue
        spent = ", ".join(f"{mode} {seconds:.0f} s" for mode, seconds in results[name]["seconds"].items())
        console.print(f"[dim]{name}: {spent}", highlight=False)
        keep(results)
    return results, failures


def started(workers: int) -> AbstractContextManager:
    """A pool of processes, or None if there is one worker: this process."""
    spawn = multiprocessing.get_context("spawn")
    return nullcontext() if workers == 1 else ProcessPoolExecutor(workers, mp_context=spawn)


def compare(results: dict[str, dict], sets: list[str]) -> list[dict]:
    """A row for each system, mode and set of prompts, and for "all": how many answers equal those of plain steps.

    sets: the name of each prompt's set. Transformers' prompt lookup is compared with its greedy decoding.
    """
    rows = []
    for name, result in results.items():
        against = results.get({common.LOOKUP: common.GREEDY}.get(name, common.PLAIN))
        if name in (common.PLAIN, common.GREEDY) or against is None:
            continue
        for mode, answers in result["answers"].items():
            first = [_first_difference(*pair) for pair in zip(answers, against["answers"][mode])]
            facts = {"system": name, "mode": mode, "accept_length": result.get("accept_length")}
            facts["tokens_per_second"] = sum(map(len, answers)) / result["seconds"][mode]
            for each in dict.fromkeys([*sets[: len(first)], "all"]):
                places = [place for place, owner in zip(first, sets) if each in (owner, "all")]
                differ = sorted(place for place in places if place is not None)
                rows.append({**facts, "set": each, "equal": len(places) - len(differ), "of": len(places),
                             "first_differences": differ})  # fmt: skip
    return rows


def _first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """The position of the first token that differs, or None."""
    return next((n for n, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)


def table(rows: list[dict]) -> Table:
    """A line for each system and mode, a column for each set."""
    sets, lines = list(dict.fromkeys(row["set"] for row in rows)), []
    for name, mode in dict.fromkeys((row["system"], row["mode"]) for row in rows):
        mine = {row["set"]: row for row in rows if (row["system"], row["mode"]) == (name, mode)}
        counts = [f"{mine[each]['equal']}/{mine[each]['of']}" if each in mine else "" for each in sets]
        length = mine["all"]["accept_length"]
        rate = f"{mine['all']['tokens_per_second']:.0f}"
        lines.append((name, mode, *counts, "" if length is None else f"{length:.2f}", rate))
    return common.draw(("system", "mode", *sets, "accept length", "tokens/s"), lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.command_line(__doc__, results="bits.json", threads=2)
    parser.add_argument("--model", default=str(common.DEMO_MODEL))
    parser.add_argument("--prompts", type=Path, nargs="+", default=sorted(common.PROMPTS.glob("*.jsonl")))
    parser.add_argument("--count", type=int, default=300, help="prompts of all files together")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt, the last ones")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, help="default: all that can run")
    parser.add_argument("--heads", type=Path, help="folder of the heads (default: heads of the model)")
    parser.add_argument("--draft-model", help="default: the model itself")
    parser.add_argument("--sampled", action="store_true", help="also drawn answers")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first prompt; each further prompt has the next"
    )
    parser.add_argument("--transformers", type=int, default=0, help="prompts that transformers answers without us")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="limit of each system and mode")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--exact", default="auto", choices=EXACT, help="refuse a model whose bits are not promised")
    parser.add_argument(
        "--options", type=json.loads, default={}, help='more of speculate(), such as \'{"kv_cache_dtype": "fp8_e4m3"}\''
    )
    parser.add_argument("--requests", action="store_true", help="compare requests with those by themselves")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 64], help="rows of the batches of --requests")
    options = parser.parse_args(arguments)
    options.heads = options.heads or Path(options.model) / "heads"
    absent = {name: reason for name, system in ALGORITHMS.items() if (reason := common.lacking(system, options.heads))}
    if options.algorithms is None:
        options.algorithms = [name for name in ALGORITHMS if name not in absent]
    elif told := [f"{name}: {absent[name]}" for name in options.algorithms if name in absent]:
        parser.error("; ".join(told) + "; name other --algorithms or --heads")
    return options


def main(arguments: list[str] | None = None) -> None:
    begin, options = time.perf_counter(), parse(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = read_prompts(options.prompts, options.count, tokenizer, options.longest)
    if options.requests:
        sys.exit(ask(options, [ids for _, ids in prompts], begin))
    with started(options.workers) as pool:
        keep = partial(write_rows, options, [name for name, _ in prompts])
        results, failures = answer_all(options, [ids for _, ids in prompts], pool, keep)
        failures += report(options, keep(results), results, begin)
    if failures:
        sys.exit("\n".join(failures))


def ask(options: argparse.Namespace, prompts: list[list[int]], begin: float) -> str | None:
    """Compare requests, and print and keep the comparison. Returns a line for each failure, or None."""
    rows, failures = [], []
    with started(options.workers) as pool:
        tasks = {name: partial(ask_one, name, options, prompts) for name in options.algorithms}
        jobs = {name: task if pool is None else pool.submit(task).result for name, task in tasks.items()}
        for name, job in jobs.items():
            try:
                rows += [{**asked(options), **row} for row in job()]
            except Exception as error:  # the answers of the other systems are still useful
                failures.append(f"{name}: {type(error).__name__}: {error}")
    facts = common.stamp(options.device) | {"max_new_tokens": options.max_new_tokens}
    common.save_rows(options.json, rows, REQUEST_KEYS, facts, "requests")
    print(f"answers equal to those of each request by itself, {len(prompts)} prompts, {options.max_new_tokens} new "
          f"tokens, {options.dtype}, exact={options.exact!r}, {time.perf_counter() - begin:.0f} s")  # fmt: skip
    Console(width=240).print(table_of_requests(rows))
    failures += [f"{row['system']}: {row['manner']}: an answer differs, although equal ones are promised"
                 for row in rows if row["promised"] and row["equal"] < row["of"]]  # fmt: skip
    return "\n".join(failures) or None


def ask_one(name: str, options: argparse.Namespace, prompts: list[list[int]]) -> list[dict]:
    """The rows of one system, one for each mode and way of asking."""
    if options.device.type == "cpu":
        common.pin(options.threads)
    logging.disable_progress_bar()
    model, rows = wrap(load(options, options.model), name, options), []
    fixed = dict(max_new_tokens=options.max_new_tokens, pad_token_id=model.generation_config.pad_token_id or 0)
    for mode in [*MODES][: 1 + options.sampled]:
        more = {name: value for name, value in MODES[mode].items() if name != "do_sample"}
        ways = InManyWays(model, prompts, fixed | more, options.seed if mode == "sampled" else None)
        for manner in ways.run(options.batches):
            console.print(f"[dim]{mode}, {manner.name}: {manner.equal} of {manner.of}", highlight=False)
            rows.append({
                "system": name, "exact": options.exact, "mode": mode, "manner": manner.name,
                "promised": manner.promised, "equal": manner.equal, "of": manner.of, "reused": manner.reused,
                "first_differences": manner.first_differences,
            })  # fmt: skip
    return rows


def table_of_requests(rows: list[dict]) -> Table:
    """A line for each system, mode and way: "300 of 300", and the prompt tokens that other requests had left."""
    lines = [
        (row["system"], row["mode"], row["manner"], f"{row['equal']} of {row['of']}", str(row["reused"]),
         "yes" if row["promised"] else "no")
        for row in rows
    ]  # fmt: skip
    return common.draw(("system", "mode", "asked", "equal answers", "reused tokens", "promised"), lines)


def asked(options: argparse.Namespace) -> dict:
    """The fields that all rows of a run share; "options" only where there are any."""
    more = {"options": json.dumps(options.options, sort_keys=True)} if options.options else {}
    return {"model": Path(options.model).name, "dtype": options.dtype, **more}


def write_rows(options: argparse.Namespace, sets: list[str], results: dict[str, dict]) -> list[dict]:
    """Replace the rows of the same systems in the file by those of `compare`, and return these."""
    rows = compare(results, sets)
    facts = common.stamp(options.device) | {"max_new_tokens": options.max_new_tokens}
    rows = [{**asked(options), **row} for row in rows]
    common.save_rows(options.json, rows, KEYS, facts)
    return rows


def report(options: argparse.Namespace, rows: list[dict], results: dict[str, dict], begin: float) -> list[str]:
    """Print the comparison. Returns a line if the promise is broken."""
    print(f"answers equal to those of plain steps, {options.count} prompts, {options.max_new_tokens} new tokens, "
          f"{options.dtype}, {time.perf_counter() - begin:.0f} s")  # fmt: skip
    Console(width=240).print(table(rows))
    parts = results.get(common.PLAIN, {}).get("variant_parts", ["plain steps failed"])
    print("same bits are " + ("promised" if not parts else f"not promised, because of {'; '.join(parts)}"))
    ours = [row for row in rows if row["set"] == "all" and row["system"] in ALGORITHMS]
    if not parts and any(row["equal"] < row["of"] for row in ours):
        return ["an answer differs from plain steps, although the same bits are promised"]
    return []


if __name__ == "__main__":
    main()
