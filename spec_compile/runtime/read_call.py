"""What one call asks for, read from what transformers prepares for its decoding loop."""

import math

import torch
from torch import Tensor

from ..capture.pictures import reads_pictures
from ..parallel.ranks import ALONE, Alone
from . import past as pasts
from .accept import Route, make_acceptor
from .accept.processors import MINIMA, is_known
from .agreement import led
from .answer import Answer
from .own_prefill import PICTURES, TOKEN_TYPES, OwnPrefill
from .prompt import Prompt
from .request import Request

SERVED_ARGUMENTS = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position",
    "inputs_embeds", "tokenizer", "assistant_tokenizer", "cache_params",
}  # fmt: skip
"""Arguments of the model's forward that the loop understands."""
CRITERIA_IN_ROUND = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Stopping criteria that a round checks by itself."""


def unserved(speculation, prompt: Prompt, generation_config, model_kwargs: dict) -> str | None:
    """The first thing asked for that only transformers' own loop does, if there is one."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "torch.autocast"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name, None):
                return name
    if not prompt.is_left_padded:
        return "attention_mask / position_ids (anything but padding on the left)"
    if any(prompt.position_offsets) and not speculation.engine.captured.shifts_positions:
        return "position_ids (of several axes)"
    is_reader = reads_pictures(speculation.original)
    if prompt.has_pictures and not is_reader:
        return "pixel_values (of a model that is not among those whose pictures are served)"
    if any(prompt.padding) and not speculation.serves_padding:
        return "attention_mask (padding on the left, which the model's own positions do not follow)"
    cache = model_kwargs.get("past_key_values")
    if cache is not None and not pasts.is_plain(cache):
        return f"past_key_values / cache_implementation ({type(cache).__name__})"
    is_filled = cache is not None and cache.get_seq_length() > 0
    is_own = prompt.is_embedded or prompt.has_pictures
    if (is_filled or is_own) and speculation.cache_layout is None:
        name = "past_key_values" if is_filled else "inputs_embeds" if prompt.is_embedded else "pixel_values"
        return f"{name} (the model's own cache holds something else than the keys and values of each layer)"
    is_asked_for = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    captured = speculation.engine.captured
    if cache is not None and is_asked_for and captured.clamps_prompts:
        return "past_key_values (the model's forward over several tokens leaves other states than single steps)"
    if any(spec.kind == "selective" for spec in captured.recurrences) and (is_filled or (is_own and is_asked_for)):
        return "past_key_values (the model's forward over several tokens does not read the states in a cache)"
    states = model_kwargs.get("cache_params")  # what a model without attention has in place of past_key_values
    if states is not None and (generation_config.return_dict_in_generate or getattr(states, "_is_user_defined", False)):
        return "cache_params"
    types = [model_kwargs[name] for name in sorted(TOKEN_TYPES & model_kwargs.keys()) if is_reader]
    cached = cache.get_seq_length() if is_filled else 0
    if not prompt.has_pictures and any(each is not None and each[..., cached:].any() for each in types):
        return "token_type_ids (of pictures that are not there)"
    served = SERVED_ARGUMENTS | (PICTURES | TOKEN_TYPES if is_reader else set())
    no_pictures = {"mm_encoder_outputs": {}}  # what a model that could read pictures is told if there are none
    others = ((name, value) for name, value in model_kwargs.items() if name not in served)
    others = ((name, value) for name, value in others if value is not None)
    return next((name for name, value in others if name not in no_pictures or value != no_pictures[name]), None)


def make_request(
    prompt: Prompt, answer: Answer, route: Route, processors: list, generation_config, shortest: int,
    own: OwnPrefill | None = None, past: pasts.Past | None = None, generator: torch.Generator | None = None,
    ranks: Alone = ALONE,
) -> Request:  # fmt: skip
    """The request for the rounds of one call. Widths of the answer become lengths of each row without its padding.

    shortest: the width below which no row may end. generator: gives the seed; None: torch's own.
    """
    seed, temperature = None, 0.0
    if generation_config.do_sample:
        drawn = int(torch.randint((1 << 63) - 1, (), generator=generator))
        (seed,) = ranks.lead(lambda: [drawn])
        temperature = generation_config.temperature or 1.0
    differences = [len(tokens) - answer.prompt_width for tokens in prompt.tokens]  # a row's length less its width
    return Request(
        prompts=prompt.tokens,
        min_lengths=[max(0, shortest + difference) for difference in differences],
        max_lengths=[answer.longest + difference for difference in differences],
        eos=sorted(answer.eos),
        ids=None if any(prompt.padding) or prompt.has_unknown_tokens else prompt.ids,
        past=past,
        position_offsets=prompt.position_offsets,
        has_unknown_tokens=prompt.has_unknown_tokens,
        first_logits=None if own is None else own.first_logits,
        features=None if own is None else own.features,
        acceptor=make_acceptor(route, answer, processors, seed, ranks),
        seed=seed or 0,
        temperature=temperature,
        prefill_chunk_size=generation_config.prefill_chunk_size,
    )


def shortest_width(processors: list) -> int:
    """The width below which no row may end."""
    minima = [processor for processor in processors if is_known(processor, MINIMA)]
    return max(
        (
            each.min_length if hasattr(each, "min_length") else each.prompt_length_to_skip + each.min_new_tokens
            for each in minima
        ),
        default=0,
    )


def longest_width(input_ids: Tensor, stopping_criteria, generation_config) -> int:
    """The width at which every row ends."""
    lengths = [c.max_length for c in stopping_criteria if type(c).__name__ == "MaxLengthCriteria"]
    longest = math.ceil(min(lengths, default=generation_config.max_length))
    return max(longest, input_ids.shape[1] + 1)


def make_answer(
    input_ids: Tensor, prompt: Prompt, longest: int, stopping_criteria, generation_config, streamer,
    ranks: Alone = ALONE,
) -> Answer:  # fmt: skip
    """The answer of one call, still without tokens; ValueError if rows may end before others and no padding is set."""
    names = {type(criterion).__name__ for criterion in stopping_criteria}
    eos = next((c.eos_token_id.tolist() for c in stopping_criteria if type(c).__name__ == "EosTokenCriteria"), [])
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    pad = generation_config._pad_token_tensor if has_eos else None
    if pad is None and has_eos:
        raise ValueError("If `eos_token_id` is defined, make sure that `pad_token_id` is defined.")
    return Answer(
        prompt.ids,
        longest,
        eos,
        None if pad is None else int(pad),
        criteria=None if names <= CRITERIA_IN_ROUND else led(stopping_criteria, ranks),
        streamer=streamer,
        keep_scores=bool(generation_config.return_dict_in_generate and generation_config.output_scores),
        keep_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
        device=input_ids.device,
    )
