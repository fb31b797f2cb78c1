"""Text of the target's own: prompts, continued by it, so that a draft learns what it will have to draft."""

import torch
from transformers import PreTrainedModel

from .data import Document

BATCH, CACHE = 512, 1 << 32
"""Prompts that are continued at a time at most, and bytes of their keys and values."""


@torch.no_grad()
def continue_documents(
    model: PreTrainedModel, documents: list[Document], length: int, seed: int, options: dict
) -> list[Document]:
    """Each document with the target's answer in place of its last supervised part, up to `length` tokens.

    Of a text that is supervised from its start the first half stays, or of each piece of `length` tokens. options: for
    ``model.generate()``. Only what the target wrote is supervised. The global random state is left alone.
    """
    prompts = [prompt for document in documents for prompt in _prompts(document.ids, document.supervised, length)]
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    continued: dict[int, Document] = {}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        size = _batch_size(model, length)
        for begin in range(0, len(order), size):
            some = order[begin : begin + size]
            continued.update(zip(some, _continue(model, [prompts[n] for n in some], length, options)))
    return [continued[n] for n in range(len(prompts))]


def _batch_size(model: PreTrainedModel, length: int) -> int:
    """Prompts to continue at a time: many, since each token of a small model costs the launches of its kernels."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * config.num_hidden_layers * heads * head_dim * length * model.dtype.itemsize
    return max(1, min(BATCH, CACHE // row))


def _prompts(ids: torch.Tensor, supervised: torch.Tensor, length: int) -> list[list[int]]:
    if bool(supervised.all()):
        pieces = [ids[begin : begin + length] for begin in range(0, len(ids), length)]
        return [piece[: (len(piece) + 1) // 2].tolist() for piece in pieces]
    free = (~supervised).nonzero()[:, 0]
    prompt = ids[: int(free[-1]) + 1]
    return [prompt.tolist()] if len(prompt) < length else []


def _continue(model: PreTrainedModel, prompts: list[list[int]], length: int, options: dict) -> list[Document]:
    config = model.generation_config
    ends = options.get("eos_token_id", config.eos_token_id)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    width = max(map(len, prompts))
    pad = next((token for token in (config.pad_token_id, *ends) if token is not None), 0)
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device),
        **{"max_new_tokens": length - width, "pad_token_id": pad, **options},
    )  # fmt: skip
    documents = []
    for prompt, row in zip(prompts, out[:, width:].tolist()):
        end = next((place for place, token in enumerate(row, 1) if token in ends), len(row))
        supervised = torch.zeros(len(prompt) + end, dtype=torch.bool)
        supervised[len(prompt) :] = True
        documents.append(Document(torch.tensor(prompt + row[:end], dtype=torch.int32), supervised))
    return documents
