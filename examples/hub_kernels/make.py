"""Make a repository for the Hub's `kernels` library out of two of the package's kernels, in one self-contained package.

    python examples/hub_kernels/make.py build/speculative-kernels

The package `speculative_kernels` has the template's ``__init__.py`` and, of the modules that it reaches by relative
imports, the statements that it needs: its copy of a module with ten functions has the one that is called. Ops are
registered in a namespace of the build (``_ops.py``), so that several builds, and spec_compile, fit into one process.
"""

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import tomllib
from collections import defaultdict
from pathlib import Path

TEMPLATE = Path(__file__).parent / "template"
PACKAGE = Path(__file__).parents[2] / "spec_compile"
NAME = "speculative_kernels"
REPLACED = {
    ("quantised", "layout_of"): "layout_of = None  # weights are not quantised here",
    ("kernels.card", "launches_early"): (
        "def launches_early(device):\n"
        '    """False: a kernel that begins early reads weights and lengths that the kernel before may have made."""\n'
        "    return False"
    ),
}
"""What takes the place of a name, by its module."""
OPS = [
    (r'f"spec_compile::\{(\w+)\}"', r"add_op_namespace_prefix(\1)"),
    (r'"spec_compile::(\w+)"', r'add_op_namespace_prefix("\1")'),
    (r"torch\.ops\.spec_compile", "registered"),
]
"""Patterns of the ops' names, with what they become."""


def bound(statement: ast.stmt | ast.alias) -> list[str]:
    """The names that a statement at the top of a module gives to the module, in its branches, too."""
    if isinstance(statement, ast.alias):
        return [(statement.asname or statement.name).split(".")[0]]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [name for alias in statement.names for name in bound(alias)]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.If | ast.Try):
        branches = [*statement.body, *statement.orelse]
        branches += [each for handler in getattr(statement, "handlers", []) for each in handler.body]
        return [name for each in branches for name in bound(each)]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


class Module:
    """A module, and what the new package needs of it. name: dotted, without the package: "kernels.card"."""

    def __init__(self, name: str, path: Path):
        self.name, self.text = name, path.read_text()
        self.body, self.is_package = ast.parse(self.text).body, path.stem == "__init__"
        self.needed, self.kept = set(), set()
        self.binds = defaultdict(list)
        for statement in self.body:
            for each in bound(statement):
                self.binds[each].append(statement)

    def target(self, node: ast.ImportFrom) -> str | None:
        """The module that a relative import names: ``from ..card`` in "kernels.linear.plans" is "kernels.card"."""
        above = [*filter(None, self.name.split("."))]
        above = above[: len(above) - node.level + self.is_package]
        return ".".join([*above, *filter(None, [node.module])]) if node.level else None

    def new_text(self) -> str:
        """The module with what is needed alone."""
        lines, parts, is_doc = self.text.splitlines(), [], True  # the module's docstring is the first part
        for statement in self.body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if isinstance(statement, ast.Import | ast.ImportFrom):
                statement.names = [each for each in statement.names if self.needed.intersection(bound(each))]
                parts += [ast.unparse(statement)] if statement.names else []
                is_doc = False
            elif statement in self.kept or (is_text and is_doc):
                begin = min(each.lineno for each in [statement, *getattr(statement, "decorator_list", [])]) - 1
                while begin and lines[begin - 1].startswith("#"):
                    begin -= 1
                blank = 2 if isinstance(statement, ast.FunctionDef | ast.ClassDef) else int(not is_text)
                parts.append("\n" * blank + "\n".join(lines[begin : statement.end_lineno]))
                is_doc = isinstance(statement, ast.Assign | ast.AnnAssign)
            else:
                is_doc = False
        parts += [text for (module, name), text in REPLACED.items() if module == self.name and name in self.needed]
        return re.sub(r" *# (guard|noqa): .*", "", "\n".join(parts)) + "\n"


class Tree:
    """The modules that the new package has, by name; "" is the template's ``__init__.py``."""

    def __init__(self):
        self.modules = {"": Module("", TEMPLATE / "torch-ext" / NAME / "__init__.py")}
        for statement in self.modules[""].body:
            self.keep(self.modules[""], statement)

    def module(self, name: str) -> Module | None:
        path = PACKAGE.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name not in self.modules and name and path.exists():
            self.modules[name] = Module(name, path)
        return self.modules.get(name)

    def want(self, module: Module, name: str) -> None:
        """Keep what gives a module this name, and functions that are decorated with it, as kernels of an op are."""
        if name in module.needed or name not in module.binds:
            return
        module.needed.add(name)
        if (module.name, name) not in REPLACED:
            for statement in module.binds[name]:
                self.keep(module, statement, name)
            for statement in module.body:
                calls = [each for each in getattr(statement, "decorator_list", []) if isinstance(each, ast.Call)]
                if any([ast.unparse(argument) for argument in call.args] == [name] for call in calls):
                    self.keep(module, statement)

    def keep(self, module: Module, statement: ast.stmt, name: str | None = None) -> None:
        """Keep a statement and all that it names. name: the only one of an import that counts; None: each."""
        if isinstance(statement, ast.ImportFrom):
            return self.keep_import(module, statement, name)
        if statement in module.kept:
            return None
        module.kept.add(statement)
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom):
                self.keep_import(module, node)
            elif isinstance(node, ast.Name):
                self.want(module, node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                for origin in module.binds[node.value.id] if node.value.id in module.binds else ():
                    if isinstance(origin, ast.ImportFrom) and origin.level:
                        found = self.module(f"{module.target(origin)}.{node.value.id}".strip("."))
                        self.want(found, node.attr) if found else None

    def keep_import(self, module: Module, node: ast.ImportFrom, name: str | None = None) -> None:
        target = module.target(node)
        for alias in node.names if target is not None else ():
            if name in (None, *bound(alias)) and not self.module(f"{target}.{alias.name}".strip(".")):
                self.want(self.module(target), alias.name) if self.module(target) else None


def write_package(folder: Path) -> None:
    """Write the package, without ``_ops.py``, which kernel-builder makes when it builds."""
    for name, module in Tree().modules.items():
        path = folder.joinpath(*filter(None, name.split(".")))
        path = path / "__init__.py" if module.is_package else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = module.new_text() if name else module.text
        for pattern, new in OPS if name else ():
            text = re.sub(pattern, new, text)
        used = [each for each in ("add_op_namespace_prefix", "registered") if name and each in text]
        if used:
            dots = "." * (name.count(".") + 1 + module.is_package)
            names = ", ".join("ops as registered" if each == "registered" else each for each in used)
            docstring, rest = re.fullmatch(r'(""".*?"""\n)?(.*)', text, re.DOTALL).groups(default="")
            text = f"{docstring}from {dots}_ops import {names}\n{rest}"
        path.write_text(text)
    for inner in [each for each in folder.rglob("*") if each.is_dir()]:
        (inner / "__init__.py").touch()


def build(source: Path, folder: Path, general: dict, backend: str) -> None:
    """One built variant, as kernel-builder lays it out: the package with ``_ops.py`` and ``metadata.json``."""
    shutil.copytree(source, folder)
    files = sorted(folder.rglob("*.py"))
    sources = hashlib.sha1(b"".join(file.read_bytes() for file in files)).hexdigest()
    unique = f"_{NAME}_{backend}_{sources[:7]}"
    prefix = f'def add_op_namespace_prefix(op_name: str) -> str:\n    return f"{unique}::{{op_name}}"\n'
    (folder / "_ops.py").write_text(f"import torch\n\nops = torch.ops.{unique}\n\n\n{prefix}")
    digests = {
        str(file.relative_to(folder)): base64.b64encode(hashlib.sha256(file.read_bytes()).digest()).decode()
        for file in sorted(folder.rglob("*.py"))
    }
    metadata = {
        "id": unique, "name": general["name"], "version": general["version"], "license": general["license"],
        "python-depends": [], "backend": {"type": backend}, "digest": {"algorithm": "sha256", "files": digests},
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def make(folder: Path) -> None:
    """Make the repository in a folder that is not there yet."""
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE.parent / "LICENSE", folder)
    source = folder / "torch-ext" / NAME
    write_package(source)
    general = tomllib.loads((folder / "build.toml").read_text())["general"]
    for backend in general["backends"]:
        build(source, folder / "build" / f"torch-{backend}", general, backend)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the repository goes; it must not be there yet")
    make(parser.parse_args().folder)
