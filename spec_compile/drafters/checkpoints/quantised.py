"""Quantised matrices in published drafts: their tensors by name, and the weights that these mean.

A matrix ``X.weight`` [O, I] is stored in several tensors, such as ``X.weight_packed`` and ``X.weight_scale``. The names
and layouts are those of transformers' own integrations, of compressed-tensors' ``compressors``, of torchao's
``prototype/safetensors``, of bitsandbytes' ``QuantState.as_dict``, and of TensorRT Model Optimizer as vLLM's
``modelopt.py`` reads it.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...quantised import Packed
from ...quantised.awq import Awq
from ...quantised.bnb import Table4
from ...quantised.codes import unpacked_nibbles
from ...quantised.fp4 import Fp4
from ...quantised.fp8 import FP8, Fp8Block
from ...quantised.gptq import Gptq
from ...quantised.torchao import Float8Weight, Int8Weight, IntGroups

Tensors = dict[str, Tensor]
"""The tensors of a matrix by the ends of their names."""


@dataclass(frozen=True)
class Scheme:
    """How a method stores a matrix.

    main: the end of the name of the tensor that has the codes.
    needs, may: ends of names of others, which must and which may be there. Scales of activations have no use, because
        drafts keep activations in 16 bits.
    shape: shapes of tensors by their ends, and a function that reads one -> [O, I].
    read: the tensors, and fields of the method's config -> the matrix; ValueError, which ends a sentence about it.
    weight: the end of the matrix's own name.
    """

    main: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    shape: Callable[[dict[str, tuple[int, ...]], Callable[[str], Tensor]], tuple[int, ...]]
    read: Callable[[Tensors, dict], Packed]
    weight: str = ".weight"


def _eight_bits(tensors: Tensors, config: dict, codes: str = ".weight", scale: str = ".weight_scale") -> Packed:
    """FP8 or int8, with a scale for all, for each output, or for each block (FP8)."""
    codes, scales = tensors[codes], tensors[scale].float()
    if codes.dtype not in (FP8, torch.int8):
        raise ValueError(f"is {codes.dtype}, expected {FP8} or torch.int8")
    (outputs, inputs), parts = codes.shape, scales.squeeze()
    if scales.numel() in (1, outputs) and parts.dim() < 2:
        layout = Int8Weight() if codes.dtype == torch.int8 else Float8Weight()
        return Packed(layout, {"codes": codes, "scales": scales.reshape(-1, 1).repeat(outputs // scales.numel(), 1)},
                      None, inputs)  # fmt: skip
    rows, columns = config.get("weight_block_size") or config.get("block_structure") or (128, 128)
    shape = -(-outputs // rows), -(-inputs // columns)
    if codes.dtype != FP8 or scales.numel() != shape[0] * shape[1]:
        raise ValueError(f"has scales {list(scales.shape)} for {codes.dtype} {list(codes.shape)}")
    return Packed(Fp8Block(rows, columns), {"codes": codes, "scales": scales.reshape(shape)}, None, inputs)


def _fp8(tensors: Tensors, config: dict) -> Packed:
    return _eight_bits(tensors, config, scale=".weight_scale_inv")


def _integer_words(tensors: Tensors, config: dict) -> Packed:
    """compressed-tensors' ``pack-quantized``: 4 or 8 bits, each plus half of its range, the first in the low bits."""
    words, scales = tensors[".weight_packed"], tensors[".weight_scale"]
    outputs, inputs = tensors[".weight_shape"].tolist()
    bits = 32 * words.shape[1] / inputs
    if bits not in (4, 8):
        raise ValueError(f"has {bits:g} bits, where 4 and 8 are read")
    codes = _unpacked(words, int(bits))
    zeros = tensors.get(".weight_zero_point")
    zeros = torch.zeros(scales.shape, dtype=torch.int8) if zeros is None else _unpacked(zeros.T, int(bits)).T
    parts = {"codes": codes, "scales": scales, "zeros": zeros[:outputs].contiguous()}
    return Packed(IntGroups(inputs // scales.shape[1], int(bits)), parts, None, inputs)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """words [R, C] int32 -> numbers [R, 32 / bits * C] int8 from minus half of the range."""
    codes = unpacked_nibbles(words) if bits == 4 else words.contiguous().view(torch.uint8)
    return (codes.short() - (1 << bits - 1)).to(torch.int8)


def _fp4(tensors: Tensors, config: dict) -> Packed:
    """compressed-tensors' NVFP4, whose global scale divides, or its MXFP4."""
    codes, scales = tensors[".weight_packed"], tensors[".weight_scale"]
    divisor = tensors.get(".weight_global_scale")
    factor = torch.ones(1) if divisor is None else divisor.float().view(1)
    return _fp4_of(codes, scales, factor, divides=divisor is not None)


def _modelopt_fp4(tensors: Tensors, config: dict) -> Packed:
    return _fp4_of(tensors[".weight"], tensors[".weight_scale"], tensors[".weight_scale_2"].float().view(1))


def _mxfp4(tensors: Tensors, config: dict) -> Packed:
    """gpt-oss's names: blocks [O, I / 32, 16] uint8, scales [O, I / 32] uint8."""
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    if blocks.dim() != 3:
        raise ValueError(f"has blocks {list(blocks.shape)}, expected [outputs, inputs / 32, 16]; experts are not read")
    return _fp4_of(blocks.flatten(1), scales, torch.ones(1))


def _fp4_of(codes: Tensor, scales: Tensor, factor: Tensor, divides: bool = False) -> Packed:
    inputs, group = 2 * codes.shape[1], 16 if scales.dtype == FP8 else 32
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    if scales.dtype not in (FP8, torch.uint8) or scales.shape[1] * group != inputs:
        raise ValueError(f"has scales {scales.dtype} {list(scales.shape)} for {inputs} inputs")
    parts = {"codes": codes, "scales": scales, "factor": factor}
    return Packed(Fp4(group, int(divides)), parts, None, inputs)


def _gptq(tensors: Tensors, config: dict) -> Packed:
    _require(config, "bits", 4)
    _require(config, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    codes, zeros, scales = (tensors[f".{name}"] for name in ("qweight", "qzeros", "scales"))
    inputs = 8 * codes.shape[0]
    groups = tensors.get(".g_idx", torch.arange(inputs, dtype=torch.int32) // (inputs // len(scales)))
    offset = int(config.get("checkpoint_format", "gptq") == "gptq")  # whose zeros are stored less 1  # guard: gptq-zero
    return Packed(Gptq(offset), {"codes": codes, "zeros": zeros, "scales": scales, "groups": groups}, None, inputs)


def _awq(tensors: Tensors, config: dict) -> Packed:
    _require(config, "bits", 4)
    _require(config, "version", "gemm", default="gemm")
    codes, zeros, scales = (tensors[f".{name}"] for name in ("qweight", "qzeros", "scales"))
    inputs = codes.shape[0]
    return Packed(Awq(inputs // len(scales)), {"codes": codes, "zeros": zeros, "scales": scales}, None, inputs)


STATE = ".weight.quant_state.bitsandbytes__"


def _table4(tensors: Tensors, config: dict) -> Packed:
    """bitsandbytes' NF4 and FP4. The state has the other facts as JSON, in bytes."""
    state = _state(next(x for end, x in tensors.items() if end.startswith(STATE)))
    parts = {"codes": tensors[".weight"].view(-1, 1), "scales": tensors[".weight.absmax"]}
    parts["table"] = tensors[".weight.quant_map"]
    nested = ".weight.nested_absmax" in tensors
    if nested:
        parts["offset"] = torch.tensor(float(state["nested_offset"]))
        parts |= {name: tensors[f".weight.nested_{name}"] for name in ("absmax", "quant_map")}
    return Packed(Table4(state["blocksize"], int(nested)), parts, None, state["shape"][1])


def _state(data: Tensor) -> dict:
    return json.loads(bytes(data.tolist()))


def _llm_int8(tensors: Tensors, config: dict) -> Packed:
    """bitsandbytes' int8. Drafts need no columns apart for outliers of activations, which they do not round."""
    codes = tensors[".weight"]
    scales = tensors[".SCB"].float().view(-1, 1) / 127
    return Packed(Int8Weight(), {"codes": codes, "scales": scales}, None, codes.shape[1])


def _torchao(tensors: Tensors, config: dict) -> Packed:
    codes, scales, zeros = (tensors.get(f"._weight_{name}") for name in ("qdata", "scale", "zero_point"))
    if zeros is None:
        return _eight_bits(tensors, config, "._weight_qdata", "._weight_scale")
    outputs, inputs = codes.shape
    if codes.dtype != torch.int8 or zeros.dtype != torch.int8 or scales.shape[0] != outputs:
        raise ValueError("is of another class than Int8Tensor, Float8Tensor and IntxUnpackedToInt8Tensor")
    width = 4 if -8 <= int(codes.min()) and int(codes.max()) < 8 else 8
    parts = {"codes": codes, "scales": scales, "zeros": zeros}
    return Packed(IntGroups(inputs // scales.shape[1], width), parts, None, inputs)


def _require(config: dict, name: str, *values, default=None) -> None:
    value = config.get(name, default)
    if value not in values:
        raise ValueError(f"has {name} {value!r}, where {' and '.join(map(repr, values))} are read")


def _same(end: str, rows: int = 1, columns: int = 1) -> Callable:
    """`Scheme.shape` of [O / rows, I / columns] codes in the tensor that ends so."""
    return lambda shapes, read: (shapes[end][0] * rows, shapes[end][1] * columns)


EIGHT_BITS = Scheme(".weight", (".weight_scale",), (".input_scale",), _same(".weight"), _eight_bits)
METHODS: dict[str, tuple[Scheme, ...]] = {
    "fp8": (Scheme(".weight", (".weight_scale_inv",), (".activation_scale", ".input_scale"), _same(".weight"), _fp8),),
    "compressed-tensors": (
        Scheme(
            ".weight_packed", (".weight_scale", ".weight_shape"), (".weight_zero_point",),
            lambda shapes, read: tuple(read(".weight_shape").tolist()), _integer_words,
        ),
        Scheme(
            ".weight_packed", (".weight_scale",), (".weight_global_scale", ".input_global_scale"),
            _same(".weight_packed", columns=2), _fp4,
        ),
        EIGHT_BITS,
    ),
    "gptq": (
        Scheme(
            ".qweight", (".qzeros", ".scales"), (".g_idx",),
            lambda shapes, read: (shapes[".qweight"][1], 8 * shapes[".qweight"][0]), _gptq,
        ),
    ),
    "awq": (
        Scheme(
            ".qweight", (".qzeros", ".scales"), (),
            lambda shapes, read: (8 * shapes[".qweight"][1], shapes[".qweight"][0]), _awq,
        ),
    ),
    "bitsandbytes": (
        *(
            Scheme(
                ".weight", (".weight.absmax", ".weight.quant_map", STATE + kind),
                (".weight.nested_absmax", ".weight.nested_quant_map"),
                lambda shapes, read, end=STATE + kind: tuple(_state(read(end))["shape"]), _table4,
            )
            for kind in ("nf4", "fp4")
        ),
        Scheme(".weight", (".SCB",), (".weight_format",), _same(".weight"), _llm_int8),
    ),
    "torchao": (
        Scheme(
            "._weight_qdata", ("._weight_scale",), ("._weight_zero_point",), _same("._weight_qdata"), _torchao,
        ),
    ),
    "mxfp4": (Scheme("_blocks", ("_scales",), (), _same("_blocks", columns=32), _mxfp4, weight=""),),
    "modelopt": (
        Scheme(
            ".weight", (".weight_scale", ".weight_scale_2"), (".input_scale",), _same(".weight", columns=2),
            _modelopt_fp4,
        ),
        EIGHT_BITS,
    ),
}  # fmt: skip
"""The schemes of each method, in the order in which they are tried."""
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
"""Algorithms of TensorRT Model Optimizer whose tensors are those of its schemes."""
CACHE_SCALES = (".k_scale", ".v_scale")
"""Ends of names of scales for a cache in FP8, which drafts do not have."""


class Published:
    """Quantised matrices of a draft as its files have them, by the addresses of the weights that they mean."""

    __slots__ = ("matrices",)  # which artefacts' keys do not look into

    def __init__(self, matrices: dict[int, Packed]):
        self.matrices = matrices

    def __repr__(self) -> str:
        """Without addresses, because compiled code is found by it."""
        return f"Published({[packed.layout.kind for packed in self.matrices.values()]})"


@dataclass(frozen=True)
class StoredMatrix:
    """A quantised matrix of a checkpoint. names: of its tensors, by their ends."""

    scheme: Scheme
    names: dict[str, str]

    def shape(self, shapes: dict[str, tuple[int, ...]], take: Callable[[str], Tensor]) -> tuple[int, ...]:
        """[O, I]. shapes: of all tensors, by name. take: as in `read`."""
        own = {end: shapes[name] for end, name in self.names.items()}
        return self.scheme.shape(own, lambda end: take(self.names[end]))

    def read(self, take: Callable[[str], Tensor], config: dict) -> Packed:
        """The matrix. take: name -> tensor. ValueError, naming it, if it is not laid out as its method says."""
        try:
            return self.scheme.read({end: take(name) for end, name in self.names.items()}, config)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"draft: {self.names[self.scheme.main]} {error}") from error


@dataclass(frozen=True)
class Quantisation:
    """A method of METHODS, and its config."""

    method: str
    config: dict

    def matrices(self, names: Iterable[str]) -> dict[str, StoredMatrix]:
        """The quantised matrices among tensors, by the names ``X.weight`` that they would have in 16 bits."""
        known, found = set(names), dict[str, StoredMatrix]()
        for scheme in METHODS[self.method]:
            for name in sorted(known):
                stem = name.removesuffix(scheme.main)
                parts = {end: stem + end for end in (scheme.main, *scheme.needs, *scheme.may) if stem + end in known}
                if stem != name and len(parts) >= 1 + len(scheme.needs) and {*scheme.needs} <= parts.keys():
                    found.setdefault(stem + scheme.weight, StoredMatrix(scheme, parts))
        return found


def quantisation_of(config: dict, modelopt: dict) -> Quantisation | None:
    """The quantisation of a draft; None: it says none. ValueError, naming it, if it is not read.

    config: the object in ``config.json``.
    modelopt: the one in ``hf_quant_config.json``; {} if there is none.
    """
    said = config.get("quantization_config") or config.get("compression_config")
    if said is None and modelopt:
        said = {"quant_method": "modelopt", **modelopt.get("quantization", {})}
    if not said:
        return None
    method = str(said.get("quant_method") or "compressed-tensors").removesuffix("_fp4").removesuffix("_mixed")
    if method == "modelopt":
        said = {**said, **said.get("quantization", {})}
        algorithm = str(said.get("quant_algo")).upper()
        if algorithm not in MODELOPT:
            raise ValueError(_unread(f"modelopt's {algorithm}", f"of modelopt {', '.join(MODELOPT)}"))
    if method not in METHODS:
        raise ValueError(_unread(method, ", ".join(METHODS)))
    return Quantisation(method, said)


def _unread(what: str, known: str) -> str:
    return f"draft: its config names the quantisation {what!r}, which is not read; read are {known}, and 16 bits"
