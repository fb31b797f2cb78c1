"""Search the settings of a draft (steps, top-k, nodes) for a model and prompts, in one process.

    python -m benchmarks.quality.tune --model meta-llama/Llama-3.1-8B-Instruct --algo eagle3 --draft PATH_OR_HUB_NAME
        [--prompts FILE.jsonl] [--steps 1 3 5] [--topk 1 4] [--nodes 4 8 16 32] [--new 128]

Every setting answers the same prompts (field "prompt"), greedily; the rate counts all of generate(), the prompts'
processing included. Answers that differ from plain decoding are counted: in 16 bits near-ties may turn.
"""

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from benchmarks.common import DEMO_MODEL, PROMPTS, read_prompts, save_rows, show, stamp, timed


def settings(options) -> Iterator[dict]:
    """The combinations that make sense: the nodes of n-grams; of other drafts a chain for each depth, and trees."""
    if options.algo == "ngram":
        yield from (dict(num_draft_tokens=nodes) for nodes in options.nodes)
        return
    for steps, topk in itertools.product(options.steps, options.topk):
        if topk == 1 or steps == 1:
            yield dict(num_steps=steps, topk=topk)
            continue
        most = 1 + topk + (steps - 1) * topk**2
        yield from (dict(num_steps=steps, topk=topk, num_draft_tokens=n) for n in options.nodes if steps < n <= most)


def answer(model, prompts: list[torch.Tensor], new: int) -> tuple[list[torch.Tensor], float]:
    """The answers, and tokens a second."""
    generate = partial(model.generate, do_sample=False, max_new_tokens=new, pad_token_id=0)
    outputs, seconds = zip(*(timed(generate, ids) for ids in prompts))
    return list(outputs), sum(map(len, outputs)) / sum(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--algo", default="ngram")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path, default=PROMPTS / "code_editing.jsonl")
    parser.add_argument("--count", type=int, default=8, help="first prompts of the file")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--topk", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--json", type=Path, help="also save the table here")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").to(device).eval()
    texts = read_prompts(options.prompts, options.count)
    prompts = [tokenizer(text, return_tensors="pt").input_ids.to(device) for text in texts]

    answer(model, prompts[:1], 8)
    plain, rate = answer(model, prompts, options.new)
    rows = [dict(setting="transformers, greedy", rate=rate, accept_length=1.0, differing=0)]
    for setting in track(list(settings(options)), "settings"):
        draft = {} if options.algo == "ngram" else {"draft": options.draft}
        fast = spec_compile.speculate(model, options.algo, check=False, **draft, **setting)
        fast.speculation.warmup()
        answer(fast, prompts[:1], 8)
        fast.speculation.stats.reset()
        outputs, rate = answer(fast, prompts, options.new)
        differing = sum(not torch.equal(ours, theirs) for ours, theirs in zip(outputs, plain))
        name = ", ".join(f"{option} {value}" for option, value in setting.items())
        length = fast.speculation.stats.accept_length
        rows.append(dict(setting=name, rate=rate, accept_length=length, differing=differing))
        print(f"{name}: {rate:.0f} tokens/s at accept length {length:.2f}")
    rows.sort(key=lambda row: -row["rate"])
    cells = [
        (row["setting"], f"{row['rate']:.0f}", f"{row['accept_length']:.2f}", str(row["differing"])) for row in rows
    ]
    title = f"{options.algo}, {len(prompts)} prompts of {options.prompts.name}, on {device}"
    show(("setting", "tokens/s", "accept length", "answers that differ"), cells, title)
    print(f"best: {rows[0]['setting']}")
    if options.json:
        rows = [{"model": Path(options.model).name, "algo": options.algo, **row} for row in rows]
        save_rows(options.json, rows, ("model", "algo", "setting"), stamp(torch.device(device)))


if __name__ == "__main__":
    main()
