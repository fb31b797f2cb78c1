"""Which models read pictures so that rounds can go on behind them."""

from transformers import PreTrainedModel

READERS = {
    f"{name}ForConditionalGeneration"
    for name in (
        "Gemma3", "InternVL", "Llava", "LlavaNext", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe",
    )
}  # fmt: skip
"""Classes of transformers in which a picture shows in the keys and values of its tokens, and in the positions behind
it, and nowhere else. Others may switch weights, or attend to a picture from each token that they generate."""
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id")
"""Values of configs that name the token in whose places a picture or a video stands."""


def reads_pictures(model: PreTrainedModel) -> bool:
    """Whether prompts of `model` may have pictures."""
    return type(model).__name__ in READERS and type(model).__module__.startswith("transformers.")


def placeholders(model: PreTrainedModel) -> frozenset[int]:
    """The tokens in whose places pictures stand."""
    values = (getattr(model.config, name, None) for name in PLACEHOLDERS)
    return frozenset(value for value in values if isinstance(value, int))
