"""Values of options: a parser of each kind of text, and the options that several commands have."""

import json
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

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
