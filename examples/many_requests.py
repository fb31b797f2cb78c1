"""Many requests at once: a batch, a stream next to it, different options for each, and a cancelled request.

python examples/many_requests.py [--eager] [--new-tokens 48]
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile

MODEL = Path(__file__).parent / "tiny_coder"
PROMPTS = ["def mean(values):\n", "class Stack:\n    def __init__(self):\n", "import json\n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    fast = spec_compile.speculate(model, algo="ngram", compile=not options.eager)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]

    # All prompts at once, as transformers' generate_batch() has it.
    outputs = fast.generate_batch(prompts, max_new_tokens=options.new_tokens, warmup=False)
    for output in outputs.values():
        print(tokenizer.decode(output.generated_tokens), end="\n---\n")

    # Requests that come one by one. Each has options of its own, and none changes the answer of another.
    with fast.continuous_batching_context_manager(warmup=False) as manager:
        long = manager.add_request(prompts[0], max_new_tokens=1000, eos_token_id=-1)
        stops = manager.add_request(prompts[1], max_new_tokens=200, stop_strings=["\n\n"], tokenizer=tokenizer)
        stream = manager.add_request(
            prompts[2], max_new_tokens=options.new_tokens, streaming=True, do_sample=True, temperature=0.8, seed=0
        )
        shown, open_requests = 0, {long, stops, stream}
        while open_requests:
            output = manager.get_result(timeout=1)
            if output is None:
                continue
            if output.request_id == stream:
                print(tokenizer.decode(output.generated_tokens[shown:]), end="", flush=True)
                shown = len(output.generated_tokens)
            if output.is_finished():
                open_requests.remove(output.request_id)
                if output.request_id == stream:
                    manager.cancel_request(long)
                print(f"\n--- {output.request_id}: {len(output.generated_tokens)} tokens, {output.finish_reason}")
        print(manager.metrics())


if __name__ == "__main__":
    main()
