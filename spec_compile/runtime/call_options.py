"""The options of one generate(): those that no model can serve are refused by name and before any preparation, and a
draft that the call names is built."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ..config import Options
from ..errors import check_int, did_you_mean

if TYPE_CHECKING:
    from .served import ServedEngine

log = logging.getLogger("spec_compile")

LONGEST = (1 << 31) - 1
"""Tokens of a text, at most."""
MOST_ROWS = 1 << 16
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
NUMBERS = (*LENGTHS, "max_time", "top_p", "num_return_sequences", "num_beams")
TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")


def check_options(default: GenerationConfig | None, options: dict[str, Any]) -> None:
    """TypeError or ValueError, naming the option, if a value is of a wrong type or beyond all bounds.

    default: the model's config, which counts, too. options: the arguments of the call. transformers checks the rest.
    """
    config = options.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(f"generation_config: expected a GenerationConfig, got {type(config).__name__}")
    for values in (options, *(vars(each) for each in (config, default) if each is not None)):
        for name in NUMBERS:
            _check_number(name, values.get(name))
        for name in TOKENS:
            for token in _tokens(values.get(name)):
                if not isinstance(token, Number):
                    raise TypeError(f"{name}: expected token ids, got {type(token).__name__} ({token!r})")
                if abs(token) > torch.iinfo(torch.int64).max:
                    raise ValueError(f"{name}: expected token ids of 64 bits, got {token}")
        size = values.get("prefill_chunk_size")
        if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
            raise TypeError(f"prefill_chunk_size: expected an int, got {type(size).__name__} ({size!r})")


def _check_number(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (Number, Tensor)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} ({value!r})")
    most = LONGEST if name in LENGTHS else MOST_ROWS if name == "num_return_sequences" else None
    if most is not None and not value <= most:  # NaN is refused, too  # guard: longest-text
        raise ValueError(f"{name}: expected at most {most}, got {value}")


def _tokens(value: Any) -> Iterator[Any]:
    """The token ids in an option; tensors and arrays have only numbers."""
    if isinstance(value, (list, tuple)):
        yield from value
    elif value is not None and not hasattr(value, "dtype"):
        yield value


NAME = "num_draft_tokens"


def read_limit(speculation: Any, most: int) -> int:
    """Nodes that rounds verify of each tree of a request, the root included.

    speculation: None leaves it to the engine; False verifies no drafts; {"num_draft_tokens": n} at most n nodes.
    most: nodes that the engine's rounds are built for.

    Raises TypeError for values of other types and other names, ValueError for more nodes than were built.
    """
    if speculation is None:
        return most
    if speculation is False:
        return 1
    if not isinstance(speculation, dict):
        raise TypeError(f"speculation: expected None, False or a dictionary with {NAME}, got {speculation!r:.80}")
    for name in speculation:
        if name != NAME:
            raise TypeError(f"speculation: unknown setting {name!r:.80}.{did_you_mean(str(name)[:80], [NAME])}")
    limit = speculation.get(NAME, most)
    check_int(f"speculation: {NAME}", limit, 1, most, "nodes verified, the root included; speculate() built the most")
    return limit


# The draft that one call names, as transformers' users name it (``assistant_model=``, ``use_mtp=True``,
# ``prompt_lookup_num_tokens=`` and ``speculation_type=``), and the model that serves it.

OF_ONE_DRAFT = {"num_draft_tokens", "artefact"}
"""Options of every algorithm that a model with another draft does not take over."""
TOKENIZERS = "tokenizer", "assistant_tokenizer"
"""Arguments of a call whose draft has another tokenizer. The former by itself is for `stop_strings`."""
OVER_THE_TARGET = "Gemma4Assistant", "Gemma4UnifiedAssistant"
"""Beginnings of the names of assistants that read the target's keys and values, as transformers knows them."""


@dataclass(frozen=True)
class CalledDraft:
    """A draft that a call names.

    argument: the call's argument that names it
    algo: that makes drafts of this kind, or None if only transformers' own loop does what the call asks for
    options: arguments of `speculate`, in addition to the options of the model that is called
    """

    argument: str
    algo: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: GenerationConfig, assistant: Any, arguments: dict[str, Any]) -> "CalledDraft":
        """The draft of a call for which transformers has chosen assisted decoding; the first that transformers takes.

        config: the call's config
        assistant: its argument `assistant_model`
        arguments: its further ones, among them perhaps `tokenizer` and `assistant_tokenizer`
        """
        for argument in ("assistant_early_exit", "assistant_ensemble_weight"):  # the latter changes the distribution
            if getattr(config, argument, None) is not None:
                return cls(argument)
        if config.prompt_lookup_num_tokens is not None:
            return cls("prompt_lookup_num_tokens", "ngram")
        if getattr(config, "use_mtp", False):
            return cls("use_mtp", "mtp")
        if not isinstance(assistant, PreTrainedModel):
            return cls("assistant_model")
        if getattr(config, "speculation_type", None) == "dflash":
            return cls("speculation_type", "dflash", {"draft": assistant})
        steps = getattr(assistant.generation_config, "num_assistant_tokens", None)
        steps = {} if steps is None else {"num_steps": steps}
        reads_target = type(assistant).__name__.startswith(OVER_THE_TARGET)
        options = {"draft": assistant} | steps
        if arguments.get("assistant_tokenizer") is not None:
            options |= {name: arguments.get(name) for name in TOKENIZERS}
        return cls("assistant_model", "assistant" if reads_target else "draft_model", options)

    def is_that_of(self, engine: "ServedEngine") -> bool:
        """True if the drafts of an engine are already of this kind."""
        if self.algo == "ngram":
            return engine.runtime.algorithm.store is not None
        draft = self.options.get("draft")
        return engine.name == self.algo and (draft is None or getattr(engine.options, "draft", None) is draft)


class CalledDrafts:
    """Speculative models with drafts that calls have named: the last one of each algorithm."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[CalledDraft, PreTrainedModel | None]] = {}

    def clear(self) -> None:
        self._made.clear()

    def release(self) -> None:
        """Let all models give back their memory, see `ServedEngine.release`."""
        for _, model in self._made.values():
            if model is not None:
                model.speculation.engine.release()

    def model_for(self, called: CalledDraft, engine: "ServedEngine") -> PreTrainedModel | None:
        """The model of `engine` with this draft and all other options of `engine`, made at the first call.

        It shares the statistics of `engine`. None if `speculate` does not serve the draft.
        """
        if called.algo is None:
            return None
        before, model = self._made.get(called.algo, (None, None))
        if before != called:
            options = {each.name: getattr(engine.options, each.name) for each in fields(Options)}
            options = {name: value for name, value in options.items() if name not in OF_ONE_DRAFT}
            try:
                model = engine.speculate(engine.original, called.algo, **options, **called.options)
                model.speculation.engine.runtime.stats = engine.runtime.stats
            except (TypeError, ValueError) as error:
                log.info("%s: the draft is not served: %s", called.argument, error)
                model = None
            self._made[called.algo] = called, model
        return model
