"""The models that read pictures in a way that lets rounds follow them."""

from transformers import PreTrainedModel

READERS = {
    f"{name}ForConditionalGeneration"
    for name in (
        "Gemma3", "InternVL", "Llava", "LlavaNext", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe",
    )
}  # fmt: skip
"""Classes of transformers in which a picture changes only the keys and values of its tokens and the positions after it.
Others may switch weights, or attend to a picture from each token that they generate."""
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id")
"""Names in a config of the token whose places in a prompt a picture or a video takes."""


def reads_pictures(model: PreTrainedModel) -> bool:
    """True if prompts of `model` may have pictures."""
    return type(model).__name__ in READERS and type(model).__module__.startswith("transformers.")


def placeholders(model: PreTrainedModel) -> frozenset[int]:
    """The tokens whose places pictures take."""
    values = (getattr(model.config, name, None) for name in PLACEHOLDERS)
    return frozenset(value for value in values if isinstance(value, int))
