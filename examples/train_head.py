"""Train a small draft for the demo model on a few texts, then draft with it.

python examples/train_head.py [--algo eagle3] [--eager] [--steps 300] [--texts 80] [--output head]

The texts are Python files of this package. A real head sees far more text, for minutes on a GPU: see docs/training.md.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from spec_compile.train import TRAINERS

MODEL = Path(__file__).parent / "tiny_coder"
SOURCES = Path(spec_compile.__file__).parent
SMALLER = {
    "eagle3": {"intermediate_size": 512, "draft_vocab_size": 2048, "ttt_steps": 3},
    "p_eagle": {"num_layers": 1, "intermediate_size": 512, "draft_vocab_size": 2048, "num_depths": 4},
    "eagle": {"intermediate_size": 512}, "mtp": {},
    **{algo: {"num_layers": 1, "block_size": 4} for algo in ("dflash", "jetspec", "dspark", "domino")},
}  # fmt: skip
"""Options that keep each kind of draft small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="eagle3", choices=TRAINERS)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--texts", type=int, default=80, help="files that are read")
    parser.add_argument("--output", type=Path, default=Path("head"))
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")

    texts = [path.read_text() for path in sorted(SOURCES.rglob("*.py")) if path.stat().st_size > 1000][: options.texts]
    result = spec_compile.train_draft(
        model, options.algo, data=texts, tokenizer=tokenizer, output=options.output, resume=False,
        steps=options.steps, batch_size=options.batch_size, sequence_length=256,
        learning_rate=3e-3, **SMALLER[options.algo],
    )  # fmt: skip
    print(result)

    fast = spec_compile.speculate(model, algo=options.algo, draft=options.output, compile=not options.eager)
    inputs = tokenizer("class Stack:\n    def __init__(self):\n", return_tensors="pt")
    output = fast.generate(**inputs, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(output[0]), fast.speculation.stats, sep="\n")


if __name__ == "__main__":
    main()
