"""Throughput of many requests at once: tokens a second by their number in flight, with drafts and without, in one run.

    python -m benchmarks.serving [--model NAME] [--in-flight 1 4 16 64] [--requests 96] [--new-tokens 128]
        [--systems plain ngram] [--draft PATH] [--no-static] [--times] [--json FILE]
    python -m benchmarks.serving --prompt-tokens 512 [--shape llama-8b] [--arrivals 32] [--pool 60] ...

--in-flight requests are under way at any time, until all are answered. Answers are greedy and have all their tokens;
end-of-sequence tokens do not end them. For comparison generate() answers the same prompts in static batches of as many
rows, which wait for their slowest; --no-static leaves these out. Each line has the median and the 99th percentile of
the seconds until a request's first token, and the 99th percentile of the seconds that it waited for a row. The first
requests of each number are a warm-up. The last lines divide rates: by that of static batches, and with drafts by that
without.

--prompt-tokens asks with prompts of that many random tokens, or of numbers between two, and --shape answers with random
weights. Such numbers are drawn so that each doubling is as likely: half of those from 100 to 30,000 are below 1,733.
There are --requests, or three for each one in flight. With `--requests 500 --in-flight 500` all come at once; at most
`ROWS` of them have a row. The cache has room for the longest. Hardly a draft is accepted on such text, so that "ngram"
shows what drafts cost where they do not pay.

--pool bounds keys and values, in gigabytes. "most at once" counts the requests that had begun and not ended, and "whole
rows" the rows with room for the longest request that the pool holds.

--arrivals prompts of --prompt-tokens come at once while --in-flight rows decode. The gaps between two tokens of a row
are told before they come, and until all of them have their first token.
"""

import argparse
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import spec_compile
from benchmarks import common
from benchmarks.rounds.shapes import DENSE, build
from spec_compile.batching.pages import MOST, wanted_tokens

LONGEST = 512
"""Most tokens of a prompt."""
WORKLOADS = ["chat", "code_editing", "docstrings", "maths", "code_completion", "bug_fixing"]
STATIC = ", static batch"
BLOCK = wanted_tokens(ContinuousBatchingConfig(num_blocks=1))
"""Tokens of a block of a manager's pool."""
ROWS = MOST["cuda"]
"""Most rows of a manager."""
KEYS = "model", "system", "in_flight", "prompt_tokens", "new_tokens"
"""The fields that tell rows of random prompts apart; those of other prompts have the first three."""


def percentile(values: list[float], share: float) -> float:
    """The value with a share `share` of `values` below it: [1, 2, 3, 4] and 0.5 give 3."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def finished(manager, count: int) -> Iterator:
    """The next `count` outputs of a manager."""
    while count:
        output = manager.get_result(timeout=1)
        if output is None:
            assert manager.is_running(), manager.background_thread_status.fatal_error
            continue
        assert output.error is None, output.error
        yield output
        count -= 1


def in_flight(manager, prompts: list[list[int]], count: int, new_tokens: int, salted: bool = False) -> dict:
    """Answer all prompts, `count` at a time. Returns rates and waits. salted: no prompt starts with keys and values of
    another one."""
    waiting, outputs, begin = list(reversed(prompts)), [], time.perf_counter()

    def ask() -> None:
        salt = str(len(waiting)) if salted else ""
        manager.add_request(waiting.pop(), max_new_tokens=new_tokens, eos_token_id=-1, cache_salt=salt)

    for _ in range(min(count, len(prompts))):
        ask()
    for output in finished(manager, len(prompts)):
        outputs.append(output)
        if waiting:
            ask()
    seconds = time.perf_counter() - begin
    steps = sum(output.speculation.steps for output in outputs)
    first, spans = [each.first_token_time - each.created_time for each in outputs], [each.lifespan for each in outputs]
    return {
        "tokens_per_s": sum(len(output.generated_tokens) for output in outputs) / seconds,
        "tokens_per_step": sum(len(output.generated_tokens) for output in outputs) / steps,
        "first_token_s": statistics.median(first),
        "first_token_p99_s": percentile(first, 0.99),
        "wait_p99_s": percentile([output.lifespan[0] - output.created_time for output in outputs], 0.99),
        "most_at_once": max(sum(begin <= now < end for begin, end in spans) for now, _ in spans),
    }


def gaps(manager, rows: list[list[int]], arrivals: list[list[int]], new_tokens: int) -> dict:
    """Seconds between two tokens of a row, the longest and the 99th percentile: "without" while only `rows` decode, and
    "with" from the moment when `arrivals` come until the last of these has its first token."""
    asked = dict(max_new_tokens=new_tokens, eos_token_id=-1, record_timestamps=True)
    names = {manager.add_request(prompt, **asked) for prompt in rows}
    # The rows decode a quarter of their answers alone.
    while sum(len(each.tokens) for each in manager.scheduler.decoder.active) < len(rows) * new_tokens // 4:
        assert manager.is_running() and manager.active_requests == len(rows), "rows ended: take more --new-tokens"
        time.sleep(0.001)
    come = time.perf_counter()
    manager.add_requests(arrivals, max_new_tokens=1, eos_token_id=-1)
    outputs = list(finished(manager, len(rows) + len(arrivals)))

    # A round's tokens have one time, so that only those of different rounds are apart.
    decoded = [output for output in outputs if output.request_id in names]
    begun = max(output.first_token_time for output in decoded)
    done = max(output.first_token_time for output in outputs)
    pairs = [pair for output in decoded for pair in pairwise(sorted({*output.timestamps}))]
    told = {"arrivals_s": done - come}
    for name, first, last in (("without", begun, come), ("with", come, done)):
        found = [late - early for early, late in pairs if first < late and early < last]
        told |= {f"{name}_longest_s": max(found), f"{name}_p99_s": percentile(found, 0.99)} if found else {}
    return told


def static(fast, tokenizer, prompts: list[list[int]], count: int, new_tokens: int) -> dict:
    """The same with generate(), in batches of `count` rows."""
    asked = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=tokenizer.pad_token_id)

    def answer() -> None:
        for index in range(0, len(prompts), count):
            some = {"input_ids": prompts[index : index + count]}
            batch = tokenizer.pad(some, return_tensors="pt", padding_side="left")
            fast.generate(**batch.to(fast.device), **asked)

    return {"tokens_per_s": new_tokens * len(prompts) / common.elapsed(answer, fast.device)[1]}


class Times:
    """Seconds by name of a manager's thread, and of the clients' threads in `add_request`, summed from now on.

    A GPU computes meanwhile; it is the limit if most of the time is "wait".
    """

    def __init__(self, manager):
        self.seconds, self._decoder = Counter(), manager.scheduler.decoder
        scheduler, prefill = manager.scheduler, manager.scheduler.prefill
        for name, owner, methods in (
            ("admit", scheduler, ["_change"]),
            ("prompts", prefill, ["step", "shift"]),
            ("launch", self._decoder, ["launch"]),
            ("collect", self._decoder, ["collect"]),
            ("compact", self._decoder, ["compact"]),
            ("leave", self._decoder, ["leave"]),
            ("check", scheduler, ["_check_model"]),
            ("deliver", manager, ["_deliver"]),
            ("add_request", manager, ["add_request"]),
        ):
            for method in methods:
                setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, function):
        def timed(*args, **kwargs):
            if name == "collect":
                launched = self._decoder.pipeline._rounds[0]
                launched.read = self._timed("wait", launched.read)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return timed

    def text(self, rounds: int) -> str:
        """A line with the microseconds of each round. Resets the sums."""
        self.seconds["collect"] -= self.seconds["wait"]
        parts = ", ".join(f"{name} {seconds / rounds * 1e6:.0f}" for name, seconds in self.seconds.most_common())
        self.seconds.clear()
        return f"{'':24} {rounds} rounds, microseconds of each: {parts}"


def forget(fast) -> None:
    """Drop the texts of all requests, which would help later ones."""
    fast.speculation.refresh()
    if fast.speculation.engine.name == "ngram":
        fast.speculation.ngram.reset()


@contextmanager
def managed(fast, slots: int, pad_token_id: int = 0, **settings) -> Iterator:
    """A running manager of `fast` with at most that many rows, warmed up. settings: more of its config's."""
    config = GenerationConfig(do_sample=False, pad_token_id=pad_token_id)
    manager = fast.init_continuous_batching(config, ContinuousBatchingConfig(max_requests_per_batch=slots, **settings))
    manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.destroy()


def measure(name: str, fast, tokenizer, prompts: list[list[int]], options) -> list[dict]:
    """The rows of one system. tokenizer: None with --prompt-tokens."""
    rows, begin, settings = [], time.perf_counter(), {}
    if options.pool:
        settings = dict(num_blocks=int(options.pool * 1e9 / fast.speculation.engine.runtime.token_bytes / BLOCK))
    slots, pad = min(ROWS, max(options.in_flight)), 0 if tokenizer is None else tokenizer.pad_token_id
    with managed(fast, slots, pad, **settings) as manager:
        print(f"{name}: warm after {time.perf_counter() - begin:.1f} s", flush=True)
        times = Times(manager) if options.times else None
        for count in options.in_flight:
            asked = prompts if tokenizer is not None or options.requests else prompts[: 3 * count]
            in_flight(manager, asked[:count], count, min(16, options.new_tokens))
            forget(fast)
            rounds = manager.metrics()["rounds_total"]
            if times:
                times.seconds.clear()
            row = {"system": name, "in_flight": count}
            if options.arrivals:
                arrivals = prompts[-options.arrivals :]
                row |= {"arrivals": len(arrivals)}
                row |= gaps(manager, [prompt[:LONGEST] for prompt in prompts[:count]], arrivals, options.new_tokens)
            else:
                row |= {"requests": len(asked), **in_flight(manager, asked, count, options.new_tokens)}
                row["whole_rows"] = manager.metrics()["cache_tokens"] // manager.scheduler.capacity
            rows.append(row)
            print(row_text(row), flush=True)
            if times:
                print(times.text(manager.metrics()["rounds_total"] - rounds), flush=True)
    for count in options.in_flight if options.static else ():
        last = prompts[-(count + len(prompts) % count) :]  # batches of all sizes
        static(fast, tokenizer, last, count, min(16, options.new_tokens))
        forget(fast)
        result = static(fast, tokenizer, prompts, count, options.new_tokens)
        rows.append({"system": name + STATIC, "in_flight": count, **result})
        print(row_text(rows[-1]), flush=True)
    return rows


def read_requests(options, tokenizer) -> list[list[int]]:
    """Token ids of `options.requests` prompts from the workloads in turn, in a fixed random order."""
    sets = [
        common.prompts_of(name, options.prompts, options.requests, tokenizer, LONGEST, options.chat)
        for name in options.workloads
    ]
    in_turn = [ids[0].tolist() for some in zip_longest(*sets) for ids in some if ids is not None]
    if len(in_turn) < options.requests:
        print(f"--requests: {options.requests} asked for, the workloads have {len(in_turn)}")
    prompts = in_turn[: options.requests]
    random.Random(0).shuffle(prompts)
    return prompts


def random_requests(options, vocab_size: int) -> list[list[int]]:
    """Prompts of --prompt-tokens random tokens."""
    draw, sizes = random.Random(0), options.prompt_tokens
    most = max(options.in_flight)
    wanted = options.arrivals + most if options.arrivals else options.requests or 3 * most
    lengths = [round(sizes[0] * (sizes[-1] / sizes[0]) ** draw.random()) for _ in range(wanted)]
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def systems_of(options) -> dict[str, dict]:
    """The options of `speculate` for each system, by its name."""
    draft = {} if options.draft is None else {"draft": options.draft}
    plain = dict(algo="ngram", num_draft_tokens=1)
    return {name: plain if name == "plain" else dict(algo=name, **draft) for name in options.systems}


def ratios(rows: list[dict]) -> list[str]:
    """A line for each system and number in flight: its rate divided by that of static batches, and of plain steps."""
    rates = {(row["system"], row["in_flight"]): row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    lines = []
    for (name, count), rate in rates.items():
        if name.endswith(STATIC):
            continue
        bases = {"the static batch": (name + STATIC, count)}
        if name != "plain":
            bases["plain"] = ("plain", count)
        told = [f"{rate / rates[key]:.2f}x {base}" for base, key in bases.items() if key in rates]
        if told:
            lines.append(f"{name}, {count} in flight: " + ", ".join(told))
    return lines


def row_text(row: dict) -> str:
    """A line of the table."""
    line = f"{row['system']:24} {row['in_flight']:4} in flight"
    if "arrivals" in row:
        told = (f"{name.removesuffix('_s')} {row[name] * 1e3:.1f} ms" for name in row if name.endswith("_s"))
        return f"{line}, {row['arrivals']} arrive: " + ", ".join(told)
    line += f" {row['tokens_per_s']:10.1f} tokens/s"
    if "wait_p99_s" in row:
        line += (
            f"  {row['tokens_per_step']:5.2f} a step, first token {row['first_token_s'] * 1e3:7.1f} ms "
            f"(p99 {row['first_token_p99_s'] * 1e3:7.1f}), wait p99 {row['wait_p99_s'] * 1e3:7.1f} ms, "
            f"most at once {row['most_at_once']}, whole rows {row['whole_rows']}"
        )
    return line


def main(arguments: list[str] | None = None) -> None:
    parser = common.command_line(__doc__, results="serving.json", threads=2)
    parser.add_argument("--model", default=str(common.DEMO_MODEL))
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS)
    parser.add_argument("--prompts", type=Path, default=common.PROMPTS, help="folder of the workloads' files")
    parser.add_argument("--chat", action="store_true", help="prompts in the form of the chat template")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, help="96, or with --prompt-tokens three for each in flight")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--systems", nargs="+", default=["plain", "ngram"], help="plain steps, and algorithms")
    parser.add_argument("--draft", default=None, help="draft of the algorithms that need one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-cache-len", type=int, default=1024)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--static", action=argparse.BooleanOptionalAction, default=True, help="also static batches")
    parser.add_argument("--times", action="store_true", help="also the parts of a round's time")
    parser.add_argument("--shape", choices=DENSE, help="random weights in place of --model")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", help="ask with random prompts of this length instead")
    parser.add_argument("--arrivals", type=int, default=0, help="random prompts that come while others decode")
    parser.add_argument("--pool", type=float, help="gigabytes of keys and values")
    options = parser.parse_args(arguments)
    device = common.device_for(options.threads)
    if options.shape:
        model, options.model = build(options.shape, device), options.shape
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(device).eval()
    options.prompt_tokens = options.prompt_tokens or ([LONGEST] if options.shape or options.arrivals else None)
    if options.prompt_tokens:
        tokenizer, prompts = None, random_requests(options, model.config.vocab_size)
        options.max_cache_len, options.static = max(options.prompt_tokens) + options.new_tokens + 64, False
    else:
        options.requests = options.requests or 96
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        prompts = read_requests(options, tokenizer)
    print(f"{len(prompts)} requests of {options.new_tokens} tokens, no prompt twice")
    shared = dict(compile=not options.eager, max_cache_len=options.max_cache_len)
    rows = []
    for name, settings in systems_of(options).items():
        fast = spec_compile.speculate(model, **settings, **shared)
        rows += measure(name, fast, tokenizer, prompts, options)
        fast.destroy_cached_continuous_batching_manager()
        del fast
    print(*ratios(rows), sep="\n")
    stamped = common.stamp(model.device)
    facts = {"model": Path(options.model).name, "requests": len(prompts), "new_tokens": options.new_tokens}
    keys, part = KEYS[:3], "rows"
    if options.prompt_tokens:
        facts["prompt_tokens"] = " to ".join(map(str, options.prompt_tokens))
        keys, part = KEYS, "arrivals" if options.arrivals else "random"
    common.save_rows(options.json, [facts | row for row in rows], keys, stamped, part)


if __name__ == "__main__":
    main()
