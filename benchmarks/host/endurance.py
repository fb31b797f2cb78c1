"""Many generate() calls of mixed lengths, one after another: does a round get slower, does the process grow?

    python -m benchmarks.host.endurance [--calls 1000] [--device cuda] [--json FILE]

Prompts of 5 to 500 random tokens, 8 to 96 new tokens, greedy and sampled by turns, batches of 1 and 2, in random order.
Prints, before the calls and after each tenth of them, the rounds so far, the median milliseconds of a round of one
sequence, and the resident memory without the trie, which grows to its capacity. On a GPU the model is in bfloat16, and
the memory of tensors, of PyTorch's allocator and of the whole device is printed, too. The first calls compile.
"""

import argparse
import os
import random
import statistics
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import spec_compile
from benchmarks.common import DEMO_MODEL, RESULTS, pin, stamp, write_json


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(fast: PreTrainedModel) -> dict[str, float]:
    """Megabytes of this process without its trie; on a GPU, which holds the texts of n-grams, also the device's."""
    if fast.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(fast.device)
        taken = {"resident_mb": resident(), "allocated_mb": torch.cuda.memory_allocated(fast.device)}
        taken |= {"reserved_mb": torch.cuda.memory_reserved(fast.device), "device_mb": total - free}
    else:
        trie = fast.speculation.ngram.stats()["bytes"]
        taken = {"resident_mb": resident() - trie, "trie_mb": trie}
    return {name: count / 1e6 for name, count in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=2, help="threads of a CPU")
    parser.add_argument("--json", type=Path, default=RESULTS / "endurance.json")
    options = parser.parse_args()
    on_gpu = options.device.type == "cuda"
    if not on_gpu:
        pin(options.threads)
    torch.manual_seed(0)
    pick = random.Random(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=dtype).to(options.device).eval()
    fast = spec_compile.speculate(model)
    speculation = fast.speculation
    for batch in (1, 2):
        speculation.warmup(batch, do_sample=True)
    tenths, times, rounds, facts = [], [], 0, stamp(model.device)

    def tell(row: dict[str, float]) -> None:
        row |= memory(fast)
        print(", ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
        tenths.append({**row, "stamp": facts})

    tell({"calls": 0, "rounds": 0})
    for call in range(1, options.calls + 1):
        batch = pick.choice((1, 1, 1, 2))
        ids = torch.randint(1, model.config.vocab_size, (batch, pick.randint(5, 500))).to(model.device)
        speculation.stats.reset()
        fast.generate(
            ids, do_sample=call % 2 == 0, max_new_tokens=pick.randint(8, 96), pad_token_id=0, eos_token_id=None
        )
        stats = speculation.stats
        rounds += stats.rounds
        if batch == 1 and call % 2:
            times.append((stats.seconds["verify"] + stats.seconds["draft"] + stats.seconds["host"]) / stats.rounds)
        if call % max(1, options.calls // 10) == 0:
            tell({"calls": call, "rounds": rounds} | ({"round_ms": statistics.median(times) * 1e3} if times else {}))
            times = []
    write_json(options.json, {"tenths": tenths})


if __name__ == "__main__":
    main()
