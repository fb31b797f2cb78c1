"""Lines of a draft's report."""

from collections.abc import Iterable

from transformers import LlamaConfig

from ..modules.layers import LayerKnobs


def describe_layers(llama: LlamaConfig, knobs: LayerKnobs) -> str:
    """The RoPE and the layers of a draft, in a line."""
    rope = dict(llama.rope_parameters)
    theta, rope_type = rope.pop("rope_theta"), rope.pop("rope_type")
    windows = "" if not any(knobs.windows) else f", sliding windows {comma_separated(knobs.windows)}"
    return (
        f"{knobs.num_layers} layer(s): rope_theta={theta:g} ({rope_type}), qkv_bias={knobs.qkv_bias}, "
        f"qk_norm={knobs.qk_norm}{windows}"
    )


def comma_separated(values: Iterable) -> str:
    """ "1, 2, 3"."""
    return ", ".join(map(str, values))
