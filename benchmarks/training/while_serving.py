"""A draft that learns while it serves (`train_while_serving`): tokens per second, and accept length, by share of time.

    python -m benchmarks.training.while_serving [--model PATH] [--draft PATH --algo NAME] [--prompts FILE ...]
        [--shares 0 0.05 0.1] [--seconds 60] [--new-tokens 128] [--requests 8] [--no-compile] [--json FILE]

For each share the draft is loaded anew and the served prompts are answered again and again, --requests at a time, for
--seconds; "tokens/s" counts all that time, so also what training takes. Share 0 does not train. Every fifth prompt is
held out: it is answered before the training and after those seconds only. "held out" is their accept length before and
after, and "served" that of the served prompts in the first and in the last pass. Answers are greedy, so all shares
answer alike; the last column counts held-out answers that are those of share 0 (in 16 bits and on a CPU also).
"""

import argparse
import time
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import spec_compile
from benchmarks.common import DEMO_MODEL, PROMPTS, RESULTS, device_for, load_model, prompts_of, save_rows, show, stamp

LONGEST = 512
"""Tokens of a prompt, from its end."""
EVERY = 5


def answers(fast, prompts: list[list[int]], new_tokens: int, requests: int) -> tuple[list[list[int]], float]:
    """The answers, and tokens a round."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_requests_per_batch=requests)
    outputs = list(fast.generate_batch(prompts, config, batching, eos_token_id=-1).values())
    tokens = [output.generated_tokens for output in outputs]
    return tokens, sum(map(len, tokens)) / sum(output.speculation.steps for output in outputs)


def measure(options, share: float, served: list[list[int]], held_out: list[list[int]], device: str) -> tuple:
    """A row, and the held-out answers."""
    model = load_model(options.model, device)
    fast = spec_compile.speculate(model, options.algo, draft=options.draft, compile=options.compile, adaptive=False)
    size = options.new_tokens, options.requests
    _, before = answers(fast, held_out, *size)
    online = spec_compile.train_while_serving(fast, share=share) if share else None
    tokens, lengths, begin = 0, [], time.monotonic()
    while (seconds := time.monotonic() - begin) < options.seconds:
        texts, length = answers(fast, served, *size)
        tokens += sum(map(len, texts))
        lengths.append(length)
    row = {"share": share, "tokens/s": round(tokens / seconds, 1), "passes": len(lengths)}
    if online is not None:
        row |= {
            "steps": online.steps,
            "swaps": online.swaps,
            "trained s": round(online.seconds, 2),
            "fault": online.fault,
        }
    texts, after = answers(fast, held_out, *size)
    row |= {"held out": [round(before, 3), round(after, 3)], "served": [round(lengths[n], 3) for n in (0, -1)]}
    return row, texts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--draft", type=Path, default=DEMO_MODEL / "heads/eagle3")
    parser.add_argument("--algo", default="eagle3")
    parser.add_argument("--prompts", type=Path, nargs="+", default=sorted(PROMPTS.glob("*.jsonl")))
    parser.add_argument("--most", type=int, default=200, help="prompts of each file")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.05, 0.1])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--as-chat", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS / "while_serving.json")
    options = parser.parse_args(arguments)
    device, tokenizer = device_for(options.threads), AutoTokenizer.from_pretrained(options.model)
    prompts = [
        ids[0].tolist()
        for path in options.prompts
        for ids in prompts_of(path.stem, path.parent, options.most, tokenizer, LONGEST, options.as_chat)
    ]
    held_out, served = prompts[::EVERY], [ids for n, ids in enumerate(prompts) if n % EVERY]
    facts = {"model": options.model.name, "draft": options.algo, "prompts": len(prompts), "seconds": options.seconds}
    rows, expected = [], None
    for share in options.shares:
        row, texts = measure(options, share, served, held_out, device)
        expected = texts if expected is None else expected
        row["alike"] = sum(ours == theirs for ours, theirs in zip(texts, expected))
        rows.append(facts | row)
        print(rows[-1], flush=True)
    columns = ["share", "tokens/s", "held out", "served", "steps", "swaps", "alike"]
    cells = [[str(row.get(name, "")) for name in columns] for row in rows]
    show(columns, cells, f"{len(served)} prompts served, {len(held_out)} held out")
    save_rows(options.json, rows, ("device", "model", "draft", "share"), stamp())


if __name__ == "__main__":
    main()
