"""Checks of a call's source and of its decoder's prompt, before any work.

transformers lets most of these calls fail inside a layer. A wrong rate of a sound cannot be seen in features or
samples; processors check it if they are told `sampling_rate`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

SHORTEST = 895
"""Samples for one place of Moonshine's encoder: windows of 127, 7 and 3 in steps of 64, 3 and 2."""


def check(config: Any, main: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """TypeError or ValueError, naming the argument, if ``generate()`` with these arguments cannot begin.

    config: the model's. main: the name of its main input.
    """
    named = {"inputs": args[0] if args else None} | kwargs
    rows = None
    for name in (main, "inputs", "inputs_embeds", "encoder_outputs"):
        given = named.get(name)
        if isinstance(given, ModelOutput):
            given = given[0]
        if given is None or (name == "encoder_outputs" and not isinstance(given, Tensor)):
            continue
        if not isinstance(given, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(given).__name__}; pass return_tensors='pt' before")
        is_states = name in ("inputs_embeds", "encoder_outputs") or (main == "input_ids" and given.is_floating_point())
        check_source(config, main, name, given, is_states)
        rows = len(given)
    prompt = named.get("decoder_input_ids")
    if isinstance(prompt, Tensor):
        if prompt.dim() != 2 or not prompt.numel() or prompt.is_floating_point():
            raise ValueError(f"decoder_input_ids: expected token ids [batch, at least one token], got {told(prompt)}")
        if rows is not None and len(prompt) != rows:
            raise ValueError(
                f"decoder_input_ids: expected a prompt for each of {rows} sources, got {len(prompt)}; repeat them by "
                "expand(), or leave them out"
            )


def check_source(config: Any, main: str, name: str, given: Tensor, is_states: bool) -> None:
    """ValueError unless a source has the shape and the sort of numbers that its encoder takes.

    is_states: it is embeddings, or the output of an encoder.
    """
    hint = "the processor or the tokenizer of the checkpoint makes them"
    is_number = given.is_floating_point()
    if is_states:
        hint = "pass states of the model's own width"
        size = getattr(config, "encoder_config", config).hidden_size
        wanted, fits = f"[batch, places, {size}]", given.dim() == 3 and given.shape[2] == size
    elif main == "input_features":
        wanted = f"[batch, {config.num_mel_bins} mel bins, frames]"
        fits = given.dim() == 3 and given.shape[1] == config.num_mel_bins
    elif main == "input_values":
        frame = getattr(config, "encoder_config", None)
        unit = 1 if frame is None else round(frame.sample_rate * frame.frame_ms / 1000)
        least, count = (SHORTEST, "") if unit == 1 else (unit, f", a multiple of {unit}")
        wanted = f"[batch, samples] with {least} samples or more{count}"
        fits = given.dim() == 2 and given.shape[1] >= least and given.shape[1] % unit == 0
    else:
        wanted, fits = "token ids [batch, at least one token]", given.dim() == 2 and given.numel() > 0
        is_number = given.dtype in (torch.int64, torch.int32)
    if not fits or not is_number:
        raise ValueError(f"{name}: expected {wanted}, got {told(given)}; {hint}")


def told(given: Tensor) -> str:
    """The dtype and the shape of a tensor, for a message."""
    return f"{str(given.dtype).removeprefix('torch.')} of shape {tuple(given.shape)}"
