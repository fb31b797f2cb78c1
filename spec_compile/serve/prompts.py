"""Checked messages as the chat template reads them, and `ChatText`: control tokens that clients write become text."""

import base64
import inspect
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer
from transformers import BatchEncoding
from transformers.utils.chat_template_utils import _compile_jinja_template, _get_template_variables

from .body import levels
from .call import CURRENT
from .errors import refuse
from .media import address_of
from .models import TEXTS

SYSTEM = ("system", "developer")
SEAL = "spec_compile:"
"""The beginning of reasoning that this server has sealed."""


def count_characters(value: Any) -> int:
    """The characters of all texts in decoded JSON."""
    return sum(len(each) for level in levels(value) for each in level if isinstance(each, str))


def messages_of(items: list[dict], instructions: str | None) -> list[dict]:
    """The messages of a chat for the checked items of /v1/responses.

    Reasoning belongs to the message or to the calls of the assistant after it, or else to an empty message. Calls
    belong to the message of the assistant before them. Instructions, and the messages of the system and of developers
    that the items begin with, are one message, because templates take one. So [reasoning, call, output] after "hi" are
    a user, an assistant with reasoning and a call, and a tool.
    """
    messages = [{"role": "system", "content": instructions}] if instructions else []
    thought: dict[str, str] = {}
    for item in [*items, {"type": "end"}]:
        kind = item.get("type", "message")
        if thought and not (kind == "message" and item["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""} | thought)
            thought = {}
        if kind == "reasoning":
            # Clients that were given it sealed may send back nothing else.
            text = text_of(item.get("content") or "") or unsealed(item.get("encrypted_content", ""))
            thought = {"reasoning_content": text}
        elif kind == "message" and item["role"] in SYSTEM and messages and messages[-1]["role"] in SYSTEM:
            messages[-1]["content"] = "\n\n".join(text_of(each["content"]) for each in (messages[-1], item))
        elif kind == "message":
            messages.append({"role": item["role"], "content": item["content"]} | thought)
            thought = {}
        elif kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            arguments = item["arguments"] if kind == "function_call" else {"input": item["input"]}
            space = f"{item['namespace']}." if "namespace" in item else ""
            function = {"name": space + item["name"], "arguments": arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "function": function})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    return messages


def text_of(content: str | list[dict]) -> str:
    """The text of a message's content. Refusal for a picture among the texts of the system."""
    if isinstance(content, str):
        return content
    if any("text" not in part for part in content):
        raise refuse("input", "messages of the system have only text here")
    return "".join(part["text"] for part in content)


def sealed(text: str) -> str:
    """A text in the form of `encrypted_content`, which clients keep and do not read. It is not compressed, so that
    the size of a body bounds what comes out of it."""
    return SEAL + base64.b64encode(text.encode()).decode()


def unsealed(content: str) -> str:
    """The text of `sealed`; "" if another server has sealed it, because nobody here can read it."""
    if not content.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEAL), validate=True).decode()
    except ValueError as error:
        raise refuse("input", "encrypted_content: expected what this server has sent, got something else") from error


def for_template(messages: list[dict], joins_texts: bool, knows_developers: bool, pictures: dict) -> list[dict]:
    """Messages of a chat as variables of a chat template.

    joins_texts: True if the content of a message is one text, False if it is a list of parts
    knows_developers: False if a developer is the system to the template
    pictures: by their names, which stand for their addresses in `messages`
    """
    made = []
    for message in messages:
        role, content = message["role"], message.get("content") or []
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [_part(part, pictures) for part in content]
        variables = {
            "role": "system" if role == "developer" and not knows_developers else role,
            "content": " ".join(part["text"] for part in parts) if joins_texts else parts,
        }
        if "tool_calls" in message:
            variables["tool_calls"] = [*map(_read_call, message["tool_calls"])]
        kept = ("tool_call_id", "name", "reasoning_content")
        made.append(variables | {name: message[name] for name in kept if name in message})
    return made


def _part(part: dict, pictures: dict) -> dict:
    if part["type"] in TEXTS:
        return {"type": "text", "text": part["text"]}
    return {"type": "image", "image": pictures[address_of(part)]}


def _read_call(call: dict) -> dict:
    """A call whose arguments are an object, which templates go through. Text that is no JSON stays."""
    if "custom" in call:
        custom = call["custom"]
        return {"id": call.get("id"), "function": {"name": custom["name"], "arguments": {"input": custom["input"]}}}
    function = call["function"]
    arguments = function["arguments"] or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        pass
    return call | {"function": function | {"arguments": arguments}}


# `ChatText`: only the chat template writes control tokens. An ordinary request, in which no text has one, is rendered
# and encoded as transformers does it.

RENDERED = {"messages", "tools", "add_generation_prompt", "load_audio_from_video"}
"""Variables of a chat template that are fields of a request, or that transformers sets."""
PRIVATE, NAMES = range(0xE000, 0xF8FF), chr(0xF8FF)
"""Characters without a meaning: those that may break the control tokens in texts, and the beginning of secret names."""
PLACEHOLDERS = (
    "<|placeholder|>", "<placeholder>", "<|image_placeholder|>", "<|video_placeholder|>", "<|audio_placeholder|>",
)  # fmt: skip
"""Texts that processors of transformers write for the tokens of a picture, until they have all of them."""


class ChatText:
    """Tells the control tokens of a chat template from their text in what clients send.

    variables: names that the template reads and that clients may give; others would go to the processor

    A control token is a special token, or another added token that the template writes. Clients' copies are broken by
    a private character before the template is rendered. The rest are the template's. The text is then encoded by a
    tokenizer that has all tokens but these, which have secret names there.
    """

    @classmethod
    def of(cls, processor: Any) -> "ChatText":
        """The object of a model's processor or tokenizer, and of the chat template that it has now.

        It replaces the tokenizer's method `_encode_plus`, so that processors encode by it, too.
        """
        tokenizer = getattr(processor, "tokenizer", processor)
        if not isinstance(tokenizer, _OfClients):
            original = type(tokenizer)
            tokenizer.__class__ = type(original.__name__, (_OfClients, original), {"chat_text": None})
        if tokenizer.chat_text is None or tokenizer.chat_text.template != processor.chat_template:
            tokenizer.chat_text = cls(processor)
        return tokenizer.chat_text

    def __init__(self, processor: Any):
        self.tokenizer, self.template = getattr(processor, "tokenizer", processor), processor.chat_template
        literals, variables = _read_templates(processor)
        added = self._added = self.tokenizer._tokenizer.get_added_tokens_decoder()
        places = {
            value for name, value in vars(processor).items() if name.endswith("_token") and isinstance(value, str)
        }
        special = {token.content for token in added.values() if token.special} | places | {*PLACEHOLDERS}
        written = {token.content for token in added.values() if token.content in literals}
        self._control = {text for text in special | written if not text.isspace()}
        self._texts = {index: token.content for index, token in added.items() if token.content in self._control}
        self._all, self._special = _any_of(self._control), _any_of(special)
        self._begins = {text[:end] for text in self._control for end in range(1, len(text))}
        self._is_normalized = any(token.normalized for token in added.values() if token.content in self._control)
        reserved = RENDERED | inspect.signature(processor.apply_chat_template).parameters.keys()
        self.variables = variables - reserved - self.tokenizer.special_tokens_map.keys()

    def sign(self, *values: Any) -> str:
        """A character that breaks control tokens, or "" if these values, of decoded JSON, have none.

        Refusal if the values have all private characters.
        """
        texts = [*_texts([*values])]
        if not any(map(self._is_suspect, texts)):
            return ""
        used = set().union(*texts)
        sign = next((chr(code) for code in PRIVATE if chr(code) not in used), None)
        if sign is None:
            raise refuse("messages", "the request has all characters of Unicode's private use area; leave some out")
        return sign

    def _is_suspect(self, text: str) -> bool:
        if self._all.search(text) or self._open(text):
            return True
        normalizer = self.tokenizer._tokenizer.normalizer if self._is_normalized else None
        return normalizer is not None and self._all.search(normalizer.normalize_str(text)) is not None

    def _open(self, text: str) -> int:
        """The place after the beginning of a control token that ends the text, white space aside, or 0.

        A template may write another text next to it, without anything between.
        """
        ending = text.rstrip()
        is_open = any(ending[-size:] in self._begins for size in range(1, 1 + min(len(ending), self._longest)))
        return len(ending) if is_open else 0

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._begins), default=0)

    def broken(self, value: Any, sign: str, is_assistants: bool = False) -> Any:
        """Decoded JSON whose texts, names in objects included, have no whole control token.

        is_assistants: True for what the model may have written: then tokens that are not special, such as <think> and
        <tool_call>, stay as they are, because templates look for them
        """
        if isinstance(value, str):
            end, tokens = self._open(value), self._special if is_assistants else self._all
            value = f"{value[:end]}{sign}{value[end:]}" if end else value  # guard: joined-control-tokens
            return _split(tokens, value, sign)
        if isinstance(value, list):
            return [self.broken(each, sign, is_assistants) for each in value]
        if isinstance(value, dict):
            tokens = self._special if is_assistants else self._all
            return {_split(tokens, name, sign): self.broken(each, sign, is_assistants) for name, each in value.items()}
        return value

    def broken_message(self, message: dict, sign: str) -> dict:
        """`broken` for a message of a chat template, whose role and types of parts are those that the server knows."""
        made = self.broken(message, sign, message["role"] == "assistant") | {"role": message["role"]}
        if isinstance(message["content"], list):
            made["content"] = [part | {"type": old["type"]} for part, old in zip(made["content"], message["content"])]
        return made

    @cached_property
    def _second(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """A tokenizer with other names of control tokens, these names, and its ids of added tokens with the right ones.

        It shares the vocabulary.
        """
        original, secret = self.tokenizer._tokenizer, f"{NAMES}{secrets.token_hex(8)}"
        names = {text: f"{secret}.{index}." for index, text in self._texts.items()}
        second = Tokenizer(original.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(original, part) is not None:
                setattr(second, part, getattr(original, part))
        tokens = {}
        for index, token in sorted(self._added.items()):
            tokens[index] = AddedToken(
                names.get(token.content, token.content), single_word=token.single_word, lstrip=token.lstrip,
                rstrip=token.rstrip, normalized=token.normalized, special=token.special,
            )  # fmt: skip
        second.add_tokens([*tokens.values()])
        return second, names, {second.token_to_id(token.content): index for index, token in tokens.items()}

    def encode(self, text: str, sign: str) -> list[int]:
        """The ids of a rendered chat. sign: breaks the control tokens that the client has written

        Refusal if the vocabulary itself has a control token, so that its text is the token.
        """
        second, names, ids = self._second
        whole = self.tokenizer._tokenizer.encode(text, add_special_tokens=False)
        parts, end = [], 0
        for token, (start, stop) in zip(whole.ids, whole.offsets):
            written = self._texts.get(token)
            if written is not None and written in text[start:stop]:  # else a normaliser has made it of the client's
                parts += text[end:start], text[start:stop].replace(written, names[written])  # white space stays
                end = stop
        named = "".join([*parts, text[end:]]).replace(sign, "")
        found = [ids.get(token, token) for token in second.encode(named, add_special_tokens=False).ids]
        if sum(token in self._texts for token in found) != len(parts) // 2:
            reason = "this tokenizer cannot tell the text of a control token from the token; leave out such texts"
            raise refuse(CURRENT.get().prompt_field, reason)
        return found


def _read_templates(processor: Any) -> tuple[str, set[str]]:
    """The texts that the chat templates write, and the variables that they read and do not set."""
    templates = getattr(processor, "chat_template", None) or {}
    templates = templates.values() if isinstance(templates, dict) else [templates]
    literals, variables = [], set()
    for template in map(str, templates):
        try:
            environment = _compile_jinja_template(template).environment
            nodes = environment.parse(template)
            variables |= _get_template_variables(template) - environment.globals.keys()
        except jinja2.TemplateError:  # requests get the reason
            continue
        literals += [node.data for node in nodes.find_all(jinja2.nodes.TemplateData)]
        literals += [node.value for node in nodes.find_all(jinja2.nodes.Const) if isinstance(node.value, str)]
    return "\0".join(literals), variables


def _texts(value: Any) -> Iterator[str]:
    """All texts of decoded JSON, names in objects included."""
    for each in chain.from_iterable(levels(value)):
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from each


def _split(tokens: re.Pattern, text: str, sign: str) -> str:
    """A text with a sign after the first character of each of these tokens."""
    return tokens.sub(lambda match: match[0][0] + sign + match[0][1:], text)


def _any_of(words: Iterable[str]) -> re.Pattern:
    """A pattern of any of these words, the longest one first; of none, it finds nothing. Words share their beginnings,
    so that a search takes time for the characters of a text, and not for each word."""
    root: dict[str, dict] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict) -> str:
        ends = [f"{re.escape(character)}{pattern(after)}" for character, after in node.items() if character]
        inner = ends[0] if len(ends) == 1 and "" not in node else f"(?:{'|'.join(ends)})" if ends else ""
        return f"{inner}?" if ends and "" in node else inner

    return re.compile(pattern(root) if root else "(?!)")


class _OfClients:
    """A mixin for a tokenizer, before its class: the prompt of a call with a sign is encoded by its `ChatText`."""

    chat_text: Any

    def _encode_plus(self, text: Any, *args: Any, **options: Any) -> BatchEncoding:
        call = CURRENT.get(None)
        if call is None or not call.sign or call.is_prepared:
            return super()._encode_plus(text, *args, **options)
        before, after = _bounds(self._tokenizer) if options.get("add_special_tokens", True) else ([], [])
        several = [text] if isinstance(text, str) else text
        ids = [before + self.chat_text.encode(each, call.sign) + after for each in several]
        made = {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}
        return BatchEncoding({name: rows[0] for name, rows in made.items()} if isinstance(text, str) else made)


def _bounds(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer adds before and after a text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    start = next(place for place in range(len(whole)) if whole[place : place + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]
