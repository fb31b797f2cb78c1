"""Throughput of many requests at once: tokens a second with so many in flight, with drafts and without, in one run.

    python benchmarks/serving.py [--model NAME] [--in-flight 1 4 16 64] [--requests 96] [--new-tokens 128]
        [--systems plain ngram] [--draft PATH] [--static] [--json FILE]

As many requests as --in-flight says are under way at any time, until all are answered. Answers are greedy and have all
their tokens; end-of-sequence tokens end nothing. --static adds generate() with batches of that many rows, which wait
for their slowest. Each line has the median and the 99th percentile of the seconds until a request's first token, and
the 99th percentile of the seconds that it waited for a row. The first requests of each number are a warm-up.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

import torch
from common import DEMO_MODEL, HERE, RESULTS, pin, prompts_of, stamp, synchronize, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import spec_compile

LONGEST = 512
"""Tokens of a prompt at most."""


def percentile(values: list[float], share: float) -> float:
    """The value below which so large a share of `values` lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def in_flight(manager, prompts: list[list[int]], count: int, new_tokens: int) -> dict:
    """Answer all prompts, `count` at a time; what it took."""
    waiting, outputs, begin = list(reversed(prompts)), [], time.perf_counter()
    for _ in range(min(count, len(prompts))):
        manager.add_request(waiting.pop(), max_new_tokens=new_tokens, eos_token_id=-1)
    while len(outputs) < len(prompts):
        output = manager.get_result(timeout=1)
        if output is None:
            assert manager.is_running(), manager.background_thread_status.fatal_error
            continue
        assert output.error is None, output.error
        outputs.append(output)
        if waiting:
            manager.add_request(waiting.pop(), max_new_tokens=new_tokens, eos_token_id=-1)
    seconds = time.perf_counter() - begin
    steps = sum(output.speculation.steps for output in outputs)
    first = [output.first_token_time - output.created_time for output in outputs]
    return {
        "tokens_per_s": sum(len(output.generated_tokens) for output in outputs) / seconds,
        "tokens_per_step": sum(len(output.generated_tokens) for output in outputs) / steps,
        "first_token_s": statistics.median(first),
        "first_token_p99_s": percentile(first, 0.99),
        "wait_p99_s": percentile([output.lifespan[0] - output.created_time for output in outputs], 0.99),
    }


def static(fast, tokenizer, prompts: list[list[int]], count: int, new_tokens: int) -> dict:
    """The same by generate() with batches of `count` rows."""
    begin, tokens = time.perf_counter(), 0
    for index in range(0, len(prompts), count):
        batch = tokenizer.pad({"input_ids": prompts[index : index + count]}, return_tensors="pt", padding_side="left")
        answer = fast.generate(
            **batch.to(fast.device), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        tokens += new_tokens * len(answer)
    synchronize(fast.device)
    return {"tokens_per_s": tokens / (time.perf_counter() - begin)}


def forget(fast) -> None:
    """No text of a request so far helps later ones."""
    fast.speculation.refresh()
    if fast.speculation.algorithm == "ngram":
        fast.speculation.ngram.reset()


def measure(name: str, fast, tokenizer, prompts: list[list[int]], options) -> list[dict]:
    """Rows of the table for one system."""
    rows = []
    slots = ContinuousBatchingConfig(max_requests_per_batch=max(options.in_flight))
    config = GenerationConfig(do_sample=False, pad_token_id=tokenizer.pad_token_id)
    manager = fast.init_continuous_batching(config, slots)
    manager.warmup()
    manager.start()
    try:
        for count in options.in_flight:
            in_flight(manager, prompts[:count], count, min(16, options.new_tokens))
            forget(fast)
            rows.append({"system": name, "in_flight": count, **in_flight(manager, prompts, count, options.new_tokens)})
            print(row_text(rows[-1]), flush=True)
    finally:
        manager.destroy()
    for count in options.in_flight if options.static else ():
        static(fast, tokenizer, prompts[:count], count, 16)
        forget(fast)
        result = static(fast, tokenizer, prompts, count, options.new_tokens)
        rows.append({"system": f"{name}, static batch", "in_flight": count, **result})
        print(row_text(rows[-1]), flush=True)
    return rows


def row_text(row: dict) -> str:
    """A line of the table."""
    line = f"{row['system']:24} {row['in_flight']:4} in flight {row['tokens_per_s']:10.1f} tokens/s"
    if "wait_p99_s" in row:
        line += (
            f"  {row['tokens_per_step']:5.2f} a step, first token {row['first_token_s'] * 1e3:7.1f} ms "
            f"(p99 {row['first_token_p99_s'] * 1e3:7.1f}), wait p99 {row['wait_p99_s'] * 1e3:7.1f} ms"
        )
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--workloads", nargs="+", default=["chat", "code_editing", "docstrings", "maths"])
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts", help="folder of the workloads' files")
    parser.add_argument("--chat", action="store_true", help="prompts in the form of the chat template")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--systems", nargs="+", default=["plain", "ngram"], help="plain steps, and algorithms")
    parser.add_argument("--draft", default=None, help="of the algorithms that need one")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-cache-len", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--static", action="store_true", help="also generate() with static batches")
    parser.add_argument("--json", type=Path, default=RESULTS / "serving.json")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pin(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(device).eval()
    few = -(-options.requests // len(options.workloads))
    texts = [
        ids for name in options.workloads
        for ids in prompts_of(name, options.prompts, few, tokenizer, LONGEST, options.chat)
    ]  # fmt: skip
    prompts = [ids[0].tolist() for ids in texts]
    random.Random(0).shuffle(prompts)
    print(f"{len(prompts)} requests of {options.new_tokens} tokens, no prompt twice")
    shared = dict(compile=not options.eager, max_cache_len=options.max_cache_len)
    draft = {} if options.draft is None else {"draft": options.draft}
    rows = []
    for name in options.systems:
        settings = dict(algo="ngram", num_draft_tokens=1) if name == "plain" else dict(algo=name, **draft)
        fast = spec_compile.speculate(model, **settings, **shared)
        rows += measure(name, fast, tokenizer, prompts, options)
        fast.destroy_cached_continuous_batching_manager()
        del fast
    facts = {
        "model": options.model,
        "requests": len(prompts),
        "new_tokens": options.new_tokens,
        "stamp": stamp(model.device),
    }
    write_json(options.json, {"rows": [{**row, **facts} for row in rows]})


if __name__ == "__main__":
    main()
