"""Answers for training on them (`train_draft(..., on_policy=True)`): seconds until a model has written them all.

    python benchmarks/on_policy.py [--prompts 1500] [--new-tokens 256] [--device cuda] [--baseline] [--json FILE]

The model has the shape of a small one (30 layers of 576, 135 million parameters) and random weights, so that no answer
ends early. Prompts of up to 640 tokens are cut from benchmarks/prompts at random places and put together anew; no two
are the same. "cold" counts everything in a fresh process but the imports and the model; "warm" is the same call again.
--baseline answers the first prompts (--baseline-prompts of them) with transformers' own generate(), two at a time and
as many at a time as ours, in the same process. What is accepted of drafts depends on how much the answers repeat
themselves, so `tokens_a_round` is given; --drafts 1 turns drafts off.
"""

import argparse
import json
import random
import time
from unittest import mock

import torch
from common import DEMO_MODEL, HERE, machine, read_prompts, synchronize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from spec_compile.runtime.generate import SpeculativeMixin
from spec_compile.training import on_policy
from spec_compile.training.data import Document

SHAPE = dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152,
             tie_word_embeddings=True, max_position_embeddings=8192)  # fmt: skip
LONGEST, PIECE = 640, 40
"""Tokens of a prompt at most, and of the pieces that it is put together from."""


def build(layers: int, device: torch.device) -> PreTrainedModel:
    """A model with random weights, in bfloat16 on a GPU."""
    config = LlamaConfig(num_hidden_layers=layers, **SHAPE)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model.eval()


def make_prompts(count: int) -> list[Document]:
    """Prompts of 40 to 640 tokens, of pieces of the benchmark's own texts."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    files = sorted((HERE / "prompts").glob("*.jsonl"))
    ids = tokenizer("\n".join(text for file in files for text in read_prompts(file, 100)), verbose=False).input_ids
    rng, prompts = random.Random(0), []
    for _ in range(count):
        starts = [rng.randrange(len(ids) - PIECE) for _ in range(rng.randint(1, LONGEST // PIECE))]
        prompts.append([token for start in starts for token in ids[start : start + PIECE]])
    return [Document(torch.tensor(p, dtype=torch.int32), torch.zeros(len(p), dtype=torch.bool)) for p in prompts]


def write(model: PreTrainedModel, prompts: list[Document], new_tokens: int) -> dict:
    """Answer all prompts; seconds, tokens, and what is known of the rounds, if ours ran."""
    options = dict(max_new_tokens=new_tokens, do_sample=False)
    stats, generate = {}, SpeculativeMixin.generate

    def counted(self, *arguments, **named):
        stats["last"] = self.speculation.stats
        return generate(self, *arguments, **named)

    begin = time.perf_counter()
    with mock.patch.object(SpeculativeMixin, "generate", counted):
        answers = on_policy.continue_documents(model, prompts, LONGEST + new_tokens, 0, options, print)
    synchronize(model.device)
    seconds, tokens = time.perf_counter() - begin, sum(int(answer.supervised.sum()) for answer in answers)
    row = {"prompts": len(prompts), "tokens": tokens, "seconds": round(seconds, 2)}
    if "last" in stats:
        last = stats["last"]
        row |= {"rounds": last.rounds, "tokens_a_round": round(last.accept_length, 2), "nodes": last.nodes}
        row["spent"] = {name: round(spent, 2) for name, spent in last.seconds.items()}
    return row


def run_baseline(model: PreTrainedModel, prompts: list[Document], new_tokens: int, rows: int) -> dict:
    """The same by transformers' own generate(), `rows` at a time."""
    with (
        mock.patch.object(on_policy, "accelerate", lambda model, *_: model),
        mock.patch.object(on_policy, "most_rows", lambda *_: rows),
    ):
        return write(model, prompts, new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=1500)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--drafts", type=int, help="nodes that a round verifies at most")
    parser.add_argument("--rows", type=int, help="prompts at a time at most")
    parser.add_argument("--baseline", action="store_true", help="transformers' own loop, too")
    parser.add_argument("--baseline-prompts", type=int, default=128, help="of so many prompts")
    parser.add_argument("--json", help="write the rows to this file")
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
        about = machine(device) | {"layers": args.layers, "new_tokens": args.new_tokens, "date": time.strftime("%F")}
        with open(args.json, "w") as file:
            json.dump({"machine": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
