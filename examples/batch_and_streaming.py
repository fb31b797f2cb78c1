"""A batch of prompts, sampling, and an answer that is shown while it is written.

python examples/batch_and_streaming.py [--eager] [--new-tokens 48]
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import spec_compile

MODEL = Path(__file__).parent / "tiny_coder"
PROMPTS = ["def mean(values):\n", "class Stack:\n    def __init__(self):\n", "import json\n"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    fast = spec_compile.speculate(model, algo="ngram", compile=not options.eager)
    length = {"max_new_tokens": options.new_tokens}

    # Prompts of unequal length are padded on the left, as transformers wants it. Each row accepts its own drafts.
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    answers = fast.generate(**batch, **length, do_sample=False)
    for text in tokenizer.batch_decode(answers, skip_special_tokens=True):
        print(text, end="\n---\n")

    # Four sampled answers to one prompt. The seed decides them, and what was drafted does not.
    torch.manual_seed(0)
    one = tokenizer(PROMPTS[0], return_tensors="pt")
    sampled = fast.generate(**one, **length, do_sample=True, temperature=0.8, top_p=0.95, num_return_sequences=4)
    print(f"{len(sampled)} sampled answers, the first of them:", tokenizer.decode(sampled[0]), sep="\n")

    # A streamer gets tokens as rounds commit them, several at a time.
    print("--- streamed:")
    fast.generate(**one, **length, do_sample=False, streamer=TextStreamer(tokenizer))
    print(fast.speculation.stats)


if __name__ == "__main__":
    main()
