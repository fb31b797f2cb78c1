"""The format of EAGLE-1 and EAGLE-2 heads: SafeAILab's, HASS', vLLM's and speculators' become an `EagleHead`."""

import torch

from ..modules.eagle import EagleHead
from .config_keys import SPECULATORS, refuse_unknown_keys
from .describe import describe_layers
from .eagle_config import DraftConfig, with_rope_theta
from .fill import fill_module
from .source import Source
from .target import Target

OVERRIDES = ("rope_theta",)


def detect(source: Source) -> bool:
    """Whether the config says so, or fc joins two states of the head's own size."""
    said = source.config.get(SPECULATORS)
    if said is not None:
        return said == "eagle"
    fc = source.shape("fc.weight")
    return fc[0] > 0 and fc[-1] == 2 * fc[0]


def read(source: Source, target: Target, overrides: dict) -> EagleHead:
    """An EAGLE-1 or EAGLE-2 head. overrides: rope_theta. ValueError if anything does not fit."""
    refuse_unknown_keys(source.config)
    checkpoint, names = source.checkpoint, source.our_names
    config = with_rope_theta(DraftConfig(source.config), overrides)
    target.check(config.layer.get("hidden_size"), config.layer.get("vocab_size"))
    wants_bias = config.get("bias") or config.get("eagle_fc_bias") or config.get("fusion_bias")
    normed = bool(config.get("layernorms"))
    llama, knobs = config.llama(), config.layer_knobs(names)
    with torch.device("meta"):
        head = EagleHead(
            llama, target.embedding, target.head_weight, knobs,
            fc_bias=bool(wants_bias) or "fc.bias" in names,
            embedding_norm=normed or "embedding_norm.weight" in names,
            state_norm=bool(config.get("add_para_norm")) or "state_norm.weight" in names,
            input_norm=normed,
            output_norm=normed,
        )  # fmt: skip
    head.flavour = "EAGLE" + (" (speculators)" if config.speculators else " (vLLM)" if config.nested else "")
    target.skip_copy(checkpoint, names.get("embedding", ""), target.embedding)
    target.skip_copy(checkpoint, names.get("head_weight", ""), target.head_weight)
    fill_module(head, checkpoint, names, target)
    fc = f"fc of [embedding; state] {'with' if head.fc.bias is not None else 'without'} a bias"
    head.report = [
        f"{head.flavour} head from {checkpoint.source}",
        "reads the state after the target's final norm",
        fc,
        describe_layers(llama, knobs),
        "embedding and output matrix: the target's",
        *checkpoint.ignored,
    ]
    return head.eval()
