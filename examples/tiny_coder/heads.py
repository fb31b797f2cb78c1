"""Train the demo model's draft heads: EAGLE-3, DFlash and one of multi-token prediction.

    python examples/tiny_coder/heads.py --work WORK --out OUT             # one H200
    python examples/tiny_coder/heads.py --work WORK --out OUT --smoke     # any CPU: only to see that it runs

1. Prompts from the model's own corpus (data.py): functions without their bodies, and the instructions of editing
   documents (edits.py). Files that were held out from the model are held out from the heads.
2. The model's own greedy answers to them, and also some unchanged texts of the corpus.
3. ``python -m spec_compile train`` for each head.

Steps whose results are already in WORK and OUT are skipped.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import data
import edits
import torch

HERE = Path(__file__).parent
SEQUENCE, NEW = 1024, 192
"""Tokens of a sequence, and most tokens of an answer."""
PROMPTS, HELD_OUT, TEXTS = 24_000, 512, 6_000
LONGEST_PROMPT, LONGEST_TEXT = 2400, 3600
"""Most characters of a prompt, and of a text."""
OPTIONS = {"batch_size": 32, "sequence_length": SEQUENCE, "checkpoint_minutes": 1}
HEADS = {
    "eagle3": {
        "taps": [2, 5, 8], "ttt_steps": 5, "draft_vocab_size": 3072, "intermediate_size": 512, "learning_rate": 3e-3,
    },
    "dflash": {"taps": [2, 5, 8], "block_size": 8, "num_layers": 3, "intermediate_size": 240},
    "mtp": {"ttt_steps": 5, "learning_rate": 2e-3},
}  # fmt: skip
"""Options of each head; all three together are small enough for a repository."""
NOTE = """
## Data

{prompts:,} prompts from permissively licensed Python sources (the corpus of the demo model, `data.py`): functions cut
off where their body begins, and editing instructions (`edits.py`), with the demo model's own greedy answers of up to
{new} tokens; and {texts:,} pieces of source files and editing documents as they are. Held out: the answers to {held_out}
prompts from files that were chosen by a hash of their content; similar ones may have been trained on.{together}

```
python examples/tiny_coder/heads.py --work WORK --out OUT
```

Apache-2.0, as the demo model.
"""


# --- prompts --------------------------------------------------------------------------------------


def code_prompts(text: str, rng, limit: int) -> list[str]:
    """Functions without their bodies, half of them after the code that precedes them."""
    lines, found = text.split("\n"), []
    nodes = (node for node in ast.walk(edits.parse(text)) if isinstance(node, edits.FUNCS))
    functions = [node for node in nodes if node.body[0].lineno > node.lineno and len(node.body) > 1]
    for function in rng.sample(functions, min(limit, len(functions))):
        has_docstring = ast.get_docstring(function, clean=False) is not None
        end = function.body[0].end_lineno if has_docstring else function.body[0].lineno - 1
        begin = min([function.lineno, *(d.lineno for d in function.decorator_list)]) - 1
        if rng.random() < 0.5:
            prompt = textwrap.dedent("\n".join(lines[begin:end]))
        else:
            room = rng.randint(0, LONGEST_PROMPT)
            while begin and sum(len(line) + 1 for line in lines[begin - 1 : end]) < room:
                begin -= 1
            prompt = "\n".join(lines[begin:end])
        found.append(prompt + "\n")
    return found


def edit_prompts(text: str, rng, limit: int) -> list[str]:
    """Editing instructions with the code to edit, and some requests for functions in words."""
    found = []
    for unit in edits.units(text, rng, limit):
        if rng.random() < 0.08:
            made = edits.write_function(unit, rng)
        else:
            edit = edits.transform(unit, rng)
            made = edits.prompt_and_answer(*edit, rng) if edit else None
        if made:
            found.append(made[0])
    return found[:limit]


def from_file(text: str) -> tuple[list[str], list[str], list[str]]:
    """(prompts of code, prompts of edits, texts) of one file."""
    rng = random.Random(text)
    documents = (edits.document(unit, rng, "") for unit in edits.units(text, rng, 1)[:1])
    begin = text.rfind("\n", 0, rng.randrange(len(text))) + 1
    texts = [text[begin : begin + LONGEST_TEXT], *filter(None, documents)]
    prompts = (some(text, rng, 4) for some in (code_prompts, edit_prompts))
    return *([prompt for prompt in some if len(prompt) <= LONGEST_PROMPT] for some in prompts), texts


def collect(work: Path, smoke: bool) -> None:
    """Write prompts.jsonl, held_out_prompts.jsonl and texts.jsonl."""
    rng, share = random.Random(0), 500 if smoke else 1
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        files = [[text for _, text in some] for some in data.load_corpus(pool, smoke)[:2]]
        train, held_out = (list(pool.imap(from_file, some[: 60 if smoke else None], 16)) for some in files)
    for name, some, count in (("prompts", train, PROMPTS), ("held_out_prompts", held_out, HELD_OUT)):
        kinds = [[prompt for found in some for prompt in found[kind]] for kind in (0, 1)]
        count = max(8, count // share) // 2  # of each kind
        chosen = [prompt for kind in kinds for prompt in rng.sample(kind, min(count, len(kind)))]
        rng.shuffle(chosen)
        write(work / f"{name}.jsonl", [{"prompt": prompt} for prompt in chosen])
    texts = [text for found in train for text in found[2]]
    write(work / "texts.jsonl", [{"text": text} for text in rng.sample(texts, min(TEXTS // share, len(texts)))])


# --- answers --------------------------------------------------------------------------------------


def answer(path: Path, prompts: list[str], device: str, new: int) -> list[str]:
    """The greedy answers, the end of the text included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from spec_compile.train.corpus import continue_documents
    from spec_compile.train.data import Document

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16" if device == "cuda" else "float32").to(device)
    encoded = [torch.tensor(ids, dtype=torch.int32) for ids in tokenizer(prompts).input_ids]
    documents = [Document(ids, torch.zeros(len(ids), dtype=torch.bool)) for ids in encoded]
    options = {"max_new_tokens": new, "do_sample": False}
    answered = continue_documents(model, documents, SEQUENCE, 0, options)
    return tokenizer.batch_decode([document.ids[document.supervised].tolist() for document in answered])


def answer_all(path: Path, prompts: list[str], device: str, new: int) -> list[dict]:
    """All prompts with their answers, made by several processes on one GPU."""
    count = 4 if device == "cuda" else 1
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        shares = pool.starmap(answer, [(path, prompts[n::count], device, new) for n in range(count)])
    return [
        {"prompt": prompt, "completion": completion}
        for n, share in enumerate(shares)
        for prompt, completion in zip(prompts[n::count], share)
    ]


# --- files ----------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)
    print(f"{path}: {len(rows)} rows, {path.stat().st_size / 1e6:.1f} MB", flush=True)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(algo: str, args, folder: Path) -> list[str]:
    """``python -m spec_compile train ...``"""
    length = ["--steps", "3"] if args.smoke else ["--minutes", str(args.minutes)]
    return [
        sys.executable, "-m", "spec_compile", "train", "--model", os.path.relpath(args.model), "--algo", algo,
        "--data", str(args.work / "train.jsonl"), "--validation", str(args.work / "held_out.jsonl"),
        "--output", str(folder), *length, "--device", args.device,
        "--options", json.dumps(OPTIONS | HEADS[algo] | ({"batch_size": 2} if args.smoke else {})),
    ]  # fmt: skip


def finish(folder: Path, facts: dict) -> None:
    """Keep the files that drafting needs, and describe the data in the card."""
    card = (folder / "README.md").read_text()
    card = card.replace("library_name", "license: apache-2.0\nlibrary_name", 1)
    card = card.rsplit("; the\ntraining goes on", 1)[0] + ".\n"
    (folder / "README.md").write_text(card + NOTE.format(**facts))
    (folder / "training.pt").unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=HERE, help="the model that train.py made")
    parser.add_argument("--work", type=Path, required=True, help="folder of the data")
    parser.add_argument("--out", type=Path, required=True, help="folder of the heads, each in its own")
    parser.add_argument("--heads", nargs="*", default=list(HEADS), choices=HEADS)
    parser.add_argument("--minutes", type=float, default=4, help="minutes of training for each head")
    parser.add_argument("--together", action="store_true", help="train the heads at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="little of everything, for a CPU")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "texts.jsonl").is_file():
        collect(args.work, args.smoke)
    texts = read(args.work / "texts.jsonl")
    for name, kept, more in (("train", "prompts", texts), ("held_out", "held_out_prompts", [])):
        if not (args.work / f"{name}.jsonl").is_file():
            prompts = [row["prompt"] for row in read(args.work / f"{kept}.jsonl")]
            write(
                args.work / f"{name}.jsonl",
                answer_all(args.model, prompts, args.device, 8 if args.smoke else NEW) + more,
            )

    facts = {
        "prompts": len(read(args.work / "train.jsonl")) - len(texts), "texts": len(texts), "new": NEW,
        "held_out": len(read(args.work / "held_out.jsonl")),
        "together": "\nThe heads were trained at the same time on one GPU." if args.together else "",
    }  # fmt: skip
    running = {}
    for algo in args.heads:
        folder = args.out / algo
        if not (folder / "config.json").is_file() or (folder / "training.pt").is_file():
            running[folder] = subprocess.Popen(command(algo, args, folder))
            if not args.together:
                running[folder].wait()
    for folder, process in running.items():
        if process.wait():
            raise SystemExit(f"the training in {folder} failed")
        finish(folder, facts)


if __name__ == "__main__":
    main()
