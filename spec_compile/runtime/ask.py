"""`Ask`: the wishes of one call or request, read from the arguments of transformers' decoding loop."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..capture.check_generation import ANY, SINGLE
from ..capture.pictures import reads_pictures
from ..compat import CACHE, STATES
from ..parallel.ranks import ALONE, Alone
from . import past as pasts
from .accept import Route, choose_route, make_acceptor
from .accept.processors import MINIMA, is_known
from .agreement import led
from .answer import Answer
from .own_prefill import PICTURES, TOKEN_TYPES, OwnPrefill
from .prompt import Prompt
from .request import Request

SERVED_ARGUMENTS = {
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_position",
    "inputs_embeds", "tokenizer", "assistant_tokenizer", STATES,
}  # fmt: skip
"""Arguments of the model's forward that our loop reads."""
CRITERIA_IN_ROUND = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Stopping criteria that a round checks by itself."""


@dataclass
class Ask:
    """The wishes of one call, or of one request, whose batch has one row.

    Columns count the tokens of a row, prompt and padding included: 7 new tokens after a prompt of 5 columns end at
    column 12.

    config: the generation config, completed by transformers.
    processors: logits processors.
    route: decides where tokens are accepted.
    shortest, longest: columns before which no row may end, and at which every row ends.
    eos, pad: see `Answer`.
    criteria: stopping criteria to be called; None if `longest` and `eos` suffice.
    """

    config: GenerationConfig
    processors: LogitsProcessorList
    route: Route
    shortest: int
    longest: int
    eos: list[int]
    pad: int | None = None
    criteria: StoppingCriteriaList | None = None

    @classmethod
    def of(
        cls, input_ids: Tensor, config: GenerationConfig, processors: LogitsProcessorList,
        criteria: StoppingCriteriaList, device: torch.device,
    ) -> "Ask":  # fmt: skip
        """Read the arguments of transformers' loop; ValueError if rows may end before others and no padding is set."""
        eos = next((c.eos_token_id.tolist() for c in criteria if type(c).__name__ == "EosTokenCriteria"), [])
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        pad = config._pad_token_tensor if has_eos else None
        if pad is None and has_eos:
            raise ValueError("If `eos_token_id` is defined, make sure that `pad_token_id` is defined.")
        keeps_scores = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        is_plain = {type(criterion).__name__ for criterion in criteria} <= CRITERIA_IN_ROUND
        return cls(
            config, processors, choose_route(config, processors, device, bool(keeps_scores), has_first_logits=False),
            _shortest(processors), _longest(input_ids.shape[1], config, criteria), sorted(eos),
            None if pad is None else int(pad), None if is_plain else criteria,
        )  # fmt: skip

    def after(self, width: int) -> "Ask":
        """This ask, whose columns count from the prompt's end, for a prompt of `width` columns."""
        return replace(self, shortest=width + self.shortest if self.shortest else 0, longest=width + self.longest)

    def from_now(self) -> "Ask":
        """The same with time limits that begin now, unless they began before."""
        if self.criteria is None:
            return self
        return replace(self, criteria=type(self.criteria)(_from_now(criterion) for criterion in self.criteria))

    def answer(
        self, ids: Tensor, streamer=None, device: torch.device | None = None, ranks: Alone = ALONE,
        keep_logprobs: bool = False,
    ) -> Answer:  # fmt: skip
        """An empty answer to prompts `ids` [B, W] int64. device: of its results. keep_logprobs: see `Answer`."""
        returns = bool(self.config.return_dict_in_generate)
        return Answer(
            ids, self.longest, self.eos, self.pad, None if self.criteria is None else led(self.criteria, ranks),
            streamer, returns and bool(self.config.output_scores), returns and bool(self.config.output_logits), device,
            keep_logprobs,
        )  # fmt: skip

    def request(
        self, prompt: Prompt, answer: Answer, own: OwnPrefill | None = None, past: pasts.Past | None = None,
        ranks: Alone = ALONE,
    ) -> Request:  # fmt: skip
        """The request of one call. Columns of the answer become lengths of each row without its padding: `longest` 12
        and a prompt of 5 columns with padding [0, 2] give max_lengths [12, 10]."""
        seed, temperature = None, 0.0
        if self.config.do_sample:
            drawn = int(torch.randint((1 << 63) - 1, ()))
            (seed,) = ranks.lead(lambda: [drawn])
            temperature = self.config.temperature or 1.0
        differences = [len(tokens) - answer.prompt_width for tokens in prompt.tokens]  # lengths minus columns
        return Request(
            prompts=prompt.tokens,
            min_lengths=[max(0, self.shortest + difference) for difference in differences],
            max_lengths=[self.longest + difference for difference in differences],
            eos=self.eos,
            ids=None if any(prompt.padding) or prompt.has_unknown_tokens else prompt.ids,
            past=past,
            position_offsets=prompt.position_offsets,
            has_unknown_tokens=prompt.has_unknown_tokens,
            first_logits=None if own is None else own.first_logits,
            features=None if own is None else own.features,
            acceptor=make_acceptor(self.route, answer, self.processors, seed, ranks),
            seed=seed or 0,
            temperature=temperature,
            prefill_chunk_size=self.config.prefill_chunk_size,
        )


def _shortest(processors: list) -> int:
    minima = [processor for processor in processors if is_known(processor, MINIMA)]
    return max(
        (
            each.min_length if hasattr(each, "min_length") else each.prompt_length_to_skip + each.min_new_tokens
            for each in minima
        ),
        default=0,
    )


def _longest(width: int, config: GenerationConfig, criteria: list) -> int:
    lengths = [each.max_length for each in criteria if type(each).__name__ == "MaxLengthCriteria"]
    return max(math.ceil(min(lengths, default=config.max_length)), width + 1)


def _from_now(criterion: Callable) -> Callable:
    """The criterion; a copy that begins now if it has a time limit that has not begun."""
    if getattr(criterion, "initial_timestamp", ...) is None:
        criterion = copy.copy(criterion)
        criterion.initial_timestamp = time.time()
    return criterion


def unserved(engine, prompt: Prompt, generation_config, model_kwargs: dict) -> str | None:
    """The first wish that only transformers' own loop fulfils, or None. engine: a `ServedEngine`."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "torch.autocast"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name, None):
                return name
    if not prompt.is_left_padded:
        return "attention_mask / position_ids (anything but padding on the left)"
    if any(prompt.position_offsets) and not engine.described.shifts_positions:
        return "position_ids (of several axes)"
    is_reader = reads_pictures(engine.original)
    if prompt.has_pictures and not is_reader:
        return "pixel_values (of a model that is not among those whose pictures are served)"
    if any(prompt.padding) and engine.served_batches != ANY:
        return "attention_mask (padding on the left, which the model's own positions do not follow)"
    if len(prompt.tokens) > 1 and engine.served_batches == SINGLE:  # guard: mixed-rows
        return "input_ids (several rows, which the model itself mixes)"
    cache = pasts.cache_among(model_kwargs)
    if cache is not None and not pasts.is_plain(cache):
        return f"{CACHE} / cache_implementation ({type(cache).__name__})"
    is_filled = cache is not None and cache.get_seq_length() > 0
    is_own = prompt.is_embedded or prompt.has_pictures
    if is_own and engine.loras is not None:
        return "inputs_embeds or pixel_values (of a model whose rows choose adapters)"
    if (is_filled or is_own) and engine.cache_layout is None:
        name = CACHE if is_filled else "inputs_embeds" if prompt.is_embedded else "pixel_values"
        return f"{name} (the model's own cache holds something else than the keys and values of each layer)"
    is_asked_for = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    captured = engine.described
    if cache is not None and is_asked_for and captured.clamps_prompts:
        return f"{CACHE} (the model's forward over several tokens leaves other states than single steps)"
    if any(spec.kind == "selective" for spec in captured.recurrences) and (is_filled or (is_own and is_asked_for)):
        return f"{CACHE} (the model's forward over several tokens does not read the states in a cache)"
    makes_cache = model_kwargs.get("use_cache", True) and not {CACHE, STATES} & model_kwargs.keys()
    if captured.recurrences and makes_cache and generation_config.return_dict_in_generate:
        return f"return_dict_in_generate (of a model that makes its {CACHE} itself)"
    states = model_kwargs.get(STATES)
    is_asked_for = generation_config.return_dict_in_generate or getattr(states, "_is_user_defined", False)
    if states is not None and states is not cache and is_asked_for:
        return f"{STATES} (of a model without attention)"
    types = [model_kwargs[name] for name in sorted(TOKEN_TYPES & model_kwargs.keys()) if is_reader]
    cached = cache.get_seq_length() if is_filled else 0
    if not prompt.has_pictures and any(each is not None and each[..., cached:].any() for each in types):
        return "token_type_ids (of pictures that are not there)"
    served = SERVED_ARGUMENTS | (PICTURES | TOKEN_TYPES if is_reader else set())
    no_pictures = {"mm_encoder_outputs": {}}  # tells a model that reads pictures that there are none
    others = ((name, value) for name, value in model_kwargs.items() if name not in served)
    others = ((name, value) for name, value in others if value is not None)
    return next((name for name, value in others if name not in no_pictures or value != no_pictures[name]), None)
