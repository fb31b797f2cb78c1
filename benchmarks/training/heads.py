"""Every kind of draft with every loss, trained on the same answers of a model: accept length by set of prompts.

    python -m benchmarks.training.heads record NAME=FILE ... --answers answers.jsonl [--model MODEL] [--measured 12]
        [--seconds 85] [--device cuda]
    python -m benchmarks.training.heads train --answers answers.jsonl --algos dflash dspark --losses fixed-exp-decay
        dpace --output FOLDER --json rows.jsonl [--minutes 7] [--device cuda:0]

`record` writes the model's greedy answers to prompts. FILE has JSON lines with `prompt`, `turns` or `messages`; files
of one NAME are one set. The first --measured prompts of each file are held out, and others that overlap with them are
left out. Until --seconds are over, more chats are recorded for training: turns of a user that the model writes itself
(chats.py), with its greedy answers, or drawn answers to the same prompts if it has no chat template.

`train` makes a row of JSON for each algorithm and loss and adds it to --json at once, so that processes on several
GPUs can share the file. "accept_length" is 1 + the shares of held-out drafts that equal the target's choices down to
each depth, by set; "rounds_accept_length" is that of generate() in whole rounds, on --rounds prompts of each set. The
loss is the option ``per_position_loss_weight``; algorithms without it are trained once.
"""

import argparse
import json
import time
from itertools import count
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import spec_compile
from benchmarks.common import DEMO_MODEL, stamp
from benchmarks.quality.bits import read_texts
from benchmarks.training.chats import AGAIN, LONGEST, Chats
from benchmarks.training.hold_out import split
from benchmarks.training.train import SHAPES
from spec_compile.train import TRAINERS
from spec_compile.train.corpus import continue_documents
from spec_compile.train.data import Document
from spec_compile.train.loss import FIXED, NAMES

SAME = dict(batch_size=32, sequence_length=512)
GREEDY = dict(do_sample=False)
TOGETHER = 1024
"""User's turns that are drawn and then answered at a time."""


class Recorder:
    """Writes a model's answers to a file, a line each: set (None: for training), prompt and completion, token ids."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace, file):
        self.model, self.tokenizer, self.file = model, tokenizer, file
        self.new_tokens, self.end = options.new_tokens, time.perf_counter() + options.seconds
        self.has_template = getattr(tokenizer, "chat_template", None) is not None

    def run(self, measured: dict[str, list[str]], others: list[str]) -> None:
        """Record the answers to all prompts, and then more until the time is over."""
        labelled = [(name, text) for name, texts in measured.items() for text in texts]
        labelled += [(None, text) for text in others]
        self.answer(labelled, GREEDY, 0)
        chats = Chats(self.model, self.tokenizer, self.new_tokens)
        for seed in count(1):
            begin = time.perf_counter()
            if self.has_template:
                more, how = chats.user_turns(TOGETHER, seed), GREEDY
            else:
                more, how = others[:TOGETHER], AGAIN
            self.answer([(None, text) for text in more], how, seed)
            if 2 * time.perf_counter() - begin > self.end or not more:  # the next would take as long
                return

    def answer(self, labelled: list[tuple[str | None, str]], how: dict, seed: int) -> None:
        """Record an answer to each (set, prompt)."""
        asked = [(name, self.document(text)) for name, text in labelled]
        asked = [(name, document) for name, document in asked if len(document.ids) <= LONGEST]
        options = how | {"max_new_tokens": self.new_tokens}
        documents = [document for _, document in asked]
        answers = continue_documents(self.model, documents, LONGEST + self.new_tokens, seed, options, print)
        for (name, document), answer in zip(asked, answers):
            row = {"set": name, "prompt": document.ids.tolist(), "completion": answer.ids[answer.supervised].tolist()}
            self.file.write(json.dumps(row) + "\n")

    def document(self, text: str) -> Document:
        """A prompt for the model to continue."""
        if self.has_template:
            chat = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int32)
        return Document(ids, torch.zeros(len(ids), dtype=torch.bool))


def record(options: argparse.Namespace) -> None:
    """The subcommand ``record``."""
    model, tokenizer = load(options)
    files = {str(path): [chat[-1]["content"] for chat in read_texts(path)] for _, path in options.sets}
    held_out, others = split({name: texts[: options.prompts] for name, texts in files.items()}, options.measured)
    measured: dict[str, list[str]] = {}
    for name, path in options.sets:
        measured.setdefault(name, []).extend(held_out[str(path)])
    with options.answers.open("w", buffering=1) as file:
        Recorder(model, tokenizer, options, file).run(measured, others)


def train(options: argparse.Namespace) -> None:
    """The subcommand ``train``."""
    model, _ = load(options)
    sets: dict[str | None, list[dict]] = {}
    for line in options.answers.read_text().splitlines():
        row = json.loads(line)
        sets.setdefault(row.pop("set"), []).append(row)
    data, facts = sets.pop(None), stamp(model.device)
    for algo in options.algos:
        has_losses = "per_position_loss_weight" in TRAINERS[algo].supports
        for loss in options.losses if has_losses else [None]:
            row = {"model": Path(options.model).name, "algorithm": algo, "loss": loss or FIXED}
            row |= measure(model, algo, loss, data, sets, options)
            print(json.dumps(row), flush=True)
            with options.json.open("a") as file:
                file.write(json.dumps(row | {"stamp": facts}) + "\n")


def measure(
    model: PreTrainedModel, algo: str, loss: str | None, data: list[dict], sets: dict, options: argparse.Namespace
) -> dict:
    """Train one draft and measure it."""
    folder = options.output / f"{algo}-{loss or FIXED}"
    chosen = SAME | SHAPES[algo] | options.options | ({} if loss is None else {"per_position_loss_weight": loss})
    result = spec_compile.train_draft(
        model, algo, data=data, validation=sets, output=folder, resume=False, minutes=options.minutes, **chosen
    )
    row = {"options": chosen, "minutes": round(result.seconds / 60, 2), "steps": result.steps, "tokens": result.tokens}
    row |= {"tokens_per_second": round(result.tokens / result.seconds), "first_loss": result.losses[0]}
    row["last_loss"] = sum(result.losses[-20:]) / len(result.losses[-20:])
    row["accept_length"] = {name: round(1 + sum(shares), 3) for name, shares in result.acceptance_by_set.items()}
    row["acceptance_by_depth"] = {
        name: [round(share, 4) for share in shares] for name, shares in result.acceptance_by_set.items()
    }
    if options.rounds:
        print(json.dumps(row), flush=True)  # in case that the rounds are stopped
        row["rounds_accept_length"] = rounds(model, algo, folder, sets, options)
    return row


def rounds(model: PreTrainedModel, algo: str, folder: Path, sets: dict, options: argparse.Namespace) -> dict:
    """The accept length of generate() by set."""
    fast = spec_compile.speculate(model, algo, draft=folder, adaptive=False, compile=False, merge_linears=False)
    lengths = {}
    for name, rows in sets.items():
        fast.speculation.stats.reset()
        for row in rows[: options.rounds]:
            ids = torch.tensor([row["prompt"]], device=model.device)
            fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new_tokens, **GREEDY)
        lengths[name] = round(fast.speculation.stats.accept_length, 3)
    return lengths


def load(options: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on its device, and its tokenizer."""
    device = torch.device(options.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(device).eval()
    return model, AutoTokenizer.from_pretrained(options.model)


def named_file(text: str) -> tuple[str, Path]:
    """NAME=FILE as (name, path); a file by itself has its own name."""
    name, _, path = text.rpartition("=")
    return name or Path(path).stem, Path(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--model", default=str(DEMO_MODEL), help="a folder, or a name on the hub")
    both.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    both.add_argument("--answers", type=Path, required=True, help="the file of recorded answers")
    both.add_argument("--new-tokens", type=int, default=256, help="of an answer at most")
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", parents=[both])
    recording.add_argument("sets", nargs="+", type=named_file, metavar="NAME=FILE")
    recording.add_argument("--measured", type=int, default=12, help="first prompts of each file, which are held out")
    recording.add_argument("--prompts", type=int, default=10_000, help="prompts of each file at most")
    recording.add_argument("--seconds", type=float, default=85.0)
    recording.set_defaults(run=record)
    training = commands.add_parser("train", parents=[both])
    training.add_argument("--algos", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    training.add_argument("--losses", nargs="+", default=list(NAMES), choices=NAMES)
    training.add_argument("--minutes", type=float, default=7.0)
    training.add_argument("--rounds", type=int, default=8, help="prompts of each set that generate() answers")
    training.add_argument("--options", type=json.loads, default={}, help="options of train_draft, as JSON")
    training.add_argument("--output", type=Path, required=True, help="folder for the drafts")
    training.add_argument("--json", type=Path, required=True)
    training.set_defaults(run=train)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
