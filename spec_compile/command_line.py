"""The parts that the commands of ``python -m spec_compile`` share: checked arguments, and loading the model."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model."""
    command.add_argument("--model", required=True, help="a directory, or a name on the model hub")
    command.add_argument("--dtype", default="auto", choices=DTYPES)
    command.add_argument("--device", type=device, default="cpu", help="cpu, cuda or cuda:N")


def load_model(arguments: argparse.Namespace) -> tuple[PreTrainedModel, object]:
    """The model, on its device and in eval mode, and its tokenizer. ValueError if they cannot be loaded."""
    name = arguments.model
    local = Path(name).expanduser()
    # A name that looks like a path is not looked up on the hub, whose error would not mention the folder.
    if not local.exists() and (local.is_absolute() or name.startswith((".", "~")) or name.count(os.sep) > 1):
        raise ValueError(f"--model: there is no folder {name}")
    if local.is_file():
        raise ValueError(f"--model: {name} is a file; expected the folder of a model, or a name on the model hub")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(local) if local.is_dir() else name)
        model = AutoModelForCausalLM.from_pretrained(str(local) if local.is_dir() else name, dtype=arguments.dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model: {name} cannot be loaded: {one_line(error)}") from error
    return model.to(arguments.device).eval(), tokenizer


def read_prompts(path: Path, limit: int) -> list[str]:
    """The first prompts of a file of JSON lines with "prompt", or of a prompt a line. ValueError if it is neither."""
    try:
        text = path.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts: {path} cannot be read: {one_line(error)}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()][:limit]
    return [_prompt(f"--prompts: {path}:{number}", line) for number, line in lines]


def _prompt(label: str, line: str) -> str:
    """The prompt of a line, which errors call `label`."""
    if not line.lstrip().startswith("{"):
        return line
    try:
        prompt = json.loads(line).get("prompt")
    except json.JSONDecodeError as error:
        raise ValueError(f"{label}: not JSON: {error}") from error
    if not isinstance(prompt, str):
        raise ValueError(f'{label}: expected an object with "prompt", a text')
    return prompt


def json_object(text: str) -> dict:
    """An argument that is a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def at_least(low: int) -> Callable[[str], int]:
    """An argument that is an int from `low`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < low:
            raise argparse.ArgumentTypeError(f"expected an int of {low} or more, got {text!r}")
        return value

    return parse


def device(text: str) -> torch.device:
    """An argument that is a device of this machine."""
    try:
        parsed = torch.device(text)
    except RuntimeError:
        parsed = None
    if parsed is None or parsed.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return parsed


def one_line(error: BaseException) -> str:
    """The message of an exception, as one line."""
    return " ".join(str(error).split()) or type(error).__name__
