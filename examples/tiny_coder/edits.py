"""Editing documents made from real source code by program transformation.

Every document is (instruction, code before, code after). The transformations work on the text through
positions from `ast`, so that layout and comments stay as they are, and are kept only if the result parses.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
import textwrap
import warnings

FUNCS = (ast.FunctionDef, ast.AsyncFunctionDef)
_RESERVED = set(keyword.kwlist) | set(dir(builtins)) | {"self", "cls"}
_NAMES = """value item data result index count total key node path name text line size start end step rows
columns width height buffer cache config options params target source output entries current previous left
right items values offset limit flag mode state left_edge chunk record field message response request payload
batch weight score label token matrix vector point angle price amount user client handler parent child root
depth level queue stack found names lines mapping table num_items max_size user_id file_name tmp acc n m x y z
i j k a b c p q s t u v w""".split()
_VERBS = "get set load compute build make find update check parse read write apply collect process create".split()
_DECORATORS = "staticmethod functools.cache functools.lru_cache(maxsize=None) override deprecated timed cached property no_grad() retry(times=3) profile".split()
_SWAP = {
    ast.Lt: ("<", ["<=", ">", ">="]),
    ast.LtE: ("<=", ["<", ">="]),
    ast.Gt: (">", [">=", "<", "<="]),
    ast.GtE: (">=", [">", "<="]),
    ast.Eq: ("==", ["!="]),
    ast.NotEq: ("!=", ["=="]),
    ast.Is: ("is", ["is not"]),
    ast.IsNot: ("is not", ["is"]),
    ast.In: ("in", ["not in"]),
    ast.NotIn: ("not in", ["in"]),
    ast.Add: ("+", ["-"]),
    ast.Sub: ("-", ["+"]),
    ast.Mult: ("*", ["+", "/"]),
    ast.Div: ("/", ["*", "//"]),
    ast.And: ("and", ["or"]),
    ast.Or: ("or", ["and"]),
}


def parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class Code:
    """One piece of code (ASCII only: columns are characters), parsed, with one function to work on."""

    def __init__(self, text: str, rng):
        self.text, self.tree, self.rng = text, parse(text), rng
        self.starts = [0]
        for line in text.split("\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.funcs = [n for n in ast.walk(self.tree) if isinstance(n, FUNCS)] if self.tree else []
        self.fn = rng.choice(self.funcs) if self.funcs else None

    def at(self, line: int, col: int) -> int:
        return self.starts[line - 1] + col

    def span(self, node) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def src(self, node) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def edit(self, *changes: tuple[int, int, str]) -> str:
        text = self.text
        for start, end, new in sorted(changes, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def once(self, piece: str) -> bool:
        return self.text.count(piece) == 1

    def docstring(self):
        body = self.fn.body
        first = body[0]
        is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return first if is_doc and isinstance(first.value.value, str) and len(body) > 1 else None

    def body_line(self, skip_docstring: bool = True):
        """(offset of the first body line, its indentation), or None for one-line functions."""
        doc = self.docstring()
        node = self.fn.body[1] if doc is not None and skip_docstring else self.fn.body[0]
        line = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
        start = self.starts[line - 1]
        indent = self.text[start : start + node.col_offset]
        return (start, indent) if not indent.strip() and line > self.fn.lineno else None

    def fresh(self, near: str = "") -> str | None:
        """A name that does not occur in the code yet."""
        rng = self.rng
        options = [rng.choice(_NAMES), f"{rng.choice(_NAMES)}_{rng.choice(_NAMES)}"]
        if near:
            options += [f"new_{near}", f"{near}_{rng.choice(_NAMES)}", f"{rng.choice(_NAMES)}_{near}", near + "s"]
        name = rng.choice(options)
        taken = name in _RESERVED or re.search(rf"\b{name}\b", self.text)
        return None if taken or len(name) > 30 else name

    def literal(self) -> str:
        rng = self.rng
        number = str(rng.choice([0, 1, 2, 3, 5, 7, 8, 10, 12, 16, 20, 32, 50, 64, 99, 100, 128, 256, 500, 1000]))
        return rng.choice([number, number, str(rng.randint(0, 9999)), f"{rng.randint(0, 99)}.{rng.randint(1, 99)}",
                           "None", "True", "False", f'"{rng.choice(_NAMES)}"', "-1", "()", "[]"])  # fmt: skip


# Each transformation returns (instruction, before, after), or None if it does not apply.


def rename_variable(c: Code):
    fn, found = c.fn, {}
    for node in ast.walk(fn):
        if isinstance(node, (ast.Global, ast.Nonlocal, ast.ClassDef, ast.JoinedStr)):
            return None
        if isinstance(node, ast.Name) and not c.src(node).isidentifier():
            return None
        if isinstance(node, ast.Name):
            found.setdefault(node.id, []).append((node, isinstance(node.ctx, ast.Store)))
        elif isinstance(node, ast.arg):
            found.setdefault(node.arg, []).append((node, True))
    local = [n for n, uses in found.items() if n not in _RESERVED and len(uses) > 1 and any(s for _, s in uses)]
    if not local:
        return None
    old = c.rng.choice(sorted(local))
    new = c.fresh(old)
    if not new:
        return None
    changes = []
    for node, _ in found[old]:
        start = c.at(node.lineno, node.col_offset)
        if c.text[start : start + len(old)] != old:
            return None
        changes.append((start, start + len(old), new))
    where = c.rng.choice([f" in `{fn.name}`", f" inside the function `{fn.name}`"])
    if len(c.funcs) == 1 and c.rng.random() < 0.6:
        where = ""
    how = c.rng.choice([
        f"Rename the variable `{old}` to `{new}`{where}.", f"Change the name of `{old}` to `{new}`{where}.",
        f"Please call the variable {new} instead of {old}{where}.", f"Use `{new}` as the name for `{old}`{where}.",
        f"rename {old} -> {new}{where}", f"Replace the identifier `{old}` with `{new}`{where}.",
    ])  # fmt: skip
    return how, c.text, c.edit(*changes)


def rename_definition(c: Code):
    classes = [n for n in ast.walk(c.tree) if isinstance(n, ast.ClassDef)]
    node = c.rng.choice(classes) if classes and c.rng.random() < 0.3 else c.fn
    if node is None or node.name.startswith("__") or len(node.name) < 3:
        return None
    old = node.name
    if isinstance(node, ast.ClassDef):
        kind, new = "class", c.rng.choice(["New", "Base", "My", "Simple", "Fast"]) + old.lstrip("_")
    else:
        near = old.strip("_")
        kind = "function"
        new = c.rng.choice(
            [
                c.fresh(near),
                f"{c.rng.choice(_VERBS)}_{c.rng.choice(_NAMES)}",
                f"{c.rng.choice(_VERBS)}_{near}",
                f"_{near}",
            ]
        )
    if not new or re.search(rf"\b{new}\b", c.text) or len(new) > 40:
        return None
    how = c.rng.choice([
        f"Rename the {kind} `{old}` to `{new}` everywhere.", f"The {kind} {old} should be called {new}. Update it and all its uses.",
        f"Change the {kind} name from `{old}` to `{new}`.", f"rename {kind} {old} to {new}",
        f"Give `{old}` the new name `{new}`, wherever it appears.",
    ])  # fmt: skip
    return how, c.text, re.sub(rf"\b{old}\b", new, c.text)


def rename_attribute(c: Code):
    names = sorted(set(re.findall(r"\bself\.([a-z_]\w*)\b", c.text)))
    if not names:
        return None
    old = c.rng.choice(names)
    new = c.fresh(old)
    if not new or f"{old}(" in c.text:
        return None
    how = c.rng.choice([
        f"Rename the attribute `self.{old}` to `self.{new}`.", f"Use `self.{new}` instead of `self.{old}`.",
        f"The attribute {old} of self must be called {new} from now on.",
    ])  # fmt: skip
    return how, c.text, re.sub(rf"\bself\.{old}\b", f"self.{new}", c.text)


def change_constant(c: Code):
    nodes = [
        n for n in ast.walk(c.fn or c.tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, (int, float, str)) and not isinstance(n.value, bool)
    ]  # fmt: skip
    if not nodes:
        return None
    node = c.rng.choice(nodes)
    old = c.src(node)
    if not 1 <= len(old) <= 30 or "\n" in old or len(re.findall(rf"(?<![\w.]){re.escape(old)}(?![\w.])", c.text)) != 1:
        return None
    if isinstance(node.value, str):
        if old[0] not in "'\"" or old[:3] in ("'''", '"""'):
            return None
        new = (
            old[0]
            + c.rng.choice([c.rng.choice(_NAMES), node.value.upper(), f"{c.rng.choice(_NAMES)}_{c.rng.choice(_NAMES)}"])
            + old[0]
        )
        kind = "string"
    else:
        new = c.rng.choice(
            [str(c.rng.randint(0, 200)), str(c.rng.randint(0, 5000)), f"{c.rng.randint(0, 20)}.{c.rng.randint(1, 99)}"]
        )
        kind = c.rng.choice(["number", "constant", "value"])
    if new == old or "\n" in new or "\\" in new:
        return None
    start, end = c.span(node)
    if c.text[start:end] != old:
        return None
    how = c.rng.choice([
        f"Change the {kind} {old} to {new}.", f"Replace the {kind} `{old}` with `{new}`.",
        f"Use {new} instead of {old}.", f"Set the {kind} to `{new}` where it is `{old}` now.",
    ])  # fmt: skip
    return how, c.text, c.edit((start, end, new))


def change_default(c: Code):
    args = c.fn.args
    pairs = list(zip(args.args[len(args.args) - len(args.defaults) :], args.defaults))
    pairs += [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults) if d is not None]
    if not pairs:
        return None
    arg, default = c.rng.choice(pairs)
    new = c.literal()
    if new == c.src(default):
        return None
    how = c.rng.choice([
        f"Set the default of `{arg.arg}` in `{c.fn.name}` to `{new}`.",
        f"The parameter {arg.arg} of {c.fn.name} should default to {new}.",
        f"Make {new} the default value of the `{arg.arg}` argument of `{c.fn.name}`.",
    ])  # fmt: skip
    return how, c.text, c.edit((*c.span(default), new))


def add_docstring(c: Code):
    where = c.body_line(skip_docstring=False)
    if where is None:
        return None
    doc, name, text = c.docstring(), c.fn.name, c.text
    words = name.strip("_").replace("_", " ")
    line = c.rng.choice([f"Return the {words}.", f"{words.capitalize()}.", f"Helper for {words}.",
                         f"Compute the {words} of the input."])  # fmt: skip
    if doc is not None:
        line = doc.value.value.strip().split("\n")[0].strip()
        start, end = c.starts[doc.lineno - 1], c.starts[doc.end_lineno]
        if not 5 <= len(line) <= 120 or '"' in line or "\\" in line:
            return None
        text = c.text[:start] + c.text[end:].lstrip("\n")
    after = text[: where[0]] + f'{where[1]}"""{line}"""\n' + text[where[0] :]
    how = c.rng.choice([
        f'Add the docstring "{line}" to `{name}`.', f"Document `{name}` with this docstring: {line}",
        f'`{name}` has no docstring. Give it this one: """{line}"""', f"Insert a docstring into {name} that says: {line}",
    ])  # fmt: skip
    return how, text, after


def remove_docstring(c: Code):
    doc = c.docstring()
    if doc is None or c.body_line(False) is None:
        return None
    start, end = c.starts[doc.lineno - 1], c.starts[doc.end_lineno]
    how = c.rng.choice([
        f"Remove the docstring of `{c.fn.name}`.", f"Delete the docstring from the function {c.fn.name}.",
        f"`{c.fn.name}` should not have a docstring.", f"Drop {c.fn.name}'s docstring, and leave the rest as it is.",
    ])  # fmt: skip
    return how, c.text, c.text[:start] + c.text[end:].lstrip("\n")


def type_hints(c: Code):
    """Strip the annotations of a function, or add them (the reverse)."""
    args, fn = c.fn.args, c.fn
    defaults = dict(zip(reversed([a.arg for a in args.posonlyargs + args.args]), reversed(args.defaults)))
    defaults |= {a.arg: d for a, d in zip(args.kwonlyargs, args.kw_defaults) if d is not None}
    changes, hints = [], []
    for arg in args.posonlyargs + args.args + args.kwonlyargs:
        if arg.annotation is not None:
            start, end = c.at(arg.lineno, arg.col_offset) + len(arg.arg), c.span(arg.annotation)[1]
            new = ""
            if arg.arg in defaults:
                stop = c.span(defaults[arg.arg])[0]
                if c.text[end:stop].strip() != "=":
                    return None
                end, new = stop, "="
            changes.append((start, end, new))
            hints.append(f"`{arg.arg}: {c.src(arg.annotation)}`")
    if fn.returns is not None:
        start, end = c.span(fn.returns)
        arrow = c.text.rfind("->", 0, start)
        changes.append((len(c.text[:arrow].rstrip()), end, ""))
        hints.append(f"return type `{c.src(fn.returns)}`")
    if not hints or "\n" in "".join(hints) or len(hints) > 6:
        return None
    bare, name = c.edit(*changes), fn.name
    if c.rng.random() < 0.5:
        how = c.rng.choice([
            f"Remove the type hints from `{name}`.", f"Strip all annotations from the signature of {name}.",
            f"`{name}` should have no type annotations.",
        ])  # fmt: skip
        return how, c.text, bare
    how = c.rng.choice([
        f"Add type hints to `{name}`: {', '.join(hints)}.", f"Annotate the signature of {name} with {', '.join(hints)}.",
    ])  # fmt: skip
    return how, bare, c.text


def guard(c: Code):
    names = [a.arg for a in c.fn.args.args if a.arg not in ("self", "cls")]
    where = c.body_line()
    if not names or where is None:
        return None
    arg, value = c.rng.choice(names), c.literal()
    test = c.rng.choice([f"{arg} is None", f"not {arg}", f"{arg} == {value}", f"{arg} < 0", f"len({arg}) == 0"])
    action = c.rng.choice(
        ["return None", "return", f"return {c.literal()}", f'raise ValueError("bad {arg}")', f"return {arg}"]
    )
    start, pad = where
    unit = "\t" if pad.startswith("\t") else "    "
    new = f"{pad}if {test}:\n{pad}{unit}{action}\n"
    how = c.rng.choice([
        f"At the start of `{c.fn.name}`, `{action}` if `{test}`.", f"Add an early exit to {c.fn.name}: if {test}, then {action}.",
        f"Begin `{c.fn.name}` with a check: when `{test}`, do `{action}`.",
    ])  # fmt: skip
    return how, c.text, c.edit((start, start, new))


def add_parameter(c: Code):
    args = c.fn.args
    if not args.args or args.vararg or args.kwonlyargs or args.kwarg or args.posonlyargs:
        return None
    last = args.defaults[-1] if args.defaults else args.args[-1]
    end, name, value = c.span(last)[1], c.fresh(), c.literal()
    if name is None:
        return None
    if args.defaults and c.text[end : end + 1] == ")" and c.text[c.span(last)[0] - 1] == "(":
        return None  # a default in parentheses ends later
    how = c.rng.choice([
        f"Add a parameter `{name}` with default `{value}` to `{c.fn.name}`.",
        f"Give {c.fn.name} one more argument, {name}={value}, at the end.",
        f"`{c.fn.name}` needs a new last parameter `{name}={value}`.",
    ])  # fmt: skip
    return how, c.text, c.edit((end, end, f", {name}={value}"))


def operator(c: Code):
    """Change an operator; the instruction asks for the change, or for a fix of the bug."""
    sites = []
    for node in ast.walk(c.fn or c.tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            sites.append((node, node.left, node.ops[0], node.comparators[0]))
        elif isinstance(node, ast.BinOp):
            sites.append((node, node.left, node.op, node.right))
        elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
            sites.append((node, node.values[0], node.op, node.values[1]))
    sites = [s for s in sites if type(s[2]) in _SWAP]
    if not sites:
        return None
    node, left, op, right = c.rng.choice(sites)
    old, others = _SWAP[type(op)]
    start, end = c.span(left)[1], c.span(right)[0]
    piece, new = c.src(node), c.rng.choice(others)
    if c.text[start:end] != f" {old} " or not c.once(piece) or "\n" in piece or len(piece) > 70:
        return None
    other = c.text[c.span(node)[0] : start] + f" {new} " + c.text[end : c.span(node)[1]]
    changed = c.edit((start, end, f" {new} "))
    if other in c.text:
        return None
    if c.rng.random() < 0.5:  # the changed code is the broken one
        piece, other, old, new, before, after = other, piece, new, old, changed, c.text
    else:
        before, after = c.text, changed
    how = c.rng.choice([
        f"There is a bug in `{c.fn.name if c.fn else 'the code'}`: `{piece}` should be `{other}`. Fix it.",
        f"Replace `{piece}` with `{other}`.", f"In `{piece}`, use `{new}` instead of `{old}`.",
        f"Fix the wrong operator: `{piece}` must read `{other}`.", f"Change {piece} to {other}",
    ])  # fmt: skip
    return how, before, after


def off_by_one(c: Code):
    calls = [n for n in ast.walk(c.fn or c.tree) if isinstance(n, ast.Call) and c.src(n.func) in ("range", "len")]
    calls = [
        n
        for n in calls
        if len(n.args) == 1 and not n.keywords and isinstance(n.args[0], (ast.Name, ast.Attribute, ast.Call))
    ]
    if not calls:
        return None
    node = c.rng.choice(calls)
    piece, sign = c.src(node), c.rng.choice(["+ 1", "- 1"])
    inside = c.src(node.func) == "range"
    other = f"{piece[:-1]} {sign})" if inside else f"{piece} {sign}"
    if not c.once(piece) or "\n" in piece:
        return None
    start, end = c.span(node)
    if c.rng.random() < 0.5:
        how = c.rng.choice(
            [
                f"Off by one: `{other}` should be `{piece}`.",
                f"Fix the off-by-one error, `{piece}` is enough where it says `{other}`.",
            ]
        )
        return how, c.edit((start, end, other)), c.text
    how = c.rng.choice([f"Off by one: `{piece}` should be `{other}`.", f"Change `{piece}` to `{other}`."])
    return how, c.text, c.edit((start, end, other))


def statement(c: Code):
    """Insert, delete or replace one whole line."""
    nodes = [
        n for n in ast.walk(c.fn or c.tree)
        if isinstance(n, (ast.Assign, ast.Expr, ast.Return, ast.AugAssign, ast.Raise)) and n.lineno == n.end_lineno
    ]  # fmt: skip
    if not nodes:
        return None
    node = c.rng.choice(nodes)
    start, end = c.starts[node.lineno - 1], c.starts[node.lineno]
    line = c.text[start : end - 1]
    piece, pad = line.strip(), line[: len(line) - len(line.lstrip())]
    if piece != c.src(node) or not c.once(piece) or not 4 <= len(piece) <= 90:
        return None
    names = sorted({n.id for n in ast.walk(node) if isinstance(n, ast.Name)}) or ["None"]
    name = c.rng.choice(names)
    new = c.rng.choice([f"print({name})", f'print("{name}:", {name})', f"logger.debug({name})", f"assert {name} is not None",
                        f"{c.rng.choice(_NAMES)} = {c.literal()}", f"{c.rng.choice(_NAMES)} = {name}"])  # fmt: skip
    kind = c.rng.random()
    if kind < 0.4:
        how = c.rng.choice([f"Insert `{new}` before the line `{piece}`.", f"Right before `{piece}`, add the line `{new}`.",
                            f"Put {new} on its own line just above {piece}"])  # fmt: skip
        return how, c.text, c.edit((start, start, f"{pad}{new}\n"))
    if kind < 0.6 and not isinstance(node, (ast.Return, ast.Raise)):
        how = c.rng.choice([f"Insert `{new}` after the line `{piece}`.", f"Below `{piece}`, add `{new}`."])
        return how, c.text, c.edit((end, end, f"{pad}{new}\n"))
    if kind < 0.75:
        how = c.rng.choice(
            [f"Delete the line `{piece}`.", f"Remove `{piece}`.", f"The line `{piece}` is not needed, take it out."]
        )
        return how, c.text, c.edit((start, end, ""))
    how = c.rng.choice([f"Replace the line `{piece}` with `{new}`.", f"Instead of `{piece}`, write `{new}`."])
    return how, c.text, c.edit((start, end, f"{pad}{new}\n"))


def percent_format(c: Code):
    for node in ast.walk(c.tree):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant)):
            continue
        text, piece = node.left.value, c.src(node)
        values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        plain = all(isinstance(v, (ast.Name, ast.Attribute)) for v in values)
        left = c.src(node.left)
        if not plain or not isinstance(text, str) or "\n" in piece or set("{}\\") & set(left) or left[0] not in "'\"":
            continue
        if text.count("%s") != len(values) or text.count("%") != len(values):
            continue
        new = "f" + re.sub("%s", lambda _, it=iter(values): "{" + c.src(next(it)) + "}", left)
        how = c.rng.choice(
            [f"Use an f-string instead of `{piece}`.", "Convert the first simple %-formatted string to an f-string."]
        )
        if not c.once(piece) or (how.startswith("Conv") and c.text.count(" % ") > 1):
            return None
        return how, c.text, c.edit((*c.span(node), new))
    return None


def decorate(c: Code):
    first = min([c.fn.lineno] + [d.lineno for d in c.fn.decorator_list])
    start = c.starts[first - 1]
    pad = c.text[start : start + c.fn.col_offset]
    if pad.strip():
        return None
    if isinstance(c.fn, ast.FunctionDef) and c.rng.random() < 0.3:
        at = c.starts[c.fn.lineno - 1] + c.fn.col_offset
        return f"Make `{c.fn.name}` a coroutine function (async).", c.text, c.edit((at, at, "async "))
    if c.fn.decorator_list and c.rng.random() < 0.6:
        old = c.src(c.rng.choice(c.fn.decorator_list))
        line = f"{pad}@{old}\n"
        if "\n" in old or not c.once(line):
            return None
        return f"Remove the decorator `@{old}` from `{c.fn.name}`.", c.text, c.text.replace(line, "")
    name = c.rng.choice(_DECORATORS)
    how = c.rng.choice([f"Decorate `{c.fn.name}` with `@{name}`.", f"Put the decorator @{name} on top of {c.fn.name}."])
    return how, c.text, c.edit((start, start, f"{pad}@{name}\n"))


def strip_comments(c: Code):
    if '"""' in c.text or "'''" in c.text:
        return None  # a line in a string may look like a comment
    after = re.sub(r"(?m)^[ \t]*#.*\n", "", c.text)
    how = c.rng.choice(
        ["Remove all lines that are only comments.", "Delete the comment lines.", "Strip the full-line comments."]
    )
    return (how, c.text, after) if after != c.text else None


def unchanged(c: Code):
    how = c.rng.choice(
        [
            "Repeat this code exactly.",
            "Return the code unchanged.",
            "Copy the following code.",
            "No change is needed: print the code as it is.",
        ]
    )
    return how, c.text, c.text


_NEEDS_FUNCTION = {
    rename_variable,
    change_default,
    add_docstring,
    remove_docstring,
    type_hints,
    guard,
    add_parameter,
    decorate,
}
TRANSFORMS = (
    [rename_variable] * 5 + [rename_definition] * 3 + [rename_attribute] + [change_constant] * 3
    + [change_default] * 2 + [add_docstring] * 2 + [remove_docstring] + [type_hints] * 2 + [guard] * 2
    + [add_parameter] * 2 + [operator] * 3 + [off_by_one] * 2 + [statement] * 3 + [percent_format] + [decorate]
    + [strip_comments]
)  # fmt: skip


def transform(text: str, rng) -> tuple[str, str, str] | None:
    """One random edit of the code, as (instruction, before, after)."""
    code = Code(text, rng)
    if code.tree is None:
        return None
    if rng.random() < 0.02:
        return unchanged(code)
    for _ in range(6):
        func = rng.choice(TRANSFORMS)
        if func in _NEEDS_FUNCTION and code.fn is None:
            continue
        made = func(code)
        if made and made[1] != made[2] and parse(made[1]) is not None and parse(made[2]) is not None:
            return made
    return None


def units(text: str, rng, limit: int) -> list[str]:
    """Pieces of a file worth editing: functions, methods, classes and runs of neighbouring definitions."""
    if not text.isascii() or "\x0c" in text:
        return []
    tree = parse(text)
    lines = text.split("\n")

    def cut(first, last):
        top = min([first.lineno] + [d.lineno for d in getattr(first, "decorator_list", [])])
        return textwrap.dedent("\n".join(lines[top - 1 : last.end_lineno])).strip("\n") + "\n"

    small = [n for n in ast.walk(tree) if isinstance(n, FUNCS + (ast.ClassDef,))]
    found = [cut(n, n) for n in rng.sample(small, min(len(small), limit))]
    found = [u for u in found if 60 <= len(u) <= 3400]
    for _ in range(max(1, limit // 3)):  # runs of top-level statements
        i = rng.randrange(len(tree.body)) if tree.body else 0
        j, most = i, rng.randint(400, 3300)
        while j + 1 < len(tree.body) and len(cut(tree.body[i], tree.body[j + 1])) < most:
            j += 1
        if tree.body and j > i:
            unit = cut(tree.body[i], tree.body[j])
            if 200 <= len(unit) <= 3400:
                found.append(unit)
    return found


_ANSWERS = [
    "",
    "",
    "",
    "Here is the updated code:\n",
    "Updated code:\n",
    "Result:\n",
    "The edited version:\n",
    "Sure.\n",
]


def prompt_and_answer(how: str, before: str, after: str, rng) -> tuple[str, str]:
    """One of several layouts, with and without fences, instruction first or last."""
    fence = rng.choice(["```python\n", "```python\n", "```python\n", "```\n", "```py\n"])
    kind, lead, gap = rng.random(), rng.choice(_ANSWERS), rng.choice(["\n", "\n\n"])
    end = "```\n"
    if kind < 0.4:
        return f"{how}{gap}{fence}{before}{end}\n{lead}{fence}", f"{after}{end}"
    if kind < 0.55:
        return f"{fence}{before}{end}{gap}{how}{gap}{lead}{fence}", f"{after}{end}"
    if kind < 0.65:
        return f"### Instruction\n{how}\n\n### Code\n{fence}{before}{end}\n### Answer\n{fence}", f"{after}{end}"
    if kind < 0.75:
        return f"User: {how}\n{fence}{before}{end}\nAssistant: {lead}{fence}", f"{after}{end}"
    if kind < 0.85:
        return f"# Original code\n{before}\n# Task: {how}\n# Edited code\n", f"{after}"
    if kind < 0.93:
        return f"# Task: {how}\n\n{before}\n# After the change:\n", f"{after}"
    return f"Before:\n{fence}{before}{end}\nAfter ({how.rstrip('.')}):\n{fence}", f"{after}{end}"


def write_function(unit: str, rng) -> tuple[str, str] | None:
    """A request for a function in words (its own docstring and signature), answered by the function."""
    code = Code(unit, rng)
    if not code.funcs or code.tree.body[0] is not code.funcs[0] or code.funcs[0].decorator_list:
        return None
    code.fn = code.funcs[0]
    doc = code.docstring()
    line = doc.value.value.strip().split("\n")[0] if doc is not None else ""
    if not 15 <= len(line) <= 150 or len(unit) > 1500:
        return None
    names = ", ".join(a.arg for a in code.fn.args.args)
    how = rng.choice([
        f"Write a Python function `{code.fn.name}({names})`. {line}",
        f"Implement `{code.fn.name}`. {line}", f"{line}\nThe function is called {code.fn.name} and takes ({names}).",
    ])  # fmt: skip
    return f"{how}\n\n```python\n", f"{unit}```\n"


def document(unit: str, rng, eot: str) -> str | None:
    """A training document: an edit, sometimes two in a row, or a function written on request."""
    if rng.random() < 0.08:
        made = write_function(unit, rng)
        return "".join(made) + eot if made else None
    edit = transform(unit, rng)
    if edit is None:
        return None
    prompt, answer = prompt_and_answer(*edit, rng)
    text = prompt + answer
    if len(text) < 2500 and answer.endswith("```\n") and rng.random() < 0.12:
        second = transform(edit[2], rng)
        if second:
            text += f"\n{rng.choice(['Now: ', 'Next: ', 'Then ', ''])}{second[0]}\n\n```python\n{second[2]}```\n"
            if second[1] != edit[2]:
                return None  # this kind of edit changed its starting point
    return text + eot
