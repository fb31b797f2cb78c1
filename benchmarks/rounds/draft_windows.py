"""A draft that attends only to the end of the text (`draft_window_size`): acceptance and time by context.

    python -m benchmarks.rounds.draft_windows --model MODEL --algo eagle3 --draft HEAD [--contexts 1024 8192]
                                              [--device cuda]
    python -m benchmarks.rounds.draft_windows --shape qwen3-8b --algo dflash [--contexts 1024 8192 32768]

With --model: the accept length of one answer, and tokens a second after its first token. The prompt is the joined text
of benchmarks/prompts; "equal" is true if the answer equals that of the draft that sees the whole text.
With --shape: milliseconds of a captured round, without the host, of a target and a head with random weights at
published sizes, whose acceptance would mean nothing.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import spec_compile
from benchmarks.common import DEMO_MODEL, RESULTS, save_rows, stamp, timed
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.drafts import TREE, make
from benchmarks.rounds.shapes import build, text_tokens

TREES = {"eagle3": TREE}
"""Options of the algorithms that draft a tree here; the others draft a chain."""
ROOM = 1024
"""Slots of the cache after the longest context."""
KEYS = ("model", "algo", "context", "window")
"""The fields that tell the rows of the results apart."""


def speculate(model: PreTrainedModel, draft, window: int | None, args: argparse.Namespace) -> PreTrainedModel:
    """A speculative model whose draft sees this window of the text (None: all of it)."""
    options = TREES.get(args.algo, {}) | ({} if window is None else dict(draft_window_size=window))
    limit = model.config.max_position_embeddings
    return spec_compile.speculate(
        model, args.algo, draft=draft, max_cache_len=min(max(args.contexts) + ROOM, limit), check=False,
        compile=not args.eager, **options,
    )  # fmt: skip


def answered(fast: PreTrainedModel, text: torch.Tensor, answers: dict, args: argparse.Namespace) -> dict:
    """Figures of the answer to `text`. answers: tokens by context, for the first window that was measured."""
    ids = text[None].to(fast.device)

    def answer_of(new: int) -> tuple[torch.Tensor, float]:
        asked = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        return timed(partial(fast.generate, **asked), ids)

    answer_of(8)  # warm-up
    _, first = answer_of(1)
    fast.speculation.stats.reset()
    answer, seconds = answer_of(args.new_tokens)
    equal = torch.equal(answer, answers.setdefault(len(text), answer))
    length, rate = fast.speculation.stats.accept_length, (args.new_tokens - 1) / (seconds - first)
    return {"accept_length": round(length, 3), "tokens_per_second": round(rate, 1), "equal": equal}


def replayed(fast: PreTrainedModel, text: torch.Tensor) -> dict:
    """The time of a round after `text`."""
    nodes = fast.speculation.engine.runtime.algorithm.plan.nodes
    return {"nodes": nodes, "ms": round(rounds(fast, len(text), 1, [nodes])[nodes], 3)}


def measured(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each window and each longer context, and for each context without a window."""
    if args.shape:
        model = build(args.shape, args.device)
        draft = make(args.algo, model, AutoConfig.for_model("llama"))
        figures, tokenizer = replayed, DEMO_MODEL
    else:
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
        draft, figures, tokenizer = args.draft, partial(answered, answers={}, args=args), args.model
    text = text_tokens(max(args.contexts), model.config.vocab_size, tokenizer)
    for window in (None, *args.windows):
        fast = speculate(model, draft, window, args)
        for context in args.contexts:
            if window is None or window < context:
                row = {"model": args.shape or Path(args.model).name, "algo": args.algo}
                yield row | {"context": context, "window": window, **figures(fast, text[:context])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name on the hub")
    parser.add_argument("--draft", help="its head")
    parser.add_argument("--shape", help="random weights of this shape, instead of --model and --draft")
    parser.add_argument("--algo", default="dflash")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--windows", type=int, nargs="*", default=[512, 2048], help="tried in addition to no window")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="compile=False")
    parser.add_argument("--json", type=Path, default=RESULTS / "draft_windows.json")
    args = parser.parse_args()
    facts = stamp(torch.device(args.device))
    for row in measured(args):
        print(json.dumps(row), flush=True)
        save_rows(args.json, [row], KEYS, facts)


if __name__ == "__main__":
    main()
