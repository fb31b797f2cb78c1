"""Mixed traffic: tokens a second in one long conversation that alternates code edits, which copy, and chat.

    python -m benchmarks.mixed_traffic [--drafts NAME ...] [--model PATH [--draft PATH] | --shape NAME [--layers N]]
        [--turns 12] [--new-tokens 128] [--context 1024] [--repeats 2] [--json FILE]

Models and drafts are those of never_slower.py. Each turn is the conversation so far, of which the last --context tokens
are kept, and a request. Plain steps, adaptive drafting and every fixed setting of a draft take turns to answer it, each
in its own conversation. An end-of-sequence token ends an answer. Rates include the time of the prompts, which is the
same for all. "over best" divides the rate of adaptive drafting by the best of the others in hindsight. "same answers"
says that all systems gave the same ones.
"""

import argparse
import sys
from functools import partial
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from torch import Tensor
from transformers import PreTrainedModel

import spec_compile
from benchmarks.common import DEMO_MODEL, RESULTS, device_for, hindsight, save_rows, show, stamp, timed
from benchmarks.never_slower import DRAFTS, SHUFFLED, add_model, check, draft_of, load, prompts_for

KINDS = ("code_editing", "chat")
"""Workloads of the turns, in turn."""
NODES, STEPS = (2, 4, 8, 16), (1, 2, 3, 5)
"""Fixed settings: nodes of trees, and steps of chains, up to those of the draft."""


def fixed_settings(settings: dict) -> dict[str, dict]:
    """The fixed settings of a draft by their names, from its options in `DRAFTS`.

    dict(num_steps=3) gives "1 step", "2 steps" and "3 steps".
    """
    most = settings.get("num_steps", 0)
    if "topk" in settings or not most:
        return {f"{nodes} nodes": settings | {"num_draft_tokens": nodes} for nodes in NODES}
    few = [steps for steps in STEPS if steps < most] + [most]
    return {f"{steps} step{'s' * (steps > 1)}": settings | {"num_steps": steps} for steps in few}


def systems_of(model: PreTrainedModel, name: str, options) -> dict[str, PreTrainedModel]:
    """The wrapped models that drafts of a name are compared in."""
    algo, _, settings = DRAFTS[name.removesuffix(SHUFFLED)]
    room = options.context + options.new_tokens
    shared = dict(compile=not options.no_compile, check=False, cache=False, max_cache_len=room)
    draft = draft_of(model, name, options)
    systems = {
        "plain": spec_compile.speculate(model, num_draft_tokens=1, **shared),
        "adaptive": spec_compile.speculate(model, algo, **draft, **settings, **shared),
    }
    for kind, fixed in fixed_settings(settings).items():
        systems[kind] = spec_compile.speculate(model, algo, adaptive=False, **draft, **fixed, **shared)
    return systems


def converse(systems: dict[str, PreTrainedModel], turns: list[tuple[str, Tensor]], options) -> tuple[dict, dict]:
    """The conversations of all systems, and the tokens and seconds [2] of each, by its name and by the kind of turn.

    turns: kind and request [1, T] of each.
    """
    fixed = dict(max_new_tokens=options.new_tokens, do_sample=False, pad_token_id=0)
    texts, spent = {}, {name: {kind: torch.zeros(2) for kind in KINDS} for name in systems}
    for name, fast in systems.items():
        texts[name] = turns[0][1][:, :0]
        fast.speculation.stats.reset()
        if hasattr(fast.speculation, "ngram"):
            fast.speculation.ngram.reset()
    for kind, request in turns:
        for name, fast in systems.items():
            prompt = torch.cat([texts[name], request], dim=1)[:, -options.context :]
            whole = torch.ones_like(prompt)  # transformers would take earlier ends of answers for padding
            answer, seconds = timed(partial(fast.generate, attention_mask=whole, **fixed), prompt)
            texts[name] = torch.cat([texts[name], request, answer[None]], dim=1)
            spent[name][kind] += torch.tensor([len(answer), seconds])
    return texts, spent


def measure(model: PreTrainedModel, name: str, turns: list[tuple[str, Tensor]], options) -> list[dict]:
    """A row for all turns, and for those of each kind."""
    systems = systems_of(model, name, options)
    for fast in systems.values():
        fast.speculation.warmup(1)
    runs = [converse(systems, turns, options) for _ in range(options.repeats)]
    texts = [*chain.from_iterable(conversations.values() for conversations, _ in runs)]
    rows = []
    for kinds in (KINDS, *((kind,) for kind in KINDS)):
        sums = {system: sum(spent[system][kind] for _, spent in runs for kind in kinds) for system in systems}
        rates = {system: float(tokens / seconds) for system, (tokens, seconds) in sums.items()}
        row = {
            "device": model.device.type,
            "model": options.shape or Path(options.model or DEMO_MODEL).name,
            "draft": name,
            "turns": kinds[0] if len(kinds) == 1 else "all",
            "tokens": int(sums["plain"][0]) // options.repeats,
            **rates,
            **hindsight(rates),
            "same answers": all(text.equal(texts[0]) for text in texts),
        }
        rows.append(row)
    lengths = {system: fast.speculation.stats.accept_length for system, fast in systems.items()}
    print(f"{name}: accept lengths " + ", ".join(f"{key} {value:.2f}" for key, value in lengths.items()), flush=True)
    rows[0]["accept lengths"] = lengths
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--turns", type=int, default=12, help="of both kinds together")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the conversation that are kept")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="rounds without Inductor")
    parser.add_argument("--json", type=Path, default=RESULTS / "mixed_traffic.json")
    options = parser.parse_args(arguments)
    check(parser, options)
    device = device_for(options.threads)
    model = load(options, device)
    prompts = prompts_for([*KINDS], (options.turns + 1) // 2, options.model or DEMO_MODEL, device)
    turns = [(kind, ids) for pair in zip(*prompts.values()) for kind, ids in zip(KINDS, pair)][: options.turns]
    facts = stamp(model.device)
    for name in options.drafts:
        rows = measure(model, name, turns, options)
        columns = [*rows[1]]
        cells = [[row[column] for column in columns] for row in rows]
        cells = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in cells]
        show(columns, cells, "tokens a second in a conversation of code edits and chat")
        save_rows(options.json, rows, ("device", "model", "draft", "turns"), facts)


if __name__ == "__main__":
    main()
