"""One request, one answer: answers in many ways next to those of each request by itself (`bits.py --requests`)."""

from rich.console import Console
from rich.table import Table

from benchmarks.common import draw
from spec_compile.tools.audit_answers import InManyWays, Manner

KEYS = ("model", "dtype", "options", "system", "exact", "mode", "manner")
"""The fields that tell the rows of the results apart."""
console = Console(stderr=True)


def ask(
    model, prompts: list[list[int]], batches: list[int], mode: str, options: dict, seed: int
) -> list[dict]:  # fmt: skip
    """A row for each way. options: of requests. seed: of the first draw, if they are drawn."""
    options = dict(options)
    ways = InManyWays(model, prompts, options, seed if options.pop("do_sample") else None)
    rows = []
    for manner in ways.run(batches):
        console.print(f"[dim]{mode}, {manner.name}: {manner.equal} of {manner.of}", highlight=False)
        rows.append(row(mode, manner))
    return rows


def row(mode: str, manner: Manner) -> dict:
    """The fields of one way in the results."""
    return {"mode": mode, "manner": manner.name, "promised": manner.promised, "equal": manner.equal, "of": manner.of,
            "reused": manner.reused, "first_differences": manner.first_differences}  # fmt: skip


def table(rows: list[dict]) -> Table:
    """A line for each system, mode and way: "300 of 300", and the prompt tokens that other requests had left."""
    lines = [
        (row["system"], row["mode"], row["manner"], f"{row['equal']} of {row['of']}", str(row["reused"]),
         "yes" if row["promised"] else "no")
        for row in rows
    ]  # fmt: skip
    return draw(("system", "mode", "asked", "equal answers", "reused tokens", "promised"), lines)
