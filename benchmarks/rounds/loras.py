"""What LoRA adapters that rows choose cost: rounds of the model with adapters next to those of the model without any.

    python -m benchmarks.rounds.loras                             # the demo model, on a CPU or a GPU
    python -m benchmarks.rounds.loras --shape llama-8b            # random weights, on a GPU
    python -m benchmarks.rounds.loras --shape llama-8b --products # also the low-rank products by themselves

All systems take turns in one process, and every round is one token without drafts (`token_times`). "grouped" is another
way to compute the products: those with all adapters at once, of which each row keeps its own.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import spec_compile
from benchmarks.common import DEMO_MODEL, RESULTS, load_model, save_rows, show, stamp
from benchmarks.rounds.shapes import DENSE, build, text_tokens
from benchmarks.rounds.token_times import step_times
from benchmarks.timers import captured, median_ms, replay_us
from spec_compile.capture.loras import without_adapters
from spec_compile.kernels.linear.low_rank import LowRank, add_low_rank

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = 64
"""Tokens of each prompt."""


def adapted(model: PreTrainedModel, adapters: int, rank: int) -> PreTrainedModel:
    """The model with so many adapters on all linear layers, named "0", "1" and so on, with random values."""
    config = partial(LoraConfig, r=rank, target_modules=LAYERS, init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, config(), adapter_name="0", autocast_adapter_dtype=False)
    for number in range(1, adapters):
        wrapped.add_adapter(str(number), config(), autocast_adapter_dtype=False)
    return wrapped.eval()


def round_rows(model: PreTrainedModel, options: argparse.Namespace) -> list[dict]:
    """A row for each number of rows and adapters: milliseconds of a round, and in proportion to no adapters."""
    wrapped = adapted(model, max(options.adapters), options.rank)
    build_fast = partial(spec_compile.speculate, max_cache_len=1024, check=False, compile=options.compile)
    base = build_fast(without_adapters(wrapped.get_base_model()))
    systems = {number: build_fast(wrapped, max_loras=number) for number in options.adapters}
    rows = []
    for batch in options.rows:
        ids = text_tokens(batch * PROMPT, model.config.vocab_size).view(batch, PROMPT).to(model.device)
        plain = dict(do_sample=False, speculation=False, pad_token_id=0, eos_token_id=None)
        ways = {0: partial(base.generate, **plain)}
        for number, fast in systems.items():
            names = [str(row % number) for row in range(batch)]
            ways[number] = partial(fast.generate, adapter_names=names, **plain)
        times = step_times({str(number): way for number, way in ways.items()}, ids, repeats=options.repeats)
        for number in ways:
            ms = times[str(number)]["ms"]
            rows.append({"rows": batch, "adapters": number, **times[str(number)], "ratio": ms / times["0"]["ms"]})
    return rows


def grouped(y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """What `add_low_rank` computes, by two products with all entries. up: [entries, rank, out]."""
    entries, rank, _ = down.shape
    inner = F.linear(x, down.flatten(0, 1)).unflatten(2, (entries, rank))
    own = torch.arange(entries, device=x.device) == rows[:, None]
    inner = torch.where(own[:, None, :, None], inner * scale[:, None], 0).flatten(2)
    return y + inner @ up.flatten(0, 1)


def product_rows(model: PreTrainedModel, options: argparse.Namespace) -> list[dict]:
    """A row for each number of rows and adapters: microseconds of the products of one square layer of the model."""
    size, device, rows = model.config.hidden_size, model.device, []
    weight = torch.empty(size, size, dtype=model.dtype, device=device)
    for batch in options.rows:
        for number in options.adapters:
            part = LowRank(1 + number, options.rank, weight, weight.dtype)
            for entry in range(1, 1 + number):
                part.put(entry, torch.randn(options.rank, size), torch.randn(size, options.rank), 0.1)
            x = torch.randn(2, batch, 1, size, dtype=weight.dtype, device=device)
            chosen = 1 + torch.arange(batch, device=device) % number
            ways = {
                "gathered": partial(add_low_rank, *x, part.down, part.up, part.scale, chosen),
                "grouped": partial(grouped, *x, part.down, part.up.transpose(1, 2).contiguous(), part.scale, chosen),
            }
            torch._dynamo.reset()
            ways = {name: torch.compile(way, dynamic=False) if options.compile else way for name, way in ways.items()}
            if device.type == "cuda":
                us = {name: replay_us(captured(way)) for name, way in ways.items()}
            else:
                us = {name: 1e3 * median_ms(way, 30) for name, way in ways.items()}
            rows.append({"rows": batch, "adapters": number, "size": size, "us": us})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*DENSE], help="a published shape with random weights; else the demo model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--products", action="store_true", help="also the products of one layer")
    parser.add_argument("--json", type=Path, default=RESULTS / "loras.json")
    options = parser.parse_args()
    model = build(options.shape, options.device) if options.shape else load_model(DEMO_MODEL, options.device)
    common = {"model": options.shape or "demo", "device": model.device.type, "rank": options.rank}
    facts, keys = stamp(model.device), ("model", "device", "rank", "rows", "adapters")
    if options.products:
        with torch.no_grad():
            products = product_rows(model, options)
        save_rows(options.json, [common | row for row in products], keys, facts, "products")
        show(("rows", "adapters", "us"), [[str(row[key]) for key in ("rows", "adapters", "us")] for row in products])
    rows = round_rows(model, options)
    save_rows(options.json, [common | row for row in rows], keys, facts)
    cells = [[str(row["rows"]), str(row["adapters"]), f"{row['ms']:.3f}", f"{row['ratio']:.2f}"] for row in rows]
    show(("rows", "adapters", "ms a round", "times no adapters"), cells)


if __name__ == "__main__":
    main()
