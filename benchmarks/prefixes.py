"""Kept prefixes: the first token of a second turn, and the cost of keeping texts that nobody asks for again.

    python -m benchmarks.prefixes [--model PATH | --shape NAME [--layers N]] [--tokens 1024 4096 25000] [--repeats 5]
        [--prompt-tokens 64 320] [--in-flight 16 64] [--requests 192] [--new-tokens 64] [--no-compile] [--json FILE]

Turns: a manager has one slot. A text of --tokens is asked for, another text takes its slot, and then the first one
comes again with its answer and 32 more tokens. "cold" is the time until the first token of the first turn, "second"
that of the second, and "added" that of a prompt of only those tokens that the second turn has to process. "second over
cold" should be 0.1 at most. Each repeat has a text of its own; the times are medians.

Serving: --in-flight requests with different random prompts of --prompt-tokens are under way at any time, with kept
prefixes and without. Both take turns, and "over off" divides the median rates; it should be 0.98 at least. On a GPU
texts of fewer than 256 tokens are not copied to the host, so 64 prompt tokens measure the decision and 320 the copies.

The numbers of --tokens that a model does not allow are left out. "token_bytes" and "state_bytes" are the memory of a
token's keys and values, and of the states at the end of a text.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch

import spec_compile
from benchmarks.common import DEMO_MODEL, command_line, device_for, load_model, save_rows, show, stamp
from benchmarks.rounds.shapes import SHAPES, build, state_bytes, text_tokens
from benchmarks.serving import finished, forget, in_flight, managed

ADDED = 32
"""Tokens that the second turn adds to the first one and its answer."""
ANSWER = 16
"""Tokens of the answers of turns."""
SHIFT = 97
"""Tokens by which the text of a repeat begins later than that of the one before."""
ROOM = 4_000_000_000
"""Bytes of host memory for kept prefixes."""


def answer(manager, prompt: list[int]):
    """The output of one request that begins when all copies of earlier texts are over."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    manager.add_request(prompt, max_new_tokens=ANSWER, eos_token_id=-1)
    return next(finished(manager, 1))


def first_token(output) -> float:
    """Seconds from a request to its first token."""
    return output.first_token_time - output.created_time


def turns(manager, texts: list[list[int]], other: list[int]) -> dict:
    """The row of texts of one length. other: takes the slot between two turns."""
    cold, second, added, reused = [], [], [], []
    for text in texts:
        one = answer(manager, text)
        answer(manager, other)
        prompt = text + one.generated_tokens + other[:ADDED]
        two = answer(manager, prompt)
        known = two.speculation.reused_prompt_tokens
        rest = answer(manager, prompt[:0:-1][: len(prompt) - known])  # reversed, so that nothing of it is known
        assert rest.speculation.reused_prompt_tokens == 0
        for seconds, output in ((cold, one), (second, two), (added, rest)):
            seconds.append(first_token(output))
        reused.append(known)
    median = {"cold_s": cold, "second_s": second, "added_s": added, "reused": reused}
    row = {name: statistics.median(values) for name, values in median.items()}
    return row | {"second over cold": row["second_s"] / row["cold_s"]}


def turn_rows(model, options) -> list[dict]:
    """A row for each length of a text that the model allows."""
    longest = model.config.get_text_config(decoder=True).max_position_embeddings - ANSWER * 2 - ADDED
    lengths = [tokens for tokens in options.tokens if tokens <= longest]
    room = max(lengths) + 2 * ANSWER + ADDED
    fast = spec_compile.speculate(model, max_cache_len=room, prefix_cache_host_bytes=ROOM, **options.shared)
    graph, rows = fast.speculation.engine.runtime.verify, []
    vocab = model.config.get_text_config(decoder=True).vocab_size
    ids = text_tokens(max(lengths) + SHIFT * (options.repeats + 1), vocab).tolist()
    other = ids[: min(lengths)][::-1]
    with managed(fast, 1) as manager:
        for tokens in lengths:
            texts = [ids[SHIFT * n : SHIFT * n + tokens] for n in range(options.repeats + 1)]
            turns(manager, texts[-1:], other)  # warm
            forget(fast)
            memory = {"token_bytes": graph.token_bytes, "state_bytes": state_bytes(graph)}
            rows.append({"tokens": tokens, **turns(manager, texts[:-1], other), **memory})
            forget(fast)
    fast.destroy_cached_continuous_batching_manager()
    return rows


def serving_rows(model, options) -> list[dict]:
    """A row with and one without kept prefixes, for each length of prompts and number in flight."""
    room = max(options.prompt_tokens) + options.new_tokens
    systems = {
        name: spec_compile.speculate(
            model, max_cache_len=room, prefix_cache_bytes=device, prefix_cache_host_bytes=host, **options.shared
        )
        for name, device, host in (("off", 0, 0), ("on", None, ROOM))
    }
    vocab = model.config.get_text_config(decoder=True).vocab_size
    generator, rows = torch.Generator().manual_seed(0), []
    for count in options.in_flight:
        for tokens in options.prompt_tokens:
            rates: dict[str, list[float]] = {name: [] for name in systems}
            for repeat in range(options.repeats + 1):
                for name, fast in systems.items():
                    prompts = torch.randint(3, vocab, (options.requests, tokens), generator=generator).tolist()
                    with managed(fast, count) as manager:
                        rate = in_flight(manager, prompts, count, options.new_tokens)["tokens_per_s"]
                    forget(fast)
                    rates[name] += [rate] if repeat else []  # the first ones warm
            medians = {name: statistics.median(values) for name, values in rates.items()}
            for name, rate in medians.items():
                facts = {"prefixes": name, "in_flight": count, "prompt_tokens": tokens, "tokens_per_s": rate}
                rows.append({**facts, "over off": rate / medians["off"]})
    return rows


def report(turned: list[dict], served: list[dict]) -> None:
    """Print both tables."""
    titles = ("tokens", "cold_s", "second_s", "added_s", "second over cold", "reused")
    show(titles, [[f"{row[title]:.4g}" for title in titles] for row in turned], "turns")
    titles = ("in_flight", "prompt_tokens", "tokens_per_s", "over off")
    show(
        ("prefixes", *titles),
        [[row["prefixes"], *(f"{row[title]:.5g}" for title in titles)] for row in served],
        "serving",
    )


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__, results="prefixes.json", threads=2)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, default=DEMO_MODEL)
    source.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--layers", type=int, help="of the shape, in place of its own")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 4096, 25000], help="of the texts of turns")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, nargs="*", default=[64, 320], help="of the requests of serving")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args(arguments)
    device = device_for(options.threads)
    model = build(options.shape, device, options.layers) if options.shape else load_model(options.model, device)
    options.shared = dict(compile=not options.no_compile, check=False)
    turned = turn_rows(model, options) if options.tokens else []
    served = serving_rows(model, options) if options.prompt_tokens else []
    report(turned, served)
    name = {"model": options.shape or options.model.name, "layers": options.layers, "device": device}
    facts, keys = stamp(model.device), ("model", "layers", "device")
    save_rows(options.json, [{**name, **row} for row in turned], (*keys, "tokens"), facts, "turns")
    served = [{**name, "new_tokens": options.new_tokens, **row} for row in served]
    save_rows(options.json, served, (*keys, "prefixes", "in_flight", "prompt_tokens"), facts, "serving")


if __name__ == "__main__":
    main()
