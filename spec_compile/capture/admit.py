"""Admission: a model that cannot be served exactly is refused before any work, with its name and the reason."""

import importlib.util

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from ..config import promises_bits
from ..errors import UnsupportedModelError
from ..inventory import held_parameters
from ..kernels import HALF
from ..kernels.card import OLDEST, card_of
from .layers import ATTENTION, layer_types, parts_of
from .quantised import admit_quantisation
from .recurrences import has_recurrences
from .training_mode import effects

DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
ONE_DEVICE = "without device_map, or with device_map='cuda:0' or 'cpu'"
GROWING_ROPE = {"dynamic", "longrope"}


def admit(model: nn.Module, exact: str = "auto") -> None:
    """Raise TypeError, ValueError or UnsupportedModelError if `model` is not a causal LM that can be captured.

    exact: the option; "bits" and "request" also refuse a device or a dtype in which bits are not promised.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers causal language model (PreTrainedModel), got {type(model).__name__}"
        )
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        _refuse(model, "is an encoder-decoder; only decoder-only causal language models can be speculated")
    if not isinstance(model, GenerationMixin) or not model.can_generate() or model.get_output_embeddings() is None:
        _refuse(model, "is not a causal language model; load it with AutoModelForCausalLM")
    if not hasattr(model.get_output_embeddings(), "weight"):
        _refuse(model, "has several output heads; only models with one head, over one vocabulary, can be speculated")
    is_recurrent = has_recurrences(model)
    if getattr(model, "_is_stateful", False) and not is_recurrent:
        _refuse(model, "keeps a recurrent state that cannot be rolled back when drafted tokens are rejected")
    unknown = sorted(set(layer_types(config)) - set(parts_of(config) if is_recurrent else ATTENTION))
    if unknown:
        _refuse(model, f"has layers of type {', '.join(unknown)}, which a token tree cannot express here")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [r for r in rope.values() if isinstance(r, dict)] if rope else []
    for rope_type in {r.get("rope_type", "default") for r in (nested or [rope])} & GROWING_ROPE:
        _refuse(model, f"uses RoPE of type {rope_type!r}, whose frequencies change with the length of the text")
    _admit_tensors(model, admit_quantisation(model))
    if promises_bits(exact, model.device.type) and (model.device.type != "cuda" or model.dtype not in HALF):
        raise UnsupportedModelError(
            "exact: bits are promised in bfloat16 and float16 on a GPU of compute capability 8.0 or later, "
            f"{type(model).__name__} is in {model.dtype} on {model.device}; move it there, or pass exact='auto'"
        )
    _admit_mode(model)
    _settle(model)


def _settle(model: PreTrainedModel) -> None:
    """Let RWKV halve weights in place now, as it does in its first forward in evaluation mode."""
    for part in model.modules():
        if hasattr(part, "_rescale_layers"):
            part._rescale_layers()


def _admit_mode(model: PreTrainedModel) -> None:
    """ValueError if the model is in training mode, and that may change its answers."""
    found = [*effects(model.named_modules())]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(
            f"model: {type(model).__name__} is in training mode, and {found[0]}{more}, so its answers would change; "
            "call model.eval() first, or set dropout and other noise to 0"
        )


def _admit_tensors(model: PreTrainedModel, packed: set[str]) -> None:
    """Refuse devices and dtypes that cannot be served. packed: paths of quantised modules, whose dtypes are known."""
    devices = sorted({str(p.device) for p in held_parameters(model)})
    if any(map(_offloads, model.modules())):
        _refuse(
            model,
            "is offloaded by accelerate, which moves its weights while it runs, and model.to() cannot undo that; load "
            f"it again on a single device: {ONE_DEVICE}",
        )
    if "meta" in devices:
        _refuse(model, "has parameters without values (on the meta device); load it by from_pretrained()")
    if len(devices) != 1:
        _refuse(model, f"is spread over {', '.join(devices)}; load it on a single device: {ONE_DEVICE}")
    _admit_device(model, torch.device(devices[0]))
    read = {id(p) for path in packed for p in held_parameters(model.get_submodule(path))}
    unknown = sorted({str(p.dtype) for p in held_parameters(model) if id(p) not in read} - {str(d) for d in DTYPES})
    if unknown:
        raise UnsupportedModelError(
            f"model: {type(model).__name__} has parameters of dtype {', '.join(unknown)}; expected float32, bfloat16 "
            "or float16"
        )


def _offloads(part: nn.Module) -> bool:
    """True if a hook of accelerate brings a module's weights to its device for each forward."""
    hook = getattr(part, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])
    return any(getattr(each, "offload", False) or type(each).__name__ == "CpuOffload" for each in hooks)


def _admit_device(model: PreTrainedModel, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        _refuse(model, f"is on {device}; it runs on a CPU or on a CUDA GPU: model.to('cpu') or model.to('cuda')")
    if device.type == "cuda":
        card = card_of(device)
        if card.capability < OLDEST:
            _refuse(
                model,
                f"is on {card.name} (compute capability {card.number}); the kernels need {OLDEST[0]}.{OLDEST[1]} or "
                "later: move it to another GPU, or model.to('cpu')",
            )
        if importlib.util.find_spec("triton") is None:
            _refuse(model, "is on a GPU, whose kernels need triton: pip install triton, or model.to('cpu')")
        if next(model.parameters()).dtype == torch.float64:
            _refuse(model, "is in float64, which the GPU kernels do not take; load it with dtype=torch.float32")


def _refuse(model: PreTrainedModel, reason: str) -> None:
    raise UnsupportedModelError(f"model: {type(model).__name__} {reason}")
