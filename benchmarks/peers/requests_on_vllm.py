"""Many requests at once in vLLM: the random prompts of benchmarks.serving, on the same shape with random weights.

    python -m benchmarks.peers.requests_on_vllm --prompt-tokens 512 [--shape llama-8b] [--in-flight 1 32 64 128]
        [--new-tokens 128] [--json FILE]

Its `LLMEngine` is stepped in a loop: --in-flight requests are under way until all are answered, greedily, each
with all its tokens. Prefix caches are off, all else is vLLM's default. The rows stand beside ours in the results
("random" of serving.json). The first requests of each number are a warm-up.
"""

import argparse
import statistics
import tempfile
import time

import torch
from transformers import AutoConfig

from benchmarks import common
from benchmarks.rounds.shapes import DENSE
from benchmarks.serving import KEYS, percentile, random_requests


def engine(shape: str, max_len: int, most: int):
    """An `LLM` of a shape with random weights, for at most `most` requests of `max_len` tokens."""
    from vllm import LLM

    model_type, sizes = DENSE[shape]
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(model_type, **sizes)
        config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]]
        config.save_pretrained(folder)
        return LLM(
            model=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enable_prefix_caching=False,
            max_model_len=max_len, max_num_seqs=most,
        )  # fmt: skip


def in_flight(core, prompts: list[list[int]], count: int, sampling) -> dict:
    """Answer all prompts, `count` at a time, as `benchmarks.serving.in_flight` does. core: an `LLMEngine`."""
    waiting, asked, first, tokens = list(enumerate(prompts)), {}, {}, 0
    begin = time.perf_counter()

    def ask() -> None:
        number, ids = waiting.pop()
        asked[str(number)] = time.perf_counter()
        core.add_request(str(number), {"prompt_token_ids": ids}, sampling)

    for _ in range(min(count, len(prompts))):
        ask()
    while core.has_unfinished_requests():
        for output in core.step():
            if output.outputs[0].token_ids:
                first.setdefault(output.request_id, time.perf_counter() - asked[output.request_id])
            if output.finished:
                tokens += len(output.outputs[0].token_ids)
                if waiting:
                    ask()
    seconds, waits = time.perf_counter() - begin, [*first.values()]
    return {
        "requests": len(prompts), "tokens_per_s": tokens / seconds, "first_token_s": statistics.median(waits),
        "first_token_p99_s": percentile(waits, 0.99),
    }  # fmt: skip


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = common.command_line(__doc__, results="serving.json")
    parser.add_argument("--shape", default="llama-8b", choices=DENSE)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512], help="as in benchmarks.serving")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 32, 64, 128])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.set_defaults(arrivals=0, requests=None)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    import vllm

    most, longest = max(options.in_flight), max(options.prompt_tokens)
    core = engine(options.shape, longest + options.new_tokens + 64, most).llm_engine
    prompts = random_requests(options, DENSE[options.shape][1]["vocab_size"])
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=options.new_tokens, ignore_eos=True, detokenize=False)
    short = vllm.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    facts = {"model": options.shape, "system": f"vLLM {vllm.__version__}", "new_tokens": options.new_tokens}
    facts["prompt_tokens"] = " to ".join(map(str, options.prompt_tokens))
    stamped = common.stamp(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for count in options.in_flight:
        in_flight(core, prompts[:count], count, short)
        row = facts | {"in_flight": count} | in_flight(core, prompts[: 3 * count], count, sampling)
        common.save_rows(options.json, [row], KEYS, stamped, "random")
        print(f"{count} in flight: {row['tokens_per_s']:.1f} tokens/s, first token {row['first_token_s']:.3f} s")


if __name__ == "__main__":
    main()
