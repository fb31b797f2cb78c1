"""The cost of the same bits in any number of rows: rounds with our kernels, compared with rounds by libraries.

    python -m benchmarks.rounds.invariance [--shape llama-8b] [--sizes 1 4 16 64] [--contexts 1024 8192]
                                           [--batches 1 16] [--attention sdpa] [--json FILE]

"invariant" rounds have our kernels. In "library" rounds torch.nn.functional.linear computes every product, and only
Inductor fuses; with --attention that backend attends, too. Weights are random and nothing is checked. Times are median
milliseconds of a captured round, as in gpu.py.
"""

import argparse
import gc
from pathlib import Path
from unittest.mock import patch

import torch

import spec_compile
from benchmarks.common import RESULTS, save_rows, stamp
from benchmarks.rounds.captured import rounds
from benchmarks.rounds.shapes import DENSE, build
from spec_compile.kernels import linear
from spec_compile.passes.row_invariance import variant_parts

KEYS = ("shape", "attention", "batch", "context", "nodes")
"""The fields that tell the rows of the results apart."""


def system_rounds(model, forms, options, **backend) -> dict[tuple[int, int, int], float]:
    """Milliseconds by (batch, context, nodes) with these forms of products. Prints parts that may differ in bits."""
    out = {}
    with patch.object(linear, "FORMS", forms):
        capacity = max(options.contexts) + 1088  # slots for the nodes of a round
        fast = spec_compile.speculate(
            model, num_draft_tokens=max(options.sizes), max_cache_len=capacity, check=False, **backend
        )
        parts = variant_parts(fast.speculation.engine.runtime.verify)
        print("the same bits" if not parts else f"{len(parts)} parts may differ, such as {parts[0]}", flush=True)
        for batch in options.batches:
            for context in options.contexts if batch == 1 else options.contexts[:1]:
                for nodes, ms in rounds(fast, context, batch, options.sizes).items():
                    out[batch, context, nodes] = ms
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b", choices=DENSE)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 8192], help="larger batches only run the first"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--attention", help="the backend of library rounds (default: ours)")
    parser.add_argument("--json", type=Path, default=RESULTS / "invariance.json")
    options = parser.parse_args()
    model = build(options.shape)
    invariant = system_rounds(model, linear.FORMS, options)
    gc.collect()
    torch.cuda.empty_cache()
    backend = {} if options.attention is None else {"attention_backend": options.attention}
    library, rows = system_rounds(model, (), options, **backend), []
    facts = {"shape": options.shape, "attention": options.attention}
    for (batch, context, nodes), ms in invariant.items():
        other = library[batch, context, nodes]
        print(f"B={batch} context {context} N={nodes}: {ms:.3f} ms, library {other:.3f} ms, {ms / other:.3f}")
        rows.append({"batch": batch, "context": context, "nodes": nodes, "invariant": ms, "library": other, **facts})
    save_rows(options.json, rows, KEYS, stamp(torch.device("cuda")))


if __name__ == "__main__":
    main()
