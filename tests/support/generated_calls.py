"""Requests for tool calls and JSON over generated schemas, and the check of a value."""

import random

from tool_templates import tool

WORDS = ("mean", "stack", "values", "total", "self", "line", "index", "café")
SAMPLINGS = [
    {"temperature": 0}, {"temperature": 0, "frequency_penalty": 0.5}, {"temperature": 1.0}, {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9}, {"temperature": 0.9, "top_k": 20}, {"temperature": 1.0, "min_p": 0.05},
]  # fmt: skip


def schema(rng: random.Random, depth: int) -> dict:
    """A schema, of which each value has few tokens."""
    kinds = ["integer", "boolean", "enum", "string", "null", "pattern"] + ["object", "array"] * (depth > 0)
    kind = rng.choice(kinds)
    if kind == "object":
        return object_schema(rng, depth - 1)
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": rng.randrange(2), "maxItems": 3}
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, '"quoted"'], rng.randint(1, 4))}
    if kind == "string":
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randint(3, 8)}
    return {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]$"} if kind == "pattern" else {"type": kind}


def object_schema(rng: random.Random, depth: int = 1) -> dict:
    """The schema of an object with up to two properties, each required or not."""
    names = rng.sample(WORDS, rng.randint(1, 2))
    properties = {name: schema(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": [name for name in names if rng.random() < 0.7]}


def fits(value, schema: dict) -> bool:
    """True if a value is one of a schema's, for the schemas above."""
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        parts = schema["properties"]
        known = isinstance(value, dict) and {*schema["required"]} <= value.keys() <= parts.keys()
        return known and all(fits(each, parts[name]) for name, each in value.items())
    if kind == "array":
        sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return sized and all(fits(each, schema["items"]) for each in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string" and "pattern" in schema:
        head, _, tail = value.partition("-")
        return 2 <= len(head) <= 4 and {*head} <= {*"abcdef"} and len(tail) == 1 and tail in "0123456789"
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    return type(value) is {"boolean": bool, "null": type(None)}[kind]


def request(number: int) -> dict:
    """The body of a chat: required or named tools, or JSON of a schema; greedy, or sampled with a seed."""
    rng = random.Random(number)
    words = " ".join(rng.choices(WORDS, k=rng.randint(2, 12)))
    body = {"messages": [{"role": "user", "content": f"{words}: [{number}, {number + 1}, {number + 2}]"}]}
    body |= {"max_tokens": 110, "seed": number} | SAMPLINGS[number % len(SAMPLINGS)]
    if number % 4 == 0:
        named = {"name": "answer", "schema": object_schema(rng)}
        return body | {"response_format": {"type": "json_schema", "json_schema": named}}
    names = [f"{word}_{number}" for word in rng.sample(WORDS[:-1], rng.randint(1, 3))]
    tools = [tool(name, object_schema(rng), strict=rng.random() < 0.5) for name in names]
    one = {"type": "function", "function": {"name": rng.choice(names)}}
    choice = "required" if number % 4 == 1 else one
    return body | {"tools": tools, "tool_choice": choice, "parallel_tool_calls": rng.random() < 0.1}


def values(body: dict, message: dict) -> list[tuple]:
    """The schema and the text of each value of an answer."""
    if "response_format" in body:
        return [(body["response_format"]["json_schema"]["schema"], message["content"])]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in body["tools"]}
    called = [each["function"] for each in message["tool_calls"]]
    return [(schemas[each["name"]], each["arguments"]) for each in called]
