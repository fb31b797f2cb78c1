"""One model on several GPUs of a host, or in several processes on a CPU: every process has a part of each layer.

torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py [--model NAME] [--algo ngram] [--eager]

Without torchrun it runs in one process:

python examples/tensor_parallel.py
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.distributed import DistributedConfig

import spec_compile

MODEL = Path(__file__).parent / "tiny_coder"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--algo", default="ngram")
    parser.add_argument("--draft")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    # Started by torchrun, transformers reads on each process only its parts of the weights. A small model may as well
    # be loaded whole on each, with speculate(..., tensor_parallel="auto").
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    spread = {"distributed_config": DistributedConfig(tp_plan="auto")} if ranks > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", **spread).eval()
    draft = {} if options.draft is None else {"draft": options.draft}
    fast = spec_compile.speculate(model, options.algo, compile=not options.eager, tensor_parallel="auto", **draft)

    # Every process calls generate() alike. The first one streams.
    inputs = tokenizer("def mean(values):\n", return_tensors="pt").to(fast.device)
    fast.generate(**inputs, max_new_tokens=options.new_tokens, do_sample=False, streamer=TextStreamer(tokenizer))
    if rank == 0:
        print(f"{ranks} processes, accept length {fast.speculation.stats.accept_length:.2f}")
        print(next(line for line in fast.speculation.explain().splitlines() if line.startswith("  shard")))
    del fast
    gc.collect()  # NCCL waits for captured graphs before its communicators end
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
