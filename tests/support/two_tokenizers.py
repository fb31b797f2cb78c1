"""A target and drafts of it whose tokens have other ids and other spellings, each with a tokenizer of its own."""

import copy
import functools

import draft_rounds as rounds
import models
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

SIZE = 130  # tokens of a draft; the target has `models.VOCAB`
FIRST = 3  # the first token of the target that is no special one
LACKING = tuple(range(FIRST, models.VOCAB, 5))  # tokens that a draft may lack


def word(i):
    """The text of token i of the target, as in " ab"; half of them begin with a space."""
    return " " * (i % 2) + chr(97 + i // 10) + chr(97 + i % 10)


def made(vocab, **special):
    """A tokenizer of this vocabulary: token -> id."""
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=special.get("unk_token")))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@functools.cache
def tokenizer():
    """The target's, over bytes."""
    words = {word(i).replace(" ", "Ġ"): i for i in range(FIRST, models.VOCAB)}
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return made({name: i for i, name in enumerate(names.values())} | words, **names)


def draft_ids():
    """The draft's id of each of the target's tokens [V], if it has them: the last id is token 0's."""
    return torch.arange(SIZE - 1, SIZE - 1 - models.VOCAB, -1)


@functools.cache
def draft_tokenizer(lacking=()):
    """A draft's, in the spelling of SentencePiece. lacking: tokens that it does not have.

    The ends of these tokens, single letters, are its ids 0 to 9.
    """
    ids = draft_ids().tolist()
    vocab = {chr(97 + i): i for i in range(10)} | {f"▁filler{i}": i for i in range(10, min(ids))}
    vocab |= {"<pad>": ids[0], "<bos>": ids[1], "<eos>": ids[2]}
    for i in range(FIRST, models.VOCAB):
        vocab[f"▁lacking{i}" if i in lacking else word(i).replace(" ", "▁")] = ids[i]
    return made(vocab, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


@functools.cache
def draft(sharpness=1.0):
    """The target with other ids. Its further tokens are likelier than those that it shares with the target.

    sharpness: a factor of its logits.
    """
    target, ids = rounds.target("llama"), draft_ids()
    model = copy.deepcopy(target)
    model.resize_token_embeddings(SIZE, mean_resizing=False)
    with torch.no_grad():
        for new, old in zip(
            (model.get_input_embeddings(), model.get_output_embeddings()),
            (target.get_input_embeddings(), target.get_output_embeddings()),
        ):
            new.weight[: ids.min()] = 3 * torch.randn(int(ids.min()), 64, generator=torch.Generator().manual_seed(0))
            new.weight[ids] = old.weight
        model.get_output_embeddings().weight *= sharpness
    return model.eval()


def fast(schedule, lacking=(), sharpness=1.0, device="cpu", **options):
    """The speculative target with such a draft, which drafts in every round."""
    names = dict(tokenizer=tokenizer(), assistant_tokenizer=draft_tokenizer(lacking))
    target, smaller = rounds.target("llama"), draft(sharpness)
    if device != "cpu":
        target, smaller = (copy.deepcopy(each).to(device) for each in (target, smaller))
    options = dict(adaptive=False, compile=False, check=False, max_cache_len=200) | options
    return models.speculate_captured(target, "draft_model", draft=smaller, **names, **schedule, **options)
