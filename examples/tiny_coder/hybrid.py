"""Demo models with recurrences or short convolutions: transformers' own classes, in small, with the loss of `model`."""

from __future__ import annotations

import copy

import data
import torch
from model import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, LENGTH, THETA, head_loss
from torch import nn

LINEAR, FULL = "linear_attention", "full_attention"
COMMON = dict(
    vocab_size=data.VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    bos_token_id=0, eos_token_id=0, pad_token_id=0,
    rope_parameters=dict(rope_type="default", rope_theta=THETA),
)  # fmt: skip


def _sizes(architecture: str, layers: int) -> tuple[str, dict]:
    """Type of the model -> its sizes. Every fourth layer has attention; in Falcon-H1 every layer has both."""
    with_attention = [i % 4 == 3 for i in range(layers)]
    return {
        "lfm2": ("lfm2", dict(block_auto_adjust_ff_dim=False,
                              layer_types=[FULL if full else "conv" for full in with_attention])),
        "qwen3_5": ("qwen3_5_text", dict(linear_num_key_heads=HEADS, linear_num_value_heads=HEADS,
                                         linear_key_head_dim=HEAD_DIM, linear_value_head_dim=HEAD_DIM,
                                         layer_types=[FULL if full else LINEAR for full in with_attention])),
        "falcon_h1": ("falcon_h1", dict(mamba_d_ssm=HIDDEN, mamba_n_heads=HEADS, mamba_d_head=HEAD_DIM,
                                        mamba_d_state=HEAD_DIM, mamba_chunk_size=128)),
    }[architecture]  # fmt: skip


ARCHITECTURES = ("lfm2", "qwen3_5", "falcon_h1")


class Hybrid(nn.Module):
    """A causal LM of transformers, trained in the same way as `model.Llama`."""

    def __init__(self, architecture: str, layers: int):
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        kind, sizes = _sizes(architecture, layers)
        config = AutoConfig.for_model(kind, **COMMON, **sizes, num_hidden_layers=layers)
        self.hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self.head_loss = head_loss

    @property
    def layers(self):
        return self.hf.model.layers

    def forward(self, tokens, teacher=None):
        """See `model.Llama.forward`."""
        ids, labels = tokens[:, :-1], tokens[:, 1:] if teacher is None else teacher
        x = self.hf.model(ids, use_cache=False).last_hidden_state
        return self.head_loss(x, self.hf.lm_head.weight, labels)

    def to_transformers(self):
        """A copy in bfloat16, on the CPU."""
        from transformers import GenerationConfig

        hf = copy.deepcopy(self.hf).to("cpu", torch.bfloat16).eval()
        hf.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
        return hf
