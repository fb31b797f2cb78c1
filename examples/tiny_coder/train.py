"""Train the embedded demo model: a 7 M parameter Llama that writes and edits Python.

    python examples/tiny_coder/train.py --out OUT --minutes 9.6        # one H200
    python examples/tiny_coder/train.py --out OUT --minutes 1 --smoke  # any CPU: only to see that it runs
    python examples/tiny_coder/train.py --out OUT --minutes 5 --layers 3 --teacher examples/tiny_coder

    python examples/tiny_coder/train.py --out OUT --minutes 9.6 --architecture qwen3_5   # a hybrid, see hybrid.py

The third makes a draft model of half the size, which learns the larger model's probabilities and has its tokenizer.
Heads for a hybrid: heads.py --model OUT.

The corpus (data.py) is the Python code installed on this machine; about 40 % of each batch are editing
documents made from it (edits.py) by worker processes while the training runs. The schedule follows the
clock, so that the learning rate has decayed when the time is up.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import time
from pathlib import Path

START = time.time()

import data  # noqa: E402
import edits  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from hybrid import ARCHITECTURES, Hybrid  # noqa: E402
from model import LAYERS, Llama, Muon, head_loss, to_transformers  # noqa: E402

LENGTH = data.MAX_LENGTH


def log(*parts) -> None:
    print(f"[{time.time() - START:6.1f} s]", *parts, flush=True)


# --- data in worker processes ---------------------------------------------------------------------

_tokenizers: dict = {}


def tokenizer_at(path: str):
    if path not in _tokenizers:
        from tokenizers import Tokenizer

        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _tokenizers[path] = Tokenizer.from_file(path)
    return _tokenizers[path]


def cut(text: str, rng) -> list[str]:
    """The text in pieces that end with a newline; prompts also end there, so that indentation stays a separate token."""
    ends = [m.end() for m in re.finditer(r'(""")?\n(?= )', text) if rng.random() < (0.3 if m[1] else 0.02)]
    return [text[a:b] for a, b in zip([0, *ends], [*ends, None])]


def encode_texts(job) -> tuple[np.ndarray, int]:
    """Files as one token array, each followed by the end-of-text token."""
    tok_path, texts, rng = job
    pieces = [p for t in texts for p in (cut(t + data.EOT, rng) if rng else [t + data.EOT])]
    encoded = tokenizer_at(tok_path).encode_batch(pieces, add_special_tokens=False)
    return np.concatenate([np.array(e.ids, dtype=np.int16) for e in encoded]), sum(len(t) for t in texts)


def edit_rows(job) -> np.ndarray:
    """Editing documents of some files, packed so that every document is whole in some row."""
    tok_path, paths, seed = job
    rng, docs = random.Random(seed), []
    for path in paths:
        text = data.read_source(path)
        for unit in edits.units(text, rng, limit=9) if text else []:
            doc = edits.document(unit, rng, data.EOT)
            if doc:
                docs.append(doc)
    rng.shuffle(docs)
    rows, row = [], []
    for e in tokenizer_at(tok_path).encode_batch(docs, add_special_tokens=False) if docs else []:
        if len(e.ids) > LENGTH + 1:
            continue
        row += e.ids
        if len(row) > LENGTH:
            rows.append(row[: LENGTH + 1])
            row = list(e.ids) if len(row) > LENGTH + 1 else []  # cut off there, whole here
    return np.array(rows, dtype=np.int16).reshape(-1, LENGTH + 1)


def edit_tasks(job) -> list[tuple[str, str]]:
    """(prompt, answer) pairs of moderate length from held-out files."""
    paths, seed, count = job
    rng, tasks = random.Random(seed), []
    for path in rng.sample(paths, len(paths)):
        text = data.read_source(path)
        for unit in edits.units(text, rng, limit=2)[:1] if text else []:
            made = edits.transform(unit, rng) if len(unit) < 1600 else None
            if made:
                tasks.append(edits.prompt_and_answer(*made, rng))
        if len(tasks) == count:
            break
    return tasks


def tokenizer_sample(train, budget: int) -> list[str]:
    """Texts of about `budget` characters, and editing documents, whose words belong in the vocabulary, too."""
    sample = []
    for _, text in train:
        sample.append(text)
        budget -= len(text)
        if budget < 0:
            break
    for path, _ in train[:200]:
        text, rng = data.read_source(path), random.Random(path)
        sample += [d for u in edits.units(text, rng, 6) if (d := edits.document(u, rng, ""))]
    return sample


class EditStream:
    """Keeps the workers busy until the device holds `capacity` rows; serves unseen rows first."""

    def __init__(self, pool, tok_path, paths, capacity, device, workers):
        self.pool, self.tok_path, self.paths = pool, tok_path, paths
        self.rows = torch.empty(capacity, LENGTH + 1, dtype=torch.int16, device=device)
        self.count = self.cursor = self.seed = 0
        self.jobs = [self.submit() for _ in range(2 * workers)]

    def submit(self):
        self.seed += 1
        paths = random.Random(self.seed).sample(self.paths, min(24, len(self.paths)))
        return self.pool.apply_async(edit_rows, ((self.tok_path, paths, self.seed),))

    def poll(self):
        waiting = []
        for job in self.jobs:
            if not job.ready():
                waiting.append(job)
                continue
            new = torch.from_numpy(job.get())[: len(self.rows) - self.count]
            self.rows[self.count : self.count + len(new)].copy_(new)
            self.count += len(new)
            if self.count < len(self.rows):
                waiting.append(self.submit())
        self.jobs = waiting

    def take(self, n):
        if self.cursor + n <= self.count:
            rows = self.rows[self.cursor : self.cursor + n]
            self.cursor += n
            return rows
        return self.rows[torch.randint(self.count, (n,), device=self.rows.device)]


class RawStream:
    """Windows of the concatenated files, shuffled and cut at another offset in every pass."""

    def __init__(self, tokens, length):
        self.tokens, self.length, self.passes, self.order = tokens, length, -1, tokens.new_empty(0)

    def take(self, n):
        if len(self.order) < n:
            phase = random.randrange(self.length)
            windows = (len(self.tokens) - phase - 1) // self.length
            self.order = torch.randperm(windows, device=self.tokens.device) * self.length + phase
            self.passes += 1
        starts, self.order = self.order[:n], self.order[n:]
        return self.tokens[starts[:, None] + torch.arange(self.length + 1, device=starts.device)]


# --- evaluation and output ------------------------------------------------------------------------


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # no second compilation for it
def validate(model, tokens, length, rows, autocast, limit) -> float:
    windows = min((len(tokens) - 1) // length, limit)
    rows = min(rows, windows)
    total, batches = 0.0, windows // rows
    for i in range(batches):
        starts = torch.arange(i * rows, (i + 1) * rows, device=tokens.device) * length
        with autocast():
            index = starts[:, None] + torch.arange(length + 1, device=tokens.device)
            total += model(tokens[index].long()).item()
    return total / batches


def generate(hf, tok, prompts, max_new_tokens, seconds) -> list[str]:
    batch = tok(prompts, return_tensors="pt", padding=True, return_token_type_ids=False).to(hf.device)
    out = hf.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False, max_time=seconds)
    new = out[:, batch["input_ids"].shape[1] :].tolist()
    new = [ids[: ids.index(0) + 1] if 0 in ids else ids for ids in new]
    return [tok.decode(ids) for ids in new]


SAMPLES = [
    'def count_words(text):\n    """Return a dictionary from each word of the text to its number of occurrences."""\n',
    'class Stack:\n    """A stack with push, pop and peek."""\n\n    def __init__(self):\n',
    "Rename the variable `total` to `result`.\n\n```python\ndef mean(values):\n    total = 0.0\n    for value in values:\n"
    "        total += value\n    return total / len(values)\n```\n\n```python\n",
    "Fix the wrong operator: `low < high` must read `low <= high`.\n\n```python\ndef search(items, key):\n    low, high = 0, "
    "len(items) - 1\n    while low < high:\n        middle = (low + high) // 2\n        if items[middle] < key:\n"
    "            low = middle + 1\n        else:\n            high = middle\n    return low\n```\n\n```python\n",
]


def final_evaluation(hf, out, tasks, device, seconds):
    from transformers import AutoTokenizer

    tok = AutoTokenizer.from_pretrained(out)
    hf = hf.to(device)
    samples = list(zip(SAMPLES, generate(hf, tok, SAMPLES, 120, seconds / 3)))
    tasks = sorted(tasks, key=lambda t: len(t[0]))
    exact, deadline = 0, time.time() + seconds * 0.85
    for i in range(0, len(tasks), 32):
        part = tasks[i : i + 32]
        budget = max(len(tok(a)["input_ids"]) for _, a in part) + 4
        made = generate(hf, tok, [p for p, _ in part], budget, max(deadline - time.time(), 2))
        exact += sum(m == a + data.EOT for m, (_, a) in zip(made, part))
    for prompt, text in samples:
        print(f"--- prompt\n{prompt}--- model\n{text}", flush=True)
    return exact, samples


def write_card(out, packages, facts, samples) -> None:
    rows = "\n".join(
        f"| {name} | {p['version']} | {p['licence']} | {p['files']} | {p['bytes'] / 1e6:.2f} |"
        for name, p in sorted(packages.items(), key=lambda item: -item[1]["bytes"])
    )
    shown = "\n\n".join(f"Prompt:\n\n````text\n{p}````\n\nModel:\n\n````text\n{m}\n````" for p, m in samples)
    fill = {**facts, "rows": rows, "shown": shown, "mb": f"{sum(p['bytes'] for p in packages.values()) / 1e6:.0f}"}
    text = (Path(__file__).parent / "card.md.in").read_text()
    for key, value in fill.items():
        text = text.replace("{{" + key + "}}", str(value))
    (out / "README.md").write_text(text)


# --- training -------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.6, help="wall time for everything")
    parser.add_argument("--rows", type=int, default=96, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak learning rate of the matrices (Muon)")
    parser.add_argument("--lr-embed", type=float, default=3e-3, help="peak rate of embeddings and norms (AdamW)")
    parser.add_argument("--edit-share", type=float, default=0.4)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--architecture", default="llama", choices=("llama", *ARCHITECTURES))
    parser.add_argument("--teacher", type=Path, help="a model of this kind: learn its probabilities, use its tokenizer")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="little data and short rows, for a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    torch.manual_seed(0)
    length = 256 if args.smoke else LENGTH
    rows = 4 if args.smoke else args.rows
    reserve = 25 if args.smoke else 65  # seconds kept for the evaluation at the end
    train_end = START + 60 * args.minutes - reserve

    workers = max(1, (os.cpu_count() or 2) - 1)
    pool = multiprocessing.get_context("fork").Pool(workers)  # before anything touches the GPU
    train, val, packages = data.load_corpus(pool, args.smoke)
    random.shuffle(train)
    log(f"{len(train)} files, {sum(len(t) for _, t in train) / 1e6:.1f} MB; {len(val)} files held out")
    if args.teacher:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.teacher / name, args.out)
    else:
        data.train_tokenizer(tokenizer_sample(train, (4 if args.smoke else 30) * 1_000_000), args.out)
    tok_path = str(args.out / "tokenizer.json")
    log("tokenizer written")

    def encode(texts, cuts):
        jobs = [(tok_path, texts[i : i + 40], random.Random(i) if cuts else None) for i in range(0, len(texts), 40)]
        parts = list(pool.imap(encode_texts, jobs))
        return torch.from_numpy(np.concatenate([p[0] for p in parts])), sum(p[1] for p in parts)

    tokens, chars = encode([t for _, t in train], True)
    val_tokens, val_chars = encode([t for _, t in val], False)
    log(f"{len(tokens) / 1e6:.1f} M tokens, {chars / len(tokens):.2f} characters each")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks_job = pool.apply_async(edit_tasks, (([p for p, _ in val], 1, 4 if args.smoke else 64),))
    stream = EditStream(pool, tok_path, [p for p, _ in train], 120 if args.smoke else 100_000, device, workers)
    raw = RawStream(tokens.to(device), length)
    val_tokens, bits = val_tokens.to(device), len(val_tokens) / val_chars / math.log(2)
    val_limit = 40 if args.smoke else 480  # windows

    torch.set_float32_matmul_precision("high")
    is_llama, teacher = args.architecture == "llama", None
    model = (Llama(args.layers) if is_llama else Hybrid(args.architecture, args.layers)).to(device)
    if args.teacher:
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.bfloat16).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    adam = torch.optim.AdamW(others, lr=args.lr_embed, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    muon = Muon(matrices, lr=args.lr, weight_decay=0.1)
    if not args.no_compile and not args.smoke:
        for layer in model.layers:  # one layer is compiled, and its code serves all
            layer.compile(dynamic=False)
        model.head_loss = torch.compile(head_loss, dynamic=False)

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def checkpoint():
        hf = to_transformers(model) if is_llama else model.to_transformers()
        hf.save_pretrained(args.out)
        return hf

    while stream.count < (50 if args.smoke else 2000):  # a first stock of edits
        stream.poll()
        time.sleep(0.2)
    log(f"{parameters / 1e6:.2f} M parameters on {device}; {stream.count} edit rows to begin with")

    edit_n = round(args.edit_share * rows)
    step, losses, records = 0, [], []
    begin = mark = saved = time.time()
    mark_step, val_loss = 0, float("nan")
    while time.time() < train_end:
        progress = (time.time() - begin) / (train_end - begin)
        scale = min(1.0, (step + 1) / (5 if args.smoke else 100), 1.02 - progress)
        for optimizer, lr in ((muon, args.lr), (adam, args.lr_embed)):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        batch = torch.cat([stream.take(edit_n)[:, : length + 1], raw.take(rows - edit_n)]).long()
        with torch.no_grad():
            wanted = teacher(batch[:, :-1], use_cache=False).logits if teacher else None
        with autocast():
            loss = model(batch, wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        muon.zero_grad()
        adam.zero_grad()
        losses.append(loss.detach())
        step += 1
        if step == 3 and not args.smoke:
            log(f"three steps done, compilation took {time.time() - begin:.0f} s")
        if step % (2 if args.smoke else 20) == 0:
            recent = torch.stack(losses[-20:]).mean().item()  # also lets the queue of the GPU drain
            if stream.jobs:
                stream.poll()
            now = time.time()
            if now - mark > 5:
                speed = (step - mark_step) * rows * length / (now - mark)
                log(f"step {step} tokens {step * rows * length / 1e6:.1f} M loss {recent:.4f} lr x{scale:.3f} "
                    f"{speed / 1e6:.3f} M tok/s eta {train_end - now:.0f} s, {stream.count} edit rows, pass {raw.passes}")  # fmt: skip
                records.append({"step": step, "seconds": round(now - START, 1), "loss": round(recent, 4)})
                mark, mark_step = now, step
            if not math.isfinite(recent):
                raise RuntimeError("the loss is not finite: lower --lr (the last checkpoint is in --out)")
            losses = losses[-20:]
            if now - saved > 120 and train_end - now > 20:
                val_loss = validate(model, val_tokens, length, rows, autocast, val_limit // 4)
                log(f"validation {val_loss:.4f} nats a token, {val_loss * bits:.4f} bits a character")
                checkpoint()
                saved = mark = time.time()
                mark_step = step

    trained = time.time() - begin
    hf = checkpoint()
    val_loss = validate(model, val_tokens, length, rows, autocast, val_limit)
    log(f"end of training: validation {val_loss:.4f} nats a token, {val_loss * bits:.4f} bits a character")
    check = val_tokens[: min(length, 512) + 1].long()[None]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        ours, theirs = model.float()(check).item(), hf.float().cpu()(check.cpu(), labels=check.cpu()).loss.item()
    log(f"the same text: {ours:.4f} here, {theirs:.4f} in transformers (weights in bf16)")
    hf = hf.to(torch.bfloat16)
    tasks = tasks_job.get(timeout=20)
    pool.terminate()
    facts = {
        "parameters": f"{parameters / 1e6:.2f}", "tokens": f"{step * rows * length / 1e6:.0f}",
        "steps": step, "step_tokens": rows * length, "minutes": f"{trained / 60:.1f}",
        "unique": f"{len(tokens) / 1e6:.0f}", "edit_unique": f"{stream.count * LENGTH / 1e6:.0f}",
        "share": f"{args.edit_share:.0%}", "loss": f"{val_loss:.3f}", "bits": f"{val_loss * bits:.3f}",
        "hardware": "one " + torch.cuda.get_device_name().replace("NVIDIA ", "") if device.type == "cuda" else "a CPU",
        "layers": args.layers, "kind": "Llama" if is_llama else f"{args.architecture} hybrid",
        "options": f" --layers {args.layers} --teacher {args.teacher}" if args.teacher else "",
        "exact": "not measured", "tasks": len(tasks), "held_out": len(val), "total": f"{args.minutes:g}",
        "versions": f"PyTorch {torch.__version__.split('+')[0]}",
    }  # fmt: skip
    write_card(args.out, packages, facts, [])  # in case the rest takes too long
    exact, samples = final_evaluation(hf, args.out, tasks, device, reserve - 15)
    facts["exact"] = exact
    write_card(args.out, packages, facts, samples)
    (args.out / "training.json").write_text(
        json.dumps({"facts": facts, "curve": records, "packages": packages}, indent=1)
    )
    log(f"edit tasks solved exactly: {exact} of {len(tasks)}")
    log("files:", ", ".join(f"{p.name} {p.stat().st_size / 2**20:.2f} MiB" for p in sorted(args.out.iterdir())))


if __name__ == "__main__":
    main()
