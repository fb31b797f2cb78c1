"""The command line: ``python -m spec_compile demo | chat | audit | train | serve | tune | tune-kernels | cache``.

A command is a function whose parameters are its arguments and options. A folder of the package adds its commands by a
file ``cli.py`` with a typer application. `main` runs one of them.
"""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli import UsageError, one_line, print_table
from .compile.cache import ArtefactCache, table_of

PROGRAM = "python -m spec_compile"


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns its exit status, which is 2 after an error and 130 after Ctrl-C.

    Raises SystemExit with status 2 for arguments that the command does not take. Each error is a line on stderr.
    """
    commands, context = typer.main.get_command(application), None
    try:
        with commands.make_context(PROGRAM, sys.argv[1:] if arguments is None else [*arguments]) as context:
            return commands.invoke(context) or 0
    except typer.Exit as end:
        return end.exit_code
    except UsageError as error:
        _print_end(context, f"error: {one_line(error.format_message())}")
        raise SystemExit(2) from None
    except (ValueError, TypeError, OSError, ImportError, KeyboardInterrupt) as error:
        if context.params["traceback"]:
            raise
        if isinstance(error, KeyboardInterrupt):
            _print_end(context, error.args[0] if error.args else "stopped")
            return 130
        _print_end(context, f"error: {one_line(error)}")
        return 2


def _print_end(context: typer.Context | None, reason: str) -> None:
    """Print why a command ended. context: None if the options before the command could not be read."""
    command = context.invoked_subcommand if context else None
    print(f"{PROGRAM} {command}: {reason}" if command else f"{PROGRAM}: {reason}", file=sys.stderr)


class _Commands(typer.core.TyperGroup):
    def get_command(self, context: Any, name: str) -> Any:
        if name not in self.commands:
            raise UsageError(f"invalid choice: {name!r}; expected one of {', '.join(self.commands)}")
        return self.commands[name]


application = typer.Typer(
    cls=_Commands,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@application.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
) -> None:
    """Lossless speculative decoding for models of transformers."""
    if context.invoked_subcommand is None:
        raise UsageError("the following arguments are required: command")


for file in sorted(Path(__file__).parent.glob("*/cli.py")):
    added = importlib.import_module(f"{__package__}.{file.parent.name}.cli")
    application.registered_commands += added.application.registered_commands


@application.command("cache")
def _cache(
    folder: Annotated[
        Path | None, typer.Option(help="By default $SPEC_COMPILE_CACHE, and without it ~/.cache/spec_compile.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete what is kept; later starts are slow once.")] = False,
) -> None:
    """List what is kept of earlier starts of models, or delete it.

    An artefact holds everything that speculate() found out about one model, with one set of options, on one machine.
    """
    store = ArtefactCache(folder)
    if folder is not None and not (store.folder and store.folder.is_dir()):
        raise ValueError(f"--folder: there is no folder {folder}")
    if clear:
        print(f"{store.folder}: {store.clear()} artefacts deleted")
    elif entries := store.entries():
        print_table(table_of(entries, str(store.folder)))
    else:
        print(f"{store.folder}: no artefacts")


if __name__ == "__main__":
    sys.exit(main())
