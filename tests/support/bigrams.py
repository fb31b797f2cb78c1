"""A target whose next token hangs on the last one, nearly alone, and drafts that know these pairs."""

import functools

import models
import torch
from draft_checkpoints import MASK
from transformers import LlamaConfig

from spec_compile.contrib.linked.draft import LinkedDraft
from spec_compile.contrib.linked.transitions import Markov
from spec_compile.drafters.modules.layers import LayerKnobs

PARDS_MASK = 95


@functools.cache
def target():
    model = models.ADMITTED["llama"]()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
    return model


@functools.cache
def table():
    """A draft of DSpark, whose block has no say."""
    model, size = target(), models.VOCAB
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=size
    )
    transition, knobs = Markov(64, size, size, 64), LayerKnobs(1, qk_norm=True)
    draft = LinkedDraft(config, embedding, output, (0, 1), 5, MASK, knobs, True, transition=transition)
    with torch.no_grad():
        draft.norm.weight.zero_()
        transition.markov_w1.weight.copy_(model.model(torch.arange(size)[:, None]).last_hidden_state[:, 0])
        transition.markov_w2.weight.copy_(output)
    return draft.requires_grad_(False).eval()


@functools.cache
def pard(sharpness=1.0):
    """The target, with a mask for PARD, so that it knows the first token that follows. sharpness: scales its logits."""
    draft = models.ADMITTED["llama"]()
    draft.load_state_dict(target().state_dict())
    draft.config.pard_token = PARDS_MASK
    with torch.no_grad():
        draft.lm_head.weight *= sharpness
    return draft
