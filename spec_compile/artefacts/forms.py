"""`PartForm`: how a part's arguments become inputs of its graph, and the graph's results become those of the part."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

Slot = tuple[str, str, str]
"""A tensor of a module: path of the module that has it, the dictionary there ("" for attributes), and its name."""
PLAIN = (bool, int, float, type(None))


@dataclass
class PartForm:
    """The form of a part, as data that a later process reads.

    sources: of the inputs; ("argument", path) is an argument, and ("held", path, slot) a tensor of a module there.
        A path (1, 2) means ``arguments[1][2]``.
    result: the part's result. ``{"result": n}`` is one of the graph, ``{"list": [...]}`` and ``{"tuple": [...]}`` have
        such results in them, and other values are constants.
    """

    sources: list[tuple]
    result: Any

    @cached_property
    def read(self) -> Callable[[tuple, list[dict[str, Any]]], list]:
        """A function of the arguments and the `holders` that gives the inputs. For sources [("argument", (1, 2)),
        ("held", (3,), slot)] it is ``lambda arguments, held: [arguments[1][2], held[0]['name']]``."""
        texts, held = list[str](), 0
        for kind, path, *slot in self.sources:
            if kind == "argument":
                texts.append("arguments" + "".join(f"[{number}]" for number in path))
            else:
                texts.append(f"held[{held}][{slot[0][2]!r}]")
                held += 1
        return eval(f"lambda arguments, held: [{', '.join(texts)}]")

    @cached_property
    def write(self) -> Callable[[list], Any]:
        """A function of the graph's results that gives those of the part. For ``{"tuple": [{"result": 0}, None]}`` it
        is ``lambda results: (results[0], None, )``."""
        return eval(f"lambda results: {_text(self.result)}")

    def holders(self, arguments: tuple) -> list[dict[str, Any]]:
        """The dictionaries that hold the modules' tensors; those of a module stay the same."""
        return [_holder(_at(arguments, path), *slot) for _, path, *slot in self.sources if slot]

    def data(self) -> dict[str, Any]:
        """The form as values of JSON."""
        return {"sources": self.sources, "result": self.result}

    @classmethod
    def of(cls, data: dict[str, Any]) -> "PartForm":
        """The form of values of JSON. ValueError if they are none."""
        try:
            form = cls([_source(*source) for source in data["sources"]], data["result"])
            form.read, form.write  # noqa: B018, they are made here, so that errors are raised here
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"form: expected sources and a result, got {data!r:.80}") from error
        return form


def _source(kind: str, path: list[int], *slot: list[str]) -> tuple:
    if not all(type(number) is int for number in path) or len(slot) != ("argument", "held").index(kind):
        raise ValueError(f"source: expected an argument or a tensor that a module holds, got {kind!r:.80}")
    if slot and not (len(slot[0]) == 3 and all(isinstance(name, str) for name in slot[0])):
        raise ValueError(f"slot: expected three names, got {slot[0]!r:.80}")
    return kind, tuple(path), *map(tuple, slot)


def _text(result: Any) -> str:
    """The code of a part's result; ValueError if it is of another form."""
    match result:
        case {"result": int(number)}:
            return f"results[{number}]"
        case {"list": [*parts]}:
            return f"[{''.join(f'{_text(part)}, ' for part in parts)}]"
        case {"tuple": [*parts]}:
            return f"({''.join(f'{_text(part)}, ' for part in parts)})"
    if type(result) not in PLAIN:
        raise ValueError(f"result: expected results, numbers, None, lists and tuples, got {result!r:.80}")
    return repr(result)


def _at(value: Any, path: tuple[int, ...]) -> Any:
    for number in path:
        value = value[number]
    return value


def _holder(owner: nn.Module, slot: Slot) -> dict[str, Any]:
    path, kind, _ = slot
    for name in filter(None, path.split(".")):
        owner = getattr(owner, name)
    return vars(owner)[kind] if kind else vars(owner)
