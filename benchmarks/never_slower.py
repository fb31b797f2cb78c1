"""Tokens a second with each draft over those of the same engine's plain steps: adaptive, and drafting in every round.

    python -m benchmarks.never_slower [--drafts NAME ...] [--workloads NAME ...] [--batch 1 8] [--sample]
        [--model PATH [--draft PATH] | --shape NAME [--layers N]] [--prompts 3] [--new-tokens 128] [--repeats 2]
        [--json FILE]

Heads of the demo model, as they are and "shuffled": the entries of each of their own matrices in a random order, so
that hardly anything is accepted. With --model, another model and n-grams, or with --draft the drafts that --drafts
names. With --shape, a model of rounds/shapes.py and drafts of every kind, all of random weights.
All systems answer each prompt in turn, in one process. "random" prompts are uniformly random token ids. The aim for
each adaptive cell is 0.97; the table has the worst first and counts the cells below.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from transformers import AutoTokenizer, PreTrainedModel

import spec_compile
from benchmarks import common
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
    "JetSpec, tree": ("jetspec", "jetspec", TREE),
    "P-EAGLE": ("p_eagle", "p_eagle", dict(num_steps=7)),
    "draft model": ("draft_model", "model", dict(num_steps=5)),
    "PARD": ("pard", "pard", dict(num_steps=7)),
}
"""Name -> algorithm, form of the draft (its folder among the demo model's heads), options."""
HEADS = common.DEMO_MODEL / "heads"
SHUFFLED = ", shuffled"
WORKLOADS = ("code_editing", "code_completion", "maths", "chat", "rag", "random")
LONGEST = {"rag": 1400}
"""Most tokens of a prompt of a workload, if not 300: passages are needed in full."""
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


def possible(options) -> list[str]:
    """The drafts that there are for the model that the options name."""
    if options.shape or options.draft:
        return list(DRAFTS)
    if options.model:
        return [name for name, (_, form, _) in DRAFTS.items() if form is None]
    names = [name for name, (_, form, _) in DRAFTS.items() if form is None or (HEADS / form).is_dir()]
    return [*names, *(name + SHUFFLED for name in names if DRAFTS[name][1])]


def draft_of(model: PreTrainedModel, name: str, options) -> dict:
    """The option that names the draft."""
    algo, form, _ = DRAFTS[name.removesuffix(SHUFFLED)]
    if form is None:
        return {}
    if options.shape:
        return {"draft": make(form, model)}
    if options.draft:
        return {"draft": options.draft}
    return {"draft": shuffled(load_head(HEADS / form, model, algo), model) if name.endswith(SHUFFLED) else HEADS / form}


def systems_of(model: PreTrainedModel, name: str, options) -> dict:
    """The wrapped models that drafts of a name are compared in."""
    algo, _, settings = DRAFTS[name.removesuffix(SHUFFLED)]
    shared = dict(compile=not options.no_compile, check=False, cache=False)
    systems = {"plain": spec_compile.speculate(model, num_draft_tokens=1, **shared)}
    for kind, adaptive in (("adaptive", True), ("fixed", False)):
        draft = draft_of(model, name, options)
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
            _, rates = common.answer_in_turn(calls, systems, [ids.repeat(batch, 1) for ids in texts], options.repeats)
            row = {
                "device": model.device.type,
                "model": options.shape or Path(options.model or common.DEMO_MODEL).name,
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


def prompts_for(workloads: list[str], count: int, path: str | Path, device: str) -> dict[str, list]:
    """The first prompts of each workload, as tokens of the model in `path`, as chats if it has a template for them."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    as_chat = tokenizer.chat_template is not None
    return {
        name: [
            ids.to(device)
            for ids in common.prompts_of(name, common.PROMPTS, count, tokenizer, LONGEST.get(name, 300), as_chat)
        ]
        for name in workloads
    }  # fmt: skip


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that name a model and its drafts; see `check` and `load`."""
    parser.add_argument("--drafts", nargs="+", metavar="NAME", help=f"some of: {'; '.join(DRAFTS)}")
    parser.add_argument("--model", help="a folder of a model, instead of the demo model")
    parser.add_argument("--draft", help="the folder of its draft, whose kind --drafts names")
    parser.add_argument("--shape", help="a model and drafts of random weights, instead of the demo model's")
    parser.add_argument("--layers", type=int, help="layers of the shape, in place of its own")


def check(parser: argparse.ArgumentParser, options) -> None:
    """Leave the parser if the options contradict each other. Sets `drafts`, by default all that are possible."""
    if options.draft and not options.drafts:
        parser.error("--draft: name its kind, too, as in --drafts 'EAGLE-3, tree'")
    names = possible(options)
    if wrong := sorted({*(options.drafts or [])} - {*names}):
        parser.error(f"--drafts: {', '.join(wrong)}: not possible with this model; choose from: {'; '.join(names)}")
    options.drafts = options.drafts or names


def load(options, device: str) -> PreTrainedModel:
    """The model that the options name."""
    if options.shape:
        return build(options.shape, device, options.layers)
    return common.load_model(options.model or common.DEMO_MODEL, device)


def main(arguments: list[str] | None = None) -> None:
    parser = common.command_line(__doc__, results="never_slower.json", threads=2)
    add_model(parser)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--sample", action="store_true", help="draw tokens, at temperature 1")
    parser.add_argument("--prompts", type=int, default=3, help="first prompts of each workload")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="rounds without Inductor")
    options = parser.parse_args(arguments)
    check(parser, options)
    device = common.device_for(options.threads)
    model = load(options, device)
    prompts = prompts_for(options.workloads, options.prompts, options.model or common.DEMO_MODEL, device)
    rows = [row for name in options.drafts for row in measure(model, name, prompts, options)]
    rows.sort(key=lambda row: row["adaptive"])
    title = f"over plain steps; {sum(row['adaptive'] < BOUND for row in rows)} cells below {BOUND}"
    common.show_rows(rows, [*rows[0]], title)
    rows = [row | {"sampled": options.sample} for row in rows]
    common.save_rows(
        options.json, rows, ("device", "model", "draft", "workload", "batch", "sampled"), common.stamp(model.device)
    )


if __name__ == "__main__":
    main()
