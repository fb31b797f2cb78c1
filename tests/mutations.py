"""Whether the tests notice faults: each guarded line of the package is changed in a copy of the tree, where the tests
that should catch it are run.

    python tests/mutations.py [NAME ...] [--workers 2] [--list] [--no-unmutated]

A line whose loss must be noticed ends in the comment `guard: name`, which is there once. `mutation_list.py` says what
is done to the smallest statement that has this line, or to the head of an `if` or a loop without its body, and which
tests notice it. In C++ the line itself is changed; a compiled module is built again, with nanobind and a C++ compiler.

NAME: parts of the names of guards, or of the files with them. Prints "caught" or "SURVIVED" for each, and exits with 1
if one survived or its tests could not be run. First the same tests run in a copy without a fault, where they must pass;
--no-unmutated leaves that out.
"""

import argparse
import ast
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutation_list import GUARDS, Change, Guard

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"\s+(?:#|//) guard: (\S+)$", re.MULTILINE)
SUFFIXES = {".py", ".h", ".cpp", ".cu"}
COMPILED = runpy.run_path(str(ROOT / "spec_compile/extensions.py"))["MODULES"]
"""The compiled modules, as "folder.name"."""
SECONDS = 600
"""After so long the tests of one mutation are stopped; they have noticed it then, too."""
RUN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "ScikitBuildRedirectingFinder"]
sys.path.insert(0, sys.argv[1])  # before an editable installation of the package
import spec_compile
assert spec_compile.__file__.startswith(sys.argv[1]), spec_compile.__file__
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
CONSTANTS = {Change.NEVER: "False", Change.ALWAYS: "True"}
OTHER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
"""The comparison that takes the bound in, or leaves it out."""


class MutationError(Exception):
    """A guard, or what it is tested with, is not as it should be."""


def markers(tree: Path = ROOT) -> dict[str, tuple[Path, int]]:
    """The path from the tree and the number of the line of each guard; MutationError if a name is there twice."""
    found: dict[str, tuple[Path, int]] = {}
    for path in sorted(path for path in (tree / "spec_compile").rglob("*") if path.suffix in SUFFIXES):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := MARKER.search(line):
                if match[1] in found:
                    raise MutationError(f"{match[1]}: {path} guards what {found[match[1]][0]} guards by this name")
                found[match[1]] = path.relative_to(tree), number
    return found


def mutated(guard: Guard, path: Path, number: int) -> str:
    """The text of the file `path` with the guarded line `number` changed; MutationError if it has nothing to change."""
    text = path.read_text()
    change = changed_python if path.suffix == ".py" else changed_cpp
    changed = change(text, number, guard.does)
    if changed == text:
        raise MutationError(f"{guard.name}: line {number} of {path} has nothing for {guard.does!r} to change")
    return changed


def changed_cpp(text: str, number: int, does: Change | str) -> str:
    """A text in C++ with one line changed, of which the condition of an `if` can become a constant."""
    lines = text.splitlines()
    line = MARKER.sub("", lines[number - 1])
    code = line.lstrip()
    if does in CONSTANTS and "if (" in line:
        begin = end = line.index("if (") + len("if (")
        depth = 1
        while depth:
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        lines[number - 1] = f"{line[:begin]}{CONSTANTS[does].lower()}{line[end - 1 :]}"
    elif does is Change.SKIP or not isinstance(does, Change):
        lines[number - 1] = line.replace(code, ";" if does is Change.SKIP else does)
    else:
        return text
    return "\n".join([*lines, ""])


def changed_python(text: str, number: int, does: Change | str) -> str:
    """A text in Python with the smallest statement changed that has a line, or its head; as it was if it cannot be."""
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    statement = min((each for each in statements if number in own_lines(each)), key=lambda each: len(own_lines(each)))
    test, value = getattr(statement, "test", None), getattr(statement, "value", None)
    head = test or getattr(statement, "iter", None) or statement
    inner = list(ast.walk(head))  # from the outermost
    if not isinstance(does, Change):
        return replaced(text, head, does)
    if does is Change.SKIP:
        return replaced(text, statement, "pass")
    if does in CONSTANTS and (test or value):
        tests = [test] if test else [node.test for node in inner if isinstance(node, ast.IfExp)]
        tests += [each for node in inner if isinstance(node, ast.comprehension) for each in node.ifs]
        if tests:
            return replaced(text, tests[0], CONSTANTS[does])
        return replaced(text, value, f"({{}}) {'|' if does is Change.ALWAYS else '&'} {CONSTANTS[does]}")  # of a tensor
    if does is Change.BOUND:
        bounds = [node for node in inner if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER]
        for node in bounds[:1]:
            node.ops[0] = OTHER[type(node.ops[0])]()
            text = replaced(text, node, f"({ast.unparse(node)})")
        return text
    if does in (Change.FIRST, Change.LAST):
        joined = [(node, operands) for node in inner if (operands := joined_by(node))]
        for node, operands in joined[:1]:
            text = replaced(text, node, f"({ast.unparse(operands[0 if does is Change.FIRST else -1])})")
        return text
    return replaced(text, value, does.value) if "{}" in does and value else text


def own_lines(statement: ast.stmt) -> range:
    """The lines of a statement, without its body."""
    body = getattr(statement, "body", None)
    return range(statement.lineno, body[0].lineno if body else statement.end_lineno + 1)


def joined_by(node: ast.AST) -> list[ast.expr]:
    """The operands of `and`, `or`, & or |."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        return [node.left, node.right]
    return node.values if isinstance(node, ast.BoolOp) else []


def replaced(text: str, node: ast.AST, new: str) -> str:
    """The text with another one in the place of a node; {} in it is what was there."""
    whole = text.encode()
    starts = [0, *(match.end() for match in re.finditer(rb"\n", whole))]
    begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
    return (whole[:begin] + new.replace("{}", whole[begin:end].decode()).encode() + whole[end:]).decode()


def copy_tree(folder: Path) -> Path:
    """A copy of what git knows of the tree, changes and new files included, and of the compiled modules."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    places = importlib.util.find_spec("spec_compile").submodule_search_locations  # which imports nothing
    for name in COMPILED:
        pattern = f"{name.replace('.', '/')}.*"
        module = next(path for place in places for path in Path(place).glob(pattern))
        shutil.copy2(module, (folder / "spec_compile" / pattern).with_name(module.name))
    return folder


def build(tree: Path, source: Path) -> tuple[Path, bytes] | None:
    """Compile the module that a file in C++ belongs to, if any, in place; returns its file and what this was before."""
    module, files = None, []
    for path in (tree / "spec_compile" / name.replace(".", "/") for name in COMPILED):
        begin = path.name[1:] if path.parent.name == "native" else ""  # two modules share that folder
        if source.parent == path.parent.resolve() and source.suffix != ".py" and source.name.startswith(begin):
            module, files = next(path.parent.glob(f"{path.name}.*")), [*path.parent.glob(f"{begin}*.cpp")]
    if module is None:
        return None
    import nanobind

    before, library = module.read_bytes(), Path(nanobind.source_dir())
    headers = [sysconfig.get_path("include"), nanobind.include_dir(), library.parent / "ext/robin_map/include"]
    command = ["c++", "-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"]
    command += [f"-I{header}" for header in headers] + [library / "nb_combined.cpp"]
    command += files
    module.unlink()
    subprocess.run([*command, "-ldl", "-o", module], check=True)
    return module, before


def run_tests(tree: Path, selections: list[str]) -> tuple[int, str]:
    """(exit status of pytest, the last lines that it printed); -1 if it took too long."""
    command = [sys.executable, "-c", RUN, str(tree), "-x", "-q", "-n0", "-p", "no:cacheprovider", "--no-header"]
    command += ["--show-capture=no", "-m", "not gpu"]
    command += [part for selection in selections for part in shlex.split(selection)]
    environment = {"TRITON_INTERPRET": "1", **os.environ}  # looked at when Triton is imported, with spec_compile here
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutation may be as long and as old as the original
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, timeout=SECONDS, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"stopped after {SECONDS} s"
    return done.returncode, "\n".join(done.stdout.splitlines()[-15:])


def try_mutation(guard: Guard, tree: Path) -> tuple[str, str]:
    """("caught", "SURVIVED" or "ERROR", why)."""
    file, number = markers(tree)[guard.name]
    path, built = tree / file, None
    original = path.read_text()
    path.write_text(mutated(guard, path, number))
    try:
        built = build(tree, path)
        status, said = run_tests(tree, [guard.tests])
    finally:
        path.write_text(original)
        if built is not None:
            built[0].write_bytes(built[1])
    if status in (1, -1):
        failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "stopped"))]
        return "caught", (failed or [said])[0]
    return ("SURVIVED", guard.tests) if status == 0 else ("ERROR", f"pytest exited with {status}:\n{said}")


def run(guards: list[Guard], workers: int, unmutated: bool) -> int:
    """Try all of them; returns how many were not caught."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            trees.put(copy_tree(Path(folder).resolve() / str(number)))

        def borrow(function, *arguments):
            tree = trees.get()
            begin = time.perf_counter()
            try:
                return *function(*arguments, tree), time.perf_counter() - begin
            finally:
                trees.put(tree)

        if unmutated:
            selections = sorted({guard.tests for guard in guards})
            checks = pool.map(lambda tests: borrow(lambda tree: run_tests(tree, [tests])), selections)
            for selection, (status, said, seconds) in zip(selections, checks):
                print(f"{'passes' if status == 0 else 'FAILS':9}{seconds:5.0f} s  {selection}", flush=True)
                if status != 0:
                    raise MutationError(f"without a mutation, pytest {selection} exited with {status}:\n{said}")
        left = 0
        tried = pool.map(lambda guard: borrow(try_mutation, guard), guards)
        for guard, (verdict, why, seconds) in zip(guards, tried):
            left += verdict != "caught"
            print(f"{verdict:9}{seconds:5.0f} s  {guard.name}: {why}", flush=True)
    print(f"{len(guards) - left} of {len(guards)} mutations caught")
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the guards and try none")
    parser.add_argument("--unmutated", action=argparse.BooleanOptionalAction, default=True, help="test that first")
    args = parser.parse_args()
    try:
        places = markers()
        if places.keys() != {guard.name for guard in GUARDS}:
            differ = places.keys() ^ {guard.name for guard in GUARDS}
            raise MutationError(f"in the package or in mutation_list.py alone: {', '.join(sorted(differ))}")
        guards = [
            guard for guard in GUARDS
            if not args.names or any(name in f"{places[guard.name][0]} {guard.name}" for name in args.names)
        ]  # fmt: skip
        if not guards:
            parser.error(f"no guard is called {' or '.join(args.names)}")
        if args.list:
            print("\n".join(f"{':'.join(map(str, places[guard.name]))}: {guard.name}" for guard in guards))
            return 0
        return 1 if run(guards, args.workers, args.unmutated) else 0
    except MutationError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
