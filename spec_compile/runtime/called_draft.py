"""The draft that one call of ``generate()`` names, as transformers' users name it, and the model that serves it.

transformers has ``assistant_model=``, ``use_mtp=True``, ``prompt_lookup_num_tokens=`` and ``speculation_type=``.
"""

import logging
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedModel

from ..config import Options

if TYPE_CHECKING:
    from .served import ServedEngine

log = logging.getLogger("spec_compile")

OF_ONE_DRAFT = {"num_draft_tokens", "artefact"}
"""Options of every algorithm that a model with another draft does not take over."""

TOKENIZERS = "tokenizer", "assistant_tokenizer"
"""Arguments of a call whose draft has a tokenizer of its own. The former by itself is that of `stop_strings`."""

OVER_THE_TARGET = "Gemma4Assistant", "Gemma4UnifiedAssistant"
"""Beginnings of the names of assistants that read the target's keys and values, as transformers knows them."""


@dataclass(frozen=True)
class CalledDraft:
    """A draft that a call names.

    argument: of the call, that names it
    algo: that makes drafts of this kind, or None if only transformers' own loop does what the call asks for
    options: of `speculate`, in addition to those of the model that is called
    """

    argument: str
    algo: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: GenerationConfig, assistant: Any, arguments: dict[str, Any]) -> "CalledDraft":
        """The draft of a call for which transformers has chosen assisted decoding; the first that transformers takes.

        config: of the call
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
        """Forget all models."""
        self._made.clear()

    def release(self) -> None:
        """Let all models give back their memory, see `ServedEngine.release`."""
        for _, model in self._made.values():
            if model is not None:
                model.speculation.engine.release()

    def model_for(self, called: CalledDraft, engine: "ServedEngine") -> PreTrainedModel | None:
        """The model of `engine` with this draft and all other options of `engine`, made at the first call.

        Its statistics are those of `engine`. None if `speculate` does not serve the draft.
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
