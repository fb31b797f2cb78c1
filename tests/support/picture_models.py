"""Tiny random image-text models for the tests: `model(name)` builds one, `inputs(name)` gives prompts with pictures."""

import functools

import torch
import transformers
from hybrids import heads_of
from models import FULL, GQA16, MOE, SPECIAL, WIN, _randomise, speculate_captured

# fmt: off
PICTURE, START, END, VIDEO = 90, 91, 93, 92
"""Token ids: of the places of a picture, of the marks around them, and of the places of a video."""
SIDE = 16  # pixels of the side of a picture that has a fixed size
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE,
             patch_size=4)
GRID_TOWER = dict(hidden_size=32, intermediate_size=48, depth=2, num_heads=2, out_hidden_size=64, patch_size=4)
GRIDS = [(1, 4, 4), (1, 4, 8)]
"""Patches of Qwen's first and second picture by time, height and width; two by two make a place."""
MARKS = dict(image_token_id=PICTURE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)


def sections(*sizes):
    """A text config whose RoPE has three axes of these sizes."""
    return dict(GQA16, rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=sizes), **SPECIAL)


# class without ForConditionalGeneration: (places of a picture, configuration, keywords of `_randomise`)
_MODELS = {
    "Gemma3": (4, dict(
        text_config=dict(GQA16, num_hidden_layers=4, sliding_window=8, layer_types=[WIN, WIN, FULL, WIN],
                         query_pre_attn_scalar=16, **SPECIAL),
        vision_config=dict(TOWER, vision_use_head=False), mm_tokens_per_image=4, image_token_id=PICTURE,
        boi_token_index=START, eoi_token_index=END), dict(std=0.4, embed=0.03, final=6.0)),
    "Llava": (16, dict(
        text_config=dict(GQA16, model_type="llama", **SPECIAL),
        vision_config=dict(TOWER, model_type="clip_vision_model"), image_token_index=PICTURE), {}),
    "LlavaNext": (36, dict(
        text_config=dict(GQA16, model_type="mistral", sliding_window=8, **SPECIAL),
        vision_config=dict(TOWER, model_type="clip_vision_model"), image_token_index=PICTURE,
        image_grid_pinpoints=[[SIDE, SIDE]]), {}),
    "Mistral3": (4, dict(
        text_config=dict(GQA16, model_type="mistral", sliding_window=None, **SPECIAL),
        vision_config=dict(TOWER, model_type="pixtral", head_dim=16), image_token_index=PICTURE), {}),
    "InternVL": (4, dict(
        text_config=dict(GQA16, model_type="qwen3", **SPECIAL), image_token_id=PICTURE,
        vision_config=dict(TOWER, image_size=[SIDE, SIDE], patch_size=[4, 4])), {}),
    "Qwen2VL": (None, dict(
        text_config=sections(2, 3, 3), vision_config=dict(
            depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=4), **MARKS), {}),
    "Qwen2_5_VL": (None, dict(
        text_config=dict(sections(2, 3, 3), layer_types=[FULL, WIN], sliding_window=8, use_sliding_window=True),
        vision_config=dict(GRID_TOWER, window_size=16, fullatt_block_indexes=[1]), **MARKS), {}),
    "Qwen3VL": (None, dict(
        text_config=sections(4, 2, 2), vision_config=dict(
            GRID_TOWER, depth=3, deepstack_visual_indexes=[0, 1], num_position_embeddings=16), **MARKS), {}),
    "Qwen3VLMoe": (None, dict(
        text_config=dict(sections(4, 2, 2), **MOE), vision_config=dict(
            GRID_TOWER, depth=3, deepstack_visual_indexes=[0, 1], num_position_embeddings=16), **MARKS), {}),
}
NAMES = [*_MODELS]
# fmt: on


@functools.cache
def model(name):
    """A model of the class `name`ForConditionalGeneration, fp32 on the CPU, which tests leave as it is."""
    _, config, keywords = _MODELS[name]
    config = getattr(transformers, f"{name}Config")(**config, **SPECIAL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    _randomise(net, torch.Generator().manual_seed(0), **keywords)
    net.generation_config.pad_token_id, net.generation_config.eos_token_id = SPECIAL["pad_token_id"], None
    return net


def inputs(name, counts=(1,), seed=1, ending=4):
    """What a processor makes of prompts of different lengths: row b has counts[b] pictures, and `ending` tokens behind
    them."""
    g = torch.Generator().manual_seed(seed)
    has_grids = _MODELS[name][0] is None

    def text(length):
        return torch.randint(3, 80, (length,), generator=g).tolist()

    rows, grids = [], []
    for number, count in enumerate(counts):
        row = text(5 + number)
        for _ in range(count):
            grids.append(GRIDS[len(grids) % 2])
            places = grids[-1][1] * grids[-1][2] // 4 if has_grids else _MODELS[name][0]
            row += [*text(2), START, *[PICTURE] * places]
        rows.append(row + text(ending))
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    arguments = dict(input_ids=ids, attention_mask=mask)
    types = {"Gemma3": "token_type_ids"}.get(name, "mm_token_type_ids" if has_grids else None)
    if types:
        arguments[types] = (ids == PICTURE).long()
    if grids and has_grids:
        patches = sum(height * width for _, height, width in grids)
        arguments["image_grid_thw"] = torch.tensor(grids)
        arguments["pixel_values"] = torch.randn(patches, 3 * 2 * 4 * 4, generator=g)
    elif grids:
        parts = [2] if name == "LlavaNext" else []  # the picture as a whole, and in one tile
        arguments["pixel_values"] = torch.randn(len(grids), *parts, 3, SIDE, SIDE, generator=g)
        if name in ("LlavaNext", "Mistral3"):
            arguments["image_sizes"] = torch.tensor([[SIDE, SIDE]] * len(grids))
    return arguments


@functools.cache
def fast(name):
    return speculate_captured(model(name), compile=False)


@functools.cache
def heads(name):
    """EAGLE-3 with a random head: its drafts are poor, its cache shows what it was given."""
    torch.manual_seed(0)
    head = heads_of(model(name))
    return speculate_captured(model(name), "eagle3", draft=head, num_steps=2, compile=False, check=False)


def save_served(folder):
    """A Llava of the demo model's vocabulary, with its processor and a chat template, for a server. It needs Pillow."""
    from server_fixtures import DEMO
    from transformers import AddedToken, AutoTokenizer, CLIPImageProcessor, LlavaProcessor

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    special = [AddedToken(text, special=True) for text in ("<image>", "<|im_start|>", "<|im_end|>")]
    tokenizer.add_tokens(special, special_tokens=True)
    text = dict(GQA16, model_type="llama", vocab_size=len(tokenizer), **SPECIAL)
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=dict(TOWER, model_type="clip_vision_model"),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}{{ note }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    pictures = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE)
    LlavaProcessor(
        pictures, tokenizer, patch_size=4, vision_feature_select_strategy="default", chat_template=template,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    return folder
