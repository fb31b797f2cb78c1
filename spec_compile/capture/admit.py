"""Admission: a model that cannot be served exactly is refused before any work, with its name and the reason.

A GPU without bfloat16 serves float16 in its place.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ..config import promises_bits
from ..errors import UnsupportedModelError, log
from ..inventory import configs_of, held, held_parameters
from ..kernels import HALF
from ..kernels.card import OLDEST, card_of
from ..quantised.codes import class_path
from .changes import effects
from .quantised import admit_quantisation, embedded_tokens, output_matrix, refuse
from .recurrences import ATTENTION, has_recurrences, layer_types, parts_of

DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
LOAD = "load it again on a single device: without device_map, or with device_map='cuda:0' or 'cpu'"
SEVERAL = f"several GPUs need tensor_parallel, or a device_map over nothing but them; or {LOAD}"
ELSEWHERE = WeakIdKeyDictionary()
"""Parameters that a graph reads elsewhere than on its device, each with this device; `contrib` adds some."""
GROWING_ROPE = {"dynamic", "longrope"}


DECODERS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {}
"""By the path of an encoder-decoder's class, what makes a causal language model of its decoder; `contrib` adds some."""


def decoder_of(original: PreTrainedModel) -> PreTrainedModel:
    """The causal language model to be captured: `original`, or the decoder of an encoder-decoder in `DECODERS`."""
    make = DECODERS.get(class_path(original))
    return original if make is None else make(original)


@dataclass
class Inventory:
    """An admitted model, and what the start of `speculate()` asks of it. `admit` makes it.

    model: for those who run, copy or trace the model. All others read what they need below.
    packed: the paths of quantised linear layers, to which `rounded_weights` adds.
    experts: the paths of quantised routed experts.
    """

    model: PreTrainedModel
    packed: set[str]
    experts: set[str]

    @property
    def name(self) -> str:
        """The name of the model's class, for messages."""
        return type(self.model).__name__

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the text decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocab_size(self) -> int:
        """The rows of the output matrix."""
        return output_matrix(self.model).shape[0]

    @property
    def embedded(self) -> int:
        """The rows of the input embedding, which may be more or fewer than `vocab_size`."""
        return embedded_tokens(self.model)


def admit(model: nn.Module, exact: str = "auto") -> Inventory:
    """The inventory of `model`. TypeError, ValueError or UnsupportedModelError unless it is a causal LM that can be
    captured.

    exact: the option; "bits" and "request" also refuse a device or a dtype in which bits are not promised.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: expected a transformers causal language model (PreTrainedModel), got {type(model).__name__}"
        )
    # The sort of model.
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        refuse(model, "is an encoder-decoder of a class that cannot be speculated; docs/models.md lists those that can")
    if not isinstance(model, GenerationMixin) or not model.can_generate() or model.get_output_embeddings() is None:
        refuse(model, "is not a causal language model; load it with AutoModelForCausalLM")
    if not hasattr(model.get_output_embeddings(), "weight"):
        refuse(model, "has several output heads; only models with one head, over one vocabulary, can be speculated")
    # Layers and positions that a token tree can express.
    is_recurrent = has_recurrences(model)
    if getattr(model, "_is_stateful", False) and not is_recurrent:
        refuse(model, "keeps a recurrent state that cannot be rolled back when drafted tokens are rejected")
    unknown = sorted(set(layer_types(config)) - set(parts_of(config) if is_recurrent else ATTENTION))
    if unknown:
        refuse(model, f"has layers of type {', '.join(unknown)}, which a token tree cannot express here")
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [r for r in rope.values() if isinstance(r, dict)] if rope else []
    for rope_type in {r.get("rope_type", "default") for r in (nested or [rope])} & GROWING_ROPE:
        refuse(model, f"uses RoPE of type {rope_type!r}, whose frequencies change with the length of the text")
    # Weights, devices and the mode.
    packed, experts = admit_quantisation(model)
    _admit_tensors(model, packed | experts)
    if promises_bits(exact, model.device.type) and (model.device.type != "cuda" or model.dtype not in HALF):
        raise UnsupportedModelError(
            "exact: bits are promised in bfloat16 and float16 on a GPU of compute capability 8.0 or later, "
            f"{type(model).__name__} is in {model.dtype} on {model.device}; move it there, or pass exact='auto'"
        )
    # In training mode dropout and other noise would change its answers.
    found = [*effects(model.named_modules())]
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(
            f"model: {type(model).__name__} is in training mode, and {found[0]}{more}, so its answers would change; "
            "call model.eval() first, or set dropout and other noise to 0"
        )
    # RWKV halves weights in place in its first forward in evaluation mode. Let it do so now.
    for part in model.modules():
        if hasattr(part, "_rescale_layers"):
            part._rescale_layers()
    return Inventory(model, packed, experts)


def _admit_tensors(model: PreTrainedModel, packed: set[str]) -> None:
    """Refuse devices and dtypes that cannot be served. packed: paths of quantised modules, whose dtypes are known."""
    devices = sorted({str(ELSEWHERE.get(p, p.device)) for p in held_parameters(model)})
    if any(map(_offloads, model.modules())):
        refuse(
            model,
            f"is offloaded by accelerate, which moves its weights as it runs, and model.to() cannot undo that; {LOAD}",
        )
    if "meta" in devices:
        refuse(model, "has parameters without values (on the meta device); load it by from_pretrained()")
    if len(devices) != 1:
        refuse(model, f"is spread over {', '.join(devices)}; {SEVERAL}")
    admit_device(model, torch.device(devices[0]))
    read = {id(p) for path in packed for p in held_parameters(model.get_submodule(path))}
    unknown = sorted({str(p.dtype) for p in held_parameters(model) if id(p) not in read} - {str(d) for d in DTYPES})
    if unknown:
        refuse(model, f"has parameters of dtype {', '.join(unknown)}; expected float32, bfloat16 or float16")


def _offloads(part: nn.Module) -> bool:
    """True if a hook of accelerate brings a module's weights to its device for each forward."""
    hook = getattr(part, "_hf_hook", None)
    hooks = getattr(hook, "hooks", [hook])
    return any(getattr(each, "offload", False) or type(each).__name__ == "CpuOffload" for each in hooks)


def admit_device(model: PreTrainedModel, device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        refuse(model, f"is on {device}; it runs on a CPU or on a CUDA GPU: model.to('cpu') or model.to('cuda')")
    if device.type == "cuda":
        card = card_of(device)
        if card.capability < OLDEST:
            refuse(
                model,
                f"is on {card.name} (compute capability {card.number}); the kernels need {OLDEST[0]}.{OLDEST[1]} or "
                "later: move it to another GPU, or model.to('cpu')",
            )
        if importlib.util.find_spec("triton") is None:
            refuse(model, "is on a GPU, whose kernels need triton: pip install triton, or model.to('cpu')")
        if next(model.parameters()).dtype == torch.float64:
            refuse(model, "is in float64, which the GPU kernels do not take; load it with dtype=torch.float32")


# GPUs without bfloat16, which train no drafts either.


def in_served_dtype(inventory: Inventory, converts: bool) -> None:
    """Convert parameters and buffers of bfloat16 to float16, in place, on a GPU that has no bfloat16; log one warning.

    converts: the option `convert_bfloat16`; False refuses the model. UnsupportedModelError, before any change, also if
    the model is quantised, or if float16 cannot hold a weight.
    """
    card = card_of(inventory.device)
    if not card.lacks_tensor_cores:
        return
    found = [each for each in held(inventory.model) if each.tensor.dtype == torch.bfloat16]
    if not found:
        return
    why = f"{inventory.name} is in bfloat16, which {card.name} (compute capability {card.number}) does not compute"
    if not converts:
        raise UnsupportedModelError(f"model: {why}; load it with dtype=torch.float16, or pass convert_bfloat16=True")
    if inventory.packed:
        raise UnsupportedModelError(f"model: {why}, and it is quantised; load it with dtype=torch.float16")
    largest = torch.finfo(torch.float16).max
    for each in found:
        if not (each.tensor.abs() <= largest).all():  # guard: float16-range
            raise UnsupportedModelError(
                f"model: {why}, and {each.path} has values beyond float16; load it with dtype=torch.float32"
            )
    for each in found:
        if isinstance(each.tensor, nn.Parameter):
            each.tensor.data = each.tensor.data.to(torch.float16)  # tied modules hold the same parameter
        else:
            each.holder[each.name] = each.tensor.to(torch.float16)
    for config in configs_of(inventory.model):
        if getattr(config, "dtype", None) == torch.bfloat16:
            config.dtype = torch.float16
    log.warning("%s; its weights were converted to float16 in place (convert_bfloat16=False refuses it)", why)


def admit_training(model: nn.Module) -> None:
    """`admit`, and UnsupportedModelError if the model's GPU serves models, but cannot train drafts for them."""
    inventory = admit(model)
    card = card_of(inventory.device)
    if card.lacks_tensor_cores:
        raise UnsupportedModelError(
            f"model: {inventory.name} is on {card.name} (compute capability {card.number}), and drafts are "
            "trained by kernels that need 8.0 or later; move it to such a GPU, or model.to('cpu')"
        )


READERS: set[str] = set()
"""Classes that read pictures, videos or sounds in a way that lets rounds follow them; `contrib` adds them."""


def reads_pictures(model: PreTrainedModel, sort: str = "text") -> bool:
    """True if prompts of `model` may have pictures, videos or sounds. sort: which it has to read, such as "image"."""
    name, module = type(model).__name__.removesuffix("ForConditionalGeneration"), type(model).__module__
    return name in READERS and module.startswith("transformers.") and sort in model.input_modalities


def placeholders(config: PreTrainedConfig) -> frozenset[int]:
    """The tokens whose places pictures, videos and sounds take."""
    values = (getattr(config, f"{x}_token_{end}", None) for x in ("image", "video", "audio") for end in ("id", "index"))
    return frozenset(value for value in values if isinstance(value, int))
