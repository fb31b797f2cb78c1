"""The same call on a tiny model and on its speculative shadow, and all that is compared of them."""

import functools
import math
import string
import warnings

import pytest
import torch
from models import ADMITTED, VOCAB, prompts
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from spec_compile import speculate
from spec_compile.compat import CACHE

NAMES = ("llama", "qwen3", "gpt2", "gemma3", "mixtral")
SINGLES, IDS, MASK = prompts()
PROMPTS = {"single": dict(input_ids=SINGLES[0]), "padded batch": dict(input_ids=IDS, attention_mask=MASK)}
EOS = list(range(10, 40))
ALL_OUTPUTS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
models, kinds = pytest.mark.parametrize("name", NAMES), pytest.mark.parametrize("kind", PROMPTS)


def rows(table: dict):
    """Parametrize `row` by id."""
    return pytest.mark.parametrize("row", [pytest.param(table[name], id=name) for name in table])


@functools.cache
def pair(name: str):
    """A tiny model and its shadow."""
    model = ADMITTED[name]()
    return model, speculate(model, compile=False, adaptive=False)  # what it drafts does not depend on the time taken


@functools.cache
def beyond(model) -> list[torch.Tensor]:
    """What the model says to each prompt beyond any stop."""
    return list(model.generate(**PROMPTS["padded batch"], max_new_tokens=24, eos_token_id=None))


def primed(name: str):
    """The pair with nothing in its trie but what the model says beyond any stop."""
    model, fast = pair(name)
    fast.speculation.ngram.reset()
    fast.speculation.ngram.add(beyond(model))
    return model, fast


@functools.cache
def tokenizer():
    """One of letters and pairs of letters, as many as the tiny models have tokens."""
    pairs = "th he in er an re nd on en at ou ed ha to or it is hi es ng ve al te ea ar se as le ti".split()
    texts = ["<pad>", "<s>", "</s>", *string.ascii_letters, *string.digits, " ", ".", *pairs]
    core = Tokenizer(BPE({text: number for number, text in enumerate(texts)}, [tuple(pair) for pair in pairs]))
    core.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)


class Recorder:
    """A streamer that remembers its calls."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(("put", value.dtype, value.tolist()))

    def end(self):
        self.calls.append("end")


def generate(system, positional=(), **arguments):
    return system.generate(*positional, **{"max_new_tokens": 12, **arguments})


def observe(system, **arguments):
    """What a call of generate() gives, and the texts of its UserWarnings."""
    if hasattr(system, "speculation"):
        system.speculation.engine._announced.clear()  # each says it again
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = generate(system, **arguments)
    return output, [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


def sequences(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def assert_same(expected, got):
    """Equal outputs of generate()."""
    assert type(got) is type(expected)
    tokens = sequences(expected)
    assert sequences(got).dtype == tokens.dtype and torch.equal(sequences(got), tokens)
    if isinstance(expected, torch.Tensor):
        return
    assert list(got) == list(expected)
    for kept in ("scores", "logits"):
        if expected.get(kept) is None:
            continue
        assert type(got[kept]) is tuple and len(got[kept]) == len(expected[kept])
        a, b = torch.stack(expected[kept], 1), torch.stack(got[kept], 1)
        ended = (b == 0).all(-1)  # ours gives zeros then, transformers what the padding leads to
        assert not tokens[:, -a.shape[1] :][ended].any()
        # logits of up to 17, by products of other shapes: an error of 1e-5 of the largest
        scale = a[a.isfinite()].abs().max().item()
        torch.testing.assert_close(b[~ended], a[~ended], rtol=1e-5, atol=1e-5 * max(1.0, scale))
    if expected.get(CACHE) is not None:
        assert type(got[CACHE]) is type(expected[CACHE])
        assert got[CACHE].get_seq_length() == expected[CACHE].get_seq_length()


def assert_drop_in(model, fast, row, aside=None):
    """The same call, made of row(), gives the same output, streams the same and warns the same: with right drafts for
    all rows, and for some of a batch, which go on beyond where the rows end. aside: what transformers' own loop has
    to do, for which there is one warning more."""
    streamer = None if aside == "num_beams" else Recorder()
    expected, before = observe(model, streamer=streamer, **row())
    for drafted in (slice(None), slice(0, None, 2))[: 1 if aside or len(sequences(expected)) == 1 else 2]:
        fast.speculation.ngram.reset()
        fast.speculation.ngram.add([*beyond(model)[drafted], *sequences(expected)[drafted]])
        rounds, again = fast.speculation.stats.rounds, streamer and Recorder()
        got, after = observe(fast, streamer=again, **row())
        more = [text for text in after if text not in before]
        if aside is None:
            assert more == [] and fast.speculation.stats.rounds > rounds
        else:
            assert len(more) == 1 and aside in more[0] and fast.speculation.stats.rounds == rounds
        assert_same(expected, got)
        assert streamer is None or again.calls == streamer.calls


def is_long(ids, scores):
    return ids.shape[1] >= 30


def is_sure(ids, scores):
    return scores[-1].softmax(-1).max(-1).values > 0.6


def moved(ids, scores):
    return scores.roll(7, dims=-1)


class CountsItsCalls:
    """A processor that remembers: what it bans depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores.index_fill(-1, torch.arange(self.calls % 5, VOCAB, 5), -math.inf)


def two_of_three(row, ids):
    """For `prefix_allowed_tokens_fn`: depends on the row and on all of the prefix."""
    return [token for token in range(VOCAB) if (token + row + int(ids.sum())) % 3]
