"""The classes of transformers that read pictures, videos or sounds in a way that lets rounds follow them."""

from transformers import modeling_outputs

from ..capture.admit import READERS
from ..runtime.prompt import PICTURES

READERS |= {
    "Apertus1p5", "Aria", "AudioFlamingo3", "AyaVision", "Chameleon", "Cohere2Vision", "CohereCompass", "Cosmos3Edge",
    "Cosmos3Omni", "DeepseekOcr2", "DeepseekVL", "DeepseekVLHybrid", "Emu3", "Ernie4_5_VLMoe", "Exaone4_5_", "FastVlm",
    "FunAsrNano", "FuyuForCausalLM", "Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Glm46V", "Glm4v", "Glm4vMoe",
    "GlmAsr", "GlmOcr", "GotOcr2", "Granite4Vision", "GraniteDocling", "GraniteSpeech", "GraniteSpeechPlus",
    "HunYuanVL", "HyperCLOVAXVisionV2", "Idefics2", "Idefics3", "InternVL", "Janus", "Lfm2Vl", "Lfm3Vl", "LightOnOcr",
    "Llama4", "Llava", "LlavaNext", "LlavaNextVideo", "LlavaOnevision", "MiniCPMOcr", "MiniCPMV4_6", "MiniCPMV4_7",
    "MiniMaxM3Sparse", "Mistral3", "Molmo2", "MossTranscribeDiarize", "MuseGlimmer", "MuseSpark", "MusicFlamingo",
    "OmniASR", "Ovis2", "PaddleOCRVL", "PerceptionLM", "QianfanOCR", "Qwen2Audio", "Qwen2VL", "Qwen2_5OmniThinker",
    "Qwen2_5_VL", "Qwen3ASR", "Qwen3OmniMoeThinker", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "SmolVLM",
    "Step3p7", "VideoLlama3", "VideoLlava", "VipLlava", "Voxtral",
}  # fmt: skip
"""Names without ForConditionalGeneration, if they end so. In these classes a picture or a sound changes only the keys,
values and states of its tokens and the positions after it. Others may switch weights, or attend to a picture from each
token that they generate."""
PICTURES |= {
    "high_res_pixel_values", "image_grids", "image_num_crops", "image_patches", "image_token_pooling", "input_values",
    "num_local_patches", "padding_mask", "pixel_values_local", "tile_fine_mask",
}  # fmt: skip

# The forward of Llama 4 in transformers 5.24 reads an attribute that the output of its text model lacks.
if not hasattr(modeling_outputs.MoeCausalLMOutputWithPast, "image_outputs"):
    modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
