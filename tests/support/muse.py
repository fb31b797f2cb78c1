"""A tiny Muse Glimmer with a draft of transformers' own class, and the drafts of transformers' assisted generation."""

import functools
from unittest import mock

import torch
import transformers

HAS_MUSE = hasattr(transformers, "MuseGlimmerAssistantModel")
V, MASK, WINDOW, BLOCK = 12, 11, 8, 5  # few tokens, so that random drafts are accepted now and then
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    sliding_window=WINDOW, max_position_embeddings=512, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
)  # fmt: skip


@functools.cache
def pair():
    """The target, of three sliding layers with RoPE and a full one without, and its draft."""
    torch.manual_seed(10)
    text = SIZES | dict(vocab_size=V, num_hidden_layers=4, pad_token_id=0)
    pictures = dict(hidden_size=16, num_hidden_layers=1, intermediate_size=16, num_attention_heads=2)
    pictures |= dict(pos_emb_height=4, pos_emb_width=4)
    config = transformers.MuseGlimmerConfig(
        text_config=text, vision_config=pictures, image_token_id=10, video_token_id=9, out_hidden_size=64,
        projector_hidden_size=16, tie_word_embeddings=False,
    )  # fmt: skip
    target = transformers.MuseGlimmerForConditionalGeneration(config).eval()
    types = ["sliding_attention", "full_attention"]
    config = transformers.MuseGlimmerAssistantConfig(
        **SIZES, num_hidden_layers=2, layer_types=types, block_size=BLOCK, mask_token_id=MASK, target_layer_ids=[0, 2]
    )
    return target, transformers.MuseGlimmerAssistantModel(config).eval()


def assisted(ids, new):
    """The answer of transformers' assisted generation, and its drafts by the length of the text before them."""
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

    drafts, (target, draft) = {}, pair()
    propose = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self, input_ids, **kwargs):
        out, size = propose(self, input_ids, **kwargs), input_ids.shape[1]
        drafts[size] = out[0][0, size:].tolist()
        return out

    with mock.patch.object(DFlashTokenCandidateGenerator, "get_candidates", recorded):
        answer = target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, assistant_model=draft,
            speculation_type="dflash",
        )  # fmt: skip
    return answer, {size: found for size, found in drafts.items() if found}
