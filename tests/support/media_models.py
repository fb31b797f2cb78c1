"""Tiny random models that read pictures or sounds, besides `picture_models`, and what processors make of prompts.

`model(name)` builds one from its config's defaults, whose sizes are made small. `inputs(name, counts)` gives prompts.
"""

import functools
import importlib.util
import inspect

import torch
import transformers
from models import FULL, GQA16, LIN, SPECIAL, WIN, _randomise, speculate_captured
from picture_models import GRIDS, PICTURE, SIDE, START, VIDEO

import spec_compile.contrib.pictures  # noqa: F401 - with which Llama 4 runs in transformers 5.24

# fmt: off
SOUND, FRAMES = 94, 64
"""The token id of the places of a sound, and the frames of one."""
TOKENS = {f"{sort}_token_{end}": token for sort, token in (("image", PICTURE), ("video", VIDEO), ("audio", SOUND))
          for end in ("id", "index")}
TOKENS |= dict(vision_start_token_id=START, image_start_token_id=START, boi_token_id=START, audio_start_token_id=88)
MOE = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
TEXT = dict(GQA16, **SPECIAL, **MOE, sliding_window=8, moe_k=2, num_experts_per_tok=2, moe_intermediate_size=32,
            shared_expert_intermediate_size=32, q_lora_rank=32, kv_lora_rank=24, n_group=1, topk_group=1,
            first_k_dense_replace=1, n_shared_experts=1, moe_num_shared_experts=1, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, index_topk=8,
            index_head_dim=16, index_n_heads=16)
_WIDTHS = dict.fromkeys(("hidden_size", "d_model", "embed_dim"), 32)
_WIDTHS |= dict.fromkeys(("intermediate_size", "mlp_dim", "encoder_ffn_dim"), 48)
_DEPTHS = dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "encoder_layers"), 2)
_HEADS = dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "num_key_value_heads"), 2)
TOWER = dict(_WIDTHS, **_DEPTHS, **_HEADS, head_dim=16, image_size=SIDE, patch_size=4, max_position_embeddings=64,
             out_hidden_size=64, num_position_embeddings=16, projection_dim=64, text_hidden_size=64, output_dim=64,
             vocab_size=96, num_mel_bins=16, max_source_positions=32, spatial_merge_size=2, temporal_patch_size=2,
             dropout=0.0, attention_dropout=0.0)


def small(config, sizes):
    """The arguments of a config like this one, with these sizes where it has them."""
    found = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            inner = small(value, TEXT if "text" in name else TOWER)
            found[name] = inner | {"model_type": value.model_type}
        elif name in sizes and value is not None and not isinstance(value, (list, tuple, dict)):
            found[name] = sizes[name]
    if sizes is TEXT:
        found["vocab_size"] = TEXT["vocab_size"]
        if types := getattr(config, "layer_types", None):
            found["layer_types"] = ([*dict.fromkeys(types)] * 2)[:2]
        rope = getattr(config, "rope_parameters", None) or {}
        if "mrope_section" in rope:
            found["rope_parameters"] = rope_of(2, 3, 3)
    return found


def rope_of(*sections, **more):
    return dict(rope_type="default", rope_theta=10000.0, mrope_section=sections, **more)


def merged(arguments, over):
    """`arguments` with those of `over` in their place, config by config."""
    arguments = dict(arguments)
    for name, value in over.items():
        inner = arguments.get(name)
        is_config = isinstance(value, dict) and isinstance(inner, dict) and name != "rope_parameters"
        arguments[name] = merged(inner, value) if is_config else value
    return arguments


# What processors make of pictures and sounds: functions of their number and a generator.


def pixels(*shape, **more):
    """One array for each picture, and other arguments by their value for one picture."""
    return lambda n, g: {"pixel_values": torch.randn(n, *shape, generator=g)} | _for_each(n, more)


def several(**shapes):
    """Arrays of these shapes for each picture."""
    return lambda n, g: {name: torch.randn(n, *shape, generator=g) for name, shape in shapes.items()}


def patches(*shape, **more):
    """Patches of pictures of two sizes, in one list."""
    def made(n, g):
        grids = [GRIDS[number % 2] for number in range(n)]
        count = sum(height * width for _, height, width in grids)
        grids = {"image_grid_thw": torch.tensor(grids), "pixel_values": torch.randn(count, *shape, generator=g)}
        return grids | _for_each(n, more)
    return made


def strips(n, g):
    """Patches of pictures of 8 by 8, side by side."""
    return {"pixel_values": torch.randn(1, 3, 4, n * 256, generator=g)} | _for_each(n, {"target_sizes": [8, 8]})


def crops(n, g):
    """Patches of whole pictures, of which two by two make a place."""
    numbers = torch.arange(16 * n).view(n, 2, 2, 2, 2).transpose(2, 3).reshape(4 * n, 4)
    made = {"pixel_values": torch.randn(n, 16, 48, generator=g), "image_token_pooling": numbers}
    return made | _for_each(n, {"image_grids": [2, 2, 0, 0], "image_num_crops": 1})


def sound(*shape, **masks):
    """Features of sounds of one length."""
    return lambda n, g: {"input_features": torch.randn(n, *shape, generator=g)} | _for_each(n, masks)


def _for_each(n, values):
    return {name: torch.tensor([value] * n) for name, value in values.items()}


MEL, MASK, SIZES, RGB = (16, FRAMES), [1] * FRAMES, [SIDE, SIDE], (3, SIDE, SIDE)
GRID = patches(3 * 2 * 4 * 4)


def MERGED(height, width):
    """The places of patches that are merged two by two."""
    return height * width // 4


LLAMA, QWEN2, CLIP = dict(model_type="llama"), dict(model_type="qwen2"), dict(model_type="clip_vision_model")
SIGLIP = dict(model_type="siglip_vision_model", vision_use_head=False)
GLM, SECTIONS = dict(text_config=dict(rope_parameters=rope_of(2, 3, 3, partial_rotary_factor=1.0))), rope_of(2, 3, 3)
GATED = dict(text_config=dict(layer_types=[LIN, FULL]))
QFORMER = dict(encoder_hidden_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
SPEECH = dict(text_config=dict(model_type="granite"), projector_config=QFORMER, has_lora_adapter=False,
              encoder_config=dict(hidden_dim=32, num_heads=2, dim_head=16, context_size=16))
OMNI = dict(vision_start_token_id=START, text_config=dict(rope_parameters=SECTIONS),
            audio_config=dict(n_window=50, max_source_positions=64, downsample_hidden_size=16, n_window_infer=100),
            vision_config=dict(fullatt_block_indexes=[1], window_size=16))
G4 = dict(rope_parameters=None, vocab_size_per_layer_input=96, hidden_size_per_layer_input=8, num_hidden_layers=4,
          num_kv_shared_layers=2, layer_types=[WIN, FULL] * 2)
STRIPS = dict(GATED, image_size=32, patch_size=4, insert_layer_id=0,
              vision_config=dict(image_size=32, insert_layer_id=0))
POSITIONS = [[x, y] for y in range(6) for x in range(6)]

UNSCALED = dict(embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=0.25)
RESNET = dict(architecture="test_resnet", hidden_size=96)  # one of timm's models for tests
SAM = dict(image_size=64, patch_size=16, output_channels=8, global_attn_indexes=[1], window_size=2)
VOCABULARY = {"<image>": PICTURE} | {f"IMGIMG{letter}Z": 80 + code for code, letter in enumerate("ABCDEFGH")}
EMU_VOCABULARY = {"<image>": PICTURE, "<|extra_200|>": 7} | {f"<|visual token {n:06d}|>": 80 + n for n in range(8)}
CODES = dict(num_embeddings=8, embed_dim=8, latent_channels=8, resolution=SIDE, base_channels=32, num_res_blocks=1,
             channel_multiplier=[1, 1, 2])

# class, which may lack ForConditionalGeneration: (places of a picture or sound, or a function of a grid's height and
# width; what is made; configuration)
_MODELS = {
    "Apertus1p5": (16, pixels(*RGB, image_sizes=SIZES), dict(
        image_token_offset=80, audio_token_offset=88,
        vision_config=dict(codebook_size=8, embed_dim=8, latent_channels=8, base_channels=32, num_res_blocks=1,
                           channel_multiplier=[1, 1, 1], attn_resolutions=[4], resolution=SIDE),
        audio_config=dict(num_filters=4, codebook_size=8, codebook_dim=32, decoder_hidden_size=32, num_lstm_layers=1,
                          decoder_intermediate_size=32, decoder_num_layers=1, decoder_attention_num_groups=4))),
    "Aria": (4, pixels(*RGB), dict(projector_patch_to_query_dict={16: 4})),
    "AyaVision": (4, pixels(*RGB), dict(text_config=dict(model_type="cohere2"), vision_config=SIGLIP,
                                        downsample_factor=2)),
    "Chameleon": (16, pixels(*RGB), dict({key: value for key, value in TEXT.items() if key != "sliding_window"},
        vocabulary_map=VOCABULARY, image_token_id=PICTURE, vq_config=CODES)),
    "Cohere2Vision": (4, pixels(*RGB), dict(vision_config=SIGLIP, downsample_factor=2)),
    "CohereCompass": (MERGED, GRID, dict(text_config=dict(rope_parameters={FULL: SECTIONS, WIN: SECTIONS}))),
    "Cosmos3Edge": (MERGED, patches(48), {}),
    "Cosmos3Omni": (MERGED, GRID, {}),
    "DeepseekOcr2": (145, pixels(3, 64, 64), dict(
        text_config=dict(mlp_layer_types=["dense", "sparse"], n_group=1, topk_group=1, num_experts_per_tok=2),
        vision_config=dict(
            encoder_config=dict(TOWER, layer_types=[FULL, FULL]),
            sam_config=dict(TOWER, **SAM, downsample_channels=[16, 32], mlp_dim=48)))),
    "DeepseekVL": (16, pixels(*RGB), {}),
    "DeepseekVLHybrid": (16, several(pixel_values=RGB, high_res_pixel_values=(3, 64, 64)), dict(
        high_res_vision_config=SAM)),
    "Emu3": (20, pixels(*RGB, image_sizes=SIZES), dict(
        vocabulary_map=EMU_VOCABULARY, image_token_id=PICTURE, text_config=dict(attention_dropout=0.0),
        vq_config=dict(codebook_size=8, embed_dim=4, latent_channels=4, base_channels=32, num_res_blocks=1,
                       channel_multiplier=[1, 1, 1], hidden_size=32, num_attention_heads=1))),
    "Ernie4_5_VLMoe": (MERGED, patches(48), dict(text_config=dict(rope_parameters=rope_of(3, 3, 2)))),
    "Exaone4_5_": (MERGED, GRID, {}),
    "Gemma4": (4, pixels(36, 48, image_position_ids=POSITIONS), dict(text_config=G4, vision_config=dict(
        TOWER, model_type="gemma4_vision", pooling_kernel_size=3, position_embedding_size=64))),
    "Gemma4Unified": (4, pixels(4, 432, image_position_ids=[[0, 0], [0, 1], [1, 0], [1, 1]]), dict(
        text_config=dict(layer_types=[WIN, FULL], rope_parameters=None),
        vision_config=dict(patch_size=4, mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=32))),
    "Glm46V": (MERGED, GRID, GLM),
    "Glm4v": (MERGED, GRID, GLM),
    "Glm4vMoe": (MERGED, GRID, GLM),
    "GlmOcr": (MERGED, GRID, GLM),
    "GotOcr2": (1, pixels(3, 64, 64), dict(text_config=QWEN2, vision_config=SAM)),
    "Granite4Vision": (10, pixels(2, *RGB, image_sizes=SIZES), dict(
        vision_config=dict(hidden_size=64), qformer_config=dict(QFORMER, encoder_hidden_size=64, hidden_size=64,
                                                                num_hidden_layers=1, num_attention_heads=1),
        deepstack_layer_map=[[1, 0]], spatial_target_layers=[1], downsample_rate="2/4", projector_dropout=0.0,
        image_grid_pinpoints=[SIZES])),
    "GraniteDocling": (4, pixels(1, *RGB, pixel_attention_mask=[True]), dict(
        text_config=UNSCALED, vision_config=dict(scale_factor=2, deepstack_visual_indexes=[0]))),
    "HunYuanVL": (lambda height, width: height // 2 * (width // 2 + 1) + 2, patches(48), dict(
        text_config=dict(head_dim=16, rope_parameters=rope_of(2, 2, 2, 2)))),
    "HyperCLOVAXVisionV2": (MERGED, GRID, {}),
    "Idefics2": (4, pixels(*RGB), dict(perceiver_config=dict(resampler_n_latents=4, resampler_depth=1,
        resampler_n_heads=2, resampler_head_dim=16, num_key_value_heads=2))),
    "Idefics3": (4, pixels(*RGB), dict(scale_factor=2, text_config=LLAMA)),
    "Janus": (16, pixels(*RGB), {}),
    "Lfm2Vl": (4, pixels(16, 48, spatial_shapes=[4, 4], pixel_attention_mask=[1] * 16), dict(
        text_config=dict(layer_types=["conv", FULL], block_auto_adjust_ff_dim=False),
        vision_config=dict(num_patches=16, vision_use_head=False), projector_hidden_size=32)),
    "Lfm3Vl": (MERGED, GRID, {}),
    "LightOnOcr": (4, pixels(*RGB, image_sizes=SIZES), {}),
    "Llama4": (4, pixels(*RGB), dict(
        text_config=dict(intermediate_size_mlp=96, moe_layers=[1], layer_types=["chunked_attention", FULL],
                         no_rope_layers=[1, 0], attention_chunk_size=16, num_experts_per_tok=1),
        vision_config=dict(intermediate_size=128, vision_output_dim=32, projector_input_dim=32,
                           projector_output_dim=32))),
    "LlavaNextVideo": (36, pixels(2, *RGB, image_sizes=SIZES), dict(
        text_config=LLAMA, vision_config=CLIP, image_grid_pinpoints=[SIZES])),
    "LlavaOnevision": (36, pixels(2, *RGB, image_sizes=SIZES), dict(vision_config=SIGLIP,
                                                                    image_grid_pinpoints=[SIZES])),
    "MiniMaxM3Sparse": (MERGED, GRID, {}),
    "MiniCPMOcr": (16, strips, STRIPS),
    "MiniCPMV4_6": (4, strips, STRIPS),
    "MiniCPMV4_7": (4, strips, STRIPS),
    "Molmo2": (4, crops, dict(
        image_patch_id=PICTURE, text_config=dict(rope_scaling_layers=[0, 1], additional_vocab_size=4),
        vision_config=dict(image_size=SIZES, num_position_embeddings=16),
        adapter_config=dict(TOWER, vision_feature_layer=[-1, 0]))),
    "MuseGlimmer": (MERGED, patches(96), dict(out_hidden_size=128, projector_hidden_size=32,
                                            vision_config=dict(pos_emb_height=8, pos_emb_width=8))),
    "MuseSpark": (MERGED, patches(96), dict(
        out_hidden_size=128, projector_hidden_size=32,
        text_config=dict(layer_types=[WIN, FULL], layer_rope_theta=[10000.0, 0], mlp_layer_types=["dense", "sparse"],
                         moe_hidden_size=32),
        vision_config=dict(pos_emb_height=8, pos_emb_width=8, layer_types=["window_attention", "full_attention"]),
        audio_config=dict(hidden_sizes=[8] * 4, depths=[1] * 4, num_hidden_layers=4, out_hidden_size=64))),
    "Ovis2": (16, pixels(*RGB), dict(text_config=QWEN2, vocab_size=96, hidden_size=64,
                                     visual_indicator_token_ids=[80, 81, 82, 83, 84],
                                     vision_config=dict(hidden_stride=1))),
    "PaddleOCRVL": (MERGED, patches(3, 4, 4), dict(text_config=dict(rope_parameters=SECTIONS))),
    "QianfanOCR": (4, pixels(*RGB), dict(vision_config=dict(image_size=SIZES, patch_size=[4, 4], drop_path_rate=0.0))),
    "Qwen3_5": (MERGED, GRID, GATED),
    "Qwen3_5Moe": (MERGED, GRID, GATED),
    "SmolVLM": (4, pixels(*RGB), dict(scale_factor=2, text_config=LLAMA)),
    "Step3p7": (1, pixels(*RGB), dict(text_config=dict(sliding_window=8))),
    "VideoLlama3": (MERGED, patches(48, image_merge_sizes=2), dict(text_config=QWEN2)),
    "VideoLlava": (16, pixels(*RGB), dict(text_config=LLAMA, vision_config=CLIP)),
    "VipLlava": (16, pixels(*RGB), dict(text_config=LLAMA, vision_config=CLIP, vision_feature_layers=[-2, -1])),
    "FastVlm": (4, pixels(3, 64, 64), dict(vision_config=RESNET, image_seq_length=4)),
    "Gemma3n": (4, pixels(3, 64, 64), dict(
        vision_soft_tokens_per_image=4, vision_config=dict(RESNET, do_pooling=False, vocab_size=4, vocab_offset=88),
        text_config=dict(num_hidden_layers=4, layer_types=[WIN, FULL] * 2, num_kv_shared_layers=2, laurel_rank=8,
                         intermediate_size=[96] * 4, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
                         vocab_size_per_layer_input=88, hidden_size_per_layer_input=8, altup_num_inputs=2),
        audio_config=dict(vocab_size=4, vocab_offset=92, input_feat_size=16, conf_num_attention_heads=2,
                          conf_num_hidden_layers=1, sscp_conv_channel_size=[8, 4]))),
    "PerceptionLM": (16, pixels(1, 3, 64, 64), dict(text_config=LLAMA, vision_config=dict(
        architecture="test_vit", model_args=dict(embed_dim=64, img_size=[64, 64], global_pool="")))),
    "FuyuForCausalLM": (4, lambda n, g: dict(image_patches=torch.randn(1, 4 * n, 48, generator=g)), dict(patch_size=4)),
    "AudioFlamingo3": (16, sound(*MEL, input_features_mask=MASK), dict(text_config=QWEN2)),
    "FunAsrNano": (8, sound(8, 48, input_features_mask=[1] * 8), dict(
        audio_config=dict(num_stacked_frames=3, num_timestamp_prediction_layers=1, hidden_dropout=0.0,
                          fsmn_kernel_size=3),
        adaptor_config=dict(TOWER, hidden_size=64, intermediate_size=16, projector_hidden_size=32))),
    "GlmAsr": (8, sound(*MEL, input_features_mask=MASK), dict(audio_config=dict(intermediate_size=128),
                                                              text_config=LLAMA)),
    "GraniteSpeech": (3, sound(15, 160), SPEECH),
    "GraniteSpeechPlus": (3, sound(15, 160), SPEECH),
    "MossTranscribeDiarize": (8, sound(*MEL, input_features_mask=MASK), {}),
    "MusicFlamingo": (16, sound(*MEL, input_features_mask=MASK), dict(text_config=QWEN2)),
    "OmniASR": (7, several(input_values=(1, 160)), dict(text_config=LLAMA, audio_config=dict(
        conv_dim=[16] * 3, conv_kernel=[10, 3, 3], conv_stride=[5, 2, 2], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, layerdrop=0.0, hidden_dropout=0.0, activation_dropout=0.0))),
    "Qwen2Audio": (16, sound(*MEL, feature_attention_mask=MASK), dict(text_config=QWEN2)),
    "Qwen2_5OmniThinker": (25, sound(16, 100, feature_attention_mask=[1] * 100), OMNI),
    "Qwen3ASR": (13, sound(16, 100, input_features_mask=[1] * 100), dict(
        audio_config=dict(downsample_hidden_size=16))),
    "Qwen3OmniMoeThinker": (13, sound(16, 100, feature_attention_mask=[1] * 100), OMNI),
    "Voxtral": (8, sound(*MEL), dict(text_config=LLAMA, audio_config=dict(intermediate_size=128), hidden_size=64)),
}
COLUMNS = {"Exaone4_5_", "HyperCLOVAXVisionV2", "MossTranscribeDiarize"}
"""Classes that count positions from a row's padding."""
WITH_TIMM = {"FastVlm", "Gemma3n", "PerceptionLM"}
"""Classes whose vision tower is timm's."""
IN_ROWS = {"Idefics2", "Idefics3", "SmolVLM"}
"""Classes whose pictures are in an array of rows, padded with pictures of zeros."""
# fmt: on


def class_of(name):
    """The class of a name in `_MODELS`; None if this version of transformers lacks it."""
    return getattr(transformers, f"{name}ForConditionalGeneration", None) or getattr(transformers, name, None)


HAS_TIMM = all(importlib.util.find_spec(name) for name in ("timm", "PIL"))
NAMES = [name for name in _MODELS if class_of(name) and (HAS_TIMM or name not in WITH_TIMM)]


@functools.cache
def model(name):
    """A model of this name in `_MODELS`, fp32 on the CPU, which tests leave as it is."""
    _, _, over = _MODELS[name]
    made = class_of(name)
    default = made.config_class()
    marks = {token: TOKENS[token] for token in TOKENS.keys() & vars(default).keys()}
    arguments = merged(small(default, {}) | marks, over)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = made(made.config_class(**SPECIAL | arguments)).float().eval()
    keywords = dict(std=0.4, embed=0.03, final=6.0) if name.startswith(("Gemma3n", "Gemma4")) else {}
    _randomise(net, torch.Generator().manual_seed(0), **keywords)
    net.generation_config.pad_token_id, net.generation_config.eos_token_id = SPECIAL["pad_token_id"], None
    return net


def inputs(name, counts=(1,), seed=1):
    """What a processor makes of prompts of different lengths: row b has counts[b] pictures or sounds."""
    g = torch.Generator().manual_seed(seed)
    places, made, _ = _MODELS[name]
    token = SOUND if has_sounds(name) else PICTURE

    def text(length):
        return torch.randint(3, 80, (length,), generator=g).tolist()

    rows, number = [], 0
    for index, count in enumerate(counts):
        row = text(5 + index)
        for _ in range(count):
            _, height, width = GRIDS[number % 2]
            row += [*text(2), START, *[token] * (places(height, width) if callable(places) else places)]
            number += 1
        rows.append(row + text(4))
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    arguments = dict(input_ids=ids, attention_mask=mask)
    for types in ("mm_token_type_ids", "moe_mm_token_type_ids"):
        if types in inspect.signature(model(name).forward).parameters:
            arguments[types] = (ids == PICTURE).long()
    if number:
        arguments |= made(number, g)
    if number and name in IN_ROWS:
        flat, arguments["pixel_values"] = arguments["pixel_values"], torch.zeros(len(counts), max(counts), *RGB)
        for row, (count, pictures) in enumerate(zip(counts, flat.split(counts))):
            arguments["pixel_values"][row, :count] = pictures
        arguments["pixel_attention_mask"] = torch.ones(len(counts), max(counts), SIDE, SIDE, dtype=torch.int64)
    return arguments


def features(name):
    """The argument that has the pictures or sounds."""
    made = _MODELS[name][1](1, torch.Generator())
    return next(key for key in ("pixel_values", "image_patches", "input_features", "input_values") if key in made)


def has_sounds(name):
    return features(name).startswith("input")


@functools.cache
def fast(name):
    return speculate_captured(model(name), compile=False)
