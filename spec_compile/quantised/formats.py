"""`Format`: how the layers of loaded models and the matrices in files of checkpoints are read.

Names and layouts follow transformers' integrations, compressed-tensors' ``compressors``, torchao's
``prototype/safetensors``, bitsandbytes' ``QuantState.as_dict``, and TensorRT Model Optimizer as vLLM's ``modelopt.py``
reads it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from .codes import Packed


@dataclass(frozen=True)
class Stored:
    """How files store a matrix X [O, I] in several tensors, such as ``X.weight_packed`` and ``X.weight_scale``.

    main: the end of the name of the tensor that has the codes.
    needs, may: ends of the names of other tensors, which must and which may be there. Scales of activations are not
        used, because drafts keep activations in 16 bits.
    shape: (shapes of the tensors, a function that reads one of them) -> (O, I).
    read: (the tensors, the fields of the method's config) -> the matrix; ValueError, which ends a sentence about it.
    weight: the end of the matrix's own name.

    `shape` and `read` know tensors by the ends of their names without leading dots and underscores.
    """

    main: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    shape: Callable[[dict[str, tuple[int, ...]], Callable[[str], Tensor]], tuple[int, ...]]
    read: Callable[[dict[str, Tensor], dict], Packed]
    weight: str = ".weight"


def sized_as(part: str, rows: int = 1, columns: int = 1) -> Callable:
    """`Stored.shape` of a matrix [rows * R, columns * C] whose part of this name is [R, C]."""
    return lambda shapes, take: (shapes[part][0] * rows, shapes[part][1] * columns)


@dataclass(frozen=True)
class Format:
    """A format of quantised weights.

    read: a module -> the linear layer that it is; None if it is of another format; UnreadError if it is not laid out as
        expected. The parts are the tensors of the module itself, so that changes of them are seen.
    files: the ways in which files of checkpoints store a matrix, by the ``quant_method`` of their config, in the order
        in which they are tried.
    """

    read: Callable[[nn.Module], Packed | None] = lambda module: None
    files: dict[str, tuple[Stored, ...]] = field(default_factory=dict)


FORMATS: list[Format] = []
"""All formats, in the order in which they are tried; `quantised` fills the list, and a package of yours may add its
own."""
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")
"""Algorithms of TensorRT Model Optimizer whose files are read."""
CACHE_SCALES = (".k_scale", ".v_scale")
"""Ends of names of scales for a cache in FP8, which drafts do not have."""


def methods() -> dict[str, tuple[Stored, ...]]:
    """How the files of each ``quant_method`` store matrices."""
    return {method: stored for each in FORMATS for method, stored in each.files.items()}


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
    """A quantised matrix of a checkpoint. names: the full names of its tensors, as `Stored.read` knows them."""

    scheme: Stored
    names: dict[str, str]

    def shape(self, shapes: dict[str, tuple[int, ...]], take: Callable[[str], Tensor]) -> tuple[int, ...]:
        """[O, I]. shapes: of all tensors, by name. take: as in `read`."""
        own = {part: shapes[name] for part, name in self.names.items()}
        return self.scheme.shape(own, lambda part: take(self.names[part]))

    def read(self, take: Callable[[str], Tensor], config: dict) -> Packed:
        """The matrix. take: name -> tensor. ValueError, naming it, if it is not laid out as its method says."""
        try:
            return self.scheme.read({part: take(name) for part, name in self.names.items()}, config)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"draft: {self.names[self.scheme.main.lstrip('._')]} {error}") from error


@dataclass(frozen=True)
class Quantisation:
    """One of `methods`, and its config."""

    method: str
    config: dict

    def matrices(self, names: Iterable[str]) -> dict[str, StoredMatrix]:
        """The quantised matrices among tensors, by the names ``X.weight`` that they would have in 16 bits."""
        known, found = set(names), dict[str, StoredMatrix]()
        for scheme in methods()[self.method]:
            for name in sorted(known):
                stem = name.removesuffix(scheme.main)
                ends = [end for end in (scheme.main, *scheme.needs, *scheme.may) if stem + end in known]
                if stem != name and {*scheme.needs} <= {*ends}:
                    parts = {end.lstrip("._"): stem + end for end in ends}
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
    if method not in methods():
        raise ValueError(_unread(method, ", ".join(methods())))
    return Quantisation(method, said)


def _unread(what: str, known: str) -> str:
    return f"draft: its config names the quantisation {what!r}, which is not read; read are {known}, and 16 bits"
