"""bitsandbytes with 4 bits, NF4 and FP4: a table of 16 values, and a scale for each block of the flattened weights.

Reference: QLoRA (arXiv 2305.14314), section 3.
"""

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .codes import WEIGHTS, Codes, Packed, Place, WeightLayout, class_path, require, require_scale
from .formats import Format, Stored, sized_as
from .fp8 import Int8Weight

NESTED = 256
"""Scales of a block that double quantisation rounds together."""


@dataclass(frozen=True)
class Table4(WeightLayout):
    """codes [O * I / 2, 1] uint8, the first of two in the high bits; scales [O * I / block] float32; table [16]
    float32. nested: scales are uint8, followed by their offset, their scales [ceil(blocks / 256)] and table [256]."""

    block: int
    nested: int
    merges = False

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].numel() * 2 // inputs

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes = parts[0].flatten()
        values = torch.empty(codes.numel() * 2, device=codes.device)
        for some, numbers in zip(codes.split(WEIGHTS // 2), values.split(WEIGHTS)):
            numbers.copy_(parts[2][_unpacked(some).int()])
        return values.view(-1, self.block).mul_(self._scales(parts).view(-1, 1)).view(-1, inputs)

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes | None:
        if inputs % self.block:
            return None  # a block has parts of two rows
        scales = self._scales(parts).view(-1, inputs // self.block)
        return Codes(_unpacked(parts[0]).view(-1, inputs), scales.T, table=parts[2])

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index == 0:
            codes = packed.codes(parts, inputs)
            return (codes[:, ::2] << 4 | codes[:, 1::2]).view(-1, 1)
        return packed.scales(parts, inputs).T.flatten() if index == 1 and not self.nested else None

    def by_outputs(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, multiply: Callable) -> Tensor:
        return super().by_outputs(x, self.by_row(parts, x.shape[-1]) or parts, bias, multiply)

    def cut(self, parts: Sequence[Tensor], begin: int, end: int) -> list[Tensor] | None:
        """None unless codes and scales lie row by row, see `by_row`."""
        return super().cut(parts, begin, end) if parts[1].dim() == 2 else None

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        """The parts lie row by row, see `by_row`."""
        return [Place((0, 1), (1, 2)), Place((0, 1), (1, self.block)), Place()]

    def by_row(self, parts: Sequence[Tensor], inputs: int) -> list[Tensor] | None:
        """codes [O, I / 2], scales [O, I / block] and table; None if a block has parts of two rows."""
        if inputs % self.block:
            return None
        return [parts[0].view(-1, inputs // 2), self._scales(parts).view(-1, inputs // self.block), parts[2]]

    def refilled(self, owner: nn.Parameter, parts: dict[str, Tensor]) -> nn.Parameter:
        """Another `Params4bit`."""
        state = copy.copy(owner.quant_state)
        if "absmax" in parts:
            state.absmax = parts["absmax"]
        other = torch.Tensor._make_subclass(type(owner), parts["weight"], owner.requires_grad)
        other.__dict__.update({**owner.__dict__, "quant_state": state})
        return other

    def _scales(self, parts: Sequence[Tensor]) -> Tensor:
        """The scale of each block, float32."""
        _, scales, _, *second = parts
        if second:
            offset, second_scales, second_table = second
            second_scales = second_scales.repeat_interleave(NESTED)[: scales.numel()]
            scales = second_table[scales.int()] * second_scales + offset
        return scales


def _unpacked(codes: Tensor) -> Tensor:
    """Bytes of two codes -> codes [O * I] uint8."""
    codes = codes.flatten()
    return torch.stack([codes >> 4, codes & 15], dim=1).flatten()


def read(module: nn.Module) -> Packed | None:
    """A `Linear4bit` whose weights are on their device."""
    if class_path(module) != "bitsandbytes.nn.modules.Linear4bit":
        return None
    state = module.weight.quant_state
    require(state is not None, "is not quantised yet; move the model to its device")
    require(not getattr(state, "packing_format_for_cpu", False), "was repacked by its first forward; load it again")
    dtype = module.compute_dtype or state.dtype
    require(
        dtype == state.dtype,
        f"computes in {dtype} with weights that are rounded to {state.dtype}; load it with "
        f"bnb_4bit_compute_dtype={state.dtype}",
    )
    outputs, inputs = state.shape
    codes, size = module.weight.data, outputs * inputs
    require(codes.dtype == torch.uint8, f"keeps codes in {codes.dtype}; set bnb_4bit_quant_storage=torch.uint8")
    require(codes.numel() * 2 == size and size % state.blocksize == 0, "has weights that do not fill its blocks")
    parts = {"weight": codes, "absmax": state.absmax, "code": state.code}
    blocks = size // state.blocksize
    if state.nested:
        require(state.state2.blocksize == NESTED, f"has {state.state2.blocksize} nested scales a block, not {NESTED}")
        require_scale("state2.absmax", state.state2.absmax, (math.ceil(blocks / NESTED),))
        parts |= {"offset": state.offset, "absmax2": state.state2.absmax, "code2": state.state2.code}
    require_scale("absmax", state.absmax, (blocks,))
    return Packed(Table4(state.blocksize, int(state.nested)), parts, module.bias, inputs, "weight")


STATE = "weight.quant_state.bitsandbytes__"


def _of_file(tensors: dict[str, Tensor], config: dict) -> Packed:
    """NF4 or FP4. The state has the other facts as JSON, in bytes."""
    state = _state(next(tensor for name, tensor in tensors.items() if name.startswith(STATE)))
    parts = {"weight": tensors["weight"].view(-1, 1), "absmax": tensors["weight.absmax"]}
    parts["code"] = tensors["weight.quant_map"]
    nested = "weight.nested_absmax" in tensors
    if nested:
        parts["offset"] = torch.tensor(float(state["nested_offset"]))
        parts |= {"absmax2": tensors["weight.nested_absmax"], "code2": tensors["weight.nested_quant_map"]}
    return Packed(Table4(state["blocksize"], int(nested)), parts, None, state["shape"][1])


def _state(data: Tensor) -> dict:
    return json.loads(bytes(data.tolist()))


def _llm_int8(tensors: dict[str, Tensor], config: dict) -> Packed:
    """8 bits. Drafts need no columns apart for outliers of activations, which they do not round."""
    codes, scales = tensors["weight"], tensors["SCB"].float().view(-1, 1) / 127
    return Packed(Int8Weight(), {"codes": codes, "scales": scales}, None, codes.shape[1])


FORMAT = Format(
    read,
    {"bitsandbytes": (
        *(
            Stored(
                ".weight", (".weight.absmax", ".weight.quant_map", f".{STATE}{kind}"),
                (".weight.nested_absmax", ".weight.nested_quant_map"),
                lambda shapes, take, name=STATE + kind: tuple(_state(take(name))["shape"]), _of_file,
            )
            for kind in ("nf4", "fp4")
        ),
        Stored(".weight", (".SCB",), (".weight_format",), sized_as("weight"), _llm_int8),
    )},
)  # fmt: skip
