"""Checks of token ids that an n-gram store is given."""

import torch

_INTEGERS = frozenset(
    getattr(torch, name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)


def check_documents(ids, name: str, limit: int) -> list[torch.Tensor]:
    """The documents in `ids`, one or a list of them, each as `check_ids` gives it."""
    if isinstance(ids, (list, tuple)) and any(_is_sequence(item) for item in ids):
        return [check_ids(item, f"{name}[{i}]", limit) for i, item in enumerate(ids)]
    return [check_ids(ids, name, limit)]


def check_ids(ids, name: str, limit: int) -> torch.Tensor:
    """`ids` as a contiguous int64 CPU tensor of ids in range; it stays alive while its pointer is used."""
    tensor = ids
    if not isinstance(tensor, torch.Tensor):
        if isinstance(ids, (str, bytes)) or not _is_sequence(ids):
            raise TypeError(
                f"{name} must be a 1-D tensor, array or list of token ids, not {type(ids).__name__}: "
                "tokenize text first"
            )
        try:
            tensor = torch.tensor(ids) if len(ids) else torch.empty(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"{name} must be a 1-D tensor, array or list of token ids: {error}") from None
    if not is_plain(tensor) or tensor.is_meta:
        raise TypeError(f"{name} must be a plain tensor with memory, not {type(tensor).__name__} ({tensor.layout})")
    if tensor.dim() != 1:
        raise ValueError(
            f"{name} must be 1-D, not of shape {list(tensor.shape)}: pass a list of its rows without padding"
        )
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name} must hold integer token ids, not {str(tensor.dtype).removeprefix('torch.')}")
    tensor = tensor.detach().to("cpu", torch.int64).contiguous()
    if tensor.numel():
        low, high = (int(bound) for bound in tensor.aminmax())
        if low < 0 or high >= limit:
            bad = low if low < 0 else high
            raise ValueError(
                f"{name} holds token id {bad}, outside the vocabulary [0, {limit}): was it tokenized for another model?"
            )
    return tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """True if a tensor's numbers lie in memory as its strides say: it is not sparse, nested, fake or a wrapper."""
    is_own = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_own and tensor.layout == torch.strided and not tensor.is_nested


def _is_sequence(value) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ()
