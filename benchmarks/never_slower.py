"""Tokens a second with each draft over those of the same engine's plain steps: adaptive, and drafting in every round.

    python -m benchmarks.never_slower [--drafts NAME ...] [--workloads NAME ...] [--batch 1 8] [--sample]
        [--shape NAME] [--prompts 3] [--new-tokens 128] [--repeats 2] [--json FILE]

Heads of the demo model, as they are and "shuffled": the entries of each of their own matrices in a random order, so
that hardly anything is accepted. With --shape, a model of rounds/shapes.py and heads, both of random weights, on a GPU.
All systems answer each prompt in turn, in one process. "random" prompts are uniformly random token ids. The aim for
each adaptive cell is 0.97; the table has the worst first and counts the cells below.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import spec_compile
from benchmarks.common import DEMO_MODEL, PROMPTS, RESULTS, answer_in_turn, pin, prompts_of, save_rows, show, stamp
from benchmarks.rounds.drafts import make
from benchmarks.rounds.shapes import build
from spec_compile.drafters.checkpoints.load import load_head

TREE = dict(topk=4, num_draft_tokens=16)
DRAFTS = {
    "n-grams": ("ngram", None, {}),
    "EAGLE-3, chain": ("eagle3", "eagle3", dict(num_steps=5)),
    "EAGLE-3, tree": ("eagle3", "eagle3", dict(num_steps=5, **TREE)),
    "EAGLE-3, tree with n-grams": ("eagle3", "eagle3", dict(num_steps=5, ngram=True, **TREE)),
    "MTP, chain": ("mtp", "mtp", dict(num_steps=3)),
    "DFlash, tree": ("dflash", "dflash", TREE),
}
"""Name -> algorithm, folder of the head, options."""
SHUFFLED = ", shuffled"
WORKLOADS = ("code_editing", "code_completion", "maths", "chat", "random")
BOUND = 0.97


def shuffled(head: torch.nn.Module, model: PreTrainedModel) -> torch.nn.Module:
    """The head, with the entries of each matrix that is not the model's in a random order."""
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        if parameter.dim() > 1 and parameter.data_ptr() not in shared:
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.data = parameter.data.flatten()[order].view_as(parameter)
    return head


def draft_of(model: PreTrainedModel, name: str, shape: str | None) -> dict:
    """The option that names the head of a draft."""
    algo, folder, _ = DRAFTS[name.removesuffix(SHUFFLED)]
    if folder is None:
        return {}
    if shape:
        return {"draft": make(folder, model)}
    draft = DEMO_MODEL / "heads" / folder
    return {"draft": shuffled(load_head(draft, model, algo), model) if name.endswith(SHUFFLED) else draft}


def systems_of(model: PreTrainedModel, name: str, options) -> dict:
    """The wrapped models that drafts of a name are compared in."""
    algo, _, settings = DRAFTS[name.removesuffix(SHUFFLED)]
    shared = dict(compile=not options.no_compile, check=False, cache=False)
    systems = {"plain": spec_compile.speculate(model, num_draft_tokens=1, **shared)}
    for kind, adaptive in (("adaptive", True), ("fixed", False)):
        draft = draft_of(model, name, options.shape)
        systems[kind] = spec_compile.speculate(model, algo, adaptive=adaptive, **draft, **settings, **shared)
    return systems


def measure(model: PreTrainedModel, name: str, prompts: dict[str, list], options) -> list[dict]:
    """A row for each workload and batch size."""
    systems, rows = systems_of(model, name, options), []
    fixed = dict(max_new_tokens=options.new_tokens, eos_token_id=None, pad_token_id=0, do_sample=options.sample)
    for batch in options.batch:
        for fast in systems.values():
            fast.speculation.warmup(batch, do_sample=options.sample)
        for workload, texts in prompts.items():
            calls = {kind: partial(fast.generate, **fixed) for kind, fast in systems.items()}
            _, rates = answer_in_turn(calls, systems, [ids.repeat(batch, 1) for ids in texts], options.repeats)
            row = {
                "device": model.device.type,
                "model": options.shape or DEMO_MODEL.name,
                "draft": name,
                "workload": workload,
                "batch": batch,
                "plain tokens_per_s": rates["plain"] * batch,
            }
            rows.append(row | {kind: rates[kind] / rates["plain"] for kind in ("adaptive", "fixed")})
            rows[-1]["accept_length"] = systems["adaptive"].speculation.stats.accept_length
            cells = ", ".join(f"{key} {value:.2f}" for key, value in rows[-1].items() if isinstance(value, float))
            print(f"{name}, {workload}, batch {batch}: {cells}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*DRAFTS, *(name + SHUFFLED for name, (_, folder, _) in DRAFTS.items() if folder)]
    parser.add_argument("--drafts", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--shape", help="a model and heads of random weights, on a GPU, instead of the demo model's")
    parser.add_argument("--sample", action="store_true", help="draw tokens, at temperature 1")
    parser.add_argument("--prompts", type=int, default=3, help="first prompts of each workload")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="rounds without Inductor")
    parser.add_argument("--json", type=Path, default=RESULTS / "never_slower.json")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pin(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    if options.shape:
        model = build(options.shape)
    else:
        model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).to(device).eval()
    prompts = {
        name: [ids.to(device) for ids in prompts_of(name, PROMPTS, options.prompts, tokenizer, 300)]
        for name in options.workloads
    }
    rows = [row for name in options.drafts for row in measure(model, name, prompts, options)]
    rows.sort(key=lambda row: row["adaptive"])
    cells = [
        [str(value) if isinstance(value, (str, int)) else f"{value:.2f}" for value in row.values()] for row in rows
    ]
    show(rows[0], cells, f"over plain steps; {sum(row['adaptive'] < BOUND for row in rows)} cells below {BOUND}")
    rows = [row | {"sampled": options.sample} for row in rows]
    save_rows(options.json, rows, ("device", "model", "draft", "workload", "batch", "sampled"), stamp(model.device))


if __name__ == "__main__":
    main()
