"""`Watch` notices and describes changes of a model since its graphs were captured.

At every call a `_Fingerprint` is compared: flat lists that C code builds in a fraction of a millisecond. If it differs,
every module is examined by name, to describe each difference that can change an answer.
"""

import copy
import reprlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from numbers import Number
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..inventory import configs_of, held_items
from .adapters import underlying
from .quantised import UNPACKS
from .training_mode import effects
from .weights import AGAIN, Slot

KEPT = "_kept_speculative_model"
"""Attribute of a model: see `custom_generate`."""
INTERNALS = set(vars(nn.Module()))
"""Attributes that every module has, `training` among them: see `effects` of training mode."""
BOOKKEEPING = {
    "_compiled_call_impl", "_gradient_checkpointing_func", "_is_hf_initialized", "_is_torch_compile", "conv1d_state",
    "generation_config", "gradient_checkpointing", "hf_device_map", "kernel_config", "loss_type", "model_tags",
    "name_or_path", "recurrent_states", "rope_deltas", "warnings_issued", KEPT,
}  # fmt: skip
"""Attributes of modules on which no logits depend, for `rope_deltas` if position ids are passed. RecurrentGemma keeps
the states of its last call in its modules."""
HARMLESS_HOOKS = ("<locals>.make_inputs_require_grads", "<locals>.output_capturing_hook")
"""Hooks that transformers registers while a model is used; they change no value."""
GLOBAL_HOOKS = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
ABSENT = "absent"


class Change(NamedTuple):
    """A difference from the captured model. text: the difference, without advice. remedy: a key of `REMEDIES`."""

    text: str
    remedy: str = "speculate"


REMEDIES = {
    "refresh": "call model.speculation.refresh() to take over its values",
    "eval": "call model.eval(): an answer of evaluation mode was captured",
    "speculate": AGAIN,
    "load": "the model's own forward has unpacked its weights: load it again, then call speculate() again",
}


def describe(changes: list[Change]) -> str:
    """A sentence with the first change of the strongest remedy, the number of others, and the remedy."""
    first = max(changes, key=lambda change: [*REMEDIES].index(change.remedy))
    more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
    return f"{first.text}{more}; {REMEDIES[first.remedy]}"


class _Facts(NamedTuple):
    """Everything on which a module's computation depends, except the values of its tensors."""

    cls: type
    forward: Callable
    values: dict[str, Any]
    empty: dict[str, bool]
    """True for each parameter and buffer that is None."""
    modules: dict[str, nn.Module | None]
    hooks: list


class Watch:
    """Watches a target for changes.

    model: the target.
    fast: the object that speculates for it.
    slots: of all weights.
    reads: for each config the names that were read while the model was captured (see `config_reads`).
    others: modules of the target whose changes count only from call to call, so that they are not watched.
    """

    def __init__(
        self, model: nn.Module, fast: nn.Module, slots: list[Slot], reads: list[tuple[Any, set[str]]],
        others: Container[nn.Module] = (),
    ):  # fmt: skip
        self._model, self._slots = model, slots
        self._paths = {part: path for path, part in model.named_modules() if part not in others}
        self._fast = weakref.ref(fast)  # weak, because `fast` refers to this object
        self._expected = {part: _facts(part) for part in self._paths}
        self._expected_fast, self._expected_global = _facts(fast, followed=True), value_hooks(GLOBAL_HOOKS)
        self._settings = [
            (config, name, copy.deepcopy(value))
            for config, names in reads
            for name in sorted(names)
            if hasattr(config, name) and is_plain(value := getattr(config, name))
        ]
        self._fingerprint = self._take_fingerprint()

    def changes(self) -> list[Change]:
        """The differences from the captured model that can change an answer."""
        if not self._fingerprint.differs(self._fast()):
            return []
        changes = [*self._changes()]
        if not changes:
            self._fingerprint = self._take_fingerprint()  # only bookkeeping differs, so the next call need not look
        return changes

    def _take_fingerprint(self) -> "_Fingerprint":
        return _Fingerprint([*self._paths], self._fast(), self._slots, [setting[:2] for setting in self._settings])

    def _changes(self) -> Iterator[Change]:
        """The differences of modules, hooks, config values and weights, examined one by one."""
        for part, path in self._paths.items():
            yield from _differences(path, self._expected[part], _facts(part))
        yield from _differences("", self._expected_fast, _facts(self._fast(), followed=True))
        # generate() runs on `fast`, so the mode of the model's own object does not matter.
        parts = {part: path for part, path in self._paths.items() if part is not self._model} | {self._fast(): ""}
        for reason in effects((path, part) for part, path in parts.items()):
            yield Change(f"the model is in training mode, and {reason}", "eval")
        yield from _hook_differences("all modules", self._expected_global, value_hooks(GLOBAL_HOOKS))
        for config, name, was in self._settings:
            now = getattr(config, name, ABSENT)
            if not _same(was, now):
                yield Change(_was_and_is(f"config.{name}", was, now))
        for slot in self._slots:
            if slot.moved and not slot.borrowed:
                misfit = slot.misfit
                text = misfit.rstrip(",") if misfit else "was moved or replaced after speculate()"
                yield Change(f"{slot.path} {text}", "speculate" if misfit else "refresh")


class _Fingerprint:
    """All that is watched, in flat lists. It refers to dictionaries inside `fast`, not to `fast`, to avoid a cycle."""

    def __init__(self, parts: list[nn.Module], fast: nn.Module, slots: list[Slot], settings: list[tuple[Any, str]]):
        self._parts, self._settings = parts, settings
        self._classes = [*{type(part) for part in parts}]
        # Scalars are read in groups of modules with the same names, containers and identities as (dict, name).
        single, several, same = defaultdict(list), [], []
        for part in parts:
            values, attributes = _values(part), vars(part)
            mode = ["training"] * ("training" in attributes)  # a compiled module has that of the one inside
            single[*mode, *(name for name in values if _is_scalar(values[name]))].append(attributes)
            several += [(attributes, name) for name, value in values.items() if _is_container(value)]
            same += [(attributes, name) for name, value in values.items() if not is_plain(value)]
            same += [(attributes, "forward")] * ("forward" in attributes)
        for part in [*parts, fast]:
            same += [(part._modules, name) for name in part._modules]
            for holder in (part._parameters, part._buffers):
                same += [(holder, name) for name, tensor in held_items(holder) if tensor is None]
        same += [(slot.holder, slot.name) for slot in slots if slot.storage is None]
        plain = [(slot.holder, slot.name) for slot in slots if slot.storage is not None]
        self._single = [(itemgetter(*names), attributes) for names, attributes in single.items() if names]
        self._fast_values = itemgetter(
            "training", *_values(fast, followed=True), *(["forward"] * ("forward" in vars(fast)))
        )
        self._several, self._same, self._tensors = (_transposed(pairs) for pairs in (several, same, plain))
        # Additions to dictionaries show in their sizes.
        dicts = [holder for part in [*parts, fast] for holder in (part._parameters, part._buffers, part._modules)]
        hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)] + [*GLOBAL_HOOKS]
        self._sized = [*map(vars, parts), *filter(None, dicts)]
        self._hooked = [*filter(None, hooks)]
        self._empty = [each for each in [*dicts, *hooks] if not each]
        self._reference = copy.deepcopy(self._containers()), self._lists(fast)

    def differs(self, fast: nn.Module) -> bool:
        """True if anything has changed since this was taken."""
        try:
            return any(self._empty) or (self._containers(), self._lists(fast)) != self._reference
        except Exception:  # an attribute was deleted, or is no tensor any more
            return True

    def _containers(self) -> list:
        """Values that may change in place."""
        settings = [getattr(config, name, ABSENT) for config, name in self._settings]
        return [*map(dict.__getitem__, *self._several), *settings]

    def _lists(self, fast: nn.Module) -> tuple:
        """Addresses, identities, scalars and sizes: everything that is compared without a copy."""
        tensors = [*map(dict.__getitem__, *self._tensors)]
        return (
            [*map(Tensor.data_ptr, tensors)],
            [*map(Tensor.is_contiguous, tensors)],
            [*map(id, map(dict.__getitem__, *self._same))],
            [[*map(values, attributes)] for values, attributes in self._single],
            [*map(len, self._sized)],
            [*map(type, self._parts)],
            [*chain.from_iterable(self._hooked)],
            [cls.forward for cls in self._classes],
            self._fast_values(vars(fast)),
            len(vars(fast)),
        )


def _facts(part: nn.Module, followed: bool = False) -> _Facts:
    """A module as it is now. Values that may change in place are copied. followed: see `_values`."""
    values = _values(part, followed)
    values = {name: copy.deepcopy(value) if is_plain(value) else value for name, value in values.items()}
    empty = {name: tensor is None for owner in (part._parameters, part._buffers) for name, tensor in held_items(owner)}
    hooks = value_hooks((part._forward_hooks, part._forward_pre_hooks))
    modules = {name: underlying(module) for name, module in part._modules.items()}
    return _Facts(type(part), _forward(part, followed), values, empty, modules, hooks)


def _values(part: nn.Module, followed: bool = False) -> dict[str, Any]:
    """The attributes that a forward or generate() may read: plain values, tensors that are no parameters, functions and
    the config. followed: leave out methods of generate(), because the call uses this object's own."""
    private = isinstance(part, PreTrainedModel)  # transformers keeps notes in a model's private attributes
    return {
        name: value
        for name, value in vars(part).items()
        if name not in INTERNALS
        and name not in BOOKKEEPING
        and not (followed if name in METHODS else private and name.startswith("_"))
        and name not in ("forward", *OF_CLASSES)
        and (is_plain(value) or isinstance(value, (Tensor, PreTrainedConfig, *FUNCTIONS)))
        and not _is_own_method(part, name, value)
    }


def _is_own_method(part: nn.Module, name: str, value: Any) -> bool:
    """True if a value that was set on a module is its class's method of that name."""
    is_bound = isinstance(value, MethodType) and value.__self__ is part
    return is_bound and value.__func__ is getattr(type(part), name, None)


def _forward(part: nn.Module, followed: bool = False) -> Callable:
    """The function that a call of the module runs, without the layers of torch.compile.

    followed: also without the mixed precision of accelerate, which keeps the forward that it wraps, and without TRL's
    head that computes log-probabilities for its loss. Rounds run none of them.
    """
    name = "_original_forward" if followed and "_original_forward" in vars(part) else "forward"
    forward = underlying(vars(part).get(name, type(part).forward))
    forward = forward.__func__ if getattr(forward, "__self__", None) is part else forward
    while followed and getattr(forward, "__globals__", {}).get("__name__", "").partition(".")[0] == "trl":
        forward = getattr(forward, "__wrapped__", None)  # none: it wraps no forward, but is another one
    return forward


def value_hooks(registries) -> list[tuple[int, Callable]]:
    """Number and function of each forward hook and forward pre-hook that may change a value."""
    hooks = [item for registry in registries for item in registry.items()]
    return [(number, hook) for number, hook in hooks if not any(name in _name(hook) for name in HARMLESS_HOOKS)]


def _differences(path: str, was: _Facts, now: _Facts) -> Iterator[Change]:
    """The differences of one module, except its mode."""
    label, prefix = path or "the model", f"{path}." if path else ""
    if was.cls is not now.cls:
        how = "was parametrized" if issubclass(now.cls, was.cls) else f"became a {now.cls.__name__}"
        yield Change(f"{label} {how} after speculate()")
    elif was.forward != now.forward:
        yield Change(f"{prefix}forward was replaced after speculate()")
    yield from _hook_differences(label, was.hooks, now.hooks)
    for name in {**was.modules, **now.modules}:
        before, after = was.modules.get(name), now.modules.get(name)
        if before is not after:
            how = "added" if before is None else "removed" if after is None else "replaced"
            class_name = type(after if before is None else before).__name__
            yield Change(f"{prefix}{name} ({class_name}) was {how} after speculate()")
    for name in {**was.empty, **now.empty}:
        before, after = was.empty.get(name, True), now.empty.get(name, True)
        if before and not after:
            yield Change(f"{prefix}{name} was added after speculate()")
        elif after and not before:
            yield Change(f"{prefix}{name} is no longer a tensor of its module")
    for name in {**was.values, **now.values}:
        before, after = was.values.get(name, ABSENT), now.values.get(name, ABSENT)
        if not _same(before, after):
            yield Change(_was_and_is(prefix + name, before, after))


def _hook_differences(label: str, was: list, now: list) -> Iterator[Change]:
    for number, hook in now:
        if (number, hook) not in was:
            yield Change(f"{label} got a forward hook ({_name(hook)}) after speculate()")
    for number, hook in was:
        if (number, hook) not in now:
            remedy = "load" if UNPACKS in getattr(hook, "__qualname__", "") else "speculate"
            yield Change(f"{label} lost a forward hook ({_name(hook)}) after speculate()", remedy)


def _was_and_is(name: str, was: Any, now: Any) -> str:
    values = f"was {reprlib.repr(was)} at speculate() and is {reprlib.repr(now)} now"
    return f"{name} {values if is_plain(was) and is_plain(now) else 'was replaced after speculate()'}"


def _same(was: Any, now: Any) -> bool:
    return was is now or (is_plain(was) and is_plain(now) and was == now)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, (Number, str, torch.dtype, torch.device, torch.Size))


def _is_container(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_plain, chain(value.keys(), value.values())))
    return isinstance(value, (list, tuple, set, frozenset)) and all(map(is_plain, value))


def is_plain(value: Any) -> bool:
    """True if a value is a number, a text or the like, or a collection of them, so that == compares it."""
    return _is_scalar(value) or _is_container(value)


def _name(hook: Callable) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _transposed(pairs: list[tuple]) -> tuple[list, list]:
    return [first for first, _ in pairs], [second for _, second in pairs]


# `config_reads`: the values of a model's configs on which its forward depends.


CONFIG_BOOKKEEPING = {
    "dtype", "is_encoder_decoder", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "torch_dtype", "use_cache", "use_return_dict",
}  # fmt: skip
"""Values of configs that select outputs, on which logits do not depend."""


@contextmanager
def config_reads(model: nn.Module) -> Iterator[list[tuple[Any, set[str]]]]:
    """A context that adds, for each config of `model`, the names that are read to the set that it yields with it."""
    reads = [(config, set()) for config in configs_of(model) if isinstance(config, PreTrainedConfig)]
    classes = [type(config) for config, _ in reads]
    try:
        for config, names in reads:
            object.__setattr__(config, "__class__", _recording(type(config), names))
        yield reads
    finally:
        for (config, names), cls in zip(reads, classes):
            object.__setattr__(config, "__class__", cls)
            names -= CONFIG_BOOKKEEPING


def _recording(cls: type, names: set[str]) -> type:
    """A subclass of a config's class that adds to `names` each public name that is read."""

    def read(self, name: str):
        if not name.startswith("_"):
            names.add(name)
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__getattribute__": read})


# Methods that transformers' decoding loop calls and rounds do not. A model that overrides one is left to that loop.


HOOKS = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""The methods of the loop. It does not include ``_prepare_*``, ``_get_logits_processor`` and
``_expand_inputs_for_generation``, which are called before it, and ``_reorder_cache``, which only beam search calls."""
METHODS = [name for name, value in vars(GenerationMixin).items() if isinstance(value, FunctionType)]
"""The methods of ``generate()`` and of everything that it calls."""
OF_CLASSES = {"generate", "_sample", "_beam_search", "_assisted_decoding"}
"""The `METHODS` that transformers looks up in a model's class, not on the object; and ``generate()``, which is looked
up at every call."""
TRUSTED = ("transformers", "torch", "spec_compile")
"""Packages whose overrides stay served: `check_generation` compares what they do with the captured graph."""


def overridden(model, names: tuple[str, ...] = HOOKS) -> str | None:
    """The first of the methods that the object itself or a class outside transformers replaces, and where."""
    for name in names:
        if name in vars(model) and name != "_sample":  # transformers looks up `_sample` only in the class
            return f"{name} (set on the {type(model).__name__} object)"
        for cls in type(model).__mro__:
            if name in vars(cls) and not is_trusted(cls, vars(cls)[name]):
                return f"{name} (overridden by {cls.__name__})"
            if name in vars(cls) and not cls.__module__.startswith("spec_compile."):
                break
    return None


def replaced_generate(model) -> Callable | None:
    """The function that was set on a model in place of its class's ``generate()``; None if there is none.

    Functions of this package lead back here, so they replace nothing: `custom_generate.generate`, and the
    ``generate()`` of a speculative model.
    """
    function = underlying(vars(model).get("generate"))
    if function in (None, type(model).generate.__get__(model)):
        return None
    inner = function.func if isinstance(function, partial) else function
    return None if _package(getattr(inner, "__module__", None) or "") == "spec_compile" else function  # guard: own-code


def is_trusted(cls: type, function: Callable) -> bool:
    """True if the class, the method and all functions that it wraps are from `TRUSTED` packages."""
    return _package(cls.__module__) in TRUSTED and all(_package(module) in TRUSTED for module in _modules(function))


def _modules(function: Callable) -> Iterator[str]:
    function = getattr(function, "__func__", function)
    while function is not None:
        yield getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", None) or "")
        function = getattr(function, "__wrapped__", None)


def _package(module: str) -> str:
    return module.partition(".")[0]
