"""Answers for training on them (`train_draft(..., on_policy=True)`): seconds until a model has written them all.

    python -m benchmarks.training.on_policy [--prompts 1500] [--new-tokens 256] [--device cuda] [--baseline]
                                            [--json FILE]

The model has the shape of a small one (30 layers of 576, 135 million parameters) and random weights, so that no answer
ends early. Prompts of up to 640 tokens are joined from random pieces of benchmarks/prompts; no two are the same. "cold"
counts everything in a fresh process except the imports and the model; "warm" is the same call again. --baseline answers
the first --baseline-prompts with transformers' own generate(), two at a time and as many at a time as ours, in the same
process. Acceptance depends on how often answers repeat themselves, so the rows have `tokens_a_round`; --drafts 1 turns
drafts off.
"""

import argparse
import json
import random
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.common import DEMO_MODEL, PROMPTS, elapsed, read_prompts, save_rows, stamp
from spec_compile.runtime.generate import SpeculativeMixin
from spec_compile.train import corpus as on_policy
from spec_compile.train.data import Document

SHAPE = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152,
             tie_word_embeddings=True, max_position_embeddings=8192)  # fmt: skip
LONGEST, PIECE = 640, 40
"""Most tokens of a prompt, and tokens of each of its pieces."""


def build(layers: int, device: torch.device) -> PreTrainedModel:
    """A model with random weights, in bfloat16 on a GPU."""
    config = LlamaConfig(num_hidden_layers=layers, **SHAPE)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model.eval()


def make_prompts(count: int) -> list[Document]:
    """Prompts of 40 to 640 tokens, joined from pieces of the benchmarks' own prompts."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    files = sorted(PROMPTS.glob("*.jsonl"))
    ids = tokenizer("\n".join(text for file in files for text in read_prompts(file, 100)), verbose=False).input_ids
    rng, prompts = random.Random(0), []
    for _ in range(count):
        starts = [rng.randrange(len(ids) - PIECE) for _ in range(rng.randint(1, LONGEST // PIECE))]
        prompts.append([token for start in starts for token in ids[start : start + PIECE]])
    return [Document(torch.tensor(p, dtype=torch.int32), torch.zeros(len(p), dtype=torch.bool)) for p in prompts]


def write(model: PreTrainedModel, prompts: list[Document], new_tokens: int) -> dict:
    """Answer all prompts. Returns seconds and tokens, and for our engine the facts about its rounds."""
    options = dict(max_new_tokens=new_tokens, do_sample=False)
    stats, generate = {}, SpeculativeMixin.generate

    def counted(self, *arguments, **named):
        stats["last"] = self.speculation.stats
        return generate(self, *arguments, **named)

    work = partial(on_policy.continue_documents, model, prompts, LONGEST + new_tokens, 0, options, print)
    with mock.patch.object(SpeculativeMixin, "generate", counted):
        answers, seconds = elapsed(work, model.device)
    tokens = sum(int(answer.supervised.sum()) for answer in answers)
    row = {"prompts": len(prompts), "tokens": tokens, "seconds": round(seconds, 2)}
    if "last" in stats:
        last = stats["last"]
        row |= {"rounds": last.rounds, "tokens_a_round": round(last.accept_length, 2), "nodes": last.nodes}
        row["spent"] = {name: round(spent, 2) for name, spent in last.seconds.items()}
    return row


def run_baseline(model: PreTrainedModel, prompts: list[Document], new_tokens: int, rows: int) -> dict:
    """The same with transformers' own generate(), `rows` at a time."""
    with (
        mock.patch.object(on_policy, "accelerate", lambda model, *_: model),
        mock.patch.object(on_policy, "most_rows", lambda *_: rows),
    ):
        return write(model, prompts, new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1500)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--drafts", type=int, help="most nodes that a round verifies")
    parser.add_argument("--rows", type=int, help="most prompts at a time")
    parser.add_argument("--baseline", action="store_true", help="also transformers' own loop")
    parser.add_argument("--baseline-prompts", type=int, default=128, help="prompts of the baseline")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    device = torch.device(args.device)
    for name, value in (("NODES", args.drafts), ("ROWS", args.rows)):
        if value is not None:
            getattr(on_policy, name)[device.type] = value
    model, prompts, rows = build(args.layers, device), make_prompts(args.prompts), []
    for name in ("ours, cold", "ours, warm"):
        rows.append({"system": name} | write(model, prompts, args.new_tokens))
    if args.baseline:
        for size in (2, min(on_policy.ROWS[device.type], args.baseline_prompts)):
            row = run_baseline(model, prompts[: args.baseline_prompts], args.new_tokens, size)
            rows.append({"system": f"transformers' generate(), {size} at a time, a part of the prompts"} | row)
    for row in rows:
        row["seconds_a_thousand_prompts"] = round(1000 * row["seconds"] / row["prompts"], 1)
        print(json.dumps(row))
    if args.json:
        facts = stamp(device) | {"layers": args.layers, "new_tokens": args.new_tokens}
        save_rows(args.json, rows, ("system",), facts)


if __name__ == "__main__":
    main()
