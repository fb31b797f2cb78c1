"""Many generate() calls of mixed lengths, one after the other: does a round get slower, does the process grow?

    python benchmarks/endurance.py [--calls 1000] [--json FILE]

Prompts of 5 to 500 random tokens, 8 to 96 new tokens, greedy and sampled by turns, batches of 1 and 2, in random order.
Prints, for each tenth of the calls, the median milliseconds of a round of one sequence and the resident memory (less
what the trie holds, which grows to its capacity). The first calls compile.
"""

import argparse
import os
import random
import statistics
from pathlib import Path

import torch
from common import DEMO_MODEL, RESULTS, pin, stamp, write_json
from transformers import AutoModelForCausalLM

import spec_compile


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS / "endurance.json")
    options = parser.parse_args()
    pin(options.threads)
    torch.manual_seed(0)
    pick = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    fast = spec_compile.speculate(model)
    speculation = fast.speculation
    for batch in (1, 2):
        speculation.warmup(batch, do_sample=True)
    tenths, times, facts = [], [], stamp()
    for call in range(1, options.calls + 1):
        batch = pick.choice((1, 1, 1, 2))
        ids = torch.randint(1, model.config.vocab_size, (batch, pick.randint(5, 500)))
        speculation.stats.reset()
        fast.generate(
            ids, do_sample=call % 2 == 0, max_new_tokens=pick.randint(8, 96), pad_token_id=0, eos_token_id=None
        )
        stats = speculation.stats
        if batch == 1 and call % 2:
            times.append((stats.seconds["verify"] + stats.seconds["draft"] + stats.seconds["host"]) / stats.rounds)
        if call % max(1, options.calls // 10) == 0:
            row = {
                "calls": call,
                "round_ms": statistics.median(times) * 1e3,
                "resident_mb": (resident() - speculation.ngram.stats()["bytes"]) / 1e6,
                "trie_mb": speculation.ngram.stats()["bytes"] / 1e6,
            }
            print(", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
            tenths.append({**row, "stamp": facts})
            times = []
    write_json(options.json, {"tenths": tenths})


if __name__ == "__main__":
    main()
