"""The fields of OpenAI's dialects, as pydantic models: messages, items, tools, and the endpoints."""

from typing import Annotated, Any

from pydantic import FailFast, WrapValidator

from ..batching.output import MOST_TOP
from .errors import shown

from .fields import (  # isort: skip
    ANY, BIASES, CHOICE, COUNT, EFFORT, ENDS, FLAG, FRACTION, IDS, INCLUDED, LENGTH, LIST, MOST_CHOICES, OBJECT,
    POSITIVE, PROMPTS, SALT, SCHEMA, SHARE, SIZE, SOME_MESSAGES, SPECULATION, STOPS, SUMMARY, TEMPERATURE, TEXT,
    VERBOSITY, WORDS, Fields, Kind, integer, is_json_object, number, one_of, only, present, record, text_or, wrong,
)  # fmt: skip
from .media import PARTS as PICTURES
from .tools import HOSTED, HOSTED_ITEMS

# Messages, items and tools.

TEXTS = ("text", "input_text", "output_text", "reasoning_text")
ROLE = one_of("system", "developer", "user", "assistant", "tool", "function")
NEEDED = {
    "message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"), "reasoning": (),
    "custom_tool_call": ("call_id", "name", "input"), "custom_tool_call_output": ("call_id", "output"),
}  # fmt: skip
"""The types of items in `input`, and the fields that each must have."""


def _address(value: Any, handler: Any) -> Any:
    return value if isinstance(value, str) else handler(value)


class MessagePart(Fields):
    """A part of a message: a text or a picture, in the forms of chats and of /v1/responses."""

    needed = ("type",)
    type: TEXT = None
    text: TEXT = None
    annotations: ANY = None
    image_url: Annotated[record("url", url=TEXT, detail=only("auto")), WrapValidator(_address)] = None
    detail: only("auto") = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        pictures = context.get("pictures", False)
        if values["type"] in TEXTS:
            cls.need(values, "text")
        elif values["type"] in PICTURES and pictures:
            cls.need(values, "image_url")
        else:
            reads = "text and pictures here, no videos and no sound" if pictures else "only text"
            raise wrong("type", f"the model reads {reads}, got {shown(values['type'])}")


ARGUMENTS = Kind(lambda value: value == "" or is_json_object(value), "a text that is a JSON object")


class CalledTool(Fields):
    """A call that the assistant has made: of a function, or of a custom tool."""

    id: ANY = None
    type: ANY = None
    index: ANY = None
    function: record("name", "arguments", name=TEXT, arguments=ARGUMENTS) = None
    custom: record("name", "input", name=TEXT, input=TEXT) = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if "custom" not in values:
            cls.need(values, "function")


Content = Annotated[list[MessagePart], FailFast(), text_or("a text or a list of parts")]


class Message(Fields):
    """A message of a chat."""

    needed, empty = ("role",), {"tool_calls": ([],)}
    role: ROLE = None
    content: Content = None
    name: TEXT = None
    tool_calls: list[CalledTool] = None
    tool_call_id: TEXT = None
    reasoning_content: TEXT = None
    annotations: only([]) = None
    audio: only() = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if "content" not in values and "tool_calls" not in values:
            raise wrong("content", "expected a text or a list of parts; there is none")


Messages = Annotated[list[Message], FailFast(), SOME_MESSAGES]


class Item(Fields):
    """An item of `input`: a message, a call, its result, or reasoning."""

    hosted = "items", HOSTED_ITEMS

    type: one_of(*NEEDED) = None
    id: ANY = None
    status: ANY = None
    phase: ANY = None
    role: ROLE = None
    content: Content = None
    annotations: only([]) = None
    call_id: TEXT = None
    name: TEXT = None
    namespace: TEXT = None
    arguments: Kind(lambda value: isinstance(value, (str, dict)), "a text") = None
    input: TEXT = None
    output: Content = None
    summary: LIST = None
    encrypted_content: TEXT = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        for name in NEEDED[values.get("type", "message")]:
            cls.need(values, name)


def _as_items(value: Any, handler: Any) -> Any:
    """Items; parts without a role are one message of the user."""
    first = value[0] if isinstance(value, list) and value else None
    is_item = isinstance(first, dict) and ("role" in first or any(first.get("type") == each for each in NEEDED))
    return handler([{"role": "user", "content": value}] if isinstance(first, dict) and not is_item else value)


Items = Annotated[
    list[Item], FailFast(), WrapValidator(_as_items), text_or("a text or a list, not empty", is_empty_served=False)
]


Function = record("name", type=ANY, name=TEXT, description=TEXT, parameters=OBJECT, strict=FLAG)
Grammar = record("syntax", "definition", syntax=one_of("lark", "regex"), definition=TEXT)
FreeText = record(
    "type", type=one_of("text", "grammar"), syntax=one_of("lark", "regex"), definition=TEXT, grammar=Grammar
)
CustomTool = record("name", name=TEXT, description=TEXT, format=FreeText)
"""A tool that takes free text, which may have to follow a grammar."""


class SingleTool(Function, CustomTool):
    """A tool: its function is an object within it in chats, and its fields are there in /v1/responses."""

    needed, hosted = ("type",), ("tools", HOSTED)
    type: Kind(
        lambda value: value in ("function", "custom", "namespace"),
        "function, custom, namespace, or a hosted tool, which the prompt leaves out",
    ) = None
    function: Function = None
    custom: CustomTool = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if values["type"] not in values:
            cls.need(values, "name")


class Tool(SingleTool):
    """A tool, or a namespace of tools."""

    by_type = {"namespace": ("name", "tools")}
    tools: Annotated[list[SingleTool], FailFast()] = None


Tools = Annotated[list[Tool], FailFast()]

# The endpoints.

EMPTY: dict[str, tuple] = {
    "stop": ("", []), "logit_bias": ({},), "stream_options": ({},), "instructions": ("",),
    "context_management": ([], {}), "mcp_servers": ([],), "reasoning_effort": ("",),
}  # fmt: skip
"""Values of fields that count as not given, as in the public APIs. Other empty values have no effect in any case."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The fields with the number of tokens that the client wants; a request has one of them at most."""


NamedSchema = record("name", "schema", name=TEXT, description=TEXT, schema=OBJECT, strict=FLAG)
"""The schema of OpenAI's `response_format`."""


class ResponseFormat(Fields):
    """OpenAI's `response_format`."""

    needed = ("type",)
    type: one_of("text", "json_object", "json_schema") = None
    json_schema: NamedSchema = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if values["type"] == "json_schema":
            cls.need(values, "json_schema")
        elif "json_schema" in values:
            raise wrong("json_schema", "only the type json_schema has it; leave it out")


class TextFormat(ResponseFormat, NamedSchema):
    """The same in `text.format` of /v1/responses, where the schema's fields are next to the type."""

    needed = ("type",)

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        for name in NamedSchema.needed if values["type"] == "json_schema" else ():
            cls.need(values, name)


class Sampling(Fields):
    """The fields of all endpoints that generate: what changes the answer, and `cache_salt`."""

    empty = EMPTY
    model: TEXT = None
    stream: FLAG = None
    temperature: TEMPERATURE = None
    top_p: FRACTION = None
    seed: integer(-(1 << 63), (1 << 64) - 1) = None
    generation_config: Kind(lambda value: isinstance(value, str), "a text that is a JSON object") = None
    speculation: SPECULATION = None
    cache_salt: SALT = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if "stream_options" in values and not values.get("stream"):
            raise wrong("stream_options", "only a stream has them; leave them out, or send stream: true")
        limits = present(LIMITS, values)
        if len({values[name] for name in limits}) > 1:
            raise wrong(limits[0], f"{' and '.join(limits)} differ; give one of them")


class VllmSampling(Sampling):
    """Fields of vLLM's that its clients send to completions, chats and messages."""

    repetition_penalty: POSITIVE = None
    min_p: SHARE = None
    top_k: integer(-1, (1 << 31) - 1) = None
    stop_token_ids: ENDS = None
    bad_words: WORDS = None
    allowed_token_ids: IDS = None
    include_stop_str_in_output: FLAG = None
    skip_special_tokens: FLAG = None
    spaces_between_special_tokens: FLAG = None
    truncate_prompt_tokens: LENGTH = None
    return_token_ids: FLAG = None
    use_beam_search: only(False) = None
    length_penalty: only(1.0, 1) = None
    early_stopping: only(False) = None
    logits_processors: only([]) = None
    prompt_logprobs: only() = None
    priority: only(0) = None
    ignore_eos: FLAG = None
    min_tokens: SIZE = None
    structured_outputs: record(
        json=ANY, regex=TEXT, choice=ANY, grammar=TEXT, json_object=FLAG, structural_tag=only()
    ) = None
    guided_json: SCHEMA = None
    guided_regex: TEXT = None
    guided_choice: LIST = None
    guided_grammar: TEXT = None


class Template(Fields):
    """The fields of endpoints with a chat template, and fields of OpenAI's that cannot change an answer."""

    tools: Tools = None
    tool_choice: CHOICE = None
    parallel_tool_calls: FLAG = None
    chat_template_kwargs: OBJECT = None
    chat_template: only() = None
    documents: only([]) = None
    add_generation_prompt: FLAG = None
    continue_final_message: FLAG = None
    reasoning_effort: EFFORT = None
    user: TEXT = None
    metadata: OBJECT = None
    store: FLAG = None
    service_tier: TEXT = None
    safety_identifier: TEXT = None
    prompt_cache_key: TEXT = None
    prompt_cache_retention: TEXT = None
    prompt_cache_options: OBJECT = None


StreamOptions = record(include_usage=FLAG, include_obfuscation=FLAG, continuous_usage_stats=only(False))
PredictedPart = record("type", "text", type=only("text"), text=TEXT)
Predicted = Annotated[list[PredictedPart], text_or("a text or a list of parts, not empty", is_empty_served=False)]


class ChoiceFields(VllmSampling):
    """The fields that completions and chats have in common."""

    thinking_token_budget: SIZE = None
    frequency_penalty: number(-2, 2) = None
    presence_penalty: number(-2, 2) = None
    stop: STOPS = None
    logit_bias: BIASES = None
    max_tokens: COUNT = None
    prediction: record("type", "content", type=only("content"), content=Predicted) = None
    n: integer(1, MOST_CHOICES) = None
    stream_options: StreamOptions = None
    user: TEXT = None


class CompletionFields(ChoiceFields):
    """POST /v1/completions."""

    needed = ("prompt",)
    prompt: PROMPTS = None
    suffix: TEXT = None
    best_of: integer(1, MOST_CHOICES) = None
    echo: FLAG = None
    max_tokens: Kind(SIZE.accepts, "an int of 1 or more, or 0 with echo") = None
    logprobs: integer(0, MOST_TOP) = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        super()._check_all(values, context)
        if values.get("max_tokens") == 0 and not values.get("echo"):
            raise wrong("max_tokens", "expected an int of 1 or more, or 0 with echo, got 0")
        n = values.get("n", 1)
        if values.get("best_of", n) != n:
            raise wrong("best_of", f"expected the value of n, {n}, because all answers are given")


class ChatFields(ChoiceFields, Template):
    """POST /v1/chat/completions."""

    needed = ("messages",)
    messages: Messages = None
    max_completion_tokens: COUNT = None
    logprobs: FLAG = None
    top_logprobs: integer(0, MOST_TOP) = None
    response_format: ResponseFormat = None
    modalities: only(["text"]) = None
    functions: only([]) = None
    function_call: only("none", "auto") = None
    verbosity: VERBOSITY = None
    audio: only() = None
    moderation: only() = None
    web_search_options: only() = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        super()._check_all(values, context)
        continues = values.get("continue_final_message", False)
        if continues and values.get("add_generation_prompt"):
            raise wrong("continue_final_message", "add_generation_prompt is true, too; give one of them")
        if continues and values["messages"][-1]["role"] != "assistant":
            raise wrong("continue_final_message", "the last message is not the assistant's")


class ResponseFields(Sampling, Template):
    """POST /v1/responses."""

    needed = ("input",)
    input: Items = None
    instructions: TEXT = None
    max_output_tokens: COUNT = None
    background: only(False) = None
    include: INCLUDED = None
    reasoning: record(effort=EFFORT, summary=SUMMARY, generate_summary=SUMMARY, context=ANY) = None
    text: record(format=TextFormat, verbosity=VERBOSITY) = None
    n: only(1) = None
    top_logprobs: only(0) = None
    truncation: one_of("auto", "disabled") = None
    stream_options: record(include_obfuscation=FLAG) = None
    access_programs: only() = None
    background_options: only() = None
    client_metadata: OBJECT = None
    context_management: only() = None
    conversation: only() = None
    image: only() = None
    max_tool_calls: COUNT = None
    moderation: only() = None
    previous_response_id: TEXT = None
    prompt: only() = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        super()._check_all(values, context)
        first = values["input"][0]
        if isinstance(first, str) or "role" in first or "previous_response_id" in values:
            return
        raise wrong("input[0]", f"expected a message first, got an item of type {shown(first.get('type'))}")
