"""This library compared with other engines: one model, the same heads and prompts, one machine, one run.

    python -m benchmarks.peers.compare --model FOLDER --heads FOLDER [--engines ours transformers vllm sglang]
        [--drafts plain n-gram EAGLE-3 DFlash JetSpec MTP "EAGLE-3 + n-gram"] [--workloads chat maths ...]
        [--folder DIR] [--trained-on FILE ...] [--prompts 10] [--new-tokens 128] [--repeats 3] [--device cuda]
        [--json FILE]
    python -m benchmarks.peers.compare --model FOLDER --device cpu --weights none int8 int4
        --engines ours llama_cpp transformers --drafts plain n-gram --prompts 5 --new-tokens 96

Every engine and setting runs in a separate process, on a GPU one after another, on a CPU all of them, which answer each
prompt in turn (worker.py). All get the same token ids (with the chat template, if the tokenizer has one), answer
greedily, one prompt at a time, and stop at the same tokens. Prefix caches are off, and n-grams forget between answers
if the engine can. Two prompts of each set are not measured: the first warms up, and both choose among the settings
(`SYSTEMS` lists them); the table has the best setting of each engine for each set, the file all of them.

Heads are folders eagle3, dflash, jetspec and mtp of --heads, in their published formats, as `python -m spec_compile
train` writes them; missing ones are left out. --trained-on names the files that the heads were trained on: a prompt
that occurs in one of them is refused.

The accept length is the tokens a forward of the target after the prompt, steps without drafts included. "same": answers
that equal those of the engine's own plain steps. If an engine refuses a setting, crashes or is not installed, its row
has the reason. Rows that a run leaves out stay in the file.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from benchmarks import common
from benchmarks.peers import worker

TREE = dict(num_steps=5, topk=4, num_draft_tokens=16)
VLLM_NGRAM = [dict(num_speculative_tokens=tokens, prompt_lookup_max=size, prompt_lookup_min=1)
              for tokens, size in ((5, 3), (10, 3), (10, 2), (16, 3))]  # fmt: skip


def ours(algo: str, draft: bool = True, **options) -> dict:
    """A setting of ours. draft: True if it takes the folder of the head."""
    return {"algo": algo, **options} | ({"draft": "HEAD"} if draft else {})


def vllm(**config) -> dict:
    """A setting of vLLM."""
    return {"speculative_config": config}


def sglang(algorithm: str, steps: int, topk: int, nodes: int) -> dict:
    """A setting of SGLang with a head."""
    return dict(
        speculative_algorithm=algorithm, speculative_draft_model_path="HEAD", speculative_num_steps=steps,
        speculative_eagle_topk=topk, speculative_num_draft_tokens=nodes,
    )  # fmt: skip


def llama_cpp(tokens: int, size: int) -> dict:
    """A setting of llama.cpp with its prompt lookup."""
    return {"lookup": dict(num_pred_tokens=tokens, max_ngram_size=size)}


SYSTEMS = {
    "plain": (None, {
        "ours": [ours("ngram", False, num_draft_tokens=1)], "transformers": [{}], "vllm": [{}], "sglang": [{}],
        "llama_cpp": [{}],
    }),
    "n-gram": (None, {
        "ours": [ours("ngram", False, num_draft_tokens=nodes) for nodes in (16, 64)],
        "transformers": common.LOOKUPS,
        "vllm": [vllm(method="ngram", **setting) for setting in VLLM_NGRAM],
        "sglang": [dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=16)],
        "llama_cpp": [llama_cpp(tokens, size) for tokens, size in ((10, 2), (10, 3), (4, 2))],
    }),
    "EAGLE-3": ("eagle3", {
        "ours": [ours("eagle3", **TREE), ours("eagle3", num_steps=3), ours("eagle3", num_steps=5)],
        "vllm": [vllm(method="eagle3", model="HEAD", num_speculative_tokens=tokens) for tokens in (3, 5)],
        "sglang": [sglang("EAGLE3", 3, 1, 4), sglang("EAGLE3", 5, 4, 16)],
    }),
    "DFlash": ("dflash", {
        "ours": [ours("dflash"), ours("dflash", topk=4, num_draft_tokens=16)],
        "vllm": [vllm(method="dflash", model="HEAD", num_speculative_tokens=7)],
        "sglang": [dict(speculative_algorithm="DFLASH", speculative_draft_model_path="HEAD")],
    }),
    "JetSpec": ("jetspec", {
        "ours": [ours("jetspec"), ours("jetspec", topk=4, num_draft_tokens=16)],
        "vllm": [vllm(method="dflash", model="HEAD", num_speculative_tokens=7)],
    }),
    "MTP": ("mtp", {
        "ours": [ours("mtp", num_steps=3)], "vllm": [vllm(method="mtp", model="HEAD", num_speculative_tokens=3)],
    }),
    "EAGLE-3 + n-gram": ("eagle3", {
        "ours": [ours("eagle3", ngram=True, num_steps=3), ours("eagle3", ngram=True, **TREE)],
    }),
}  # fmt: skip
"""Drafts -> folder of --heads (None: needs no head), and by engine the settings to try. HEAD stands for that folder."""
QUANTISES = "ours", "llama_cpp"
"""Engines that round weights while they load."""
KEYS = ("model", "dtype", "weights", "engine", "drafts")
"""The fields that tell the rows of the results apart."""
TUNING = 2
"""Prompts of each set that choose the setting."""


def filled(setting, head: str):
    """`setting` with HEAD replaced by the folder of the head."""
    if isinstance(setting, dict):
        return {name: filled(value, head) for name, value in setting.items()}
    return head if setting == "HEAD" else setting


def best(results: list[dict], settings: list[dict], sets: list[str]) -> dict:
    """A row of figures by set, each of the fastest setting over the set's tuning prompts; and all that were tried.

    results: one for each setting, in order. The row is "refused" only if no setting was served.
    """
    tried = [{"setting": setting, **result} for setting, result in zip(settings, results)]
    served = [one for one in tried if "sets" in one]
    if not served:
        return {"refused": tried[0]["refused"], "tried": tried}
    fastest_by_set = {}
    for name in sets:
        fastest = max(served, key=lambda one: one["sets"][name]["tuning_tokens_per_second"])
        fastest_by_set[name] = {"setting": fastest["setting"], **fastest["sets"][name]}
    return {"version": served[0]["version"], "sets": fastest_by_set, "tried": tried}


def compare_answers(row: dict, plain: dict[str, dict], eos: list[int]) -> None:
    """Set "same" in the figures of each set: the answers equal to those of the engine's plain steps. Drop the answers.

    plain: engine -> set -> answers; a row of plain steps adds its own.
    """

    def cut(answer: list[int]) -> list[int]:
        return answer[:-1] if answer and answer[-1] in eos else answer

    sets = row.get("sets", {})
    if row["drafts"] == "plain":
        plain[row["engine"]] = {name: figures["answers"] for name, figures in sets.items()}
    for name, base in plain.get(row["engine"], {}).items() if sets else ():
        answers = sets[name]["answers"]
        sets[name] |= {"same": sum(cut(a) == cut(b) for a, b in zip(answers, base)), "of": len(answers)}
    for some in (sets, *(one.get("sets", {}) for one in row["tried"])):
        for figures in some.values():
            figures.pop("answers", None)


def cells(row: dict, sets: list[str]) -> list[str]:
    """The figures of each set, or the reason why there are none."""
    return [row["refused"]] if "refused" in row else [cell(row["sets"][name]) for name in sets]


def cell(figures: dict) -> str:
    """The figures of one set."""
    length = "-" if figures["accept_length"] is None else f"{figures['accept_length']:.2f}"
    same = f" ({figures['same']}/{figures['of']})" if "same" in figures else ""
    return f"{length}, {figures['tokens_per_second']:,.0f}{same}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.command_line(__doc__, threads=2)
    parser.add_argument("--model", default=str(common.DEMO_MODEL))
    parser.add_argument("--heads", type=Path, help="folder of the heads (default: heads of the model)")
    parser.add_argument("--engines", nargs="+", default=["ours", "transformers", "vllm"],
                        choices=["ours", "transformers", "vllm", "sglang", "llama_cpp"])  # fmt: skip
    parser.add_argument("--drafts", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--workloads", nargs="+", default=["chat", "code_completion", "maths", "code_editing"])
    parser.add_argument("--folder", type=Path, default=common.PROMPTS)
    parser.add_argument("--trained-on", type=Path, nargs="+", default=[])
    parser.add_argument("--prompts", type=int, default=10, help="prompts of each workload that are measured")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt, the last ones")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", type=int, default=8, help="most settings to try for each engine and drafts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", nargs="+", default=["none"], choices=["none", "int8", "int4"],
                        help="to what engines that can do so round the weights")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=600, help="seconds that an engine may take to load or answer")
    parser.add_argument("--eager", action="store_true", help="do not compile ours")
    parser.add_argument("--json", type=Path, help="the results' file (default: peers.json, of a CPU peers_cpu.json)")
    options = parser.parse_args(arguments)
    options.json = options.json or common.RESULTS / ("peers_cpu.json" if options.device == "cpu" else "peers.json")
    options.heads = options.heads or Path(options.model) / "heads"
    return options


def make_task(options: argparse.Namespace) -> dict:
    """The task that all engines get. ValueError if a head was trained on a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    sets, chat = {}, bool(getattr(tokenizer, "chat_template", None))
    longest = min(
        options.longest, AutoConfig.from_pretrained(options.model).max_position_embeddings - options.new_tokens
    )
    for name in options.workloads:
        common.refuse_trained(options.folder / f"{name}.jsonl", options.prompts, options.trained_on)
        some = common.split_prompts(name, options.folder, options.prompts, TUNING, tokenizer, longest, chat)
        measured, tuning = ([ids[0].tolist() for ids in prompts] for prompts in some)
        sets[name] = {"measured": measured, "tuning": tuning}
    eos = GenerationConfig.from_pretrained(options.model).eos_token_id
    return dict(
        model=options.model, dtype=options.dtype, device=options.device, threads=options.threads, sets=sets,
        new_tokens=options.new_tokens, max_len=longest + options.new_tokens, repeats=options.repeats,
        eos=eos if isinstance(eos, list) else [eos] * (eos is not None), compile=not options.eager,
    )  # fmt: skip


def systems(options: argparse.Namespace, weights: str | None) -> dict[tuple[str, str], list]:
    """(drafts, engine) -> the settings to try, for drafts that have their head and engines that round weights so."""
    found = {}
    for drafts in options.drafts:
        folder, engines = SYSTEMS[drafts]
        if folder and not (options.heads / folder / "config.json").is_file():
            print(f"{drafts}: left out, because there is no {options.heads / folder}", flush=True)
            continue
        for engine in options.engines:
            settings = [filled(one, str(options.heads / str(folder))) for one in engines.get(engine, [])]
            if settings and (weights is None or engine in QUANTISES):
                found[drafts, engine] = settings[: options.settings]
    return found


def measured(task: dict, found: dict[tuple[str, str], list], options: argparse.Namespace) -> Iterator[tuple]:
    """(drafts, engine, a result for each setting), on a GPU as soon as there are any."""
    tasks = {key: [task | {"engine": key[1], "setting": one} for one in settings] for key, settings in found.items()}
    if options.device != "cpu":
        for key, some in tasks.items():
            yield *key, [result for one in some for result in worker.measure([one], options.timeout)]
        return
    results = iter(worker.measure([one for some in tasks.values() for one in some], options.timeout))
    for key, some in tasks.items():
        yield *key, [next(results) for _ in some]


def main(arguments: list[str] | None = None) -> None:
    begin, options = time.perf_counter(), parse(arguments)
    task, lines = make_task(options), []
    facts = common.stamp(torch.device(options.device)) | {"prompts": options.prompts, "new_tokens": options.new_tokens}
    for weights in (None if name == "none" else name for name in options.weights):
        found, plain = systems(options, weights), {}
        shared = {"model": Path(options.model).name, "dtype": options.dtype, "weights": weights}
        for drafts, engine, results in measured(task | {"weights": weights}, found, options):
            row = shared | {"engine": engine, "drafts": drafts}
            row |= best(results, found[drafts, engine], options.workloads)
            compare_answers(row, plain, task["eos"])
            common.save_rows(options.json, [row], KEYS, facts)  # at once, so that a stopped run keeps its rows
            said, name = cells(row, options.workloads), " ".join(filter(None, (drafts, weights)))
            print(f"{time.perf_counter() - begin:5.0f} s: {name}, {engine}: {'; '.join(said)}", flush=True)
            lines.append((name, f"{engine} {row.get('version', '')}", *said))
    title = "accept length, tokens/s (answers equal to plain)"
    common.show(("drafts", "engine", *options.workloads), lines, title)


if __name__ == "__main__":
    main()
