"""The command line.

``python -m spec_compile audit --model MODEL --prompt TEXT``,
``python -m spec_compile train --model MODEL --data FILE --output FOLDER``, ``python -m spec_compile serve MODEL`` and
``python -m spec_compile tune-kernels --model MODEL``.
"""

import argparse
import sys
from pathlib import Path

from . import audit, speculate, tune_kernels
from .audit import check_samples
from .command_line import add_model, at_least, json_object, load_model, one_line, read_prompts
from .report.audit import LOSSLESS, NOT_LOSSLESS, NOT_TESTED
from .serving import cli as serving
from .training import cli


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns its exit status; after a line on stderr 2 if the user made an error, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m spec_compile")
    parser.add_argument("--traceback", action="store_true", help="show where in the program an error was raised")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_audit(commands)
    cli.add_command(commands)
    serving.add_command(commands)
    tune_kernels.add_command(commands)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if parsed.traceback:
            raise
        print(f"{parser.prog} {parsed.command}: error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        if parsed.traceback:
            raise
        print(f"{parser.prog} {parsed.command}: {stop.args[0] if stop.args else 'stopped'}", file=sys.stderr)
        return 130


def _add_audit(commands) -> None:
    command = commands.add_parser(
        "audit",
        help="compare speculative with plain decoding, token for token and draw for draw",
        description="Prints the tables; exits with 0 if nothing but near-ties differs, with 1 if something else does, "
        "with 2 if an argument is wrong, and with 3 if too little was generated to tell.",
    )
    add_model(command)
    command.add_argument("--algo", default="ngram")
    command.add_argument("--prompt", action="append", default=[], help="a prompt; may be repeated")
    command.add_argument("--prompts", type=Path, help='a file of JSON lines with "prompt", or of one prompt a line')
    command.add_argument("--limit", type=at_least(1), default=10, help="prompts read from the file at most")
    command.add_argument("--max-new-tokens", type=at_least(1), default=64)
    command.add_argument("--samples", type=at_least(0), default=0, help="draws a prompt for the test of sampling")
    command.add_argument("--generate", type=json_object, default={}, help="JSON, such as '{\"temperature\": 0.7}'")
    command.add_argument("--options", type=json_object, default={}, help="JSON, such as '{\"num_draft_tokens\": 8}'")
    command.set_defaults(run=_audit, refuse=command.error)


def _audit(arguments: argparse.Namespace) -> int:
    """Run the command ``audit``. Returns the exit status."""
    check_samples(arguments.samples)
    prompts = list(arguments.prompt)
    if arguments.prompts is not None:
        prompts += read_prompts(arguments.prompts, arguments.limit)
    if not prompts:
        arguments.refuse("give at least one --prompt, or --prompts")
    model, tokenizer = load_model(arguments)
    fast = speculate(model, arguments.algo, **arguments.options)
    amounts = {"max_new_tokens": arguments.max_new_tokens, "samples": arguments.samples}
    report = audit(fast, prompts, tokenizer, **amounts, **arguments.generate)
    print(report)
    return {LOSSLESS: 0, NOT_LOSSLESS: 1, NOT_TESTED: 3}[report.verdict]


if __name__ == "__main__":
    sys.exit(main())
