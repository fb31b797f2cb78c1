"""Fields that ask for an answer in a form: OpenAI's and vLLM's, as grammars of xgrammar, each compiled once."""

import json
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from ..runtime.verify.constraint import FIRST_SECONDS, SECONDS_A_STEP, STEP_SECONDS, given_up
from .body import DEEPEST, is_too_deep
from .call import MOST_IDLE
from .errors import Refusal, refuse
from .fields import is_list, present
from .grammar_judge import Judge, compile_grammar

SECONDS = 2.0
"""Time of a processor that a grammar may take to be compiled, in a child process that tries it first."""
LONGEST_SPEC, MOST_OPEN, MOST_CHOICES = 1 << 15, 512, 1024
"""Characters and opening brackets of a specification, and texts to choose from."""
KEPT, MOST_GIVEN_UP = 32, 2
"""Compiled grammars that are kept, and masks that take too long but still run."""
PATIENCE = 30.0
"""Seconds that a grammar waits for others that are compiled before."""
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields, and the kinds of `structured_outputs` that they are."""
FORM_FIELDS = ("response_format", "structured_outputs", *GUIDED)
ANY_OBJECT = '{"type": "object"}'
JUDGE = Judge()
"""The child process that tries grammars, for all models of this process."""


def read_form(fields: dict) -> tuple[str, str, str] | None:
    """The field with the form that an answer shall have, the kind of its specification, and its text; None: free text.

    fields: the request's, without nulls

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
    if name in GUIDED:
        return _of_kind(name, GUIDED[name], value)
    if name == "response_format":
        if value["type"] == "json_schema":
            return _of_kind("response_format.json_schema.schema", "json", value["json_schema"]["schema"])
        return (name, "json", ANY_OBJECT) if value["type"] == "json_object" else None
    if len(value) > 1:
        raise refuse(name, f"{' and '.join(value)} are there; give one of them")
    return next((_of_kind(f"{name}.{kind}", kind, each) for kind, each in value.items()), None)


def _of_kind(path: str, kind: str, value: Any) -> tuple[str, str, str] | None:
    if kind == "json_object":
        return (path, "json", ANY_OBJECT) if value else None
    if kind == "choice":
        if not is_list(value, lambda each: isinstance(each, str) and each, MOST_CHOICES):
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
    waits: a context in which other requests may use the caller's thread
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, ends: int | list[int] | None,
        waits: Callable[[], AbstractContextManager] = nullcontext,
    ):  # fmt: skip
        self.tokenizer, self.vocab_size, self.ends, self._waits = tokenizer, vocab_size, ends, waits
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock, self._turn, self._free = threading.Lock(), threading.Lock(), threading.Semaphore(MOST_IDLE)

    def processor(self, field: str, kind: str, text: str, parts: Sequence[tuple[str, str]] = ()) -> Any:
        """xgrammar's logits processor for one answer, which ends by a RequestError if its masks take too long.

        field, kind, text: see `read_form`; kind may also be structural_tag
        parts: for each schema in the specification, the field that it is from and its text, to name the one at fault

        Refusal with status 501 if xgrammar is not installed, 400 if the grammar cannot be compiled within the bounds,
        and 503 if too many other grammars wait.
        """
        try:
            from xgrammar.contrib.hf import LogitsProcessor
        except ImportError as error:
            reason = "the server needs xgrammar for it: pip install 'spec_compile[grammars]'"
            raise refuse(field, reason, 501) from error
        processor = LogitsProcessor(self._find(field, kind, text, parts))
        processor.field = field
        return processor

    def _find(self, field: str, kind: str, text: str, parts: Sequence[tuple[str, str]]) -> Any:
        key = kind, text
        if given_up() >= MOST_GIVEN_UP:
            raise _busy(field, "other grammars take too long")
        if (kept := self._look_up(key)) is not None:
            return kept
        if not self._free.acquire(blocking=False):
            raise _busy(field)
        try:
            with self._waits():
                if not self._turn.acquire(timeout=PATIENCE):
                    raise _busy(field)
                try:  # another request may have asked for the same
                    return self._look_up(key) or self._keep(key, self._within_bounds(field, kind, text, parts))
                finally:
                    self._turn.release()
        finally:
            self._free.release()

    def _look_up(self, key: tuple[str, str]) -> Any:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, key: tuple[str, str], grammar: Any) -> Any:
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _within_bounds(self, field: str, kind: str, text: str, parts: Sequence[tuple[str, str]]) -> Any:
        """The compiled grammar, which a child process has compiled and followed before."""
        fields = [*(path for path, _ in parts), field]
        jobs = [*(("json", schema) for _, schema in parts), (kind, text)]
        limits = {"step": STEP_SECONDS / 2, "first": FIRST_SECONDS / 2, "each": SECONDS_A_STEP}  # with a reserve
        try:
            verdict = JUDGE.ask(self._vocabulary, jobs, limits | {"seconds": SECONDS})
        except OSError as error:
            raise Refusal(
                503, f"{field}: grammars cannot be compiled now; try again later", field, retries=True
            ) from error
        if verdict is not None:
            number, reason = verdict
            reason = re.sub(r"^\[.*?\] \S+:\d+: ", "", reason).strip()[:200]
            raise refuse(fields[number], reason)
        return compile_grammar(self._info, kind, text)

    @cached_property
    def _info(self) -> Any:
        from xgrammar import TokenizerInfo

        return TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=self.vocab_size, stop_token_ids=self.ends)

    @cached_property
    def _vocabulary(self) -> str:
        """The path of a file with the vocabulary."""
        self._folder = tempfile.TemporaryDirectory(prefix="spec_compile_")
        path = Path(self._folder.name) / "vocabulary.json"
        path.write_text(self._info.serialize_json())
        return str(path)


def _busy(field: str, reason: str = "other grammars are being compiled") -> Refusal:
    return refuse(field, f"{reason}; try again later", 503, retries=True)


# JSON schemas that no text fits, because a value of them would have no end.


def has_finite_value(schema: dict) -> bool:
    """False if every value of a schema contains another value of it, without end.

    schema: nested at most `DEEPEST` deep

    For example ``{"$ref": "#"}`` has none, and neither has an object that requires a property with this schema. A list
    of itself has one, the empty list. Each round finds the references that end if those found before end.
    """
    targets = {each: _resolve(schema, each) for each in _references(schema)}
    ends = {each for each, target in targets.items() if target is None}  # a compiler names those that lead nowhere
    while more := {each for each in targets.keys() - ends if _ends(targets[each], ends)}:
        ends |= more
    return _ends(schema, ends)


def _references(node: Any) -> set[str]:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    own = {node["$ref"]} if isinstance(node, dict) and isinstance(node.get("$ref"), str) else set()
    return own.union(*map(_references, children))


def _resolve(schema: dict, reference: str) -> Any:
    """The part that "#/$defs/name" names, or None."""
    root, *names = reference.split("/")
    part: Any = schema if root == "#" else None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, dict) else None
    return part


def _ends(node: Any, ends: set[str]) -> bool:
    """True if a schema has a finite value, given the references that have one."""
    if not isinstance(node, dict) or "enum" in node or "const" in node:
        return True
    if isinstance(node.get("$ref"), str):
        return node["$ref"] in ends
    for name in ("anyOf", "oneOf"):
        if isinstance(node.get(name), list) and node[name]:
            return any(_ends(each, ends) for each in node[name])
    needed = list(node["allOf"]) if isinstance(node.get("allOf"), list) else []
    types = node.get("type", "object" if "properties" in node else "array")
    if types == "object" and isinstance(node.get("properties"), dict) and isinstance(node.get("required"), list):
        needed += [each for name, each in node["properties"].items() if name in node["required"]]
    if types == "array" and isinstance(node.get("minItems"), int) and node["minItems"] > 0:
        needed += [node.get("items")]
    return all(_ends(each, ends) for each in needed)
