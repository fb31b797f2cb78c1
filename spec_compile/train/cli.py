"""The commands of this folder: ``python -m spec_compile train``."""

from pathlib import Path
from typing import Annotated

import typer

from ..cli import Device, Dtype, Model, json_object, load_model, parsed, share_or_file, tell
from . import TRAINERS, train_draft
from .loop import bars_on_terminals
from .save import STATE

application = typer.Typer()


@application.command("train")
def _train(
    model: Model,
    data: Annotated[str, typer.Option(help="A .txt or .jsonl file.")],
    output: Annotated[str, typer.Option(help="The folder to write.")],
    dtype: Dtype = "auto",
    device: Device = "cpu",
    algo: Annotated[str, typer.Option(help=f"One of {', '.join(TRAINERS)}.")] = "eagle3",
    validation: Annotated[str, typer.Option(help="The held-out share, a file, or a folder of sets.")] = "0.05",
    on_policy: Annotated[bool, typer.Option("--on-policy", help="Train on answers that the model writes.")] = False,
    steps: Annotated[int | None, typer.Option(help="Updates of the weights.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Give this or --steps. Without either it is 30.")] = None,
    push: Annotated[str | None, typer.Option(help="A repository of the model hub for the head: USER/NAME.")] = None,
    private: Annotated[bool | None, typer.Option("--private", help="Make that repository private.")] = None,
    license: Annotated[str | None, typer.Option(help="Of the head, for its card, such as apache-2.0.")] = None,
    options: Annotated[dict, parsed(json_object, "JSON", "Such as '{\"batch_size\": 16}'.")] = "{}",
) -> None:
    """Train a draft head for a model.

    Writes the head, its card and a state to go on from; the same command goes on after a stop.
    """
    tell(f"loading {model}")
    try:
        with bars_on_terminals():
            loaded, tokenizer = load_model(model, dtype, device)
        result = train_draft(
            loaded, algo, data=data, output=output, tokenizer=tokenizer, validation=share_or_file(validation),
            on_policy=on_policy, steps=steps, minutes=minutes, push=push, private=private, license=license, **options,
        )  # fmt: skip
    except KeyboardInterrupt as stop:
        folder = Path(output).expanduser()
        is_kept = (folder / STATE).is_file()
        how = stop.args[0] if stop.args else f"stopped; {folder} keeps {'a' if is_kept else 'no'} checkpoint"
        raise KeyboardInterrupt(
            f"{how}; the same command {'goes on from there' if is_kept else 'begins anew'}"
        ) from None
    print(result)
