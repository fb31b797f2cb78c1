"""vLLM's field `thinking_token_budget`, as a logits processor."""

from typing import Any

from ..runtime.accept.thinking import ThinkingBudget, find_marks
from .errors import refuse

FIELD = "thinking_token_budget"


class ThinkingReader:
    """Makes the processors of one model's requests.

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

    def processor(self, fields: dict, form: Any) -> Any:
        """The processor of a request; `form` if it has no budget. Refusal if the model does not think.

        fields: of the request, checked
        form: xgrammar's processor for the form of the answer, which begins after the thinking, or None
        """
        if FIELD not in fields:
            return form
        if self._reason:
            raise refuse(FIELD, f"{self._reason}; leave it out")
        start, end = self._marks
        return ThinkingBudget(self._tokenizer, fields[FIELD], start=start, end=end, then=form)
