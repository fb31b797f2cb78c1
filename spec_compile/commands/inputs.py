"""The model and the prompts that the arguments of a command name."""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..training.read import numbered_lines, parse_json
from .output import one_line


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
