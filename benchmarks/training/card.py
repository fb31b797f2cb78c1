"""What was measured of a head, in its card: accept length by set of prompts, and speed by requests in flight.

    python -m benchmarks.training.card HEAD --model NAME [--drafts EAGLE-3] [--algo eagle3]
        [--peers FILE] [--serving FILE]

HEAD is a folder that `python -m spec_compile train` wrote. The rows come from the results of

    python -m benchmarks.peers.compare --model NAME --heads FOLDER --engines ours --drafts plain EAGLE-3
    python -m benchmarks.serving --model NAME --chat --systems plain eagle3 --draft HEAD

A second run replaces the section. Push the folder after it (`hf upload USER/NAME HEAD`).
"""

import argparse
from pathlib import Path

from benchmarks.common import RESULTS, command_line
from benchmarks.tables.figures import Results, set_title, table

BEGIN = "## Measured\n"


def by_set(results: Results, file: str, model: str, drafts: str) -> str:
    """A line for each set of prompts, one request at a time; "" if plain steps or the head were not measured."""
    found = {
        row["drafts"]: row for row in results.all(file, "rows") if (row["model"], row["engine"]) == (model, "ours")
    }
    if not {"plain", drafts} <= found.keys():
        return ""
    plain, ours = (results.seen(found[name])["sets"] for name in ("plain", drafts))
    lines = [
        (set_title(name), f"{one['accept_length']:.2f}", f"{plain[name]['tokens_per_second']:,.0f}",
         f"{one['tokens_per_second']:,.0f}")
        for name, one in ours.items()
    ]  # fmt: skip
    return table(("prompts", "accept length", "plain steps, tokens/s", "with this head, tokens/s"), lines)


def by_requests(results: Results, file: str, model: str, algo: str) -> str:
    """A line for each number of requests in flight; "" if plain steps or the head were not measured."""
    found = {(row["system"], row["in_flight"]): row for row in results.all(file, "rows") if row["model"] == model}
    lines = []
    for count in (count for system, count in found if system == algo and ("plain", count) in found):
        plain, ours = (results.seen(found[system, count]) for system in ("plain", algo))
        rates = plain["tokens_per_s"], ours["tokens_per_s"]
        told = (f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[1] / rates[0]:.2f}×", f"{ours['tokens_per_step']:.2f}")
        lines.append((str(count), *told))
    titles = ("requests in flight", "plain steps, tokens/s", "with this head, tokens/s", "ratio", "tokens a round")
    return table(titles, lines) if lines else ""


def section(options: argparse.Namespace) -> str:
    """The section of the card. ValueError if nothing was measured."""
    parts = []
    for path, make, name in (
        (options.peers, by_set, options.drafts), (options.serving, by_requests, options.algo),
    ):  # fmt: skip
        results = Results(path.parent)
        if body := make(results, path.stem, options.model, name):
            parts.append(f"{body}\n\n{results.caption()}")
    if not parts:
        raise ValueError(
            f"--model: neither {options.peers.name} nor {options.serving.name} has rows of {options.model} with plain "
            "steps and with this head; run the commands of --help first"
        )
    return "\n\n".join([BEGIN.rstrip(), *parts]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("head", type=Path, help="the folder of the head")
    parser.add_argument("--model", required=True, help="the model's name in the results")
    parser.add_argument("--drafts", default="EAGLE-3", help="the drafts' name in the results of peers.compare")
    parser.add_argument("--algo", default="eagle3", help="the system's name in the results of serving")
    parser.add_argument("--peers", type=Path, default=RESULTS / "peers.json")
    parser.add_argument("--serving", type=Path, default=RESULTS / "serving.json")
    options = parser.parse_args(arguments)
    card = options.head / "README.md"
    text = section(options)
    card.write_text(card.read_text().split(BEGIN)[0].rstrip() + "\n\n" + text)
    print(text)


if __name__ == "__main__":
    main()
