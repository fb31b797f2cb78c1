"""Tiny models with recurrences and short convolutions, and their answers and states."""

import functools

import models
import torch
from transformers import LlamaConfig

import spec_compile
from spec_compile.compat import CACHE
from spec_compile.drafters.modules.eagle import Eagle3Head
from spec_compile.passes.outputs import FINAL

TURN = 10  # new tokens of each of the calls of `turns`
NEW = 48
NOISY = {"zamba": 1e-4}  # as far as its own generate() is from a plain forward
DELAYS = ("zaya",)  # whose states here are past inputs of other sizes than transformers' cache holds
PURE = ("mamba", "mamba2")  # without attention, their caches hold only states


@functools.cache
def system(name, algorithm="ngram", **options):
    """A model, and what `speculate` makes of it."""
    model = models.HYBRIDS[name]()
    return model, spec_compile.speculate(model, algorithm, compile=False, **options)


def batch(lengths, seed=0):
    """Rows of random ids padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, models.VOCAB, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return ids, mask.long()


def answer(model, ids, mask, new=NEW, **more):
    options = dict(do_sample=False, eos_token_id=None, pad_token_id=0) | more
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, **options)


def texts(sequences, mask):
    """The rows without padding: references from which drafts are copied, so that many are accepted."""
    return [row[int((mask[number] == 0).sum()) :] for number, row in enumerate(sequences)]


def states_of(cache):
    """Convolution histories [B, w, C] and states [B, ...] in a cache of transformers', in the order of layers."""
    tensors = []
    for layer in cache.layers:
        if getattr(layer, "conv_states", None) and layer.conv_states.get(0) is not None:
            tensors.append(layer.conv_states[0].transpose(1, 2))
        if getattr(layer, "recurrent_states", None) and layer.recurrent_states.get(0) is not None:
            tensors.append(layer.recurrent_states[0])
    return tensors


def heads_of(model):
    """A random EAGLE-3 head with a tap behind a recurrence, one behind attention, and one of the embeddings."""
    shared = model.get_input_embeddings().weight, (1, 0, FINAL), models.BASE["hidden_size"]
    head = Eagle3Head(LlamaConfig(**models.GQA16), *shared, head_weight=model.get_output_embeddings().weight)
    return head.requires_grad_(False).eval()


def bits_of_answers(model, nodes, reference=None, **options):
    """Tokens [B, T] and logits [new, B, V] of an answer whose rounds verify `nodes` nodes, and the accept length."""
    ids, mask = (tensor.to(model.device) for tensor in batch((5, 70, 131)))
    settings = dict(compile=False, num_draft_tokens=nodes, max_cache_len=512) | options
    fast = spec_compile.speculate(model, **settings)
    more = {} if reference is None else {"reference": texts(reference, mask)}
    if not fast.speculation.engine.captured.clamps_prompts:  # such a cache cannot be handed out
        more |= dict(return_dict_in_generate=True, output_logits=True)
    out = answer(fast, ids, mask, **more)
    sequences, logits = (out, out) if torch.is_tensor(out) else (out.sequences, torch.stack(out.logits))
    return sequences.cpu(), logits.cpu(), fast.speculation.stats.accept_length


def turns(model, lengths, cache, *, reference=None, **options):
    """Three calls, of which each goes on where the one before ended, behind one or three more tokens; the texts, and
    the cache after each."""
    ids, mask = (tensor.to(model.device) for tensor in batch(lengths))
    texts = []
    for more in (1, 3, 3):
        extra = {} if reference is None else {"reference": reference}
        ids = answer(model, ids, mask, TURN, **{CACHE: cache}, **extra, **options)
        texts.append((ids, [state.clone() for state in states_of(cache)]))
        added = torch.arange(5, 5 + len(lengths))[:, None] + torch.arange(more)
        ids = torch.cat([ids, added.to(ids.device)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return texts
