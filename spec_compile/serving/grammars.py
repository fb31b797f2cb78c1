"""Fields that ask for an answer in a form: OpenAI's and vLLM's, as grammars of xgrammar, each compiled once."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import torch

from .body import DEEPEST, is_too_deep
from .errors import Refusal, refuse
from .fields import ANY, FLAG, OBJECT, TEXT, Field, check_object, present
from .schemas import has_finite_value

SECONDS = 2.0
"""Time that a grammar may take to be compiled."""
LONGEST_SPEC, MOST_OPEN, MOST_MEMORY = 1 << 15, 512, 64 << 20
"""Characters and opening brackets of a specification, and bytes of the compiled grammar."""
MOST_CHOICES, MOST_SPACES = 1024, 32
"""Texts to choose from, and characters of white space between two parts of JSON."""
KEPT, AT_ONCE = 32, 2
"""Compiled grammars that are kept, and grammars that are compiled at the same time."""
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields, and the kinds of `structured_outputs` that they are."""
FORM_FIELDS = ("response_format", "structured_outputs", *GUIDED)
TYPE = Field(lambda value: value in ("text", "json_object", "json_schema"), "text, json_object or json_schema")
FORMAT = {"type": TYPE, "json_schema": OBJECT}
NAMED = {"name": TEXT, "description": TEXT, "schema": OBJECT, "strict": FLAG}
KINDS = {"json": ANY, "regex": TEXT, "choice": ANY, "grammar": TEXT, "json_object": FLAG}
ANY_OBJECT = '{"type": "object"}'


def read_form(fields: dict) -> tuple[str, str, str] | None:
    """The field with the form that an answer shall have, the kind of its specification, and its text; None: free text.

    fields: of the request, without nulls

    The kinds are json (a schema), regex and grammar (EBNF). Refusal that names the field for a bad or large
    specification, and for more than one. For example ``{"guided_choice": ["a", "b"]}`` gives ``("guided_choice",
    "grammar", 'root ::= "a" | "b"')``.
    """
    forms = [form for name in present(FORM_FIELDS, fields) if (form := _form(name, fields[name])) is not None]
    if len(forms) > 1:
        raise refuse(forms[1][0], f"{forms[0][0]} asks for a form, too; give one of them")
    if not forms:
        return None
    check_size(forms[0][0], forms[0][2])
    return forms[0]


def check_size(field: str, text: str) -> None:
    """Refuse the text of a specification that is too large."""
    if len(text) > LONGEST_SPEC or sum(map(text.count, "([{")) > MOST_OPEN:
        reason = f"expected at most {LONGEST_SPEC} characters and {MOST_OPEN} opening brackets"
        raise refuse(field, f"{reason}, got {len(text)} characters; send a smaller one")


def _form(name: str, value: Any) -> tuple[str, str, str] | None:
    if name == "response_format":
        return _of_format(check_object(value, FORMAT, ("type",), name))
    if name in GUIDED:
        return _of_kind(name, GUIDED[name], value)
    given = check_object(value, KINDS, (), name)
    if len(given) > 1:
        raise refuse(name, f"{' and '.join(given)} are there; give one of them")
    for kind, each in given.items():
        return _of_kind(f"{name}.{kind}", kind, each)
    return None


def _of_format(value: dict) -> tuple[str, str, str] | None:
    if value["type"] == "json_schema":
        if "json_schema" not in value:
            raise refuse("response_format.json_schema", f"expected {OBJECT.expected}; there is none")
        path = "response_format.json_schema"
        named = check_object(value["json_schema"], NAMED, ("name", "schema"), path)
        return _of_kind(f"{path}.schema", "json", named["schema"])
    if "json_schema" in value:
        raise refuse("response_format.json_schema", "only the type json_schema has it; leave it out")
    return ("response_format", "json", ANY_OBJECT) if value["type"] == "json_object" else None


def _of_kind(path: str, kind: str, value: Any) -> tuple[str, str, str] | None:
    if kind == "json_object":
        return (path, "json", ANY_OBJECT) if value else None
    if kind == "choice":
        fits = isinstance(value, list) and 0 < len(value) <= MOST_CHOICES
        if not fits or not all(isinstance(each, str) and each for each in value):
            raise refuse(path, f"expected a list of 1 to {MOST_CHOICES} texts, none of them empty")
        return path, "grammar", "root ::= " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value)
    if kind == "json":
        return path, "json", read_schema(path, value)
    if not isinstance(value, str) or not value:
        raise refuse(path, "expected a text that is not empty")
    return path, kind, value


def read_schema(path: str, value: Any) -> str:
    """The text of a schema that is an object, or the text of one. Refusal if it is none, or no value of it ends."""
    try:
        schema = json.loads(value) if isinstance(value, str) and len(value) <= LONGEST_SPEC else value
    except (ValueError, RecursionError) as error:
        raise refuse(path, f"not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise refuse(path, f"expected a JSON schema of at most {LONGEST_SPEC} characters, an object")
    if is_too_deep(schema):
        raise refuse(path, f"expected at most {DEEPEST} lists and objects in each other, got more")
    if not has_finite_value(schema):
        raise refuse(path, "it cannot be compiled: every value of it has another one in it, without end")
    return json.dumps(schema)


class GrammarCache:
    """Compiles grammars for one model, and keeps the last ones.

    tokenizer: the model's
    vocab_size: tokens of the model's logits
    ends: token ids that end an answer, or None if the tokenizer knows them
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: int | list[int] | None):
        self.tokenizer, self.vocab_size, self.ends = tokenizer, vocab_size, ends
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock, self._free = threading.Lock(), threading.Semaphore(AT_ONCE)

    def processor(self, field: str, kind: str, text: str, parts: Sequence[tuple[str, str]] = ()) -> Any:
        """xgrammar's logits processor for one answer.

        field, kind, text: see `read_form`; kind may also be structural_tag
        parts: for each schema in the specification, the field that it is from and its text, to name the one at fault

        Refusal with status 501 if xgrammar is not installed, 400 if the grammar cannot be compiled within the bounds,
        and 503 if other grammars keep the threads for them busy.
        """
        try:
            from xgrammar.contrib.hf import LogitsProcessor
        except ImportError as error:
            reason = "the server needs xgrammar for it: pip install 'spec_compile[grammars]'"
            raise Refusal(501, f"{field}: {reason}", field.partition(".")[0]) from error
        return LogitsProcessor(self._find(field, kind, text, parts))

    def _find(self, field: str, kind: str, text: str, parts: Sequence[tuple[str, str]]) -> Any:
        key = kind, text
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        grammar = self._within_bounds(field, kind, text, parts)
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _within_bounds(self, field: str, kind: str, text: str, parts: Sequence[tuple[str, str]]) -> Any:
        """The compiled grammar. A thread that is too slow goes on, and does not keep the process from ending."""
        results: list[Any] = []
        begun = [field]
        info = self._info  # it is made once, which does not count

        def work() -> None:
            try:
                for path, schema in parts:
                    begun.append(path)
                    compile_grammar(bytes_info(), "json", schema)
                begun.append(field)
                results.append(compile_grammar(info, kind, text))
            except Exception as error:
                results.append(error)
            finally:
                self._free.release()

        if not self._free.acquire(timeout=SECONDS):
            raise Refusal(503, f"{field}: other grammars are being compiled; try again later", field, retries=True)
        thread = threading.Thread(target=work, name="spec_compile grammar", daemon=True)
        thread.start()
        thread.join(SECONDS)
        field = begun[-1]
        if not results:
            raise refuse(field, f"it takes more than {SECONDS:g} seconds to compile; send a smaller one")
        (result,) = results
        if isinstance(result, Exception):
            reason = re.sub(r"^\[.*?\] \S+:\d+: ", "", str(result)).strip()[:200]
            raise refuse(field, f"it cannot be compiled: {reason}") from result
        return result

    @cached_property
    def _info(self) -> Any:
        from xgrammar import TokenizerInfo

        return TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.vocab_size, stop_token_ids=self.ends)


@cache
def bytes_info() -> Any:
    """A vocabulary of one token for each byte, for which grammars are compiled at once."""
    from xgrammar import TokenizerInfo

    return TokenizerInfo([*(bytes([byte]) for byte in range(256)), b"</s>"], stop_token_ids=[256])


def compile_grammar(info: Any, kind: str, text: str) -> Any:
    """xgrammar's compiled grammar. ValueError if it is too large or allows no token, RuntimeError if it is wrong.

    info: xgrammar's TokenizerInfo
    kind, text: see `GrammarCache.processor`
    """
    from xgrammar import GrammarCompiler, GrammarMatcher

    compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if kind == "json":
        grammar = compiler.compile_json_schema(text, max_whitespace_cnt=MOST_SPACES)
    else:
        compilers = {"regex": compiler.compile_regex, "structural_tag": compiler.compile_structural_tag}
        grammar = compilers.get(kind, compiler.compile_grammar)(text)
    if grammar.memory_size_bytes > MOST_MEMORY:
        raise ValueError(f"it takes {grammar.memory_size_bytes} bytes, and may take {MOST_MEMORY}")
    bits = torch.zeros(1, -(-info.vocab_size // 32), dtype=torch.int32)
    GrammarMatcher(grammar).fill_next_token_bitmask(bits)
    if not bits.any():
        raise ValueError("it allows no first token")
    return grammar
