"""A draft's attention over the ends of the text alone (`draft_window_size`): acceptance and time by context.

    python benchmarks/draft_windows.py --model MODEL --algo dflash --draft HEAD [--contexts 1024 8192] [--device cuda]
    python benchmarks/draft_windows.py --shape qwen3-8b --algo dflash [--contexts 1024 8192 32768]

With --shape weights are random, so that nothing is said about acceptance, and a round's time is that of a head at its
published size. The text is that of benchmarks/prompts, end to end. "ms_a_round" is the time of an answer less that of
its first token, by its rounds; "equal" says whether the answer is that of the draft that sees the whole text.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from common import HERE, machine, read_prompts, synchronize
from drafts import make
from shapes import build, text_tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import spec_compile

TREES = {"dflash": {}, "eagle3": dict(num_steps=5, topk=4, num_draft_tokens=16)}


def own_text(name: str, count: int) -> torch.Tensor:
    """The benchmark's prompts by the model's own tokenizer, end to end."""
    files = sorted((HERE / "prompts").glob("*.jsonl"))
    ids = AutoTokenizer.from_pretrained(name)("\n".join(text for f in files for text in read_prompts(f, 100))).input_ids
    return torch.tensor((ids * -(-count // len(ids)))[:count])


def seconds(fast: PreTrainedModel, ids: torch.Tensor, new: int) -> tuple[float, torch.Tensor]:
    """Seconds of one answer of `new` tokens, and its tokens."""
    synchronize(fast.device)
    begin = time.perf_counter()
    out = fast.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    synchronize(fast.device)
    return time.perf_counter() - begin, out


def measure(model: PreTrainedModel, draft, text: torch.Tensor, window: int | None, args: argparse.Namespace) -> dict:
    """One row: a context, which is the length of `text`, and a window."""
    ids = text[None].to(model.device)
    options = TREES.get(args.algo, {}) | ({} if window is None else dict(draft_window_size=window))
    fast = spec_compile.speculate(
        model, args.algo, draft=draft, max_cache_len=len(text) + args.new_tokens + 8, check=False,
        compile=not args.eager, **options,
    )  # fmt: skip
    seconds(fast, ids, 8)  # warm-up
    first, _ = seconds(fast, ids, 1)
    fast.speculation.stats.reset()
    whole, out = seconds(fast, ids, args.new_tokens)
    stats = fast.speculation.stats
    return {
        "context": len(text), "window": window, "accept_length": round(stats.accept_length, 3),
        "ms_a_round": round(1e3 * (whole - first) / max(1, stats.rounds), 3),
        "tokens_per_second": round((args.new_tokens - 1) / (whole - first), 1), "answer": out[0, len(text) :].tolist(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a folder or a name on the hub")
    parser.add_argument("--draft", help="its head")
    parser.add_argument("--shape", help="random weights of this shape, in place of --model and --draft")
    parser.add_argument("--algo", default="dflash")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 2048], help="besides none")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="compile=False")
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    device, rows = torch.device(args.device), []
    if args.shape:
        model = build(args.shape, args.device)
        draft = make(args.algo, model, AutoConfig.for_model("llama"))
        text = text_tokens(max(args.contexts), model.config.vocab_size)
    else:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
        draft, text = args.draft, own_text(args.model, max(args.contexts))
    for context in args.contexts:
        answer = None
        for window in (None, *(size for size in args.windows if size + 4 < context)):
            row = measure(model, draft, text[:context], window, args)
            answer = row["answer"] if answer is None else answer
            rows.append(row | {"equal": row.pop("answer") == answer})
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        about = machine(device) | {"date": time.strftime("%F"), **vars(args)}
        Path(args.json).write_text(json.dumps({"machine": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
