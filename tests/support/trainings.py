"""Trainings of tiny heads: a target, its texts, and a call of `train_draft` on them."""

import functools

import models
import pytest
import torch
from transformers import AutoTokenizer

from spec_compile import train_draft
from spec_compile.drafters.checkpoints.files import Target
from spec_compile.train import TRAINERS
from spec_compile.train import data as texts
from spec_compile.train.data import read
from spec_compile.train.features import TargetFeatures
from spec_compile.train.options import TrainingOptions

CODER = "examples/tiny_coder"
HEADS = ("eagle3", "eagle", "mtp")
ALGORITHMS = (*HEADS, "dflash")
SMALL = {
    "dflash": {"block_size": 4, "num_layers": 2}, "jetspec": {"block_size": 4, "num_layers": 2},
    "dspark": {"block_size": 4, "num_layers": 2, "markov_rank": 16},
    "domino": {"block_size": 4, "num_layers": 2, "emb_dim": 16, "gru_hidden_dim": 32},
    "p_eagle": {"num_depths": 4, "num_layers": 2},
}  # fmt: skip
"""Options of small blocks."""


def silent(progress):
    pass


@functools.cache
def target(name="llama"):
    return models.ADMITTED[name]()


@pytest.fixture(autouse=True)
def captured_once(monkeypatch):
    """A target whose weights stay as they are is captured once."""
    monkeypatch.setattr("spec_compile.api.capture", models.captured)


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(CODER)


def sequences(count=6, length=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, models.VOCAB, (count, length), generator=g).tolist()


def train(folder, algo="eagle3", model=None, **options):
    defaults = dict(data=sequences(), validation=sequences(), steps=4, progress=silent, **SMALL.get(algo, {}))
    return train_draft(model or target(), algo, output=folder, **defaults | options)


def made(algo, **options):
    """A trainer for the tiny target in float64, a batch with padding and unsupervised tokens, its features."""
    model = models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, rms_norm_eps=1e-5)).double()
    documents = read(sequences(3, 12), None, models.VOCAB)
    documents[1] = documents[1].piece(0, 9)
    documents[2].supervised[:6] = False
    counts = texts.count_tokens(documents, models.VOCAB)
    if "taps" in TRAINERS[algo].supports:
        options["taps"] = (0, 1)  # transformers gives the state after the last layer behind the final norm
    trainer = TRAINERS[algo](Target.of(model), TrainingOptions(**options), counts)
    batch = texts.collate(documents)
    return model, documents, trainer, batch, TargetFeatures(model, trainer.taps, trainer.kept)(batch.ids)


def chatter(template):
    made = AutoTokenizer.from_pretrained(CODER)
    made.chat_template = template
    return made


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TURNS += "{% if add_generation_prompt %}<assistant>{% endif %}"
TALK = [
    {"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three?"}, {"role": "assistant", "content": "four"},
]  # fmt: skip

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
