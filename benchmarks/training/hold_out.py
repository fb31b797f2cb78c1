"""Disjoint sets of prompts: to measure heads with, and to train them on.

    python -m benchmarks.training.hold_out SET.jsonl ... --out FOLDER [--measured 12]

Files of prompts have JSON lines with `prompt`, `turns` or `messages`. The first --measured prompts of each file go to
FOLDER/measured/SET.jsonl, for quality/acceptance.py and peers/compare.py (--folder FOLDER/measured --trained-on
FOLDER/train.jsonl --prompts 10: two of each set are for tuning). The others go to FOLDER/train.jsonl as chats without
answers, unless they contain a measured prompt or are contained in one. Train with

    python -m spec_compile train --model MODEL --algo eagle3 --data FOLDER/train.jsonl --on-policy --minutes 30
                                 --output HEADS/eagle3

or pass the file to chats.py, which adds prompts that the model writes. It also answers the measured prompts, for
heads.py (--prompts FOLDER/measured/SET.jsonl --count 0 --answers 1).
"""

import json
from pathlib import Path

from benchmarks.common import command_line, words
from benchmarks.quality.bits import read_texts


def split(sets: dict[str, list[str]], count: int) -> tuple[dict[str, list[str]], list[str]]:
    """The first `count` prompts of each set, and the others that do not overlap with any of them."""
    measured = {name: texts[:count] for name, texts in sets.items()}
    known = [words(text) for texts in measured.values() for text in texts]
    others = list(dict.fromkeys(text for texts in sets.values() for text in texts[count:]))
    return measured, [text for text in others if not any(words(text) in one or one in words(text) for one in known)]


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("sets", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--measured", type=int, default=12, help="prompts of each set")
    options = parser.parse_args(arguments)
    sets = {path.stem: [chat[-1]["content"] for chat in read_texts(path)] for path in options.sets}
    measured, others = split(sets, options.measured)
    (options.out / "measured").mkdir(parents=True, exist_ok=True)
    for name, texts in measured.items():
        lines = [json.dumps({"prompt": text}) for text in texts]
        (options.out / "measured" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(texts)} measured of {len(sets[name])}")
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in others]
    (options.out / "train.jsonl").write_text("\n".join(lines) + "\n")
    print(f"train.jsonl: {len(others)} prompts")


if __name__ == "__main__":
    main()
