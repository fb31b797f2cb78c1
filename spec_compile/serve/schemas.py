"""JSON schemas that no text fits, because a value of them would have no end."""

from typing import Any


def has_finite_value(schema: dict) -> bool:
    """False if every value of a schema contains another value of it, without end.

    schema: of at most `DEEPEST` lists and objects in each other

    For example ``{"$ref": "#"}`` has none, and neither has an object that requires a property of its own schema. A list
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
