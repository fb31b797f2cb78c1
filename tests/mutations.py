"""Whether the tests notice faults: each mutation of `mutation_list.py` is made in a copy of the tree, where the tests
that should catch it are run.

    python tests/mutations.py [NAME ...] [--workers 2] [--list] [--no-unmutated]

NAME: parts of the names of mutations, or of the files that they change. Prints "caught" or "SURVIVED" for each, and
exits with 1 if one survived or its tests could not be run. A mutation's text must occur exactly once in its file.
First the same tests run in a copy without a fault, where they must pass; --no-unmutated leaves that out.
"""

import argparse
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ("ngram/_ngram_trie.*", "kernels/linear/_few_rows.*", "kernels/attention/_cpu_attention.*")
"""The compiled modules, which are copied as they are."""
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


class MutationError(Exception):
    """A mutation, or what it is tested with, is not as it should be."""


def mutated(mutation: Mutation, tree: Path = ROOT) -> str:
    """The text of the file with the mutation; MutationError unless what it replaces is there exactly once."""
    text = (tree / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1 or mutation.old == mutation.new:
        raise MutationError(f"{mutation.name}: expected once in {mutation.file}, found {count} times: {mutation.old!r}")
    return text.replace(mutation.old, mutation.new)


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
    for pattern in COMPILED:
        module = next(path for place in places for path in Path(place).glob(pattern))
        shutil.copy2(module, folder / "spec_compile" / Path(pattern).parent / module.name)
    return folder


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


def try_mutation(mutation: Mutation, tree: Path) -> tuple[str, str]:
    """("caught", "SURVIVED" or "ERROR", why)."""
    path = tree / mutation.file
    original = path.read_text()
    path.write_text(mutated(mutation, tree))
    try:
        status, said = run_tests(tree, [mutation.tests])
    finally:
        path.write_text(original)
    if status in (1, -1):
        failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "stopped"))]
        return "caught", (failed or [said])[0]
    return ("SURVIVED", mutation.tests) if status == 0 else ("ERROR", f"pytest exited with {status}:\n{said}")


def run(mutations: list[Mutation], workers: int, unmutated: bool) -> int:
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
            selections = sorted({mutation.tests for mutation in mutations})
            checks = pool.map(lambda tests: borrow(lambda tree: run_tests(tree, [tests])), selections)
            for selection, (status, said, seconds) in zip(selections, checks):
                print(f"{'passes' if status == 0 else 'FAILS':9}{seconds:5.0f} s  {selection}", flush=True)
                if status != 0:
                    raise MutationError(f"without a mutation, pytest {selection} exited with {status}:\n{said}")
        left = 0
        for mutation, (verdict, why, seconds) in zip(
            mutations, pool.map(lambda mutation: borrow(try_mutation, mutation), mutations)
        ):
            left += verdict != "caught"
            print(f"{verdict:9}{seconds:5.0f} s  {mutation.name}: {why}", flush=True)
    print(f"{len(mutations) - left} of {len(mutations)} mutations caught")
    return left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutations and try none")
    parser.add_argument("--unmutated", action=argparse.BooleanOptionalAction, default=True, help="test that first")
    args = parser.parse_args()
    mutations = [m for m in MUTATIONS if not args.names or any(name in f"{m.file} {m.name}" for name in args.names)]
    if not mutations:
        parser.error(f"no mutation is called {' or '.join(args.names)}")
    try:
        for mutation in mutations:
            mutated(mutation)
        if args.list:
            print("\n".join(f"{m.file}: {m.name}" for m in mutations))
            return 0
        return 1 if run(mutations, args.workers, args.unmutated) else 0
    except MutationError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
