"""Answers in a form: JSON of a schema, texts of a regex, a choice or a grammar; equal with drafts and without."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import pbkdf2_hmac

import pytest
from server_fixtures import CHATS, COMPLETIONS, DEMO, ask, body, refusal, save_whole
from sweeps import thinned
from transformers import AutoTokenizer

from spec_compile.errors import RequestError
from spec_compile.runtime.verify import constraint
from spec_compile.serve import grammars
from spec_compile.serve.errors import Refusal
from spec_compile.serve.grammars import GrammarCache

NAME = {"type": "string", "maxLength": 8}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4}
SCHEMAS = [
    {"type": "object", "properties": {"name": NAME, "values": NUMBERS}, "required": ["name", "values"]},
    {"type": "array", "items": {"enum": ["red", "green", 3, None]}, "minItems": 2, "maxItems": 5},
    {"type": "object", "properties": {"inner": {"type": "object", "properties": {"flag": {"type": "boolean"}},
                                                "required": ["flag"]}}, "required": ["inner"]},
    {"$defs": {"name": NAME}, "type": "array", "items": {"$ref": "#/$defs/name"}, "minItems": 1, "maxItems": 3},
]  # fmt: skip


def is_name(value):
    return isinstance(value, str) and len(value) <= 8


CHECKS = [
    lambda value: value.keys() == {"name", "values"} and is_name(value["name"]) and len(value["values"]) <= 4
    and all(type(each) is int and 0 <= each <= 99 for each in value["values"]),
    lambda value: 2 <= len(value) <= 5 and all(each in ("red", "green", 3, None) for each in value),
    lambda value: value.keys() == {"inner"} and [*map(type, value["inner"].values())] == [bool],
    lambda value: 1 <= len(value) <= 3 and all(map(is_name, value)),
]  # fmt: skip
"""For each schema, True for a value that it allows."""
SAMPLINGS = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 20, "seed": 8}]


SAVE = save_whole
SERVER = dict(slots=4)


@pytest.fixture(scope="module")
def client(client):
    pytest.importorskip("xgrammar")
    return client


def answers(client, path=CHATS, limit=700, **fields):
    """The text with drafts, which is that without drafts."""
    prompt = 'default = {"name": "mean", "values": [1, 2, 3]}\nresult = '
    found = [ask(client, path, prompt, limit, **fields, **extra) for extra in ({}, {"speculation": False})]
    assert found[0].text == found[1].text and [each.reason for each in found] == ["stop"] * 2, found
    return found[0].text


@pytest.mark.parametrize("number, sampling", thinned(3, range(len(SCHEMAS)), SAMPLINGS))
def test_answers_are_json_of_the_schema(client, number, sampling):
    schema, fits = SCHEMAS[number], CHECKS[number]
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    text = answers(client, **sampling, response_format=named)
    assert fits(json.loads(text)), text
    for fields in (
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
    ):
        assert answers(client, **sampling, **fields) == text
    assert fits(json.loads(answers(client, COMPLETIONS, **sampling, guided_json=schema)))


def test_answers_with_penalties_have_the_form_too(client):
    text = answers(client, temperature=0, guided_json=SCHEMAS[0], frequency_penalty=1.5, repetition_penalty=1.2)
    assert CHECKS[0](json.loads(text)), text


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=json.dumps)
def test_answers_match_a_regex_a_choice_or_a_grammar(client, sampling):
    cases = {
        "regex": (r"[a-c]{2,6}-\d{3}", lambda text: re.fullmatch(r"[a-c]{2,6}-\d{3}", text)),
        "choice": (['say "é"\n', "no", "😀"], lambda text: text in ('say "é"\n', "no", "😀")),
        "grammar": ('root ::= "(" root ")" | "x"', lambda text: re.fullmatch(r"\(*x\)*", text)),
    }
    for kind, (spec, fits) in cases.items():
        if kind == "grammar" and sampling["temperature"] == 0:
            spec = 'root ::= "(" inner ")"\ninner ::= "x" | "y"'
            fits = ("(x)", "(y)").__contains__
        for path in (CHATS, COMPLETIONS):
            text = answers(client, path, **sampling, **{f"guided_{kind}": spec})
            assert fits(text), text
            assert answers(client, path, **sampling, structured_outputs={kind: spec}) == text
    with_null = {"choice": ["only this"], "regex": None}
    assert answers(client, structured_outputs=with_null) == "only this"
    for word in ("😀", "a\tb\\c/'d'", "\b\f\x01"):
        assert answers(client, guided_choice=[word]) == word


def test_an_object_of_any_names(client):
    text = answers(client, temperature=1.0, seed=1, response_format={"type": "json_object"}, limit=1200)
    assert isinstance(json.loads(text), dict)


def test_a_form_of_free_text_changes_nothing(client):
    plain = ask(client, CHATS, limit=8)
    for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}):
        assert ask(client, CHATS, limit=8, **fields).text == plain.text


def test_forms_that_cannot_be_compiled_are_refused_by_their_field(client):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strange"}}}
    for name, value in (
        ("response_format", schema), ("guided_json", {"$ref": "#/nowhere"}), ("guided_json", {"$ref": "#"}),
        ("guided_regex", "(a"), ("guided_grammar", "root ::= nothing"), ("structured_outputs", {"regex": "(a"}),
    ):  # fmt: skip
        assert "cannot be compiled" in refusal(client.post(CHATS, json=body(CHATS) | {name: value}), name)


@pytest.fixture
def cache():
    return GrammarCache(AutoTokenizer.from_pretrained(DEMO), 4096, None)


def test_a_grammar_is_compiled_once_and_the_oldest_is_dropped(cache, monkeypatch):
    pytest.importorskip("xgrammar")
    compiled, compile_grammar = [], grammars.compile_grammar
    monkeypatch.setattr(grammars, "KEPT", 2)
    monkeypatch.setattr(grammars, "compile_grammar", lambda *args: compiled.append(args[2]) or compile_grammar(*args))
    processors = [cache.processor("f", "regex", text) for text in ("a", "b", "a", "c", "a", "b")]
    assert compiled == ["a", "b", "c", "b"]
    assert len({*map(id, processors)}) == 6  # one for each answer


MANY = {f"p{number}": {"type": "string"} for number in range(500)}
SLOW = [
    ("regex", "(.*)*" * 100), ("regex", "(((((a?){99}){99}){99}){99}){99}"), ("regex", "[a-z]{20}" + "(.*)*" * 400),
    ("json", json.dumps({"type": "object", "minProperties": 400, "properties": MANY})),
    ("json", json.dumps({"type": "object", "properties": {"a": {"type": "string", "pattern": "(.*)*" * 100}}})),
    ("grammar", "root ::= " + "\n".join(
        f'r{n} ::= r{(n + 1) % 20} r{(n * 7 + 3) % 20} | [a-z] r{(n + 5) % 20} | ""' for n in range(20)
    ).replace("r0 ::=", "r0\nr0 ::=", 1)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), SLOW, ids=range(len(SLOW)))
def test_a_grammar_that_takes_long_is_refused_and_others_go_on(cache, monkeypatch, kind, text):
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(grammars, "SECONDS", 0.5)
    with pytest.raises(Refusal, match=r"guided_x: it takes (too long to follow|more than)") as caught:
        cache.processor("guided_x", kind, text)
    assert caught.value.status_code == 400 and caught.value.param == "guided_x"
    cache.processor("guided_x", "regex", "[a-z]+")


@pytest.mark.parametrize("streams", [False, True])
def test_a_grammar_that_becomes_slow_ends_its_own_request(client, monkeypatch, streams):
    """The child process may have missed it."""
    plain = ("a mean of", 40)
    answer = ask(client, COMPLETIONS, *plain, temperature=0).text
    monkeypatch.setattr(grammars.Judge, "ask", lambda *args: None)
    monkeypatch.setattr(constraint, "STEP_SECONDS", 0.05)
    slow = body(COMPLETIONS, "x", 300, temperature=0, ignore_eos=True, stream=streams, guided_regex="(.*)*" * 200)
    with ThreadPoolExecutor() as pool:
        response = pool.submit(client.post, COMPLETIONS, json=slow)
        assert ask(client, COMPLETIONS, *plain, temperature=0).text == answer
        response = response.result()
    assert response.status_code == (200 if streams else 400), response.text
    assert "guided_regex: its grammar takes too long to follow" in response.text
    assert ask(client, COMPLETIONS, *plain, temperature=0).text == answer


class Burns:
    """A matcher whose step takes a second of a processor, without the interpreter."""

    def accept_token(self, token):
        return pbkdf2_hmac("sha256", b"", b"", 1_500_000) is None


def test_steps_of_a_matcher_have_a_deadline(cache, monkeypatch):
    pytest.importorskip("xgrammar")
    for thread in [*constraint._given_up]:  # of other tests
        thread.join(60)
    matcher = constraint.TimedConstraint(Burns, "guided_regex")
    for _ in range(2):
        with pytest.raises(RequestError, match="guided_regex: its grammar takes too long") as caught:
            matcher.accept_token(0)
    assert caught.value.field == "guided_regex" and constraint.given_up() == 1
    monkeypatch.setattr(grammars, "MOST_GIVEN_UP", 1)
    with pytest.raises(Refusal, match="other grammars take too long") as caught:
        cache.processor("guided_regex", "regex", "a")
    assert caught.value.status_code == 503
    for thread in [*constraint._given_up]:
        thread.join(60)
    assert constraint.given_up() == 0 and cache.processor("guided_regex", "regex", "a")
    matcher = constraint.TimedConstraint(list, "guided_regex")
    with pytest.raises(AttributeError):
        matcher.accept_token(0)


def test_without_xgrammar_the_reason_says_what_to_install(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar.contrib.hf", None)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(Refusal, match="xgrammar") as caught:
        cache.processor("structured_outputs.json", "json", "{}")
    assert caught.value.status_code == 501 and caught.value.param == "structured_outputs"
    assert "pip install" in caught.value.detail
