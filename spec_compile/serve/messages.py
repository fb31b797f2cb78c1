"""Checks of messages, items of /v1/responses and tools, before transformers makes a prompt of them."""

import inspect
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer
from transformers import BatchEncoding
from transformers.cli.serving.utils import Modality
from transformers.utils.chat_template_utils import _compile_jinja_template, _get_template_variables

from .call import CURRENT
from .errors import refuse, shown
from .fields import ANY, FLAG, LIST, OBJECT, TEXT, Field, check_object, only
from .media import PARTS as PICTURES

TEXTS = ("text", "input_text", "output_text")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _is_json(value: Any, kind: type = object) -> bool:
    """True for a value of this kind, or JSON of one."""
    try:
        return isinstance(json.loads(value) if isinstance(value, str) else value, kind)
    except (ValueError, RecursionError):
        return False


ROLE = Field(lambda value: isinstance(value, str) and value in ROLES, f"one of {', '.join(ROLES)}")
CONTENT = Field(lambda value: isinstance(value, (str, list)), "a text or a list of parts")
ARGUMENTS = Field(lambda value: _is_json(value, dict), "a text that is a JSON object")
GAINED = Field(lambda value: isinstance(value, (str, dict)), "a text")
"""Arguments of a call of /v1/responses. The model has written them, and not always as an object."""
ADDRESS = Field(lambda value: isinstance(value, (str, dict)), "an address, or an object with it")
MESSAGE = {
    "role": ROLE,
    "content": CONTENT,
    "name": TEXT,
    "tool_calls": LIST,
    "tool_call_id": TEXT,
    "reasoning_content": TEXT,
    "annotations": only([]),
}
CALL = {"id": ANY, "type": ANY, "index": ANY, "function": OBJECT}
CALLED = {"name": TEXT, "arguments": ARGUMENTS}
TEXT_PART = {"type": TEXT, "text": TEXT} | dict.fromkeys(
    ("annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"), ANY
)
ITEM = {"type": ANY, "id": ANY, "status": ANY}
ITEMS = {
    "message": ITEM | {"phase": ANY, "role": ROLE, "content": CONTENT, "annotations": only([])},
    "function_call": ITEM | {"call_id": TEXT, "name": TEXT, "arguments": GAINED},
    "function_call_output": ITEM | {"call_id": TEXT, "output": CONTENT},
    "reasoning": ITEM | {"content": CONTENT, "summary": only([]), "encrypted_content": only()},
}
"""The fields of each type of item in `input`."""
REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The fields that an item of each type must have."""
TOOL = {"type": ANY, "function": OBJECT}
FUNCTION = {"type": ANY, "name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": FLAG}


def check_messages(messages: list, modality: Modality, path: str = "messages") -> list[dict]:
    """The messages of a chat without fields that are null. Refusal that names the place of a field that is not served.

    modality: of the model's inputs
    path: the client's name of the list
    """
    return [_check_message(each, modality, f"{path}[{index}]") for index, each in enumerate(messages)]


def _check_message(message: Any, modality: Modality, path: str) -> dict:
    fields = check_object(message, MESSAGE, ("role",), path)
    fields.pop("annotations", None)
    for index, call in enumerate(fields.get("tool_calls", [])):
        call_path = f"{path}.tool_calls[{index}]"
        called = check_object(call, CALL, ("function",), call_path)["function"]
        check_object(called, CALLED, CALLED, f"{call_path}.function")
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]  # transformers would leave out the content
    if "content" not in fields and "tool_calls" not in fields:
        raise refuse(f"{path}.content", f"expected {CONTENT.expected}; there is none")
    check_parts(fields.get("content", ""), modality, f"{path}.content")
    return fields


def check_parts(content: str | list, modality: Modality, path: str) -> None:
    """Refuse parts of a content that the model does not read."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        part_path = f"{path}[{index}]"
        OBJECT.check(part_path, part)
        part_type = part.get("type")
        TEXT.check(f"{part_path}.type", part_type)
        if part_type in TEXTS:
            check_object(part, TEXT_PART, ("text",), part_path)
        elif part_type in PICTURES and modality in (Modality.VLM, Modality.MULTIMODAL):
            _check_picture(part, part_path)
        else:
            reads = "only text" if modality is Modality.LLM else "text and pictures here, no videos and no sound"
            raise refuse(f"{part_path}.type", f"the model reads {reads}, got {shown(part_type)}")


def _check_picture(part: dict, path: str) -> None:
    """Refuse a picture with other fields than its address."""
    fields = check_object(
        part, {"type": TEXT, "image_url": ADDRESS, "detail": only("auto")}, ("type", "image_url"), path
    )
    if isinstance(fields["image_url"], dict):
        check_object(fields["image_url"], {"url": TEXT, "detail": only("auto")}, ("url",), f"{path}.image_url")


def check_input(items: str | list, modality: Modality, has_instructions: bool) -> str | list[dict]:
    """The field `input` of /v1/responses without nulls. Refusal as in `check_messages`.

    transformers reads reasoning before a message of the assistant, so an empty one is put between reasoning and a call.
    """
    if isinstance(items, str):
        return items
    for index, item in enumerate(items):
        OBJECT.check(f"input[{index}]", item)
    if "role" not in items[0] and items[0].get("type") not in ITEMS:  # parts of one message
        check_parts(items, modality, "input")
        return items
    checked = [_check_item(item, modality, f"input[{index}]") for index, item in enumerate(items)]
    if "role" not in checked[0]:
        raise refuse("input[0]", f"expected a message first, got an item of type {shown(checked[0].get('type'))}")
    if has_instructions and checked[0]["role"] == "system":
        raise refuse("instructions", "the input begins with a message of the system; give one of them")
    read: list[dict] = []
    for item, follower in zip(checked, [*checked[1:], {}]):
        read.append(item)
        if item.get("type") == "reasoning" and follower.get("role") != "assistant":
            read.append({"role": "assistant", "content": ""})
    return read


def _check_item(item: dict, modality: Modality, path: str) -> dict:
    item_type = item.get("type") or "message"
    if not isinstance(item_type, str) or item_type not in ITEMS:
        raise refuse(f"{path}.type", f"expected one of {', '.join(ITEMS)}, got {shown(item_type)}")
    fields = check_object(item, ITEMS[item_type], REQUIRED[item_type], path)
    if item_type == "reasoning":
        for index, part in enumerate(fields.get("content", [])):
            check_object(part, {"type": ANY, "text": TEXT}, ("text",), f"{path}.content[{index}]")
    else:
        name = "output" if item_type == "function_call_output" else "content"
        check_parts(fields.get(name, ""), modality, f"{path}.{name}")
    if item_type == "function_call" and not _is_json(fields["arguments"]):
        fields["arguments"] = json.dumps(fields["arguments"])  # transformers reads JSON; templates get the text again
    return fields


def check_tools(tools: list) -> None:
    """Refuse tools that are not functions. Chats and /v1/responses have a form each."""
    for index, tool in enumerate(tools):
        path, function = f"tools[{index}]", tool
        OBJECT.check(path, tool)
        only("function").check(f"{path}.type", tool.get("type"))
        if "function" in tool:
            function = check_object(tool, TOOL, ("function",), path)["function"]
            path += ".function"
        check_object(function, FUNCTION, ("name",), path)


def count_characters(value: Any) -> int:
    """The characters of all texts in decoded JSON."""
    total, level = 0, [value]
    while level:
        total += sum(len(each) for each in level if isinstance(each, str))
        containers = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return total


# `ChatText`: control tokens that clients write into a chat become text, and only the chat template writes such tokens.
#
# An ordinary request, in which no text has one, is rendered and encoded as transformers does it.

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
        texts = [*_texts(values)]
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
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        yield from value
        yield from _texts([*value.values()])


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
