"""The command line's parts: values of options, the model and prompts that they name, and tables and errors."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

UsageError: Any = typer.BadParameter.__base__
"""The base class of typer's errors about arguments. typer does not export it."""


def load_model(name: str, dtype: str, device: torch.device) -> tuple[PreTrainedModel, object]:
    """The model, on its device and in eval mode, and its tokenizer. ValueError if they cannot be loaded."""
    local = Path(name).expanduser()
    # A path is not looked up on the hub, whose error would be about something else.
    if not local.exists() and (local.is_absolute() or name.startswith((".", "~")) or name.count(os.sep) > 1):
        raise ValueError(f"--model: there is no folder {name}")
    if local.is_file():
        raise ValueError(f"--model: {name} is a file; expected the folder of a model, or a name on the model hub")
    source = str(local) if local.is_dir() else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model: {name} cannot be loaded: {one_line(error)}") from error
    return model.to(device).eval(), tokenizer


def read_prompts(path: Path, limit: int) -> list[str]:
    """The first prompts of a file of JSON lines with "prompt", or of a prompt a line. ValueError if it is neither."""
    try:
        lines = numbered_lines(path.expanduser().read_text())[:limit]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts: {path} cannot be read: {one_line(error)}") from error
    return [_prompt(f"--prompts: {path}:{number}", line) for number, line in lines]


def _prompt(label: str, line: str) -> str:
    """The prompt of a line, which errors call `label`."""
    if not line.lstrip().startswith("{"):
        return line
    prompt = parse_json(line, label).get("prompt")
    if not isinstance(prompt, str):
        raise ValueError(f'{label}: expected an object with "prompt", a text')
    return prompt


# The form in which commands print tables and errors.


FILE_WIDTH = 200
"""Columns of a table in a file or a pipe, which gets whole lines."""


def print_table(table: Table) -> None:
    """Print a table on stdout, as wide as the terminal, or `FILE_WIDTH` columns wide if stdout is none."""
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def tell(message: str) -> None:
    """Print a line on stderr."""
    print(message, file=sys.stderr, flush=True)


def one_line(error: object) -> str:
    """The message of an exception, as one line."""
    return " ".join(str(error).split()) or type(error).__name__


# Values of options: a parser of each kind of text, and the options that several commands have.


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


class _BadValue(typer.BadParameter):
    def format_message(self) -> str:
        return f"{self.param.opts[0]}: {self.message}"


def parsed(parse: Callable[[str], Any], metavar: str, meaning: str) -> Any:
    """An option whose value `parse` makes of its text; a ValueError of it is shown after the option's name.

    metavar, meaning: for the help
    """

    def value_of(text: Any) -> Any:
        try:
            return parse(text) if isinstance(text, str) else text  # a default may be a value already
        except ValueError as error:
            raise _BadValue(str(error)) from error

    return typer.Option(parser=value_of, metavar=metavar, help=meaning)


def json_object(text: str) -> dict:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text!r}")
    return value


def at_least(low: int) -> Callable[[str], int]:
    """A parser of ints from `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low:
            raise ValueError(f"expected an int of {low} or more, got {text!r}")
        return value

    return parse


def int_list(text: str) -> list[int]:
    """Ints from 1, with commas between them."""
    return [*map(at_least(1), text.split(","))]


def dtype_name(text: str) -> str:
    """One of `DTYPES`."""
    if text not in DTYPES:
        raise ValueError(f"invalid choice: {text!r}; expected one of {', '.join(DTYPES)}")
    return text


def local_device(text: str) -> torch.device:
    """A device of this machine."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"{text}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def share_or_file(text: str) -> float | str:
    """A number, which is a share of the data, or the path of a file."""
    try:
        return float(text)
    except ValueError:
        return text


Model = Annotated[str, typer.Option(help="A directory, or a name on the model hub.")]
Dtype = Annotated[str, parsed(dtype_name, "DTYPE", f"One of {', '.join(DTYPES)}.")]
Device = Annotated[torch.device, parsed(local_device, "DEVICE", "cpu, cuda or cuda:N.")]


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1."""
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def parse_json(line: str, label: str) -> Any:
    """The value of a line of JSON, which errors call `label`."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{label}: not JSON: {error}") from error
