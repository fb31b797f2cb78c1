"""The command line of training: ``python -m spec_compile train --model MODEL --data FILE --output FOLDER``."""

import argparse
from pathlib import Path

from ..command_line import add_model, json_object, load_model
from .progress import bars_on_terminals, tell
from .save import STATE
from .train import TRAINERS, train_draft


def add_command(commands) -> None:
    """Add ``train`` to the parser's commands."""
    command = commands.add_parser(
        "train",
        help="train a draft head for a model",
        description="Writes the head, its card and a state to go on from; the same command goes on after a stop.",
    )
    add_model(command)
    command.add_argument("--algo", default="eagle3", help=", ".join(TRAINERS))
    command.add_argument("--data", required=True, help="a .txt or .jsonl file")
    command.add_argument("--output", required=True, help="the folder to write")
    command.add_argument("--validation", default="0.05", help="the share of the data that is held out, or a file")
    command.add_argument("--on-policy", action="store_true", help="train on answers that the model writes")
    command.add_argument("--steps", type=int)
    command.add_argument("--minutes", type=float, help="give this or --steps (default: 30)")
    command.add_argument("--options", type=json_object, default={}, help="JSON, such as '{\"batch_size\": 16}'")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command ``train``. Returns the exit status."""
    tell(f"loading {arguments.model}")
    try:
        with bars_on_terminals():
            model, tokenizer = load_model(arguments)
        result = train_draft(
            model, arguments.algo, data=arguments.data, output=arguments.output, tokenizer=tokenizer,
            validation=_share_or_file(arguments.validation), on_policy=arguments.on_policy,
            steps=arguments.steps, minutes=arguments.minutes, **arguments.options,
        )  # fmt: skip
    except KeyboardInterrupt as stop:
        folder = Path(arguments.output).expanduser()
        is_kept = (folder / STATE).is_file()
        how = stop.args[0] if stop.args else f"stopped; {folder} keeps {'a' if is_kept else 'no'} checkpoint"
        raise KeyboardInterrupt(
            f"{how}; the same command {'goes on from there' if is_kept else 'begins anew'}"
        ) from None
    print(result)
    return 0


def _share_or_file(text: str) -> float | str:
    """``--validation``: a number is a share of the data, anything else the path of a file."""
    try:
        return float(text)
    except ValueError:
        return text
