"""OpenAI's field `prediction`: a text that the client expects, which becomes a reference of its request."""

from bisect import bisect_left
from typing import Any

from ..batching.output import RequestSpeculation
from .errors import refuse
from .fields import TEXT, Field, check_object, only

PARTS = Field(lambda value: isinstance(value, (str, list)) and len(value) > 0, "a text or a list of parts, not empty")
PREDICTION = {"type": only("content"), "content": PARTS}
PART = {"type": only("text"), "text": TEXT}
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


def read_prediction(value: Any) -> str:
    """The text of the field. Refusal if it has another form than OpenAI's."""
    content = check_object(value, PREDICTION, PREDICTION, "prediction")["content"]
    if isinstance(content, str):
        return content
    parts = [check_object(part, PART, PART, f"prediction.content[{index}]") for index, part in enumerate(content)]
    return "".join(part["text"] for part in parts)


def tokenize(text: str, tokenizer: Any, most_characters: int, vocab_size: int) -> list[int]:
    """The token ids of a prediction. Refusal if no row can hold it, or the model does not know a token.

    most_characters: that a row can hold
    """
    if len(text) > most_characters:
        raise refuse("prediction", f"expected at most {most_characters} characters, because a row holds no more")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids and max(ids) >= vocab_size:
        raise refuse("prediction", f"token id {max(ids)} is outside the vocabulary of {vocab_size} tokens")
    return ids


def reference_of(prompt: list[int], prediction: list[int]) -> list[int]:
    """The reference of a request: see `PROMPT_END`."""
    return prompt[-PROMPT_END:] + prediction


def usage_details(prediction: list[int], answer: list[int], speculation: RequestSpeculation) -> dict[str, int]:
    """The field `completion_tokens_details` of a usage.

    prediction, answer: token ids
    speculation: of the answer
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
    for number, token in enumerate(answer):
        if place == len(prediction):
            break
        if prediction[place] != token:
            ends = runs.get(tuple(answer[max(number + 1 - RUN, 0) : number + 1]), [])
            index = bisect_left(ends, place)
            if index == len(ends):
                continue
            place = ends[index]
        place, common = place + 1, common + 1
        accepted += number < len(are_drafts) and are_drafts[number]
    return accepted, len(prediction) - common
