"""Tables of many requests: loads, second turns and rollouts."""

from benchmarks.tables.figures import Results, table


def second_turns(results: Results) -> str:
    """A row for each model and length of a text: the first tokens of its first and second turn."""
    titles = ("cold", "second turn", "only what it adds")
    rows = []
    for row in map(results.seen, results.all("prefixes", "turns")):
        times = (f"{1e3 * row[name]:.1f} ms" for name in ("cold_s", "second_s", "added_s"))
        rows.append((row["model"], f"{row['tokens']:,}", *times, f"{row['second over cold']:.2f}"))
    return table(("model", "tokens", *titles, "second over cold"), rows)


def kept_prefixes(results: Results) -> str:
    """A row for each number in flight and length of prompts: the rates with and without kept prefixes."""
    rates: dict[tuple, dict] = {}
    for row in map(results.seen, results.all("prefixes", "serving")):
        rates.setdefault((row["model"], row["in_flight"], row["prompt_tokens"]), {})[row["prefixes"]] = row
    rows = [
        (model, str(in_flight), str(tokens), *(f"{by[name]['tokens_per_s']:,.0f}" for name in ("off", "on")),
         f"{by['on']['over off']:.2f}")
        for (model, in_flight, tokens), by in rates.items()
    ]  # fmt: skip
    return table(("model", "in flight", "prompt tokens", "tokens/s without", "with", "ratio"), rows)


def rollouts(results: Results) -> str:
    """A row for each system and epoch of rollouts, next to transformers' loops."""
    rows = []
    for row in map(results.seen, results.all("rollouts", "rows")):
        length = f"{row['accept length']:.2f}" if "accept length" in row else "-"
        ratios = (f"{row[f'over {name}']:.2f}" for name in ("HF generate_batch", "HF generate"))
        rows.append((row["model"], row["system"], str(row["epoch"]), f"{row['seconds']:.2f} s", length, *ratios))
    titles = ("seconds", "accept length", "over generate_batch()", "over generate()")
    return table(("model", "system", "epoch", *titles), rows)
