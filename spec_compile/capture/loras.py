"""`Loras`: the LoRA adapters of a peft model, of which each row of a batch chooses one."""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..inventory import configs_of
from ..kernels.linear.low_rank import LowRank
from .copies import M, shared_copy

BASE = "__base__"
"""peft's name for no adapter."""


class SlotsTakenError(RuntimeError):
    """Every slot holds the adapter of a request under way."""


@dataclass(eq=False)
class Loaded:
    """An adapter in a slot.

    index: its entry in each `LowRank`; 0 for `BASE`.
    version: a number that no adapter with other values has; 0 for `BASE`.
    number: counts names, so that it stays if an adapter's values change; 0 for `BASE`.
    values: its tensors as they were copied, see `_values`.
    users: requests under way that have it.
    last_use: grows from use to use.
    """

    name: str
    index: int
    version: int
    number: int = 0
    values: list[tuple] = field(default_factory=list)
    users: int = 0
    last_use: int = 0


NO_ADAPTER = Loaded(BASE, 0, 0)


class Loras:
    """The slots for adapters of one model. A request takes an adapter, which is copied to a slot unless it is there.

    An adapter that was loaded, deleted or changed after speculate() counts from the next request on; requests under way
    keep the values that they began with. Its owner holds the engine's turn.
    """

    def __init__(self, model: nn.Module, most: int, rank: int | None):
        """model: a model whose layers peft has wrapped.
        most: the number of slots.
        rank: the largest rank of an adapter; None for the largest rank that an adapter has now.

        Raises ValueError if the model has no adapters, and UnsupportedModelError, naming the adapter, for one that
        cannot be chosen for each row.
        """
        self._layers = _lora_layers(model)
        self._model, self.most = model, most
        matrices = [layer.lora_A[name].weight for layer in self._layers.values() for name in layer.lora_A]
        if not matrices:
            raise ValueError(
                "max_loras: the model has no LoRA adapters; wrap it with peft (get_peft_model() or "
                "PeftModel.from_pretrained()) before speculate(), or leave max_loras out"
            )
        self.rank = rank or max(map(len, matrices))
        dtype = reduce(torch.promote_types, [matrix.dtype for matrix in matrices])
        for name in self.names:
            self._check(name)
        self.parts = {
            path: LowRank(1 + most, self.rank, layer.base_layer.weight, dtype) for path, layer in self._layers.items()
        }
        """By the path of each layer that an adapter changes."""
        self._slots = list[Loaded | None]([None] * most)
        self._versions: dict[str, tuple[list[tuple], int]] = {}
        self._names: dict[str, int] = {}
        self._numbers, self._uses = itertools.count(1), itertools.count(1)

    @property
    def names(self) -> list[str]:
        """The adapters that the model has now. Any thread may ask, also while another one adds adapters."""
        return sorted({name for layer in self._layers.values() for name in [*layer.lora_A]})

    @property
    def active(self) -> str:
        """The name of the adapter that peft would run without `adapter_names`; ValueError if there are several."""
        names = [] if self._are_disabled else next(iter(self._layers.values())).active_adapters
        if len(names) > 1:
            raise ValueError(
                f"adapter_names: the adapters {', '.join(names)} are active at once, and a row has one; call "
                "set_adapter() with one name, or pass adapter_names"
            )
        return names[0] if names else BASE

    @property
    def _are_disabled(self) -> bool:
        """True inside peft's ``disable_adapter()``, where every row has none."""
        return next(iter(self._layers.values())).disable_adapters

    def check_name(self, name: Any, argument: str = "adapter_names") -> None:
        """TypeError or ValueError, with the known names, unless there is an adapter of this name.

        argument: the argument that errors name.
        """
        if not isinstance(name, str):
            raise TypeError(f"{argument}: expected names of adapters, got {type(name).__name__}")
        if name != BASE and name not in self.names:
            raise ValueError(f"{argument}: there is no adapter {name!r}; known are {', '.join([*self.names, BASE])}")

    def has_room(self, name: str) -> bool:
        """True unless `take` would raise SlotsTakenError."""
        if name == BASE or any(map(_is_free, self._slots)):
            return True
        return self._present(name) is not None or name not in self.names

    def take(self, name: str) -> Loaded:
        """The adapter of this name, in a slot that it keeps until `release`.

        Raises what `check_name` raises, UnsupportedModelError if it is of a sort that no row may choose, and
        SlotsTakenError.
        """
        self.check_name(name)
        for path, layer in self._layers.items():
            if layer.merged:
                raise UnsupportedModelError(f"adapter_names: adapters are merged into {path}; call unmerge_adapter()")
        if name == BASE or self._are_disabled:
            return NO_ADAPTER
        loaded = self._present(name) or self._load(name)
        loaded.users += 1
        loaded.last_use = next(self._uses)
        return loaded

    def release(self, loaded: Loaded) -> None:
        """A request that took an adapter is over."""
        if loaded is not NO_ADAPTER:
            loaded.users -= 1

    def forget(self) -> None:
        """Weights may have changed without notice: copy each adapter again when it is next taken."""
        self._versions.clear()
        for slot in filter(None, self._slots):  # a slot without values is never `_present`
            slot.values = []

    @contextmanager
    def in_own_forward(self, names: list[str] | None) -> Iterator[None]:
        """A context in which the model's own forward gives each row its adapter; names: one a prompt, None: `active`.

        Rows of one prompt, as in beam search, follow each other: names ["a", "b"] and 4 rows give a, a, b, b.
        """
        if names is None:
            yield
            return

        def choose(layer: nn.Module, arguments: tuple, kwargs: dict) -> tuple[tuple, dict]:
            times = len(arguments[0]) // len(names)
            return arguments, kwargs | {"adapter_names": [name for name in names for _ in range(times)]}

        with ExitStack() as stack:
            for layer in self._layers.values():
                stack.enter_context(layer.register_forward_pre_hook(choose, with_kwargs=True))
            yield

    def _present(self, name: str) -> Loaded | None:
        """The slot that has the adapter as it is now."""
        slots = [slot for slot in self._slots if slot and slot.name == name]
        values = self._values(name) if slots else []
        return next((slot for slot in slots if _same(slot.values, values)), None)

    def _load(self, name: str) -> Loaded:
        self._check(name)
        free = [index for index, slot in enumerate(self._slots) if _is_free(slot)]
        if not free:
            under_way = sorted({slot.name for slot in self._slots if slot})
            raise SlotsTakenError(
                f"adapter_names: no slot is free for {name!r}, because {', '.join(under_way)} are in use and "
                f"max_loras={self.most}; pass a larger max_loras to speculate(), or wait"
            )
        # Among free slots, the one that was used longest ago.
        chosen = min(free, key=lambda index: getattr(self._slots[index], "last_use", 0))
        values = self._values(name)
        if name not in self._versions or not _same(self._versions[name][0], values):
            self._versions[name] = values, next(self._numbers)
        # Layers that the adapter does not change get zeros.
        for path, layer in self._layers.items():
            is_there = name in layer.lora_A
            down, up = (layer.lora_A[name].weight, layer.lora_B[name].weight) if is_there else (None, None)
            self.parts[path].put(1 + chosen, down, up, layer.scaling[name] if is_there else 0.0)
        number = self._names.setdefault(name, 1 + len(self._names))
        loaded = self._slots[chosen] = Loaded(name, 1 + chosen, self._versions[name][1], number, values)
        return loaded

    def _values(self, name: str) -> list[tuple]:
        """All that an adapter's values depend on: its tensors, their versions, and the scaling of each layer."""
        values = []
        for layer in self._layers.values():
            if name in layer.lora_A:
                for tensor in (layer.lora_A[name].weight, layer.lora_B[name].weight):
                    version = 0 if tensor.is_inference() else tensor._version
                    values.append((weakref.ref(tensor), tensor.data_ptr(), version, layer.scaling[name]))
        return values

    def check_config(self, name: str, config: Any) -> None:
        """UnsupportedModelError, naming the adapter, if rows could not choose one of this peft configuration.

        It comes before an adapter is loaded, because layers that peft has wrapped stay wrapped.
        """
        from peft import LoraConfig
        from peft.tuners.tuners_utils import check_target_module_exists

        if not isinstance(config, LoraConfig):
            raise UnsupportedModelError(f"max_loras: the adapter {name!r} is no LoRA, but of {type(config).__name__}")
        self._check_rank(name, max([config.r, *(config.rank_pattern or {}).values()]))
        for each in ("modules_to_save", "target_parameters", "trainable_token_indices", "use_dora"):
            if getattr(config, each, None):
                raise UnsupportedModelError(f"max_loras: the adapter {name!r} has {each}, which rows cannot choose")
        others = of_adapters(self._model)
        paths = [path.removesuffix(".base_layer") for path, part in self._model.named_modules() if part not in others]
        for path in paths:
            if path not in self._layers and check_target_module_exists(config, path):
                raise UnsupportedModelError(
                    f"max_loras: the adapter {name!r} changes {path}, which no adapter changed when speculate() ran; "
                    "call speculate() again with this adapter"
                )

    def _check_rank(self, name: str, rank: int) -> None:
        if rank > self.rank:
            raise UnsupportedModelError(
                f"max_lora_rank: the adapter {name!r} has rank {rank}, and slots have room for {self.rank}; pass a "
                "larger max_lora_rank to speculate()"
            )

    def _check(self, name: str) -> None:
        """UnsupportedModelError, naming the adapter, if rows cannot choose it."""
        config = self._model.peft_config.get(name)
        faults = [f"trains biases (bias={config.bias!r})"] if getattr(config, "bias", "none") != "none" else []
        for path, layer in self._layers.items():
            if name in layer.lora_variant:
                faults.append(f"is a {type(layer.lora_variant[name]).__name__.removesuffix('LinearVariant')} adapter")
            if layer.lora_bias.get(name):
                faults.append(f"has a bias of its own ({path})")
            if name in layer.lora_A:
                self._check_rank(name, len(layer.lora_A[name].weight))
        if faults:
            raise UnsupportedModelError(
                f"max_loras: the adapter {name!r} {faults[0]}; only plain LoRA on linear layers can be chosen for each "
                "row. Make it the only active adapter, and call speculate() without max_loras"
            )


def _same(some: list[tuple], others: list[tuple]) -> bool:
    """True if two results of `Loras._values` have the same tensors, by identity, with the same values."""
    if len(some) != len(others):
        return False
    return all(one[:1] and one[0] is other[0] and one[1:] == other[1:] for one, other in zip(some, others))


def _is_free(slot: Loaded | None) -> bool:
    return slot is None or slot.users == 0  # guard: adapter-in-use


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that peft has wrapped, by path. UnsupportedModelError, naming it, for one that is no linear layer."""
    if not hasattr(model, "peft_config"):
        return {}
    from peft.tuners.lora import Linear
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers, head = {}, model.get_output_embeddings()
    for path, part in model.named_modules():
        if isinstance(part, BaseTunerLayer) or isinstance(part, AuxiliaryTrainingWrapper):
            base = getattr(part, "base_layer", None)
            if type(part) is not Linear or type(base) is not nn.Linear or part is head:
                kind = "the output head" if part is head else f"of class {type(base or part).__name__}"
                raise UnsupportedModelError(
                    f"max_loras: an adapter changes {path}, {kind}; only LoRA on linear layers inside the model can "
                    "be chosen for each row. Call speculate() without max_loras for one adapter"
                )
            layers[path] = part
    return layers


def of_adapters(model: nn.Module) -> set[nn.Module]:
    """The modules of a model that belong to adapters: peft's layers without the layers that these wrap."""
    found: set[nn.Module] = set()
    for layer in _lora_layers(model).values():
        found |= {*layer.modules()} - {*layer.base_layer.modules()}
    return found


def without_adapters(model: M) -> M:
    """A `shared_copy` of a model that has the wrapped layers in place of peft's; configurations are shared, too."""
    layers = {id(layer): layer.base_layer for layer in _lora_layers(model).values()}
    plain = shared_copy(model, layers | {id(config): config for config in configs_of(model)})
    for name in ("peft_config", "_hf_peft_config_loaded"):
        plain.__dict__.pop(name, None)
    return plain
