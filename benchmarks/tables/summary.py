"""The table of README.md: spec_compile next to other engines, each in its fastest way."""

from benchmarks.tables.figures import MODELS, NONE, Results, model_name, set_title, table

SMOLLM2, GEMMA3 = MODELS.values()
RIVALS = "vllm", "llama_cpp"
EMPTY = [NONE] * 3 + [""]


def fastest(results: Results, file: str, engine: str, model: str, title: str, weights: str | None):
    """Tokens a second of an engine's fastest way on a set, and its row; (0, {}) if it was not measured."""
    best: tuple[float, dict] = (0.0, {})
    for row in results.all(file, "rows"):
        if (row["engine"], model_name(row), row.get("weights")) == (engine, model, weights):
            for name, figures in row.get("sets", {}).items():
                if set_title(name) == title and figures and figures["tokens_per_second"] > best[0]:
                    best = figures["tokens_per_second"], row
    return best


def peer_cells(results: Results, file: str, model: str, title: str, weights: str | None) -> list[str]:
    """Transformers (with its own weights), the other engine and ours, and ours over the other engine."""
    cells, rates = [], []
    for engines, rounded in ((("transformers",), None), (RIVALS, weights), (("ours",), weights)):
        rate, row = max((fastest(results, file, one, model, title, rounded) for one in engines), key=lambda one: one[0])
        results.seen(row)
        cells.append(f"{rate:,.0f} ({row['drafts']})" if row else NONE)
        rates.append(rate)
    return [*cells, f"{rates[2] / rates[1]:.1f}×" if rates[1] and rates[2] else ""]


def start_cells(results: Results, model: str) -> list[str]:
    """Seconds until the first token of a process, with caches that an earlier one left."""
    rows = [row for row in results.all("first_token", "rows") if model_name(row) == model and row["device"] == "cuda"]
    warm = {row["system"]: results.seen(row)["seconds"] for row in rows if row["cache"] == "warm"}
    cells = [f"{warm[name]:.1f} s" if name in warm else NONE for name in ("transformers", "vllm", "ours")]
    return [*cells, f"{warm['vllm'] / warm['ours']:.1f}×" if {"vllm", "ours"} <= {*warm} else ""]


def request_cells(results: Results, shape: str, count: int) -> list[str]:
    """Tokens a second of random prompts of 512 tokens, `count` at once."""
    rows = [row for row in results.all("serving", "random")
            if (row["model"], row["in_flight"], row["prompt_tokens"]) == (shape, count, "512")]  # fmt: skip
    theirs = [row for row in rows if row["system"].startswith("vLLM")]
    ours = [row for row in rows if row not in theirs]
    if not theirs or not ours:
        return EMPTY
    theirs, ours = (results.seen(max(some, key=lambda row: row["tokens_per_s"])) for some in (theirs, ours))
    rates = theirs["tokens_per_s"], ours["tokens_per_s"]
    return ["", f"{rates[0]:,.0f}", f"{rates[1]:,.0f} ({ours['system']})", f"{rates[1] / rates[0]:.2f}×"]


def summary(results: Results) -> str:
    """The rows of README.md."""
    rows = [
        [f"{model}, {title}", *peer_cells(results, "peers", model, title, None)]
        for model in (SMOLLM2, GEMMA3)
        for title in ("code editing", "maths", "chat")
    ]
    rows += [
        [f"{model}, code editing, CPU, 4 bits", *peer_cells(results, "peers_cpu", model, "code editing", "int4")]
        for model in (SMOLLM2, GEMMA3)
    ]
    rows.append([f"{SMOLLM2}, first token of a later process", *start_cells(results, SMOLLM2)])
    rows.append(["64 requests, Llama-3.1-8B shape", *request_cells(results, "llama-8b", 64)])
    return table(("tokens/s", "transformers", "vLLM, llama.cpp", "spec_compile", "ratio"), rows)
