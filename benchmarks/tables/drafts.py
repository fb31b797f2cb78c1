"""Tables about drafts: the columns that others publish, other engines, trees of many nodes, windows, and training."""

from benchmarks.tables.figures import NONE, SHAPES, Results, table

WORKLOADS = {
    "code_editing": "code editing (EditEval)",
    "bug_fixing": "bug fixing (HumanEvalFix)",
    "code_completion": "code completion (HumanEval)",
    "maths": "maths (GSM8K)",
    "chat": "chat (MT-bench)",
    "docstrings": "docstrings",
    "random": "random tokens",
}
HEADS = {
    "eagle": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash", "jetspec": "JetSpec", "dspark": "DSpark",
    "domino": "Domino", "p_eagle": "P-EAGLE",
}  # fmt: skip


def measured_sets(results: Results, file: str) -> list[str]:
    """The names of the sets of a file, in the order of `WORKLOADS`."""
    names = list(results.get(file, "workloads"))
    return [name for name in WORKLOADS if name in names] + [name for name in names if name not in WORKLOADS]


def published(results: Results, file: str) -> str:
    """The columns that others publish, for the drafts accepted most often: a row for each set."""
    rows = []
    for name in measured_sets(results, file):
        for system, row in results.get(file, "workloads", name, "systems").items():
            if "first_token_s" not in row or system != "EAGLE-3 and n-gram, tree of 16":
                continue
            results.seen(row)
            depths = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"][:5])
            times = (f"{row['first_token_s'] * 1e3:.1f} ms", f"{row['further_token_s'] * 1e3:.2f} ms")
            gain = f"{row['over_plain']:.2f}×" if "over_plain" in row else NONE
            rows.append((name.replace("_", " "), f"{row['accept_length']:.2f}", depths, *times, gain))
    columns = ("category", "accept length", "acceptance by position", "first token (TTFT)", "a further token (TPOT)",
               "vs plain steps")  # fmt: skip
    return table(columns, rows)


def peers(results: Results) -> str:
    """A row for each engine and way of drafting, a column for each set: accept length and tokens a second."""
    every = results.all("peers", "rows")
    names = list(dict.fromkeys(name for row in every for name in row.get("sets", {})))
    rows = []
    for row in map(results.seen, every):
        cells = [row["refused"], *[""] * (len(names) - 1)] if "refused" in row else [
            f"{figures['accept_length'] or 0:.2f}, {figures['tokens_per_second']:,.0f}" if figures else NONE
            for figures in (row["sets"].get(name) for name in names)
        ]  # fmt: skip
        rows.append((row["drafts"], f"{row['engine']} {row.get('version', '')}".strip(), *cells))
    sets = (name.replace("_", " ") for name in names)
    return table(("drafts", "engine", *sets), rows)


LLAMA_CPP = {None: "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""Weights of ours -> the type in which llama.cpp has them."""


def peers_cpu(results: Results) -> str:
    """A row for each engine, its weights and way of drafting, a column for each set: accept length, tokens a second,
    and for ours in brackets over llama.cpp of the same weights: plain steps over its plain steps, drafts over the
    faster of its plain steps and its lookup."""
    every = [row for row in results.all("peers_cpu", "rows") if "sets" in row]
    names = list(dict.fromkeys(name for row in every for name in row["sets"]))
    rows = []
    for row in map(results.seen, every):
        theirs = [one for one in every if one["engine"] == "llama_cpp" and one["weights"] == row["weights"]
                  and (one["drafts"] == "plain" or row["drafts"] != "plain")]  # fmt: skip
        cells = []
        for name in names:
            figures = row["sets"].get(name)
            rates = [one["sets"][name]["tokens_per_second"] for one in theirs if name in one["sets"]]
            cell = f"{figures['accept_length']:.2f}, {figures['tokens_per_second']:,.0f}" if figures else NONE
            if figures and rates and row["engine"] == "ours":
                cell += f" ({figures['tokens_per_second'] / max(rates):.2f}×)"
            cells.append(cell)
        kinds = LLAMA_CPP if row["engine"] == "llama_cpp" else {None: row["dtype"]}
        weights = kinds.get(row["weights"], row["weights"])
        rows.append((weights, row["drafts"], f"{row['engine']} {row['version']}", *cells))
    return table(("weights", "drafts", "engine", *(WORKLOADS.get(name, name) for name in names)), rows)


def rounded_weights(results: Results) -> str:
    """A row for each format of `weights`: perplexity before and after, and answers."""
    rows = []
    for row in map(results.seen, results.all("rounded_weights", "rows")):
        perplexity = f"{row['before']:.3f}", f"{row['after']:.3f} ({row['after'] / row['before'] - 1:+.2%})"
        agreeing = f"{row['agreeing'] / row['predicted']:.1%} of {row['predicted']:,}"
        rows.append((row["weights"], *perplexity, agreeing, f"{row['same']}/{row['of']}"))
    titles = "perplexity before", "after", "same most probable token", "greedy answers equal"
    return table(("weights", *titles), rows)


def draft_weights(results: Results) -> str:
    """A row for each head, a column for each format of both parts: a draft, and a round with it."""
    cells: dict[str, dict[str, str]] = {}
    for row in results.all("draft_weights", "rows"):
        if isinstance(row["draft_weights"], str) and not row["draft_weights"].startswith("{"):
            results.seen(row)
            times = f"{row['draft_ms']:.2f} ms, {row['round_ms']:.2f} ms"
            cells.setdefault(f"{SHAPES[row['shape']]}, {HEADS[row['algo']]}", {})[row["draft_weights"]] = times
    ways = list(dict.fromkeys(way for by in cells.values() for way in by))
    return table(("a draft, a round", *ways), ((head, *map(by.get, ways)) for head, by in cells.items()))


def training(results: Results) -> str:
    """A row for each head."""
    rows = []
    for row in map(results.seen, results.all("training", "rows")):
        figures = f"{row['tokens_per_second']:,}", f"{row['peak_gigabytes']:.1f} GB" if "peak_gigabytes" in row else ""
        rows.append((HEADS[row["algorithm"]], *figures))
    return table(("head", "tokens/s", "peak memory"), rows)


def trained(results: Results) -> str:
    """A row for each head and loss, trained by Muon, a column for each set of held-out prompts: accept length."""
    every = [row for row in results.all("trained", "rows") if row["options"]["optimizer"] == "muon"]
    rows = []
    names = list(every[0]["accept_length"]) if every else []
    for row in map(results.seen, every):
        lengths = (f"{row['accept_length'][name]:.2f}" for name in names)
        rows.append((HEADS[row["algorithm"]], row["loss"], *lengths))
    return table(("head", "weights of positions", *names), rows)


def never_slower(results: Results) -> str:
    """The five cells of each device that gain least by adaptive drafting."""
    every, cells = results.all("never_slower", "rows"), []
    for device, name in {"cpu": "CPU", "cuda": "H200"}.items():
        worst = sorted((row for row in every if row["device"] == device), key=lambda row: row["adaptive"])[:5]
        for row in map(results.seen, worst):
            figures = (f"{row[key]:.2f}" for key in ("adaptive", "fixed", "accept_length"))
            tokens = "drawn" if row["sampled"] else "greedy"
            cells.append((name, *figures, row["draft"], row["workload"].replace("_", " "), str(row["batch"]), tokens))
    return table(("on", "adaptive", "fixed", "accept length", "draft", "prompts", "rows", "tokens"), cells)
