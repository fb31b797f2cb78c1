"""How long ``speculation.refresh()`` takes, for the demo model on a CPU and, with a GPU, for a large shape; and the
look for changes that every generate() begins with.

    python benchmarks/refresh.py [--shape llama-8b] [--threads 1] [--repeats 5] [--json FILE]

Before each refresh() every parameter is replaced by a copy of it, as ``load_state_dict(assign=True)`` does. "nothing
moved" is a refresh() after which nothing had to be copied. The floor is the time in which the bytes of the parameters
are copied once, tensor by tensor, into memory that was written before. "look" is that at a model of 32 layers (hidden
32, on the CPU), which has as many modules as one of any size. Medians of the repeats, in milliseconds.
"""

import argparse
import json
import statistics
import sys
import time
import timeit
from functools import partial
from pathlib import Path

import torch
from common import DEMO_MODEL, machine, pin, synchronize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import spec_compile


def measure(model: PreTrainedModel, repeats: int) -> dict[str, float]:
    """Milliseconds of refresh() after all parameters were replaced and after none was, and of copying them."""
    fast = spec_compile.speculate(model, compile=False, check=False)
    ids = torch.arange(1, 9, device=model.device)[None]
    asked = dict(do_sample=False, max_new_tokens=4, eos_token_id=None, pad_token_id=0)
    fast.generate(ids, **asked)
    milliseconds: dict[str, list[float]] = {"refresh": [], "nothing moved": [], "copy": []}

    def timed(name: str, function) -> None:
        synchronize(model.device)
        begin = time.perf_counter()
        function()
        synchronize(model.device)
        milliseconds[name].append((time.perf_counter() - begin) * 1e3)

    with torch.no_grad():
        for _ in range(repeats + 1):
            replace_parameters(model)
            timed("refresh", fast.speculation.refresh)
            timed("nothing moved", fast.speculation.refresh)
            copies = [parameter.clone() for parameter in model.parameters()]
            timed("copy", partial(copy_all, copies, [*model.parameters()]))
            del copies
    fast.generate(ids, **asked)
    return {name: round(statistics.median(times[1:]), 3) for name, times in milliseconds.items()}


def look(repeats: int) -> dict[str, float]:
    """Milliseconds of a look for changes in a model of 32 layers."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=32, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    fast = spec_compile.speculate(LlamaForCausalLM(config).eval(), compile=False, check=False)
    seconds = timeit.repeat(fast.speculation.engine.watch.changes, number=20, repeat=10 * repeats)
    return {"look": round(statistics.median(seconds) / 20 * 1e3, 3)}


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each tensor into another."""
    for target, source in zip(targets, sources):
        target.copy_(source)


def replace_parameters(model: PreTrainedModel) -> None:
    """Put a new parameter of the same values in the place of each; tied ones stay tied."""
    new: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                copy = new.setdefault(id(parameter), nn.Parameter(parameter.detach().clone()))
                setattr(part, name, copy)


def main(arguments: list[str]) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    pin(options.threads)
    results = {"demo model, CPU": measure(AutoModelForCausalLM.from_pretrained(DEMO_MODEL).eval(), options.repeats)}
    results["32 layers"] = look(options.repeats)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        from gpu import build  # needs a GPU

        results[options.shape] = measure(build(options.shape), options.repeats)
    for name, times in results.items():
        print(f"{name}: " + ", ".join(f"{what} {value:.2f} ms" for what, value in times.items()))
    if options.json:
        options.json.write_text(json.dumps({**machine(device), "milliseconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
