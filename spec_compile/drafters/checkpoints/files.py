"""Reading published checkpoints strictly: every tensor is used, or named as left out, or an error.

`Checkpoint` has the tensors, and `Target` the parts of a model that its draft shares.
"""

import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...capture.quantised import RoundedHead, packed_layer
from ...parallel.slices import whole
from ...quantised import Packed
from ...quantised.formats import CACHE_SCALES, Published, Quantisation, StoredMatrix

FILES = ("model.safetensors", "pytorch_model.bin", "consolidated.safetensors")
FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
QUANTISED = ("_scale", "_scale_inv", "scales", "qweight", "qzeros", "g_idx", "absmax", "qscale_weight")
UNSAID = "; quantised weights are read only as the quantization_config of its config.json says"

Fetch = Callable[[str], Path | None]


def fetcher(source: str | Path, revision: str | None = None, local: bool = False) -> Fetch:
    """A function: name of a file -> its path, or None if `source` has no such file.

    source: a folder, or a repository of the hub; only files that are asked for are downloaded.
    local: download nothing, look into the cache only.
    Raises ValueError if `source` is neither, or naming a file that cannot be downloaded.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return lambda name: folder / name if (folder / name).is_file() else None

    def fetch(name: str) -> Path | None:
        try:
            return Path(hf_hub_download(str(source), name, revision=revision, local_files_only=local))
        except (HFValidationError, RepositoryNotFoundError) as error:
            raise ValueError(
                f"draft: {str(source)!r} is neither a folder nor a repository that can be read from the hub: "
                f"{_first_line(error)}"
            ) from error
        except Exception as error:  # also of the HTTP library, which differs between versions of huggingface_hub
            # Without a connection nothing tells that a repository has no such file.
            is_sure = local or constants.HF_HUB_OFFLINE or not isinstance(error, LocalEntryNotFoundError)
            if isinstance(error, EntryNotFoundError) and is_sure:
                return None
            raise ValueError(f"draft: {name} of {source} could not be downloaded: {_first_line(error)}") from error

    return fetch


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read_json(path: Path) -> dict:
    """The object in a JSON file; ValueError if there is none."""
    try:
        content = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"draft: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"draft: {path} holds a {type(content).__name__}; expected an object")
    return content


def load_pickled(path: Path):
    """Load a file of ``torch.save`` without running code from it; ValueError if it cannot be read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch raises errors of a dozen types for damaged files
        reason = (str(error).strip().splitlines() or ["it is empty"])[0]
        if isinstance(error, pickle.UnpicklingError) or "weights_only" in reason:
            reason = "it holds more than tensors, or it is damaged"
        raise ValueError(f"draft: {path} cannot be read ({reason}); is it complete?") from error


@dataclass(frozen=True)
class TensorSources:
    """The tensors of `shape` that a parameter is made of, by `join`."""

    names: list[str]
    shape: tuple[int, ...]
    join: Callable[[list[Tensor]], Tensor] = lambda tensors: tensors[0]


class Checkpoint:
    """The tensors of a checkpoint by name; shapes are known at once, values are read when they are taken.

    A quantised matrix stands here under the name that it would have in 16 bits, as the weights that it means.
    """

    def __init__(
        self, source: str | Path, found: Fetch | dict[str, Tensor], wanted: Callable[[str], bool] = lambda name: True,
        quantisation: Quantisation | None = None,
    ):  # fmt: skip
        """ValueError if `source` has no weights that can be read.

        found: finds the files of `source`, or its tensors.
        wanted: names of tensors that are looked at.
        """
        self.source, self._loaded = source, {}
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        # Find the tensors: given, in one file, or in several files.
        if isinstance(found, dict):
            self._loaded[Path(source)] = found
            path, shards = Path(source), {}
        else:
            path, listed = find_weights(source, found)
            shards = {name: shard for name, shard in listed.items() if wanted(name)}
            lost = [shard for shard in dict.fromkeys(shards.values()) if found(shard) is None]
            if lost:
                raise ValueError(f"draft: {source} has no {_some(lost)}, which its index names")
        if path is not None:
            self._list(path, None, wanted)
        for shard in dict.fromkeys(shards.values()):
            self._list(found(shard), [name for name in shards if shards[name] == shard], wanted)
        # Quantised matrices stand in the place of the tensors that store them.
        self._matrices: dict[str, StoredMatrix] = {}
        self._config = {} if quantisation is None else quantisation.config
        if quantisation is not None:
            self._matrices = quantisation.matrices(self.shapes)
            shapes = {name: matrix.shape(self.shapes, self._stored) for name, matrix in self._matrices.items()}
            for part in (part for matrix in self._matrices.values() for part in matrix.names.values()):
                self.shapes.pop(part, None)
            self.shapes |= shapes
        self._left = dict.fromkeys(self.shapes)
        self.ignored: list[str] = []
        for name in self.shapes:
            if name.endswith(CACHE_SCALES):
                self.ignore(name, "a scale of a cache in FP8, and drafts keep theirs in 16 bits")

    def ignore(self, name: str, why: str) -> None:
        """Leave a tensor out, if it is there, and say so."""
        if name in self._left:
            del self._left[name]
            self.ignored.append(f"ignored: {name}, {why}")

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read a tensor; ValueError if it is missing, not of `shape`, or not finite."""
        self._check({name: shape})
        self._left.pop(name, None)
        tensor = self._read(name)
        if tensor.dtype in FLOATS and not tensor.isfinite().all():
            raise ValueError(f"draft: {name} in {self.source} holds NaN or infinity; the file is damaged")
        return tensor

    def take_weight(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The same, and a ValueError if it is not in a floating-point format of 16 bits or more."""
        tensor = self.take(name, shape)
        if tensor.dtype not in FLOATS:
            raise ValueError(f"draft: {name} in {self.source} is {tensor.dtype}{UNSAID}")
        return tensor

    def packed(self, name: str) -> Packed | None:
        """A matrix as it is stored; None if it is not quantised."""
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.read(self._stored, self._config)

    def rows(self, name: str, rows: Tensor) -> Tensor:
        """Some rows of a tensor, without taking it."""
        if name in self._matrices:
            return self._read(name)[rows]
        path = self._files[name]
        if path in self._loaded:
            return self._loaded[path][name][rows]
        parts = _from_safetensors(path, lambda file: [file.get_slice(name)[row : row + 1] for row in rows.tolist()])
        return torch.cat(parts)

    def fill(self, draft: nn.Module, sources_of: Callable[[str, tuple[int, ...]], TensorSources], like: Tensor) -> None:
        """Give `draft` the parameters and buffers that it has on the meta device.

        sources_of: name and shape of a parameter -> its tensors.
        like: the target's embedding, whose device all take; parameters take its dtype, too, and buffers keep theirs.

        Raises ValueError, before anything is read, that names every tensor that is missing, has another shape, or is
        left over in the checkpoint.

        Quantised matrices are given as the weights that they mean, and as they are stored in ``draft.published``.
        """
        # Find the tensors of each parameter, and refuse the files unless these are all tensors.
        empty = {name: value for name, value in draft.state_dict().items() if value.is_meta}
        parts = {name: sources_of(name, tuple(value.shape)) for name, value in empty.items()}
        taken = {name: part.shape for part in parts.values() for name in part.names}
        self._check(taken)
        left = [name for name in self._left if name not in taken]
        if left:
            raise ValueError(
                f"draft: {self.source} holds tensors that this format does not know: {_some(left)}{_how(left)}"
            )
        # Read them.
        buffers, state, published = dict(draft.named_buffers()), {}, {}
        for name, part in parts.items():
            value = part.join([self.take_weight(source) for source in part.names])
            state[name] = value.to(like.device, buffers[name].dtype if name in buffers else like.dtype).contiguous()
            stored = self.packed(part.names[0]) if len(part.names) == 1 else None
            if stored is not None:
                published[state[name].data_ptr()] = stored.to(like.device)
        draft.load_state_dict(state, strict=False, assign=True)
        draft.published = Published(published)
        for name, parameter in draft.named_parameters():
            if name in state:
                parameter.requires_grad_(False)

    def _check(self, wanted: dict[str, tuple[int, ...] | None]) -> None:
        # Names, then shapes.
        missing = [name for name in wanted if name not in self.shapes]
        if missing:
            raise ValueError(
                f"draft: {self.source} has no {_some(missing)}; it holds {_some(list(self.shapes))}{_how(self.shapes)}"
            )
        wrong = [
            f"{name} is {list(self.shapes[name])}, expected {list(shape)}"
            for name, shape in wanted.items()
            if shape is not None and self.shapes[name] != tuple(shape)
        ]
        if wrong:
            raise ValueError(f"draft: {self.source} does not fit its config or the target: {_some(wrong)}")

    def _list(self, path: Path, names: Iterable[str] | None, wanted: Callable[[str], bool]) -> None:
        if path.suffix == ".safetensors":
            shapes = _from_safetensors(
                path, lambda file: {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}
            )
        else:
            if path not in self._loaded:
                self._loaded[path] = load_pickled(path)
            values = self._loaded[path]
            if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
                raise ValueError(f"draft: {path} holds a {type(values).__name__}; expected tensors by name")
            shapes = {name: tuple(value.shape) for name, value in values.items()}
        for name in shapes if names is None else names:
            if name not in shapes:
                raise ValueError(f"draft: {path} has no {name}, which the index of {self.source} says is there")
            if wanted(name):
                self._files[name], self.shapes[name] = path, shapes[name]

    def _read(self, name: str) -> Tensor:
        packed = self.packed(name)
        return self._stored(name) if packed is None else packed.weight()

    def _stored(self, name: str) -> Tensor:
        path = self._files[name]
        if path in self._loaded:
            return self._loaded[path][name]
        return _from_safetensors(path, lambda file: file.get_tensor(name))


def find_weights(source: str | Path, fetch: Fetch) -> tuple[Path | None, dict[str, str]]:
    """The file with all tensors; or None, and the name of the file with each tensor. ValueError if there is neither."""
    for name in FILES:
        if (path := fetch(name)) is not None:
            return path, {}
        if (index := fetch(f"{name}.index.json")) is not None:
            return None, read_json(index).get("weight_map", {})
    offline = "; the hub is not asked (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    raise ValueError(f"draft: {source} has none of {', '.join(FILES)}, and no index of several{offline}")


def _from_safetensors(path: Path, read: Callable):
    try:
        with safe_open(path, framework="pt") as file:
            return read(file)
    except SafetensorError as error:
        raise ValueError(f"draft: {path} cannot be read ({error}); is it complete?") from error


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _how(names: Iterable[str]) -> str:
    return UNSAID if any(name.endswith(QUANTISED) for name in names) else ""


@dataclass(frozen=True)
class Target:
    """The target's embedding [V, h], output matrix [V, h] and text config.

    codes: the output matrix in 8 bits, if the target itself reads it so.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    embedding: nn.Parameter
    head_weight: nn.Parameter
    codes: Packed | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Target":
        """ValueError if no head can share the output layer and the embedding of `model`."""
        output = model.get_output_embeddings()
        if output is None or getattr(output, "bias", None) is not None:
            problem = "has no output layer" if output is None else "has an output layer with a bias"
            raise ValueError(f"draft: {type(model).__name__} {problem}, which draft heads share")
        shared = [whole(part.weight, keep=True) for part in (model.get_input_embeddings(), output)]
        if shared[1].device != (device := shared[0].device):  # layers are on several GPUs, and drafts on the first
            shared[1] = nn.Parameter(shared[1].detach().to(device), requires_grad=False)
        if len(shared[0]) < len(shared[1]):
            raise ValueError(
                f"draft: {type(model).__name__} generates {len(shared[1])} tokens and reads only {len(shared[0])}, but "
                "draft heads read what they draft; pass algo='ngram'"
            )
        codes = packed_layer(output) if isinstance(output, RoundedHead) else None
        return cls(model, model.config.get_text_config(decoder=True), *shared, codes)

    @property
    def hidden_size(self) -> int:
        """h, the size of the states that heads read."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        """V, the rows of the output matrix."""
        return self.head_weight.shape[0]

    def check(self, hidden_size: int, vocab_size: int | None) -> None:
        """ValueError if a head was made for a model of other sizes."""
        embedded = self.embedding.shape[0]
        for name, theirs, ours in (
            ("hidden_size", hidden_size, self.hidden_size),
            ("vocab_size", vocab_size, embedded if vocab_size == embedded else self.vocab_size),
        ):
            if theirs is not None and theirs != ours:
                raise ValueError(
                    f"draft: it was made for a model with {name} {theirs}, {type(self.model).__name__} has {ours}; "
                    "take the head of this model"
                )

    def skip_copy(self, checkpoint: Checkpoint, name: str | None, shared: Tensor) -> None:
        """Leave a tensor out, if it is there, because the target's is used, and say if the two differ."""
        if name is not None and name in checkpoint.shapes:
            same = likeness(checkpoint, name, shared) > 0.99
            checkpoint.ignore(name, "a copy of the target's" if same else "the target's is used, though it is another")


def likeness(checkpoint: Checkpoint, name: str, ours: Tensor) -> float:
    """Correlation of some rows of a tensor with the same rows of `ours`; 0 if their shapes differ."""
    if checkpoint.shapes[name] != tuple(ours.shape):
        return 0.0
    rows = torch.arange(0, ours.shape[0], max(1, ours.shape[0] // 64))
    pair = [checkpoint.rows(name, rows), ours.detach()[rows.to(ours.device)].cpu()]
    return float(torch.corrcoef(torch.stack([values.flatten().float() for values in pair])).nan_to_num()[0, 1])
