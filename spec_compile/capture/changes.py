"""`Watch` notices and describes changes of a model since its graphs were captured. This is what it promises.

| changed after `speculate()` | at the next call |
| --- | --- |
| values of weights, in place | are used |
| a tensor of the same shape and dtype in another place | raises; `refresh()` takes it over |
| training mode, with dropout or other noise above 0 | raises, until `model.eval()` |
| modules, forwards, forward hooks, plain attributes, config values that were read in capture | raises; `speculate()` |
| tensors of another shape, dtype or device | raises; `speculate()` |
| bookkeeping of transformers, backward hooks, the generation config, config values that nothing read | is allowed |

At every call one `_Fingerprint` is compared: flat lists that C code builds in a fraction of a millisecond. If it
differs, every module is examined by name, to describe each difference that can change an answer.
"""

import copy
import functools
import inspect
import operator
import re
import reprlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ..inventory import held_items
from .quantised import UNPACKS
from .replaced import METHODS, OF_CLASSES, underlying
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

    paths: the modules to watch, each with its path in the target, "" for the target itself.
    fast: the object that speculates for it.
    slots: the slots of all weights.
    reads: for each config the names that were read while the model was captured (see `config_reads`).
    """

    def __init__(
        self, paths: dict[nn.Module, str], fast: nn.Module, slots: list[Slot], reads: list[tuple[Any, set[str]]]
    ):
        self._paths, self._slots = paths, slots
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
        parts = [(path, part) for part, path in self._paths.items() if path]
        for reason in effects([*parts, ("", self._fast())]):
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
        # A place is a dictionary and a name in it. A value that may change there is compared by ==, others by identity.
        fixed, mutable = [], []
        for part in parts:
            attributes = vars(part)
            for name, value in _values(part).items():
                (mutable if _is_container(value) else fixed).append((attributes, name))
            # A compiled module has the mode of the one inside.
            fixed += [(attributes, name) for name in ("training", "forward") if name in attributes]
        for part in [*parts, fast]:
            fixed += [(part._modules, name) for name in part._modules]
            for holder in (part._parameters, part._buffers):
                fixed += [(holder, name) for name, tensor in held_items(holder) if tensor is None]
        fixed += [(slot.holder, slot.name) for slot in slots if slot.storage is None]
        plain = [(slot.holder, slot.name) for slot in slots if slot.storage is not None]
        own = ["training", *_values(fast, followed=True), *(["forward"] * ("forward" in vars(fast)))]
        self._of_fast = operator.itemgetter(*own)
        self._fixed, self._mutable, self._tensors = (_transposed(places) for places in (fixed, mutable, plain))
        # Additions to dictionaries show in their sizes; most are empty, and `any` reads those fastest.
        dicts = [holder for part in [*parts, fast] for holder in (part._parameters, part._buffers, part._modules)]
        hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)] + [*GLOBAL_HOOKS]
        self._sized = [*map(vars, parts), *filter(None, dicts)]
        self._hooked = [*filter(None, hooks)]
        self._empty = [each for each in [*dicts, *hooks] if not each]
        self._held, self._values = self._read_fixed(), copy.deepcopy(self._read_values())
        self._lists = self._read_lists(fast)

    def differs(self, fast: nn.Module) -> bool:
        """True if anything has changed since this was taken."""
        try:
            if any(self._empty) or not all(map(operator.is_, self._read_fixed(), self._held)):
                return True
            return self._read_values() != self._values or self._read_lists(fast) != self._lists
        except Exception:  # an attribute was deleted, or is no tensor any more
            return True

    def _read_fixed(self) -> list:
        """Numbers, texts, functions, modules and the like, which are compared by identity."""
        return [*map(dict.__getitem__, *self._fixed)]

    def _read_values(self) -> list:
        """Values that may change in place."""
        settings = [getattr(config, name, ABSENT) for config, name in self._settings]
        return [*map(dict.__getitem__, *self._mutable), *settings]

    def _read_lists(self, fast: nn.Module) -> tuple:
        """Addresses, sizes, classes, the numbers of hooks, and the attributes of `fast`."""
        tensors = [*map(dict.__getitem__, *self._tensors)]
        return (
            [*map(Tensor.data_ptr, tensors)],
            [*map(Tensor.is_contiguous, tensors)],
            [*map(len, self._sized)],
            [*map(type, self._parts)],
            [*chain.from_iterable(self._hooked)],
            [cls.forward for cls in self._classes],
            self._of_fast(vars(fast)),
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


def _is_container(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_plain, chain(value.keys(), value.values())))
    return isinstance(value, (list, tuple, set, frozenset)) and all(map(is_plain, value))


def is_plain(value: Any) -> bool:
    """True if a value is a number, a text or the like, or a collection of them, so that == compares it."""
    is_scalar = value is None or isinstance(value, (Number, str, torch.dtype, torch.device, torch.Size))
    return is_scalar or _is_container(value)


def _name(hook: Callable) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)


def _transposed(pairs: list[tuple]) -> tuple[list, list]:
    return [first for first, _ in pairs], [second for _, second in pairs]


# Training mode changes no answer if every number that drops or adds noise is 0: dropout, stochastic depth, the jitter
# of routers. The methods of a class show their names, as ``self.attention_dropout`` and ``self.config.hidden_dropout``.


NOISE = re.compile("drop|jitter|noise|prob|^p$")
"""In the names of numbers that are 0 if nothing is dropped and no noise is added."""
NOT_READ = {nn.Module, object, *PreTrainedModel.__mro__, *GenerationMixin.__mro__}
"""Classes that compute no values."""
NOT_FORWARD = {"__init__", "train", "eval"}
"""Methods that a forward does not call."""
OF_GRADIENTS = {"gradient_checkpointing"}
OF_CACHES = {"cache", "cache_params", "past_key_values", "use_cache"}
"""Names that stand next to `training` if a method only asks how gradients are kept, or whether to make a cache. The
second counts in transformers' own code only."""


def effects(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """The reasons why training mode may change answers, each a clause such as "lm_head.dropout is 0.1".

    modules: paths and modules. Modules in evaluation mode have no effect.
    """
    for path, part in modules:
        if not part.training:
            continue
        reads = _reads(type(part))
        found = {name: _number(part, name) for name in sorted(frozenset().union(*(noise for noise, _ in reads)))}
        for name, (owner, value) in found.items():
            if value is not ... and value > 0:  # guard: dropout
                yield f"{'.'.join(filter(None, [path, owner, name]))} is {value}"
        is_known = {name for name, (_, value) in found.items() if value is not ...}
        if any(asks and not noise & is_known for noise, asks in reads):
            yield f"the code of {path or 'the model'} ({type(part).__name__}) reads `training`"


@functools.lru_cache(maxsize=1 << 10)
def _reads(cls: type) -> list[tuple[frozenset[str], bool]]:
    """For each method that a class has or inherits: the names of noise that it reads, and True if it asks for the mode
    and that may change values. The cache is bounded: each model that `speculate` makes has a class."""
    reads = []
    for each in cls.__mro__:
        harmless = OF_GRADIENTS | OF_CACHES if each.__module__.startswith("transformers.") else OF_GRADIENTS
        methods = [] if each in NOT_READ else [value for name, value in vars(each).items() if name not in NOT_FORWARD]
        for function in (function for value in methods for function in _functions(value)):
            names = _names(function.__code__)
            reads.append((frozenset(filter(NOISE.search, names)), "training" in names and not names & harmless))
    return reads


def _functions(value: Any) -> Iterator[FunctionType]:
    """The function of a class attribute, and the functions that its decorators wrap."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    while inspect.isfunction(value):
        yield value
        value = getattr(value, "__wrapped__", None)


def _names(code: CodeType) -> set[str]:
    """The names of attributes, variables and arguments in a function and the functions inside it, also those in texts,
    as in ``getattr(self, "gradient_checkpointing", False)``."""
    names = {*code.co_names, *code.co_varnames, *code.co_freevars}
    names.update(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
    return names.union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _number(part: nn.Module, name: str) -> tuple[str, Any]:
    """Owner and value of a number: ("", 0.1) for an attribute, ("config", 0.1) for a field of the module's config.

    A module counts as 0, because it is examined by itself, and None does. Without such a number the value is ``...``.
    """
    for owner, holder in (("", part), ("config", getattr(part, "config", None))):
        value = getattr(holder, name, ...)
        if value is None or isinstance(value, nn.Module):
            return owner, 0
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return owner, value
    return "", ...


# The values of a model's configs on which its forward depends.


CONFIG_BOOKKEEPING = {
    "dtype", "is_encoder_decoder", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "torch_dtype", "use_cache", "use_return_dict",
}  # fmt: skip
"""Values of configs that select outputs, on which logits do not depend."""


@contextmanager
def config_reads(configs: Iterable[Any]) -> Iterator[list[tuple[Any, set[str]]]]:
    """A context that yields each of transformers' configs with a set, to which it adds the names that are read."""
    reads = [(config, set()) for config in configs if isinstance(config, PreTrainedConfig)]
    with ExitStack() as stack:
        for config, names in reads:
            stack.callback(object.__setattr__, config, "__class__", type(config))
            object.__setattr__(config, "__class__", _recording(type(config), names))
        yield reads


def _recording(cls: type, names: set[str]) -> type:
    """A subclass of a config's class that adds to `names` each public name that is read, without bookkeeping."""

    def read(self, name: str):
        if not name.startswith("_") and name not in CONFIG_BOOKKEEPING:
            names.add(name)
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__getattribute__": read})
