"""Training of draft heads (`train_draft`): tokens a second, and the loss of every step.

    python -m benchmarks.training.train [--algorithms eagle3 dflash] [--device cuda] [--steps 60] [--model MODEL]

The target has the shape of a small one (30 layers of 576, 135 million parameters) and random weights, unless --model
names another. Sequences of up to --length tokens, of very different lengths, are joined from random pieces of
benchmarks/prompts. To compare two trees of the package, run this script with either in PYTHONPATH: data, seeds and
their order are the same, so that losses can be compared step by step. "tokens_per_second" leaves the first --warm-up
steps out.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import spec_compile
from benchmarks.common import DEMO_MODEL, PROMPTS, command_line, read_prompts, save_rows, stamp, synchronize
from benchmarks.rounds.shapes import build
from spec_compile.train.loop import Loop

SHAPES = {
    "eagle3": {}, "eagle": {}, "mtp": {}, "p_eagle": {"num_layers": 2},
    **{algo: {"num_layers": 2} for algo in ("dflash", "jetspec", "dspark", "domino")},
}  # fmt: skip
"""Algorithm -> options that differ from the defaults, for a small target."""


def make_texts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Sequences of token ids, most of them much shorter than `length`, of pieces of 40 tokens of the prompts."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    files = sorted(PROMPTS.glob("*.jsonl"))
    ids = tokenizer("\n".join(text for file in files for text in read_prompts(file, 100)), verbose=False).input_ids
    rng, texts = random.Random(1), list[list[int]]()
    for _ in range(count):
        size = max(40, int(length * rng.random() ** 0.5))
        starts = [rng.randrange(len(ids) - 40) for _ in range(-(-size // 40))]
        texts.append([token % vocab_size for start in starts for token in ids[start : start + 40]][:size])
    return texts


def load(path: str, device: str) -> PreTrainedModel:
    """The model to train for, in bfloat16 on a GPU."""
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


class Clock:
    """Counts tokens and seconds of the steps after the first `warm_up`."""

    def __init__(self, device: torch.device, warm_up: int, steps: int):
        self.device, self.warm_up, self.steps = device, warm_up, steps
        self.tokens = self.seconds = 0.0
        self._step = Loop._step

    def step(self, loop: Loop, share: float) -> None:
        """Replaces `Loop._step`."""
        number = loop.state.step
        if number == self.warm_up:
            synchronize(self.device)
            self._begin = time.perf_counter(), loop.state.tokens
        self._step(loop, share)
        if number == self.steps - 1:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self._begin[0]
            self.tokens = loop.state.tokens - self._begin[1]


def train(model: PreTrainedModel, algo: str, texts: list[list[int]], args: argparse.Namespace) -> dict:
    """Train one head. Returns tokens a second, and the losses."""
    clock = Clock(model.device, args.warm_up, args.steps)
    options = SHAPES[algo] | args.options
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Loop, "_step", lambda *given: clock.step(*given)):
        result = spec_compile.train_draft(
            model, algo, data=texts, output=Path(folder) / algo, validation=0, steps=args.steps,
            batch_size=args.batch, sequence_length=args.length, learning_rate=1e-3, progress=lambda _: None, **options,
        )  # fmt: skip
    name = Path(args.model).name if args.model else f"random, {args.layers} layers"
    row = {"model": name, "algorithm": algo, "tokens_per_second": round(clock.tokens / clock.seconds)}
    row |= {"tokens": int(clock.tokens), "seconds": round(clock.seconds, 2)}
    row["losses"] = [round(loss, 6) for loss in result.losses]
    if model.device.type == "cuda":
        row["peak_gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        torch.cuda.reset_peak_memory_stats()
    return row


def main() -> None:
    parser = command_line(__doc__, results="training.json")
    parser.add_argument("--algorithms", nargs="+", default=["eagle3", "dflash"], choices=list(SHAPES))
    parser.add_argument("--model", help="a folder or a name on the hub")
    parser.add_argument("--layers", type=int, default=30, help="layers of the target with random weights")
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--options", type=json.loads, default={}, help="options of train_draft, as JSON")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = load(args.model, args.device) if args.model else build("smollm2-135m", args.device, args.layers)
    texts = make_texts(args.texts, args.length, model.get_output_embeddings().weight.shape[0])
    facts = stamp(device)
    for algo in args.algorithms:
        row = train(model, algo, texts, args)
        print(json.dumps(row), flush=True)
        save_rows(args.json, [row], ("model", "algorithm"), facts)


if __name__ == "__main__":
    main()
