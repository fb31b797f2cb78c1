"""The table of README.md: spec_compile next to the fastest other way to do the same."""

from benchmarks.common import LOOKUP
from benchmarks.rounds.token_times import EAGER, PLAIN, STATIC
from benchmarks.tables.figures import NONE, Results, hardware, table

BEST = (LOOKUP, STATIC, EAGER, "HF greedy", "HF assistant")
"""Transformers' own ways to generate."""
Cells = tuple[str, str, str, str]
NOTHING: Cells = (NONE, NONE, "", "")


def against(rivals: dict[str, float], ours: float, row: dict) -> Cells:
    """The fastest of `rivals` (tokens a second by name), ours, the ratio, and the hardware that measured `row`."""
    best = max(rivals, key=rivals.__getitem__)
    theirs = f"{rivals[best]:,.0f} tokens/s ({best.removeprefix('HF ')})"
    return theirs, f"{ours:,.0f} tokens/s", f"{ours / rivals[best]:.1f}×", hardware(row)


def step_cells(results: Results, shape: str) -> Cells:
    """A token of transformers' best way, and of ours by plain steps."""
    rows = {row["system"]: row for row in results.all("gpu", "shapes", shape, "steps")}
    theirs = [row for name, row in rows.items() if name in BEST]
    if not theirs or PLAIN not in rows:
        return NOTHING
    best, plain = results.seen(min(theirs, key=lambda row: row["ms"])), results.seen(rows[PLAIN])
    name, ratio = best["system"].removeprefix("HF "), best["ms"] / plain["ms"]
    return f"{best['ms']:.2f} ms ({name})", f"{plain['ms']:.2f} ms", f"{ratio:.1f}×", hardware(plain)


def acceptance_cells(results: Results, workload: str, name: str) -> Cells:
    """Transformers' best way, and one of ours in the same run."""
    systems = results.get("acceptance_smollm2", "workloads", workload, "systems")
    row = results.seen(systems.get(name, {}))
    rivals = {
        other: each["tokens_per_second"] for other, each in systems.items()
        if other in BEST and each["stamp"] == row.get("stamp")
    }  # fmt: skip
    return against(rivals, row["tokens_per_second"], row) if LOOKUP in rivals else NOTHING


def peer_cells(results: Results, file: str, workload: str, drafts: str, rival: str, weights: str | None) -> Cells:
    """Another engine in its fastest way, and ours with some drafts. weights: to what both have rounded them."""
    rows = [row for row in results.all(file, "rows") if row.get("weights") == weights]
    rows = [row for row in rows if workload in row.get("sets", {})]
    rate = {(row["engine"], row["drafts"]): row["sets"][workload]["tokens_per_second"] for row in rows}
    found = {(row["engine"], row["drafts"]): row for row in rows}
    rivals = {key: value for key, value in rate.items() if key[0] == rival}
    if not rivals or ("ours", drafts) not in found:
        return NOTHING
    best = max(rivals, key=rivals.__getitem__)
    results.seen(found[best])
    name = f"vLLM, {best[1]}" if rival == "vllm" else f"llama.cpp, {'lookup' if best[1] == 'n-gram' else 'plain'}"
    return against({name: rate[best]}, rate["ours", drafts], results.seen(found["ours", drafts]))


def round_cells(results: Results, shape: str, draft: str) -> Cells:
    """The floor of a round with a draft, and the round."""
    row = results.row("gpu", "shapes", shape, "drafts", name=draft)
    if not row:
        return NOTHING
    floor = f"{row['floor_copy_ms']:.2f} ms (floor: reading the weights)"
    return floor, f"{row['ms']:.2f} ms", f"{row['over_copy']:.2f}× the floor", hardware(row)


def summary(results: Results) -> str:
    """The rows of README.md."""
    both, tree = "EAGLE-3 + n-gram", "EAGLE-3, tree of 16 in 5 steps"
    model, on_cpu = "SmolLM2-135M, EAGLE-3 and n-grams", "EAGLE-3 and n-gram, tree of 16"
    rows = [
        (f"{model}, {name}", *peer_cells(results, "peers", key, both, "vllm", None), "`peers.compare`")
        for key, name in {"editeval": "code editing", "gsm8k_test": "maths", "mt_bench": "chat"}.items()
    ]
    rows += [
        (f"{model}, maths", *acceptance_cells(results, "gsm8k_test", on_cpu), "`quality.acceptance --as-chat`"),
        ("SmolLM2-135M, 4 bits, n-grams, code editing",
         *peer_cells(results, "peers_cpu", "code_editing", "n-gram", "llama_cpp", "int4"),
         "`peers.compare --device cpu`"),
        ("Llama-3.1-8B shape, one token without drafts", *step_cells(results, "llama-8b"), "`gpu --baselines`"),
        ("Llama-3.1-8B shape, a round of EAGLE-3's tree", *round_cells(results, "llama-8b", tree), "`gpu --drafts`"),
    ]  # fmt: skip
    return table(("", "compared with", "spec_compile", "", "hardware", "`python -m benchmarks.`"), rows)
