"""The command ``serve``: transformers' server, with speculative models and continuous batching."""

import argparse
import importlib
import inspect
from typing import Annotated, Any

import typer
from transformers.cli.serve import Serve

from ..command_line import json_object
from . import FLAGS, GRACE, MAX_QUEUE

PACKAGES = ("fastapi", "openai", "prometheus_client", "uvicorn")


def add_command(commands: Any) -> None:
    """Add the command ``serve``, whose arguments are parsed as those of ``transformers serve``."""
    # No character begins an option here, so that all arguments are collected for typer.
    command = commands.add_parser(
        "serve", add_help=False, prefix_chars="\0", help="an HTTP server with OpenAI's API: serve MODEL --algo ALGO"
    )
    command.add_argument("arguments", nargs="*")
    command.set_defaults(run=run)


def require_packages() -> None:
    """Raise ImportError, with what to install, if a package of the extra ``serve`` is missing."""
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"serving needs {name}: pip install 'spec_compile[serve]'") from error


def run(parsed: argparse.Namespace) -> int:
    """Run the command. Ends by SystemExit, as typer does."""
    require_packages()
    return make_command()(parsed.arguments, prog_name="python -m spec_compile serve")


def make_command() -> Any:
    """typer's command: our own options, and after them those of transformers that do something here."""
    own = [each for each in inspect.signature(_serve).parameters.values() if each.kind is not each.VAR_KEYWORD]
    theirs = [each for name, each in inspect.signature(Serve.__init__).parameters.items() if name in FLAGS]

    def serve(**arguments: Any) -> None:
        _serve(**arguments)

    serve.__signature__ = inspect.Signature([*own, *theirs])
    serve.__annotations__ = {each.name: each.annotation for each in (*own, *theirs)}
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command(help=_serve.__doc__)(serve)
    return typer.main.get_command(application)


def _serve(
    model: Annotated[str, typer.Argument(help="A directory, or a name on the model hub.")],
    algo: Annotated[str, typer.Option(help="How drafts are made.")] = "ngram",
    draft: Annotated[str | None, typer.Option(help="The draft: a directory, or a name on the model hub.")] = None,
    options: Annotated[str, typer.Option(help="Options of speculate(), as JSON.")] = "{}",
    slots: Annotated[int | None, typer.Option(help="Requests that are answered at once.", min=1)] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; others get 429.", min=1)] = MAX_QUEUE,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share the model.", min=1)] = 1,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default as it is called here.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that requests have to end after SIGTERM.", min=0)] = GRACE,
    **flags: Any,
) -> None:
    """An HTTP server with OpenAI's API: transformers' own, around speculative models and continuous batching.

    POST /v1/chat/completions, /v1/completions, /v1/responses; GET /v1/models, /health, /metrics.
    """
    from .drain import Runner
    from .server import build

    try:
        choices = json_object(options)
    except argparse.ArgumentTypeError as error:
        raise typer.BadParameter(str(error), param_hint="--options") from error
    if draft is not None:
        choices["draft"] = draft
    sizes = {"slots": slots, "max_queue": max_queue, "tensor_parallel": tensor_parallel}
    runner = Runner(build(model, algo, choices, **sizes, served_model_name=served_model_name, **flags), grace)
    runner.run()
    if runner.has_failed:
        raise typer.Exit(1)
