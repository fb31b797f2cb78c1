"""The function that a repository's ``custom_generate/generate.py`` gives to transformers.

transformers calls it in place of ``generate()`` of a plain model, if ``custom_generate=`` names such a repository or if
the model was loaded from one. `examples/custom_generate` is a repository, and every trained head's folder is one.
"""

import inspect
from dataclasses import fields
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.dynamic_module_utils import get_cached_module_file

from .api import speculate
from .capture.changes import KEPT
from .compat import CACHE
from .drafters import ALGORITHMS
from .runtime.generate import SpeculativeMixin

OF_TRANSFORMERS = {*inspect.signature(GenerationMixin.generate).parameters, "tokenizer", "assistant_tokenizer", CACHE}
"""Arguments of transformers' ``generate()`` that are neither values of a generation config nor inputs of the model."""
OF_LOADING = {"trust_remote_code", *inspect.signature(get_cached_module_file).parameters}
"""Arguments, such as ``revision`` and ``token``, by which transformers has found this function."""
OF_A_CALL = {*inspect.signature(SpeculativeMixin.generate).parameters} - {"self", "args", "kwargs"}
"""Arguments that ``generate()`` of a speculative model adds."""
OPTIONS = {"algo", *(field.name for entry in ALGORITHMS.values() for field in fields(entry.options))} - OF_A_CALL
"""Options of `speculate`."""


class _Kept:
    """The speculative model that a model keeps, and the options of `speculate` that made it.

    A copy or a pickle of the model has an empty dict in its place.
    """

    def __init__(self, fast: PreTrainedModel, options: dict[str, Any]):
        self.fast, self.options = fast, options

    def __reduce__(self):
        return dict, ()


def generate(*args: Any, model: PreTrainedModel, **arguments: Any) -> Any:
    """``model.generate()`` with the same arguments and the same answer, in fewer steps.

    model: a causal language model of transformers. At the first call it gets a speculative model, which it keeps as
        long as it lives. Changed weights are taken over. After a call with another option, or another change of the
        model, it keeps a new one.
    arguments: the arguments of ``generate()`` of a speculative model, and options of `speculate` such as ``algo`` and
        ``draft``. ``cache`` is an option unless it is a cache of keys and values.

    Raises ValueError that names an argument which is neither, and all that `speculate` and ``generate()`` raise.
    """
    if isinstance(model, SpeculativeMixin):
        model = vars(model)["speculation"].original
    options = {name: value for name, value in arguments.items() if name in OPTIONS and not isinstance(value, Cache)}
    # transformers passes every argument of its generate(), also those that the caller left out.
    unset = {name for name, value in arguments.items() if name in OF_TRANSFORMERS and value is None}
    asked = {name: value for name, value in arguments.items() if name not in unset | OF_LOADING | options.keys()}
    fast = _kept(model, options)
    if fast is None:
        known = {*OF_TRANSFORMERS, *OF_A_CALL, *vars(model.generation_config)}
        model._validate_model_kwargs({name: value for name, value in asked.items() if name not in known})
        fast = speculate(model, **options)
        vars(model)[KEPT] = _Kept(fast, options)
    return fast.generate(*args, **asked)


def _kept(model: PreTrainedModel, options: dict[str, Any]) -> PreTrainedModel | None:
    """The speculative model that `model` keeps, with the model's weights of now; None if another must be made."""
    kept = vars(model).get(KEPT)
    if not isinstance(kept, _Kept) or kept.options != options or kept.fast.speculation.original is not model:
        return None
    changes = kept.fast.speculation.engine.watch.changes()
    if any(change.remedy == "speculate" for change in changes):
        return None
    if any(change.remedy == "refresh" for change in changes):
        kept.fast.speculation.refresh()
    return kept.fast
