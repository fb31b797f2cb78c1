"""Rounds of algo="self" after long texts, next to plain steps.

    python -m benchmarks.rounds.self_drafts [--shape llama-8b] [--texts 32768x8 131072x1 65536x1] [--steps 1 2]
                                            [--acceptance 0.8]

For each `TOKENSxROWS`: the median milliseconds of a captured plain step, and of a round that verifies the model's own
drafts over the first 64 and the last 1,024 tokens. Weights are random, so the gain is simulated: with s steps and a
share a of drafts that is accepted after an accepted one, a round gains 1 + a + ... + a ** s tokens. The bound has the
bytes of weights and of keys and values in place of the times.
"""

import gc

import torch

import spec_compile
from benchmarks.common import command_line
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.shapes import build, context_bytes, weight_bytes

REPEATS = 15


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--texts", nargs="+", default=["32768x8", "131072x1", "65536x1"], metavar="TOKENSxROWS")
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    model = build(args.shape, args.device)
    weights = weight_bytes(model)
    for text in args.texts:
        context, batch = map(int, text.split("x"))
        common = dict(max_cache_len=context + 1024, check=False, adaptive=False)
        plain = None
        for steps in (0, *args.steps):
            own = dict(algo="self", num_steps=steps) if steps else dict(algo="ngram", num_draft_tokens=1)
            fast = spec_compile.speculate(model, **own, **common)
            ms = rounds(fast, context, batch, [steps + 1], REPEATS)[steps + 1]
            plain = plain or ms
            tokens = sum(args.acceptance**depth for depth in range(steps + 1)) if steps else 1.0
            cache = batch * context_bytes(fast.speculation.engine.runtime.verify, context)
            bound = tokens * (weights + cache) / ((steps + 1) * weights + cache)
            print(
                f"{text:>9} {steps} steps: {ms:.2f} ms; simulated at {args.acceptance}: {tokens * plain / ms:.3f} of "
                f"plain, bound {bound:.2f}",
                flush=True,
            )
            del fast
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
