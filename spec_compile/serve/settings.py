"""The settings of one request, from its field `generation_config` and from OpenAI's fields."""

import copy
import json
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor

from ..batching.output import Output, RequestSpeculation
from ..errors import did_you_mean
from ..runtime.verify.sample import NO_PROBABILITIES
from ..runtime.verify.thinking import ThinkingBudget, find_marks
from .errors import Refusal, failed, quoted, refuse, shown

from .fields import (  # isort: skip
    COUNT, FLAG, FRACTION, ID, POSITIVE, SHARE, SIZE, STOPS, Kind, integer, is_list, is_number, number, only, present,
)  # fmt: skip
from .models import LIMITS

DEFAULT_LIMIT = 1024
"""New tokens at most of a request without a limit, as in transformers' server."""
MOST_WORDS, MOST_PHRASES = 1024, 64
"""Entries of a list of words at most, and entries with more than one token, each of which costs time in every step."""
NAME = "generation_config"


def _is_ids(value: Any) -> bool:
    return is_list(value, ID.accepts, MOST_WORDS)


def _is_words(value: Any) -> bool:
    if not is_list(value, _is_ids, MOST_WORDS):
        return False
    return sum(len(word) > 1 for word in value) <= MOST_PHRASES and sum(map(len, value)) <= 2 * MOST_WORDS


def _is_sequence_bias(value: Any) -> bool:
    pairs = is_list(value, lambda each: isinstance(each, list) and len(each) == 2)
    return pairs and _is_words([ids for ids, _ in value]) and all(BIAS.accepts(bias) for _, bias in value)


def _is_decay(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and SIZE.accepts(value[0]) and POSITIVE.accepts(value[1])


BIAS = number(-1e30, 1e30)
WORDS = f"at most {MOST_WORDS} lists of token ids, of which at most {MOST_PHRASES} have more than one"
IDS = Kind(_is_ids, f"a list of at most {MOST_WORDS} token ids")
ENDS = Kind(
    lambda value: integer(-1, (1 << 31) - 1).accepts(value) or _is_ids(value),
    f"a token id, a list of at most {MOST_WORDS}, or -1, which ends nothing",
)
WATERMARK = {
    "greenlist_ratio": SHARE, "bias": number(-100, 100), "hashing_key": SIZE, "context_width": integer(1, 64),
    "seeding_scheme": only("lefthash"),
}  # fmt: skip


def _is_watermark(value: Any) -> bool:
    return isinstance(value, dict) and all(
        each is None or (name in WATERMARK and WATERMARK[name].accepts(each)) for name, each in value.items()
    )


SHAPING = {
    "temperature": POSITIVE, "top_k": SIZE, "top_p": FRACTION, "top_h": FRACTION, "typical_p": FRACTION, "min_p": SHARE,
    "epsilon_cutoff": SHARE, "eta_cutoff": SHARE,
    "repetition_penalty": POSITIVE, "encoder_repetition_penalty": POSITIVE,
    "no_repeat_ngram_size": SIZE, "encoder_no_repeat_ngram_size": SIZE, "guidance_scale": number(-1e5, 1e5),
    "exponential_decay_length_penalty": Kind(_is_decay, "a list of an int and a factor above 0"),
    "bad_words_ids": Kind(_is_words, WORDS),
    "sequence_bias": Kind(_is_sequence_bias, f"a list of pairs of token ids and {BIAS.expected}, {WORDS}"),
    "suppress_tokens": IDS, "begin_suppress_tokens": IDS, "forced_bos_token_id": ID, "forced_eos_token_id": ENDS,
    "min_length": SIZE, "min_new_tokens": SIZE,
    "watermarking_config": Kind(_is_watermark, "an object of the settings of transformers' WatermarkingConfig"),
}  # fmt: skip
"""The settings that `generation_config` may have and that change scores."""
SERVED = SHAPING | {
    "max_length": COUNT, "max_new_tokens": COUNT,
    "max_time": Kind(lambda value: is_number(value) and 0 < value <= 1e9, "seconds, a number above 0"),
    "stop_strings": STOPS, "do_sample": FLAG, "renormalize_logits": FLAG, "remove_invalid_values": FLAG,
    "pad_token_id": ID, "bos_token_id": ID, "eos_token_id": ENDS,
}  # fmt: skip
"""All settings that it may have."""
NEUTRAL = {
    "num_beams": only(1), "num_beam_groups": only(1), "num_return_sequences": only(1), "use_cache": only(True),
    "length_penalty": only(1.0, 1), "diversity_penalty": only(0.0, 0), "early_stopping": only(False),
    "penalty_alpha": only(0.0, 0), "num_assistant_tokens_schedule": only("constant"),
} | dict.fromkeys(
    ("use_mtp", "token_healing", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
     "return_dict_in_generate", "low_memory", "is_assistant"), only(False)
)  # fmt: skip
"""Settings that are not served, with the values that change nothing."""
OF_IDS = (
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "pad_token_id",
    "bos_token_id", "eos_token_id", "bad_words_ids", "sequence_bias",
)  # fmt: skip
"""Settings that are token ids."""
SHAPING_FIELDS = (
    "logit_bias", "bad_words", "allowed_token_ids", "frequency_penalty", "presence_penalty", "min_tokens",
    "thinking_token_budget", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "tool_choice",
)  # fmt: skip
"""Fields of a request that change scores, too."""
NO_TOKEN = "with these settings no token is left that could be drawn; weaken them"
LISTS = ("stop_strings", "bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens")
"""Settings that count as not given if they are empty."""
ORIGIN = {"transformers_version", "_from_model_config", "_commit_hash"}
"""Entries of a model's generation_config.json that only name its origin."""


def read_config(text: str) -> dict:
    """The settings in the field `generation_config`, which is JSON, without its nulls; a refusal names the setting."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse(NAME, f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise refuse(NAME, "expected a text that is a JSON object")
    known = set(GenerationConfig().to_dict()) - ORIGIN
    absent = {name for name, value in values.items() if value is None or (name in LISTS and value in ("", [], {}))}
    settings = {name: value for name, value in values.items() if name not in ORIGIN | absent}
    for name, value in settings.items():
        if name not in known and name not in SERVED:
            raise refuse(f"{NAME}.{name[:80]}", f"unknown; there is no such setting.{did_you_mean(name[:80], known)}")
        kind = SERVED.get(name) or NEUTRAL.get(name) or only()
        if not kind.accepts(value):
            raise refuse(f"{NAME}.{name}", f"expected {kind.expected}, got {shown(value)}")
    return {name: value for name, value in settings.items() if name in SERVED}


def end_of(output: Output, fields: dict, death: str | None) -> Refusal:
    """The error for the client of a request that has ended by one, or was cancelled.

    fields: the request's, checked
    death: the reason for clients if the worker has died, or None
    """
    if death is not None:
        return Refusal(503, death)
    if output.error is None:
        return Refusal(500, "cancelled, because the client reads too slowly")
    if output.error_status is None:
        return Refusal(500, failed(output.error))
    if output.error != NO_PROBABILITIES:
        return Refusal(output.error_status, output.error, (output.error_field or "").partition(".")[0] or None)
    config = json.loads(fields[NAME]) if NAME in fields else {}
    names = [*present((*SHAPING, *SHAPING_FIELDS), fields), *(f"{NAME}.{name}" for name in present(SHAPING, config))]
    return refuse(", ".join(names), NO_TOKEN) if names else Refusal(500, failed(output.error))


def _of_fields(fields: dict) -> dict[str, tuple[str, Any]]:
    """For each setting of transformers that a field of OpenAI's or vLLM's sets, the field and the value."""
    settings: dict[str, tuple[str, Any]] = {}
    if "temperature" in fields:
        settings["do_sample"] = ("temperature", fields["temperature"] > 0)
        if fields["temperature"] > 0:
            settings["temperature"] = ("temperature", float(fields["temperature"]))
    for name in present(("top_p", "min_p", "repetition_penalty"), fields):
        settings[name] = (name, float(fields[name]))
    if "top_k" in fields:
        settings["top_k"] = ("top_k", max(0, fields["top_k"]))  # vLLM's -1 and 0 are transformers' 0: all tokens
    if "min_tokens" in fields:
        settings["min_new_tokens"] = ("min_tokens", fields["min_tokens"])
    for name in present(LIMITS, fields):
        settings["max_new_tokens"] = (name, fields[name])
    if "stop" in fields:
        settings["stop_strings"] = ("stop", fields["stop"])
    if "logit_bias" in fields:
        settings["sequence_bias"] = ("logit_bias", [[[int(key)], bias] for key, bias in fields["logit_bias"].items()])
    return settings


def _ends(fields: dict, values: dict, defaults: GenerationConfig, vocab: int) -> list[int] | int:
    """The setting `eos_token_id` of a request with `stop_token_ids` or `ignore_eos`.

    values: what `generation_config` has. The other arguments are as in `make_config`.

    With the model's end 2, `stop_token_ids: [7]` gives [2, 7], and [7] if `ignore_eos` is true as well.
    -1 ends nothing.
    """
    own: Any = values.get("eos_token_id", defaults.eos_token_id)
    if fields.get("ignore_eos"):
        if values.get("eos_token_id", -1) != -1:
            raise refuse("ignore_eos", f"{NAME}.eos_token_id says something else; give one of them")
        own = -1
    more = fields.get("stop_token_ids", [])
    if more:
        check_ids("stop_token_ids", more, vocab)
    own = own if isinstance(own, list) else [-1 if own is None else own]
    return [*dict.fromkeys([*(token for token in own if token >= 0), *more])] or -1


def make_config(fields: dict, defaults: GenerationConfig, vocab: int) -> tuple[GenerationConfig, str | None]:
    """The settings of a request, and the name of the field with the number of tokens that it wants, or None.

    fields: the request's, checked
    defaults: the model's
    vocab: number of the model's tokens

    Refusal that names the field for settings that are not served, or that contradict each other.
    """
    values = read_config(fields[NAME]) if NAME in fields else {}
    names = {setting: f"{NAME}.{setting}" for setting in values}
    limits = [names[setting] for setting in present(("max_new_tokens", "max_length"), values)]
    for setting, (field, value) in _of_fields(fields).items():
        if setting in values and values[setting] != value:
            raise refuse(field, f"{NAME}.{setting} says something else; give one of them")
        values[setting], names[setting] = value, field
        if field in LIMITS:
            limits = [field, *([f"{NAME}.max_length"] if "max_length" in values else [])]
    if len(limits) > 1:
        raise refuse(limits[0], f"{limits[1]} is a limit, too; give one of them")
    for setting in present(OF_IDS, values):
        check_ids(names[setting], values[setting], vocab, setting)
    check_ids("allowed_token_ids", fields.get("allowed_token_ids", [0]), vocab)
    if fields.get("stop_token_ids") or fields.get("ignore_eos"):
        values["eos_token_id"] = _ends(fields, values, defaults, vocab)
    if "sequence_bias" in values:
        pairs = values["sequence_bias"]
        values["sequence_bias"] = {tuple(ids): float(bias) for ids, bias in pairs}
        if len(values["sequence_bias"]) < len(pairs):
            raise refuse(names["sequence_bias"], "the same ids are there twice")
    return _completed(values, defaults, NAME in fields), limits[0] if limits else None


def forbid(config: GenerationConfig, words: list[str], tokenizer: Any) -> None:
    """Add vLLM's `bad_words` to a request's settings: each word as it begins a text, and as it goes on after a space.

    The words ["mad"] become the ids of "mad" and of " mad".
    """
    ids: list[list[int]] = []
    for word in words:
        first, spaced = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (word, f" {word.lstrip()}"))
        ids += [each for each in (first, spaced) if each and each not in ids]
    if ids:
        config.bad_words_ids = [*(config.bad_words_ids or []), *ids]


def _completed(values: dict, defaults: GenerationConfig, has_config: bool) -> GenerationConfig:
    """A config of these values. The model's own settings fill in the others, in the manager if not here."""
    try:
        if has_config:
            config = GenerationConfig(**values)
        else:
            config = copy.deepcopy(defaults)
            vars(config).update(values)
    except (ValueError, TypeError) as error:
        raise refuse(NAME, quoted(error)) from error
    config.use_cache = True
    if values.get("max_length") is not None:
        config.max_new_tokens = None
    elif config.max_new_tokens is None or "max_new_tokens" not in values:
        config.max_new_tokens = max(DEFAULT_LIMIT, config.max_new_tokens or 0)
    return config


def check_ids(field: str, value: Any, vocab: int, setting: str = "") -> None:
    """Refuse ids that the model does not have. setting: transformers', whose value this is"""
    words = (
        [ids for ids, _ in value] if setting == "sequence_bias" else value if setting == "bad_words_ids" else [value]
    )
    largest = max(max(word) if isinstance(word, list) else word for word in words)
    if largest >= vocab:
        raise refuse(field, f"token id {largest} is outside the vocabulary of {vocab} tokens")


class AllowedTokens(LogitsProcessor):
    """vLLM's `allowed_token_ids`: all other tokens have no probability. ids: below the number of the model's tokens"""

    def __init__(self, ids: list[int]):
        self.ids = ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [B, V] of the token after each row of `input_ids` [B, L]."""
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.ids] = scores[:, self.ids]
        return allowed


class CountPenalties(LogitsProcessor):
    """OpenAI's frequency_penalty and presence_penalty: lowers the scores of tokens that the answer has already.

    A token that occurs c > 0 times in the answer so far loses ``frequency * c + presence``. The prompt does not count.

    prompt_length: tokens of the prompt
    frequency, presence: from -2 to 2; negative values raise the scores
    """

    def __init__(self, prompt_length: int, frequency: float, presence: float):
        self.prompt_length, self.frequency, self.presence = prompt_length, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [B, V] of the token after each row of `input_ids` [B, L]."""
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, self.prompt_length :]):
            tokens, counts = torch.unique(ids, return_counts=True)
            scores[row, tokens] -= self.frequency * counts.to(scores.dtype) + self.presence
        return scores


BUDGET = "thinking_token_budget"


class ThinkingReader:
    """Makes the processors for vLLM's field `thinking_token_budget` of one model's requests.

    tokenizer: the model's. vocab_size: tokens of the model's logits.
    """

    def __init__(self, tokenizer: Any, vocab_size: int):
        self._tokenizer, self._marks, self._reason = tokenizer, ("", ""), ""
        try:
            self._marks = find_marks(tokenizer)
            marks = ThinkingBudget(tokenizer, 0, start=self._marks[0], end=self._marks[1]).marks
            if max(*marks.start_ids, *marks.end_ids) >= vocab_size:
                self._reason = f"the model does not have the tokens of {' and '.join(self._marks)}"
        except ValueError as error:
            self._reason = str(error)

    @property
    def is_able(self) -> bool:
        """True if the model thinks."""
        return not self._reason

    def processor(self, fields: dict, form: Any) -> Any:
        """The processor of a request; `form` if it has no budget. Refusal if the model does not think.

        fields: the request's, checked
        form: xgrammar's processor for the form of the answer, which begins after the thinking, or None
        """
        if BUDGET not in fields:
            return form
        if self._reason:
            raise refuse(BUDGET, f"{self._reason}; leave it out")
        start, end = self._marks
        return ThinkingBudget(self._tokenizer, fields[BUDGET], start=start, end=end, then=form)


# OpenAI's field `prediction`: a text that the client expects, which becomes a reference of its request.

NO_NGRAMS = (
    "the server drafts without n-grams, which copy from a prediction; start it with ngram=True, as in "
    """--options '{"ngram": true}', or leave the field out"""
)
PROMPT_END = 12
"""Tokens of the prompt's end that a reference begins with. So the first draft of an answer is the beginning of the
prediction: the prompt [.., 7, 8] and the prediction [1, 2] give [.., 7, 8, 1, 2], in which 1 follows the prompt's end.
"""
RUN = 3
"""Tokens in a row that an answer and a later place of a prediction must have in common, for the answer to go on there:
fewer are common by chance."""


def read_prediction(prediction: dict, requests: Any) -> list[int]:
    """The token ids of the field `prediction`, which is checked. Refusal if the server does not draft n-grams, no row
    can hold it, or the model does not know a token.

    requests: the server's `Requests`
    """
    content = prediction["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if not requests.has_ngrams:
        raise refuse("prediction", NO_NGRAMS)
    if len(text) > requests.most_characters:
        reason = f"expected at most {requests.most_characters} characters, because a row holds no more"
        raise refuse("prediction", reason)
    ids = requests.tokenizer(text, add_special_tokens=False)["input_ids"]
    check_ids("prediction", ids or [0], requests.embedded)
    return ids


def reference_of(prompt: list[int], prediction: list[int]) -> list[int]:
    """The reference of a request: see `PROMPT_END`."""
    return prompt[-PROMPT_END:] + prediction


def usage_details(prediction: list[int], answer: list[int], speculation: RequestSpeculation) -> dict[str, int]:
    """The field `completion_tokens_details` of a usage.

    prediction, answer: token ids
    speculation: the answer's figures
    """
    are_drafts: list[bool] = []
    for accepted, gained in zip(speculation.per_step_accepted, speculation.per_step_tokens):
        are_drafts += [number < accepted for number in range(gained)]  # the last one is the target's own
    accepted, missing = count_tokens(prediction, answer, are_drafts)
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": missing}


def count_tokens(prediction: list[int], answer: list[int], are_drafts: list[bool]) -> tuple[int, int]:
    """How many tokens of a prediction were accepted as drafts, and how many the answer does not have.

    are_drafts: for each token of the answer, True if it was drafted

    The answer follows the prediction token by token. After a token that differs it goes on at the same place, or at the
    nearest later one where its last `RUN` tokens are the prediction's. No token of the prediction counts twice.
    The prediction [1, 2, 3, 4, 5, 6, 7] and the answer [1, 2, 9, 3, 8, 5, 6, 7] have 1, 2, 3 and 7 in common.
    """
    runs: dict[tuple[int, ...], list[int]] = {}
    for end in range(RUN - 1, len(prediction)):
        runs.setdefault(tuple(prediction[end + 1 - RUN : end + 1]), []).append(end)
    place = accepted = common = 0
    for place_in_answer, token in enumerate(answer):
        if place == len(prediction):
            break
        if prediction[place] != token:
            ends = runs.get(tuple(answer[max(place_in_answer + 1 - RUN, 0) : place_in_answer + 1]), [])
            index = bisect_left(ends, place)
            if index == len(ends):
                continue
            place = ends[index]
        place, common = place + 1, common + 1
        accepted += place_in_answer < len(are_drafts) and are_drafts[place_in_answer]
    return accepted, len(prediction) - common
