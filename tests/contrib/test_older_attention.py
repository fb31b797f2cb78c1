"""Models from before transformers' attention interface: the same tokens as transformers' generate()."""

import importlib

import models
import pytest
import torch

import spec_compile
from spec_compile.contrib.older_attention import CHANGES

BERT = dict(models.BASE, is_decoder=True)
BART = dict(
    vocab_size=models.VOCAB, d_model=64, encoder_layers=2, decoder_layers=2, decoder_attention_heads=4,
    decoder_ffn_dim=96, max_position_embeddings=512, is_decoder=True, is_encoder_decoder=False,
)  # fmt: skip
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16)
CLASSES = {
    "Git": dict(models.BASE, vision_config=TOWER),
    "MegatronBert": BERT,
    "Mvp": BART,
    "RemBert": dict(BERT, input_embedding_size=64, output_embedding_size=64),
    "RoFormer": dict(BERT, embedding_size=64),
    "RoFormer values": dict(BERT, embedding_size=64, rotary_value=True),
    "TrOCR": BART,
}
OFTEN = {"MegatronBert", "Mvp", "RoFormer values"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in CLASSES]
)
def test_rows_that_gain_unlike_numbers_of_tokens(name):
    """Each row's positions are its own: the references draft all of one row's answer, and little of the other's."""
    config = name.split()[0]
    model = models.build(f"{config}Config", f"{config}ForCausalLM", CLASSES[name])
    fast = spec_compile.speculate(model, compile=False, adaptive=False)
    ids = models.prompts((21,))[0][0].repeat(2, 1)
    ids[1] = ids[1].flip(0)
    asked = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, eos_token_id=None)
    want = model.generate(ids, **asked)
    assert fast.generate(ids, reference=[want[0]], **asked).equal(want)
    assert fast.speculation.stats.accept_length > 1.2


def test_transformers_has_the_classes():
    for path in CHANGES:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
