"""Every kind of draft with every loss, trained on the same answers of a model: accept length by set of prompts.

    python -m benchmarks.training.heads --model MODEL --data chats.jsonl --sets answered/chat.jsonl answered/maths.jsonl
        --output FOLDER --json rows.jsonl [--algos dflash dspark] [--losses fixed-exp-decay dpace] [--minutes 7]

--data has the model's chats, and --sets its greedy answers to prompts that are held out (hold_out.py and chats.py). A
row of JSON for each algorithm and loss is added to --json at once, so that processes on several GPUs can share the
file. "accept_length" is 1 + the shares of held-out drafts that equal the target's choices down to each depth, by set;
"rounds_accept_length" is that of generate() in whole rounds, on --rounds prompts of each set. The loss is the option
``per_position_loss_weight``; algorithms without it are trained once.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import spec_compile
from benchmarks.common import DEMO_MODEL, command_line, stamp
from benchmarks.quality.bits import read_prompts
from benchmarks.training.train import SHAPES, load
from spec_compile.train import TRAINERS
from spec_compile.train.loss import FIXED, NAMES

SAME = dict(batch_size=32, sequence_length=512)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, algo: str, loss: str | None, options: argparse.Namespace
) -> dict:
    """Train one draft and measure it."""
    folder, sets = options.output / f"{algo}-{loss or FIXED}", {path.stem: path for path in options.sets}
    chosen = SAME | SHAPES[algo] | options.options | ({} if loss is None else {"per_position_loss_weight": loss})
    result = spec_compile.train_draft(
        model, algo, data=options.data, validation=sets, tokenizer=tokenizer, output=folder, resume=False,
        minutes=options.minutes, **chosen,
    )  # fmt: skip
    row = {"options": chosen, "minutes": round(result.seconds / 60, 2), "steps": result.steps, "tokens": result.tokens}
    row |= {"tokens_per_second": round(result.tokens / result.seconds), "first_loss": result.losses[0]}
    row["last_loss"] = sum(result.losses[-20:]) / len(result.losses[-20:])
    by_set = result.acceptance_by_set
    row["accept_length"] = {name: round(1 + sum(shares), 3) for name, shares in by_set.items()}
    row["acceptance_by_depth"] = {name: [round(share, 4) for share in shares] for name, shares in by_set.items()}
    if options.rounds:
        row["rounds_accept_length"] = rounds(model, tokenizer, algo, folder, options)
    return row


def rounds(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, algo: str, folder: Path, options: argparse.Namespace
) -> dict:
    """The accept length of generate() by set."""
    fast = spec_compile.speculate(model, algo, draft=folder, adaptive=False, compile=False, merge_linears=False)
    lengths, asked = {}, dict(do_sample=False, max_new_tokens=options.new_tokens)
    for path in options.sets:
        fast.speculation.stats.reset()
        for _, prompt in read_prompts([path], options.rounds, tokenizer, 1024):
            ids = torch.tensor([prompt], device=model.device)
            fast.generate(ids, attention_mask=torch.ones_like(ids), **asked)
        lengths[path.stem] = round(fast.speculation.stats.accept_length, 3)
    return lengths


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL), help="a folder, or a name on the hub")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, required=True, help="the model's own chats")
    parser.add_argument("--sets", type=Path, nargs="+", required=True, help="files of its answers, which are held out")
    parser.add_argument("--algos", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--losses", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=8, help="prompts of each set that generate() answers")
    parser.add_argument("--new-tokens", type=int, default=256, help="of an answer at most")
    parser.add_argument("--options", type=json.loads, default={}, help="options of train_draft, as JSON")
    parser.add_argument("--output", type=Path, required=True, help="folder for the drafts")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model, options.device), AutoTokenizer.from_pretrained(options.model)
    facts = stamp(model.device)
    for algo in options.algos:
        has_losses = "per_position_loss_weight" in TRAINERS[algo].supports
        for loss in options.losses if has_losses else [None]:
            row = {"model": Path(options.model).name, "algorithm": algo, "loss": loss or FIXED}
            row |= measure(model, tokenizer, algo, loss, options)
            print(json.dumps(row), flush=True)
            with options.json.open("a") as file:
                file.write(json.dumps(row | {"stamp": facts}) + "\n")


if __name__ == "__main__":
    main()
