"""Drafts whose weights are read in fewer bits (`draft_weights`), next to the same drafts in 16 bits.

    python -m benchmarks.rounds.draft_weights [--shape llama-8b] [--drafts eagle eagle3 dflash] [--context 1024]
                                              [--seconds 210]

A row for each draft and each value of the option: milliseconds of a draft (its forwards, without the target: a chain of
five tokens, or a block of 16), of one of its forwards, and of a whole captured round; each over that of the same draft
in 16 bits in the same run; and the bytes that the draft reads, with the time that they take at the speeds of a large
read and copy. Drafts have the target's vocabulary. Weights are random, so acceptance means nothing here.

--seconds: no other row is begun after so many. Formats come in turn, so that each draft has its first rows then.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial

import torch
from transformers import PreTrainedModel

import spec_compile
from benchmarks.common import command_line, floors, save_rows, stamp
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.drafts import make
from benchmarks.rounds.shapes import build, read_bytes
from benchmarks.timers import bandwidth, median_ms
from spec_compile.drafters.modules.dflash import DFlashDraft
from spec_compile.drafters.modules.eagle import Eagle3Head
from spec_compile.runtime.session import StepKind

CHAIN = dict(num_steps=5)
OPTIONS = {"eagle": CHAIN, "eagle3": CHAIN, "dflash": {}}
"""Options of each algorithm, which is also the form of its draft."""
FORMATS = [None, "fp8", "int4", {"output": "fp8"}, {"output": "int4"}, "int8"]
"""Values of ``draft_weights``, in the order in which they are measured."""
KEYS = ("shape", "algo", "draft_weights", "context")
"""The fields that tell the rows of the results apart."""


def draft_bytes(algorithm, steps: int) -> int:
    """Bytes of matrices that the forwards of one draft read: those of the layers once less than the output matrix in a
    chain, whose first token comes from the state that the round has kept."""
    weights = algorithm.weights
    draft, total = weights.draft, 0
    is_block = isinstance(draft, DFlashDraft)
    for name, parameter in draft.named_parameters():
        is_projection = name == "fc.weight" and isinstance(draft, (Eagle3Head, DFlashDraft))  # of the target's states
        if parameter is draft.head_weight:
            total += weights.read_bytes(parameter, "output") * (1 if is_block else steps)
        elif parameter.dim() == 2 and parameter is not draft.embedding and not is_projection:
            total += weights.read_bytes(parameter, "layers") * (1 if is_block else steps - 1)
    return total


def measured(model: PreTrainedModel, draft: torch.nn.Module, algo: str, value, context: int, speeds: dict) -> dict:
    """The figures of one draft with one value of the option."""
    begin = time.perf_counter()
    fast = spec_compile.speculate(
        model, algo, draft=draft, draft_weights=value, max_cache_len=context + 1024, check=False, adaptive=False,
        **OPTIONS[algo],
    )  # fmt: skip
    algorithm = fast.speculation.engine.runtime.algorithm
    nodes, steps = algorithm.plan.nodes, OPTIONS[algo].get("num_steps", 1)
    ms = rounds(fast, context, 1, [nodes])[nodes]
    session = fast.speculation.engine.session(1)
    propose = session.get(StepKind.PROPOSE)
    with torch.no_grad():
        session.state.lengths.fill_(context - 1)
        draft_ms = median_ms(partial(propose, 128), 30)
    size = draft_bytes(algorithm, steps)
    return {
        "nodes": nodes, "draft_ms": draft_ms, "forward_ms": draft_ms / max(steps - 1, 1), "round_ms": ms,
        "draft_bytes": size, **floors(size, speeds, draft_ms),
        "round_floor_copy_ms": (size + read_bytes(fast, context, 1, nodes)) / speeds["copy"] * 1e3,
        "ready_seconds": time.perf_counter() - begin, "told": algorithm.weights.explain(),
    }  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each format and draft, with its times over those of the same draft in 16 bits."""
    begin, model = time.perf_counter(), build(args.shape, args.device)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    drafts = {algo: make(algo, model, vocabulary) for algo in args.drafts}
    speeds = bandwidth() if args.device == "cuda" else {"read": 1e10, "copy": 1e10}
    whole: dict[str, dict] = {}
    for value in FORMATS:
        for algo, draft in drafts.items():
            if time.perf_counter() - begin > args.seconds:
                print(f"{algo} {value}: left out after {args.seconds} s", flush=True)
                continue
            row = measured(model, draft, algo, value, args.context, speeds)
            first = whole.setdefault(algo, row)
            ratios = {f"{name}_over_16_bits": row[f"{name}_ms"] / first[f"{name}_ms"] for name in ("draft", "round")}
            what = json.dumps(value) if isinstance(value, dict) else value or "16 bits"
            yield {"shape": args.shape, "algo": algo, "draft_weights": what, "context": args.context, **row, **ratios}
            if args.device == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    parser = command_line(__doc__, results="draft_weights.json")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--drafts", nargs="+", choices=OPTIONS, default=[*OPTIONS])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=210)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    facts = stamp(torch.device(args.device))
    for row in rows(args):
        ratios = [row[f"{name}_over_16_bits"] for name in ("draft", "round")]
        print(
            f"{row['algo']:7} {row['draft_weights']:18} draft {row['draft_ms']:.3f} ms, {ratios[0]:.3f} of 16 bits and "
            f"{row['over_copy']:.2f} times its floor; forward {row['forward_ms']:.3f} ms; round {row['round_ms']:.3f} "
            f"ms, {ratios[1]:.3f} of 16 bits; ready after {row['ready_seconds']:.0f} s", flush=True,
        )  # fmt: skip
        save_rows(args.json, [row], KEYS, facts)


if __name__ == "__main__":
    main()
