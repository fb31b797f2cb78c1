"""The prompts of one ``generate()``, read from the arguments of transformers' decoding loop."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..compat import CACHE
from .past import cache_among


@dataclass
class Prompt:
    """The B rows to be continued.

    ids: [B, W] integers on the CPU, the argument of transformers' loop.
    tokens: token ids of each row [B lists] without padding; 0 for an unknown token.
    padding: positions of padding on the left of each row [B].
    width: positions of every row, padding and cached tokens included.
    is_left_padded: True if only padding on the left is masked, and positions count from each row's first token.
    is_embedded: True if embeddings came in place of token ids.
    has_unknown_tokens: True if a cache, embeddings or pictures came in place of some tokens.
    has_pictures: True if pictures or videos replace some tokens.
    position_offsets: for each row [B] the difference of its positions from 0, 1, 2, …, at all tokens that rounds and
        prefills process; None if `is_left_padded` is False.
    """

    ids: Tensor
    tokens: list[list[int]]
    padding: list[int]
    width: int
    is_left_padded: bool
    is_embedded: bool
    has_unknown_tokens: bool
    has_pictures: bool
    position_offsets: list[int] | None

    @classmethod
    def of(
        cls, input_ids: Tensor, generation_config, model_kwargs: dict, placeholders: frozenset[int] = frozenset()
    ) -> "Prompt":  # fmt: skip
        """The prompts of a call of ``_sample``.

        input_ids: [B, W] integers; W is 0 if embeddings replace them. They may begin after the cached tokens.
        generation_config, model_kwargs: the arguments of ``_sample``.
        placeholders: ids of tokens that pictures replace.
        Raises RuntimeError or ValueError, as transformers does, if `input_ids` are no rows of integers, or if they
        and the cache do not make up the attention mask's width.
        """
        embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        _check_ids(input_ids, embeds)
        ids = input_ids.cpu()  # tensors on a GPU are copied once
        mask = None if mask is None else mask.cpu()
        batch, id_width = ids.shape
        width = _width(id_width, generation_config, model_kwargs) if embeds is None else embeds.shape[1]
        padding, is_left_padded = [0] * batch, True
        if mask is not None:
            is_left_padded = mask.dim() == 2 and mask.shape == (batch, width)
            if is_left_padded:
                seen = mask.to(torch.int64)
                is_left_padded = not bool((seen.diff(dim=1) < 0).any()) and bool(seen.any(dim=1).all())
                padding = (seen == 0).sum(dim=1).tolist()
        has_pictures, cache = _has_pictures(model_kwargs), cache_among(model_kwargs)
        cached = int(cache.get_seq_length()) if cache is not None else 0
        positions, offsets = model_kwargs.get("position_ids"), [0] * batch
        if positions is not None and is_left_padded:
            first = cached if embeds is None and not has_pictures else width - 1
            offsets = _position_offsets(positions.cpu(), padding, width, first)
            is_left_padded = offsets is not None
        unknown = [0] * (width - id_width)
        tokens = [(unknown + row if unknown else row)[pad:] for row, pad in zip(ids.tolist(), padding)]
        are_cached = cached > 0 and any(not placeholders.isdisjoint(row) for row in tokens)
        return cls(
            ids, tokens, padding, width, is_left_padded, embeds is not None,
            bool(unknown) or has_pictures or are_cached, has_pictures, offsets,
        )  # fmt: skip

    def check_tokens(self, vocab_size: int) -> None:
        """Raise ValueError if a token id is not in a vocabulary of this size."""
        ids = self.ids.numpy()
        if ids.size and 0 <= ids.min() and ids.max() < vocab_size:  # most prompts, padding included
            return
        unknown = next((token for row in self.tokens for token in row if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise ValueError(f"input_ids: token id {unknown} is outside the vocabulary of {vocab_size} tokens")


def _check_ids(input_ids: Tensor, embeds: Tensor | None) -> None:
    """Refuse anything but a batch of token ids, as transformers does."""
    if input_ids.dim() == 2 and (input_ids.shape[0] == 0 or input_ids.is_floating_point()):
        raise RuntimeError(f"input_ids: expected rows of integers, got {input_ids.dtype} {tuple(input_ids.shape)}")
    if input_ids.dim() != 2 or (input_ids.shape[1] == 0 and embeds is None):
        raise ValueError(f"input_ids: expected [batch, at least one token], got shape {tuple(input_ids.shape)}")


def _width(id_width: int, generation_config, model_kwargs: dict) -> int:
    """Positions of every row: those of the mask, or without one of the ids or the cache.

    The ids are either all tokens, or those after the cache; else ValueError.
    """
    cache, mask = cache_among(model_kwargs), model_kwargs.get("attention_mask")
    cached = int(cache.get_seq_length()) if cache is not None else 0
    is_healed = bool(generation_config.token_healing) and not cached  # other ids may have replaced the masked ones
    if is_healed and (mask is None or mask.shape[-1] != id_width):
        return id_width
    if mask is not None:
        width = mask.shape[-1]
    else:
        width = getattr(generation_config, "_mask_length", None) or max(id_width, cached)
    if cached >= width or (not is_healed and width not in (id_width, cached + id_width)):
        raise ValueError(
            f"attention_mask, {CACHE}: {cached} cached and {id_width} given tokens do not make the mask's "
            f"{width}; pass all tokens, or those behind the cache and a mask over both"
        )
    return width


def _has_pictures(model_kwargs: dict) -> bool:
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    values = [*encoded.values(), model_kwargs.get("pixel_values"), model_kwargs.get("pixel_values_videos")]
    return any(value is not None for value in values)


def _position_offsets(positions: Tensor, padding: list[int], width: int, first: int) -> list[int] | None:
    """The offset of each row's positions [B] from 0, 1, 2, … at its first token; None if it is not constant.

    positions: of the last columns, [1 or B, up to W], where each offset has to be 0. For multi-axis RoPE they have up
        to 3 axes in front, or one more that counts the text; all axes must have one offset from column `first` on.

    E.g. padding [0, 2], width 5: 0 1 2 3 4 and 1 1 0 1 2 have the offsets 0. With three equal axes 4 5 6 7 8 in row 0
    gives 4.
    """
    if positions.shape[-1] > width:
        return None
    expected = (torch.arange(width) - torch.tensor(padding)[:, None])[:, width - positions.shape[-1] :]
    offsets = positions - expected
    offsets = torch.where(expected < 0, offsets[..., -1:], offsets)
    if positions.dim() < 3:
        return None if offsets.any() else [0] * len(padding)
    offsets = offsets[-3:, :, max(first - width, -positions.shape[-1]) :]
    return None if (offsets != offsets[:1, :, -1:]).any() else offsets[0, :, -1].tolist()
