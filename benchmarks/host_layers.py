"""Tokens a second of models with a part of their weights in the host's memory, next to transformers with accelerate.

    python -m benchmarks.host_layers [--shapes llama-8b qwen3-30b-a3b] [--layers 6] [--model FOLDER [--host-layers N]]
        [--new-tokens 8] [--our-tokens 32] [--acceptance 0.7] [--compile] [--json FILE]

Shapes have random weights and need no download. A dense model has half of its layers on the host, a mixture has the
experts of all its layers there and is cut to --layers layers. accelerate's hooks are on the modules that are there.

A token takes the difference of two answers, of one token and of several, divided by the tokens between them; the
prompt is real text. transformers runs first, because ours pins the memory that its hooks read. Its hooks move all
experts of a layer; ours fetches those that tokens choose.

"simulated" are drafts that are right with the stated probability (see simulated_acceptance.py), and cost nothing: for a
dense model trees of 16 nodes, for a mixture as many nodes as adaptive drafting chooses, as nodes read more experts.
Random weights make the acceptance of n-grams an accident: look at it with --model only.
"floor" is the time to move the bytes that a round of one token reads from the host, at the measured speed of large
copies from pinned memory. More tokens choose more experts, but read the same matrices.
"""

import gc
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import accelerate
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import spec_compile
from benchmarks import common
from benchmarks.rounds.shapes import SHAPES, build, text_tokens
from benchmarks.simulated_acceptance import TREE, draw_right
from benchmarks.timers import median_ms
from spec_compile.contrib import offload

PROMPT = 64
"""Tokens of the prompt."""
TRANSFORMERS, NGRAM = "transformers", "ours, n-grams"


def to_host(model: PreTrainedModel, count: int | None) -> list[nn.Module]:
    """Let accelerate offload the experts of a mixture, or the last layers (`count`, or half of them)."""
    layers = [*model.model.layers]
    experts = [layer.mlp.experts for layer in layers if hasattr(layer.mlp, "experts")]
    count = len(layers) // 2 if count is None else count
    parts = experts if experts else layers[len(layers) - count :]
    device = model.device
    for part in parts:
        accelerate.cpu_offload(part, device)
    return parts


def link(device: torch.device, size: int = 1 << 28) -> dict[str, float]:
    """Bytes a second from the host's pinned memory to the device: of large copies, and of the op for experts.

    size: bytes of a copy; the op copies 8 of 64 experts, an eighth of them.
    """
    held = torch.zeros(64, size // 64, dtype=torch.uint8, pin_memory=device.type == "cuda")
    ids = torch.arange(0, 64, 8, device=device)[None]
    calls = {
        "copies": (partial(offload.FETCH, held, str(device)), size),
        "experts": (partial(offload.FETCH_EXPERTS, held, ids), size // 8),
    }
    return {name: count / median_ms(call, 5) * 1e3 for name, (call, count) in calls.items()}


def read_bytes(fast: PreTrainedModel) -> float:
    """Bytes that a round of one token reads from the host: matrices, and a token's share of experts [E, ...]."""
    served = fast.speculation.original
    config = served.config.get_text_config(decoder=True)
    chosen, total = getattr(config, "num_experts_per_tok", 0) or 0, 0.0
    for name, parameter in served.named_parameters():
        if parameter in offload.PLACES:
            share = chosen / len(parameter) if ".experts." in name else 1.0
            total += parameter.nbytes * share
    return total


def token_ms(system: PreTrainedModel, ids: Tensor, tokens: int, repeats: int) -> tuple[Tensor, float]:
    """The answer of `tokens` tokens, and milliseconds for each token but the first: the least of all repeats."""
    fixed = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None, pad_token_id=0)

    def timed(count: int) -> tuple[Tensor, float]:
        if hasattr(getattr(system, "speculation", None), "ngram"):
            system.speculation.ngram.reset()  # an answer that it knows would be accepted as a whole
        return common.elapsed(partial(system.generate, ids, max_new_tokens=count, **fixed), ids.device)

    timed(1)
    first = min(timed(1)[1] for _ in range(repeats))
    answers = [timed(tokens) for _ in range(repeats)]
    return answers[0][0], (min(seconds for _, seconds in answers) - first) / (tokens - 1) * 1e3


def measure(name: str, model: PreTrainedModel, options) -> list[dict]:
    """A row for each system. The first row is transformers'."""
    begin = time.perf_counter()

    def tell(text: str) -> None:
        print(f"{name}, {time.perf_counter() - begin:5.1f} s: {text}", flush=True)

    tokenizer = {"model": options.model} if options.model else {}
    ids = text_tokens(PROMPT, model.config.vocab_size, **tokenizer)[None].to(model.device)
    text, right = (torch.zeros(1, PROMPT + options.our_tokens, dtype=torch.int64, device=ids.device) for _ in range(2))
    right.copy_(draw_right(options.acceptance, *right.shape))
    parts = to_host(model, options.host_layers)
    tell(f"{len(parts)} modules, such as {type(parts[0]).__name__}, are offloaded")
    wanted, ms = token_ms(model, ids, options.new_tokens, 1)
    tell(f"a token of transformers takes {ms:.1f} ms")
    rows = [{"shape": name, "system": TRANSFORMERS, "ms a token": ms}]

    shared = dict(compile=options.compile, check=False, cache=False, max_cache_len=PROMPT + options.our_tokens + 64)
    shared |= dict(prefix_cache_bytes=0, prefix_cache_host_bytes=0)
    adaptive = any(".experts." in name for name, _ in model.named_parameters())
    drafted = dict(algo="simulated", draft=None, text=text, right=right, adaptive=adaptive, **TREE)
    systems = {
        "ours, plain": dict(num_draft_tokens=1),
        f"ours, simulated acceptance {options.acceptance}, {'adaptive' if adaptive else '16 nodes'}": drafted,
        NGRAM: dict(algo="ngram"),
    }
    speeds = link(ids.device)
    tell(", ".join(f"{way}: {speed / 1e9:.1f} GB/s from the host" for way, speed in speeds.items()))
    for system, settings in systems.items():
        fast = spec_compile.speculate(model, **shared, **settings)
        fast.speculation.warmup()
        read = [line.split("  ")[-1] for line in fast.speculation.explain().splitlines() if "a round reads" in line]
        tell(f"{system} is ready; {read[0]}")
        if settings.get("adaptive"):
            token_ms(fast, ids, options.our_tokens, 1)  # adaptive drafting learns what drafts gain
        fast.speculation.stats.reset()
        answer, ms = token_ms(fast, ids, options.our_tokens, 2 if rows[1:] else 1)
        if not rows[1:]:
            text[:] = answer  # the truth of simulated drafts
        floor = read_bytes(fast) / speeds["copies"] * 1e3
        length = min(wanted.shape[1], answer.shape[1])
        same = (wanted[0, :length] == answer[0, :length]).long().cumprod(0).sum().item() - PROMPT
        row = {"shape": name, "system": system, "ms a token": ms, "accept length": fast.speculation.stats.accept_length}
        row |= {"floor ms": floor, "floor over ms": floor / ms, "GB a round": read_bytes(fast) / 1e9}
        rows.append(row | {"equal tokens": f"{same} of {length - PROMPT}"})
        tell(f"a token of {system} takes {ms:.1f} ms")
        del fast
    for row in rows:
        row |= {"tokens/s": 1e3 / row["ms a token"], "over transformers": rows[0]["ms a token"] / row["ms a token"]}
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = common.command_line(__doc__, results="", threads=2)
    parser.add_argument("--shapes", nargs="*", default=["llama-8b", "qwen3-30b-a3b"], choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=6, help="layers of a mixture of --shapes")
    parser.add_argument("--model", help="a folder or a name on the Hub, in place of shapes")
    parser.add_argument("--host-layers", type=int, help="layers of a dense model on the host; half of them by default")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens that transformers generates")
    parser.add_argument("--our-tokens", type=int, default=32, help="tokens that ours generates")
    parser.add_argument("--acceptance", type=float, default=0.7, help="of simulated drafts")
    parser.add_argument("--compile", action="store_true", help="also compile rounds, which takes a minute")
    options = parser.parse_args(arguments)
    device, rows = common.device_for(options.threads), []
    for name in [options.model] if options.model else options.shapes:
        if options.model:
            model = common.load_model(options.model, device)
        else:
            is_mixture = "moe" in SHAPES[name][0] or SHAPES[name][0] in ("mixtral", "gpt_oss")
            model = build(name, device, options.layers if is_mixture else None)
        rows += measure(name, model, options)
        del model
        gc.collect()
        offload.release_unused()
    columns = ["system", "ms a token", "tokens/s", "over transformers", "accept length", "GB a round", "floor ms"]
    common.show_rows(rows, ["shape", *columns, "floor over ms", "equal tokens"], "a part of the weights on the host")
    if options.json:
        common.save_rows(options.json, rows, ("shape", "system"), common.stamp(torch.device(device)))


if __name__ == "__main__":
    main()
