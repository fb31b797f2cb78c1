"""Text of the target's own: prompts, continued by it, so that a draft learns what it will have to draft."""

import gc
import time
import warnings
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from ..api import speculate
from ..errors import UnsupportedModelError
from ..runtime import prefill_chunks as chunks
from ..tree import MAX_NODES
from .data import Document
from .progress import say_nothing

ROWS = {"cpu": 32, "cuda": 128}
"""Prompts that are continued at a time at most. A small model's step costs a GPU the launches of its kernels, however
many rows there are; beyond this the reading of their keys and values is most of it."""
NODES = {"cpu": 1, "cuda": 8}
"""Nodes that a round verifies at most, if tokens are not drawn. With so many rows a CPU computes all the time, so that
drafts cost it more than they save; a GPU takes in each round the number that pays."""
TOKENS = 1 << 17
"""Tokens of all prompts of a batch at most, which are processed at once."""
CACHE, SHARE = 1 << 32, 0.25
"""Bytes of the keys and values of a batch on a CPU, and the share of a GPU's free memory that they may take."""
CORPUS = 1 << 17
"""Tokens of earlier texts from which n-grams are drafted on a GPU: each round searches them all."""


@torch.no_grad()
def continue_documents(
    model: PreTrainedModel, documents: list[Document], length: int, seed: int, options: dict,
    tell: Callable[[str], None] = say_nothing,
) -> list[Document]:  # fmt: skip
    """The target's answer to each of the documents' `prompts`, behind its prompt, up to `length` tokens of both.

    model: in eval mode; it does not change. options: for ``model.generate()``. tell: given a line when the answers
    begin and when they are there. Only what the target wrote is supervised. The global random state is left alone.

    `speculate` makes the model fast for this; where it refuses, transformers' own loop runs, with one warning.
    """
    some = [prompt for document in documents for prompt in prompts(document, length)]
    if not some:
        return []
    longest = max(map(len, some))
    tokens = longest + (options.get("max_new_tokens") or length - longest)
    batches = -(-len(some) // _most_rows(model, longest, tokens))
    rows = -(-len(some) // batches)  # one size for all batches, for each size is captured by itself
    order = sorted(range(len(some)), key=lambda n: len(some[n]))
    order += order[-1:] * (batches * rows - len(order))
    tell(f"{type(model).__name__} writes {len(some):,} answers, {rows} at a time")
    begin, answers = time.perf_counter(), {}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        fast = _accelerated(model, rows, tokens, options)
        torch.manual_seed(seed)
        for first in range(0, len(order), rows):
            batch = order[first : first + rows]
            answers |= zip(batch, _continue(fast, [some[n] for n in batch], length, options))
    del fast
    gc.collect()  # its graphs and caches, which lie in cycles
    if devices:
        torch.cuda.empty_cache()
    written = sum(int(document.supervised.sum()) for document in answers.values())
    tell(f"{len(some):,} answers of {written:,} tokens in {time.perf_counter() - begin:.0f} s")
    return [answers[n] for n in range(len(some))]


def prompts(document: Document, length: int) -> list[list[int]]:
    """What of a document is given to the target: the tokens before its last supervised part, if they are fewer than
    `length`; of a text that is supervised from its start the first half, or that of each piece of `length` tokens."""
    ids, supervised = document.ids, document.supervised
    if bool(supervised.all()):
        pieces = [ids[begin : begin + length] for begin in range(0, len(ids), length)]
        return [piece[: (len(piece) + 1) // 2].tolist() for piece in pieces]
    free = (~supervised).nonzero()[:, 0]
    prompt = ids[: int(free[-1]) + 1]
    return [prompt.tolist()] if len(prompt) < length else []


def _most_rows(model: PreTrainedModel, longest: int, tokens: int) -> int:
    """How many prompts of up to `longest` tokens, of `tokens` with their answers, may be continued at a time."""
    config, device = model.config.get_text_config(decoder=True), model.device
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slots = tokens + MAX_NODES + chunks.SIZES[device.type][0]  # a step writes behind the text
    row = 2 * config.num_hidden_layers * heads * head_dim * slots * model.dtype.itemsize
    memory = int(SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else CACHE
    return max(1, min(ROWS[device.type], memory // row, TOKENS // longest))


def _accelerated(model: PreTrainedModel, rows: int, tokens: int, options: dict) -> PreTrainedModel:
    """`model` made fast for batches of `rows` texts of up to `tokens` tokens.

    Its linear layers are not merged, which would move its weights. Nothing goes through Inductor, which would take
    longer than the answers; a GPU's rounds are captured.
    """
    drawn = options.get("do_sample", model.generation_config.do_sample)
    nodes = 1 if drawn else NODES[model.device.type]
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    try:
        fast = speculate(
            model, "ngram", num_draft_tokens=nodes, max_cache_len=min(tokens, positions or tokens), compile=False,
            merge_linears=False, capacity=CORPUS,
        )  # fmt: skip
        fast.speculation.warmup(rows)
    except (UnsupportedModelError, RuntimeError) as error:  # the latter if a round cannot be captured
        warnings.warn(
            f"on_policy: transformers' own generate() writes the answers, without speculation, because speculate() "
            f"cannot serve this model: {error}",
            stacklevel=2,
        )
        return model
    return fast


def _continue(model: PreTrainedModel, some: list[list[int]], length: int, options: dict) -> list[Document]:
    config = model.generation_config
    ends = options.get("eos_token_id", config.eos_token_id)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    width = max(map(len, some))
    pad = next((token for token in (config.pad_token_id, *ends) if token is not None), 0)
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in some])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in some])
    out = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device),
        **{"max_new_tokens": length - width, "pad_token_id": pad, **options},
    )  # fmt: skip
    documents = []
    for prompt, row in zip(some, out[:, width:].tolist()):
        end = next((place for place, token in enumerate(row, 1) if token in ends), len(row))
        supervised = torch.zeros(len(prompt) + end, dtype=torch.bool)
        supervised[len(prompt) :] = True
        documents.append(Document(torch.tensor(prompt + row[:end], dtype=torch.int32), supervised))
    return documents
