"""The command line: ``python -m spec_compile audit --model MODEL --prompt TEXT``, and
``python -m spec_compile train --model MODEL --data FILE --output FOLDER``."""

import argparse
import json
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from . import audit, speculate
from .audit import check_samples
from .audit_report import LOSSLESS, NOT_LOSSLESS, NOT_TESTED
from .training import cli


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m spec_compile")
    commands = parser.add_subparsers(dest="command", required=True)
    auditing = commands.add_parser(
        "audit",
        help="compare speculative with plain decoding, token for token and draw for draw",
        description="Prints the tables; exits with 0 if nothing but near-ties differs, with 1 if something else does, "
        "with 2 if an argument is wrong, and with 3 if too little was generated to tell.",
    )
    auditing.add_argument("--model", required=True, help="a directory, or a name on the model hub")
    auditing.add_argument("--algo", default="ngram")
    auditing.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    auditing.add_argument("--prompts", type=Path, help='a file of JSON lines with "prompt", or of one prompt a line')
    auditing.add_argument("--limit", type=int, default=10, help="prompts read from the file at most")
    auditing.add_argument("--max-new-tokens", type=int, default=64)
    auditing.add_argument("--samples", type=int, default=0, help="draws a prompt for the test of sampling")
    auditing.add_argument("--dtype", default="auto")
    auditing.add_argument("--device", default="cpu")
    auditing.add_argument("--generate", type=json.loads, default={}, help='JSON, such as \'{"temperature": 0.7}\'')
    auditing.add_argument("--options", type=json.loads, default={}, help='JSON, such as \'{"num_draft_tokens": 8}\'')
    cli.add_command(commands)
    given = parser.parse_args(arguments)
    if given.command == "train":
        return cli.run(given)
    try:
        check_samples(given.samples)
    except ValueError as error:
        auditing.exit(2, f"{auditing.prog}: error: {error}\n")
    prompts = list(given.prompt)
    if given.prompts is not None:
        lines = [line for line in given.prompts.read_text().splitlines() if line.strip()][: given.limit]
        prompts += [json.loads(line)["prompt"] if line.startswith("{") else line for line in lines]
    if not prompts:
        auditing.error("give at least one --prompt, or --prompts")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype).to(given.device).eval()
    fast = speculate(model, given.algo, **given.options)
    report = audit(
        fast, prompts, tokenizer, max_new_tokens=given.max_new_tokens, samples=given.samples, **given.generate
    )
    print(report)
    return {LOSSLESS: 0, NOT_LOSSLESS: 1, NOT_TESTED: 3}[report.verdict]


if __name__ == "__main__":
    sys.exit(main())
