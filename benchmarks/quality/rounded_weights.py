"""Perplexity and greedy answers of a model before and after its weights were rounded by the option `weights`.

    python -m benchmarks.quality.rounded_weights --model FOLDER [--dtype bfloat16] [--weights int8 int4 fp8]
        [--folder DIR] [--texts rag code_completion] [--workloads chat maths] [--prompts 6] [--new-tokens 64]
        [--threads 2] [--json FILE]

Perplexity is that of the sets of --texts as they are, and answers are those to the prompts of --workloads (with the
chat template, if the tokenizer has one), by transformers' greedy decoding of both models.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import DEMO_MODEL, PROMPTS, command_line, pin, prompts_of, save_rows, show, stamp
from spec_compile.capture.admit import admit
from spec_compile.capture.rounded import rounded_weights
from spec_compile.quantised.rounded import FORMATS
from spec_compile.tools.audit_answers import Rounding, compare_rounding

LONGEST = 1024
"""Tokens of a text or prompt, the last ones."""
KEYS = ("model", "dtype", "weights")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, results="rounded_weights.json", threads=2)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--weights", nargs="+", default=["int8", "int4", "fp8"], choices=list(FORMATS))
    parser.add_argument("--folder", type=Path, default=PROMPTS)
    parser.add_argument("--texts", nargs="+", default=["rag", "code_completion"], help="sets whose text is predicted")
    parser.add_argument("--workloads", nargs="+", default=["chat", "maths"], help="sets whose prompts are answered")
    parser.add_argument("--prompts", type=int, default=6, help="first prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser.parse_args(arguments)


def row_of(rounding: Rounding) -> dict:
    """The figures of a row."""
    before, after = rounding.perplexity
    return {
        "predicted": rounding.predicted, "before": before, "after": after, "agreeing": rounding.agreeing,
        "same": sum(length is None for length in rounding.same), "of": len(rounding.same),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    pin(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)

    def loaded():
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()

    def ids_of(names: list[str], as_chat: bool) -> list[torch.Tensor]:
        sets = (prompts_of(name, options.folder, options.prompts, tokenizer, LONGEST, as_chat) for name in names)
        return [ids for prompts in sets for ids in prompts]

    unrounded, facts, lines = loaded(), stamp(), []
    texts = ids_of(options.texts, False)
    prompts = ids_of(options.workloads, bool(getattr(tokenizer, "chat_template", None)))
    generate = {"max_new_tokens": options.new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id or 0}
    for name in options.weights:
        model = loaded()
        with rounded_weights(admit(model), name):
            row = row_of(compare_rounding(unrounded, model, texts, prompts, generate))
        row = {"model": Path(options.model).name, "dtype": options.dtype, "weights": name} | row
        save_rows(options.json, [row], KEYS, facts)
        change = f"{row['after'] / row['before'] - 1:+.2%}"
        agreeing = f"{row['agreeing'] / row['predicted']:.1%}"
        perplexity = f"{row['before']:.3f} -> {row['after']:.3f}"
        lines.append((name, perplexity, change, agreeing, f"{row['same']}/{row['of']}"))
    show(("weights", "perplexity", "", "same best token", "answers equal"), lines, row["model"])


if __name__ == "__main__":
    main()
