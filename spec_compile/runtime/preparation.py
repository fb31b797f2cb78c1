"""Everything before the decoding loop of a generate(): checks of its options, the draft that it names, and
transformers' preparation, which is kept for later calls."""

import logging
import marshal
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from numbers import Number
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..capture.replaced import HOOKS, METHODS, is_trusted
from ..config import Options
from ..errors import check_int, did_you_mean, log
from .prompt import Prompt
from .request import Request
from .verify import Route
from .verify.processors import MINIMA, OF_SCORES, is_known

if TYPE_CHECKING:
    from .engine import Engine


LONGEST = (1 << 31) - 1  # tokens of a text, at most
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
            if (value := values.get(name)) is None:
                continue
            is_number = isinstance(value, (Number, Tensor))
            if not is_number:
                raise TypeError(f"{name}: expected a number, got {type(value).__name__} ({value!r})")
            most = LONGEST if name in LENGTHS else MOST_ROWS if name == "num_return_sequences" else None
            if most is not None and not value <= most:  # NaN is refused, too  # guard: longest-text
                raise ValueError(f"{name}: expected at most {most}, got {value}")
        for name in TOKENS:
            for token in _tokens(values.get(name)):
                is_number = isinstance(token, Number)
                if not is_number:
                    raise TypeError(f"{name}: expected token ids, got {type(token).__name__} ({token!r})")
                if abs(token) > torch.iinfo(torch.int64).max:
                    raise ValueError(f"{name}: expected token ids of 64 bits, got {token}")
        size = values.get("prefill_chunk_size")
        if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
            raise TypeError(f"prefill_chunk_size: expected an int, got {type(size).__name__} ({size!r})")


def _tokens(value: Any) -> Iterator[Any]:
    """The token ids in an option; tensors and arrays have only numbers."""
    if isinstance(value, (list, tuple)):
        yield from value
    elif value is not None and not hasattr(value, "dtype"):
        yield value


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
    known = "num_draft_tokens"
    if not isinstance(speculation, dict):
        raise TypeError(f"speculation: expected None, False or a dictionary with {known}, got {speculation!r:.80}")
    for name in speculation:
        if name != known:
            raise TypeError(f"speculation: unknown setting {name!r:.80}.{did_you_mean(str(name)[:80], [known])}")
    limit = speculation.get(known, most)
    check_int(f"speculation: {known}", limit, 1, most, "nodes verified, the root included; speculate() built the most")
    return limit


# The draft that one call names, as transformers' users name it (``assistant_model=``, ``use_mtp=True``,
# ``prompt_lookup_num_tokens=`` and ``speculation_type=``), and the model that serves it.

# Options of every algorithm that a model with another draft does not take over.
OF_ONE_DRAFT = {"num_draft_tokens", "artefact"}
# Arguments of a call whose draft has another tokenizer. The former by itself is for `stop_strings`.
TOKENIZERS = "tokenizer", "assistant_tokenizer"
# Beginnings of the names of assistants that read the target's keys and values, as transformers knows them.
OVER_THE_TARGET = "Gemma4Assistant", "Gemma4UnifiedAssistant"


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
        reads_target = type(assistant).__name__.startswith(OVER_THE_TARGET)
        options: dict[str, Any] = {"draft": assistant} if steps is None else {"draft": assistant, "num_steps": steps}
        if arguments.get("assistant_tokenizer") is not None:
            options |= {name: arguments.get(name) for name in TOKENIZERS}
        return cls("assistant_model", "assistant" if reads_target else "draft_model", options)

    def is_that_of(self, engine: "Engine") -> bool:
        """True if the drafts of an engine are already of this kind."""
        if self.algo == "ngram":
            return engine.runtime.algorithm.store is not None
        draft = self.options.get("draft")
        return engine.name == self.algo and (draft is None or getattr(engine.options, "draft", None) is draft)


def model_for(called: CalledDraft, engine: "Engine") -> PreTrainedModel | None:
    """The model of `engine` with this draft and all other options of `engine`, made at the first call.

    It shares the statistics of `engine`. None if `speculate` does not serve the draft.
    """
    if called.algo is None:
        return None
    before, model = engine.called_drafts.get(called.algo, (None, None))
    if before != called:
        names = [each.name for each in fields(Options) if each.name not in OF_ONE_DRAFT]
        options = {name: getattr(engine.options, name) for name in names}
        try:
            model = engine.speculate(engine.original, called.algo, **options, **called.options)
            vars(model)["speculation"].engine.runtime.stats = engine.runtime.stats
        except (TypeError, ValueError) as error:
            log.info("%s: the draft is not served: %s", called.argument, error)
            model = None
        engine.called_drafts[called.algo] = called, model
    return model


# transformers' preparation of a call, kept for the next call that is alike. transformers copies and validates the
# generation config several times for a call. For common calls the outcome depends only on the values of a `Key`, so
# it is prepared once. Other calls, and those with a warning, are prepared every time.

# Generation options that may differ from their defaults in calls whose preparation is kept.
OPTIONS = {
    "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "eos_token_id", "pad_token_id", "bos_token_id",
}  # fmt: skip
# Values of a prepared config that `OPTIONS` decide, or that nothing reads.
UNUSED = {"transformers_version", "max_length", "min_length"}
# Logits processors that remember nothing and do not depend on the width of the prompt.
PROCESSORS = OF_SCORES | {"RepetitionPenaltyLogitsProcessor"}
MOST = 32  # requests that are kept: the last used ones
# Methods that prepare nothing. All others of `METHODS` must be transformers' own.
LOOPS = {*HOOKS, "_beam_search", "_assisted_decoding", "_optimize_model_for_decode"}
LOGGER = logging.getLogger("transformers")  # its level changes the warnings of transformers

_methods = attrgetter(*METHODS)
_own_methods = {name: getattr(GenerationMixin, name) for name in METHODS if name not in LOOPS}

Key = tuple[Any, ...]
SCALARS = {NoneType, bool, int, float, str}


def read_inputs(args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None, Any, dict] | None:
    """The ids [B, W] int64 of ``generate()``, its attention mask [B, W] or None, its streamer and other arguments; None
    if the inputs have an uncommon form."""
    if len(args) > 1 or (args and "inputs" in kwargs):
        return None
    others = dict(kwargs)
    inputs, ids = args[0] if args else others.pop("inputs", None), others.pop("input_ids", None)
    mask, streamer = others.pop("attention_mask", None), others.pop("streamer", None)
    ids = inputs if ids is None else ids if inputs is None else None
    if type(ids) is not Tensor or ids.dtype is not torch.int64 or ids.dim() != 2 or not ids.numel():
        return None
    if mask is None:  # transformers warns about some batches without a mask
        return (ids, None, streamer, others) if ids.shape[0] == 1 else None
    if type(mask) is not Tensor or mask.shape != ids.shape or mask.device != ids.device or mask.is_floating_point():
        return None
    return ids, mask, streamer, others


def read_prompt(ids: Tensor, mask: Tensor | None, padding: int | None) -> Prompt | None:
    """The prompts, read with one copy; None if the mask has a zero, or if transformers infers a mask from tokens
    `padding`."""
    numbers = (ids if mask is None else torch.cat((ids, mask))).cpu()
    batch, width = ids.shape
    ids, seen = numbers[:batch], numbers[batch:].numpy()
    if (seen != 1).any() or (mask is None and padding is not None and (ids.numpy() == padding).any()):
        return None
    none = [0] * batch
    return Prompt(ids, ids.tolist(), none, width, False, False, False, none)


class Remembered:
    """Requests that transformers has prepared for one model, without what differs from call to call.

    Their columns count from the end of the prompt, and they have no processors that set a minimum length.
    """

    def __init__(self) -> None:
        self.awaited: Key | None = None  # the key of the call that transformers prepares, until `keep`
        self._kept: OrderedDict[Key, tuple[Request, int | None]] = OrderedDict()

    def find(self, key: Key | None) -> tuple[Request, int | None] | None:
        """The request of this key, if it is kept, and the token from which transformers infers a missing mask, if it
        does."""
        if key is None or (found := self._kept.get(key)) is None:
            return None
        self._kept.move_to_end(key)
        return found

    @contextmanager
    def awaiting(self, key: Key | None) -> Iterator[None]:
        """A context in which transformers prepares the call of this key. A streamer may make other calls in it."""
        before, self.awaited = self.awaited, key
        try:
            yield
        finally:
            self.awaited = before

    def keep(self, model: object, prompt: Prompt, request: Request) -> None:
        """Keep the request of the `awaited` key, if later calls may use it."""
        key, self.awaited = self.awaited, None
        config, processors = request.config, request.processors
        if key is None or any(prompt.padding) or not _prepares_as_transformers(type(model).__bases__[1]):
            return
        if not all(is_known(each, PROCESSORS | MINIMA) for each in processors):
            return
        if request.criteria is not None or not _has_options_alone(config):
            return

        # Lengths have to be numbers of new tokens, and ends of sequence tokens.
        least, most = config.min_new_tokens or 0, config.max_new_tokens
        if type(most) is not int or least > most or (least and request.route is Route.ON_HOST):
            return
        pad = config._pad_token_tensor
        if any(token < 0 for token in request.eos) or (pad is not None and pad.numel() != 1):
            return
        padding = None if pad is None or int(pad) in request.eos else int(pad)

        # Leave out all that depends on the width of the prompt.
        others = type(processors)(each for each in processors if not is_known(each, MINIMA))
        # transformers ignores the least number of new tokens if nothing ends a row.
        kept = replace(request, processors=others, shortest=least if request.eos else 0, longest=most)
        self._kept[key] = kept, padding
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)


def make_key(model: Any, device: torch.device, ids: Tensor, mask: Tensor | None, options: dict) -> Key | None:
    """All values that transformers reads to prepare a call of `model`; None if it must prepare the call itself.

    device: the model's device. options: the other arguments of the call.
    """
    config = options.pop("generation_config", None)
    configs = [model.generation_config] if config is None else [model.generation_config, config]
    if not options.keys() <= OPTIONS or {*map(type, configs)} != {GenerationConfig} or ids.device != device:
        return None
    if model.config.is_encoder_decoder:  # whose ids are a source
        return None
    configs = [*map(vars, configs)]
    if any(values.get(name) is not None for values in configs for name in ("max_length", "min_length")):
        return None  # transformers warns if they come with max_new_tokens or min_new_tokens
    values = [value for part in (*configs, options) for value in part.values() if type(value) not in SCALARS]
    if not all(map(is_plain, values)):
        return None
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    if not vars(model).keys().isdisjoint(METHODS):
        return None
    read = {name: value for name, value in vars(model.config).items() if type(value) in SCALARS or is_plain(value)}
    facts = marshal.dumps((options, *configs, read, LOGGER.getEffectiveLevel()), 2)  # tells 1, 1.0 and True apart
    methods = _methods(type(model)), _methods(type(model).__bases__[1])  # ours, and the model's own class's
    return facts, len(ids), mask if mask is None else mask.dtype, device, model.main_input_name, methods


def _prepares_as_transformers(cls: type) -> bool:
    """True if a model's class prepares calls only by the methods that `GenerationMixin` had at import."""
    return all(getattr(cls, name) is own and is_trusted(GenerationMixin, own) for name, own in _own_methods.items())


def _has_options_alone(config: GenerationConfig) -> bool:
    """True if all options of a prepared config besides `OPTIONS` have their defaults."""
    defaults = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    return all(
        name in OPTIONS | UNUSED
        or name.startswith("_")
        or (name in defaults and (value == defaults[name] or (value is False and defaults[name] is None)))
        for name, value in vars(config).items()
    )


def asked(prompt: Prompt, generation_config: GenerationConfig, processors: list, criteria: list) -> dict[str, Any]:
    """The parts of one call, by name, that ranks have to agree on."""
    options = {name: value for name, value in vars(generation_config).items() if not name.startswith("_")}
    return {
        "the prompts": (prompt.tokens, prompt.padding),
        "the generation config": sorted((name, value) for name, value in options.items() if is_plain(value)),
        "the logits processors": [type(processor).__name__ for processor in processors],
        "the stopping criteria": [type(criterion).__name__ for criterion in criteria],
    }


def is_plain(value: Any) -> bool:
    """True if a value is a number, a text, None, or lists, tuples and dictionaries of such."""
    cls = type(value)
    if cls in (list, tuple):
        return all(map(is_plain, value))
    return cls in SCALARS or (cls is dict and all(map(is_plain, (*value, *value.values()))))
