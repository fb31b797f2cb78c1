"""The check that each decoder layer of a captured graph shows its attention, its recurrence, both or neither."""

from collections import Counter

import torch
from torch import fx
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedModelError
from ..graph import calls, layer_of
from ..kernels.ops import arguments_of

INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""The type of layers with an indexer; the second name is that before transformers 5.20."""
ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", *INDEXED)
PARTS: dict[str, tuple[set[str], ...]] = {
    "full_attention": ({"attention"},),
    "sliding_attention": ({"attention"},),
    "linear_attention": ({"convolution", "recurrence"}, {"recurrence"}),
    "conv": ({"convolution"},),
    "hybrid": ({"attention", "convolution", "recurrence"},),
    "mlp": (set(),),
    "moe": (set(),),
}
"""The parts that mix tokens in a layer, by the type that the configuration gives it; linear attention has one of two
forms."""
OF_FAMILY: dict[str, dict[str, tuple[set[str], ...]]] = {
    "recurrent_gemma": {"attention": PARTS["sliding_attention"], "recurrent": PARTS["linear_attention"]},
    "zaya": dict.fromkeys(("hybrid", "hybrid_sliding"), ({"attention", "convolution"},)),
}
"""Other types, by the model's: RecurrentGemma's before transformers 5.24, or types that mean something else."""
MARKERS = torch.ops.spec_compile.attention.default, torch.ops.spec_compile.recurrence.default


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer; empty if the configuration names none."""
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def parts_of(config: PreTrainedConfig) -> dict[str, tuple[set[str], ...]]:
    """`PARTS` as a model's configuration means them."""
    return PARTS | OF_FAMILY.get(config.model_type, {})


def check_layers(model: PreTrainedModel, gm: fx.GraphModule) -> None:
    """UnsupportedModelError unless every layer shows the markers of its type, and nothing else that mixes tokens."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    attention, recurrence = (calls(gm, marker) for marker in MARKERS)
    if not recurrence:
        skipped = {*(getattr(config, "cross_attention_layers", None) or ())}  # Mllama's, in a text without pictures
        if len(attention) != len({*range(config.num_hidden_layers)} - skipped):
            own = next((path for path, part in model.named_modules() if "forward" in vars(part)), None)
            raise UnsupportedModelError(
                f"model: {name} called attention through transformers' interface {len(attention)} times in "
                f"{config.num_hidden_layers} layers; every layer must, or its own mask or state would be lost"
                + ("" if own is None else f". A function was set as {f'{own}.forward'.lstrip('.')}; remove it")
            )
        for kind, types, argument in (("chunked", ("chunked_attention",), "chunk"), ("indexed", INDEXED, "chosen")):
            told = sum(arguments_of(node)[argument] is not None for node in attention)
            if told != sum(each in types for each in layer_types(config)):
                raise UnsupportedModelError(f"model: {name} has {kind} layers that its attention is not told of")
        return
    if calls(gm, torch.ops.aten.conv1d.default):
        raise UnsupportedModelError(f"model: {name} has convolutions over tokens that are not of a known form")
    shown = Counter((layer_of(node), "attention") for node in attention)
    for node in recurrence:
        shown[layer_of(node), "convolution" if node.args[0] == "convolution" else "recurrence"] += 1
    wanted = parts_of(config)
    for number, layer_type in enumerate(layer_types(config) or ["linear_attention"] * config.num_hidden_layers):
        parts = {part for layer, part in shown if layer == number}
        if parts not in wanted[layer_type] or shown[number, "attention"] > 1:
            raise UnsupportedModelError(
                f"model: {name}: layer {number} of type {layer_type} shows {', '.join(sorted(parts)) or 'nothing'} in "
                f"place of {', '.join(sorted(wanted[layer_type][0])) or 'nothing'}; its own state would be lost"
            )
