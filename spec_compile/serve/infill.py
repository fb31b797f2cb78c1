"""Text between a prefix and a suffix: `suffix` of /v1/completions, and llama.cpp's /infill, which editors use."""

from collections.abc import Iterator
from typing import ClassVar

from .answers import ReadAnswer
from .call import HttpCall
from .endpoint import Generating, Stream, event
from .errors import refuse
from .fields import ANY, FLAG, LENGTH, LIST, SHARE, SIZE, STOPS, TEXT, number, record, wrong
from .infill_tokens import NO_MARKS, plain_ids
from .models import Sampling
from .prompts import count_characters


class InfillFields(Sampling):
    """POST /infill, by llama.cpp's names."""

    needed = ("input_prefix", "input_suffix")
    input_prefix: TEXT = None
    input_suffix: TEXT = None
    input_extra: list[record("filename", "text", filename=TEXT, text=TEXT)] = None
    prompt: TEXT = None
    n_predict: LENGTH = None
    top_k: SIZE = None
    min_p: SHARE = None
    repeat_penalty: number(1e-5, 1e5) = None
    presence_penalty: number(-2, 2) = None
    frequency_penalty: number(-2, 2) = None
    stop: STOPS = None
    n_indent: SIZE = None
    t_max_predict_ms: SIZE = None
    cache_prompt: FLAG = None
    id_slot: ANY = None
    samplers: LIST = None
    n_probs: SIZE = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        super()._check_all(values, context)
        for name in ("n_indent", "n_probs"):
            if values.get(name):
                raise wrong(name, "expected 0, because nothing else is served")


class InfillStream(Stream):
    """The events of an answer by llama.cpp's names."""

    def write(self, choice: HttpCall, item: str) -> str:  # type: ignore[override]
        return event({"index": 0, "content": item, "stop": False})

    def end(self, choice: HttpCall, is_last: bool) -> str:
        return event(self.endpoint.ended(choice, ""))


class Infill(Generating):
    """POST /infill."""

    fields, prompt_field, stream = InfillFields, "input_prefix", InfillStream
    names: ClassVar[dict[str, str]] = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}

    def _read(self, call: HttpCall, body: dict) -> dict:
        """The fields by the names of completions."""
        fields = super()._read(call, body)
        if self.requests.infill is None:
            raise refuse("input_prefix", NO_MARKS)
        for name, theirs in self.names.items():
            if theirs in fields:
                fields[name] = fields.pop(theirs)
        if fields.get("max_tokens", 0) == -1:
            del fields["max_tokens"]
        return fields | {"stop_token_ids": [*self.requests.infill.ends]}

    def _check(self, call: HttpCall) -> None:
        super()._check(call)
        names = ("input_prefix", "input_suffix", "input_extra", "prompt")
        self._check_size(count_characters([call.fields.get(name) for name in names]))

    def _prompts(self, call: HttpCall) -> Iterator[tuple[dict, str | None]]:
        fields, tokenizer = call.fields, self.requests.tokenizer
        files = fields.get("input_extra", [])
        ids = self.requests.infill.prompt(tokenizer, fields["input_prefix"], fields["input_suffix"], files)
        yield {"input_ids": ids + plain_ids(tokenizer, fields.get("prompt", ""))}, None

    def _whole(self, call: HttpCall, answers: list[ReadAnswer]) -> dict:
        return self.ended(call.choices[0], answers[0].content)

    def ended(self, choice: HttpCall, text: str) -> dict:
        """A complete answer, or the last event of a stream."""
        kind = "word" if choice.cut.found is not None else "limit" if choice.finish_reason == "length" else "eos"
        return {
            "index": 0, "content": text, "stop": True, "model": self._model(choice), "stop_type": kind,
            "stopping_word": choice.cut.found or "", "truncated": False, "tokens_evaluated": choice.prompt_length,
            "tokens_predicted": len(choice.output.generated_tokens),
            "tokens_cached": choice.output.speculation.reused_prompt_tokens,
        } | self.speculation([choice])  # fmt: skip
