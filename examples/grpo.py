"""Reinforcement learning of a small model in the manner of GRPO, with rollouts that are drafted by n-grams.

python examples/grpo.py [--eager] [--steps 3] [--model HuggingFaceTB/SmolLM2-135M-Instruct]
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile

PROMPTS = ["def mean(values):\n", "def read_lines(path):\n", "def merge(first, second):\n"]
GREEDY = {"max_new_tokens": 48, "do_sample": False}
SAMPLED = GREEDY | {"do_sample": True, "num_return_sequences": 8}


def reward(code: str) -> float:
    """1 for a text whose whole lines Python compiles, otherwise 0."""
    try:
        compile(code.rpartition("\n")[0], "answer", "exec")
        return 1.0
    except SyntaxError:
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", default=Path(__file__).parent / "tiny_coder", help="a folder or a name on the hub")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="float32").train()
    fast = spec_compile.speculate(model, algo="ngram", compile=not options.eager)
    optimizer = torch.optim.AdamW(fast.parameters(), lr=2e-5)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    for step in range(options.steps):
        answers = fast.generate_batch(prompts, **SAMPLED, seed=step, warmup=False).values()
        texts = [answer.prompt_ids + answer.generated_tokens for answer in answers]
        rewards = torch.tensor([*map(reward, tokenizer.batch_decode(texts))]).view(len(prompts), -1)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        for answer, text, advantage in zip(answers, texts, advantages.flatten()):
            labels = torch.tensor([[-100] * len(answer.prompt_ids) + answer.generated_tokens])
            (advantage * fast(torch.tensor([text]), labels=labels).loss / len(answers)).backward()
        optimizer.step()
        optimizer.zero_grad()
        begin = time.perf_counter()
        rollouts = [each.generated_tokens for each in fast.generate_batch(prompts, **GREEDY, warmup=False).values()]
        seconds = time.perf_counter() - begin
        own = [model.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in prompts]
        others = time.perf_counter() - begin - seconds
        assert rollouts == own, "transformers' own loop gives other tokens after this step"
        print(f"reward {rewards.mean():.3f}, a batch {seconds:.2f} s, by transformers one by one {others:.2f} s")


if __name__ == "__main__":
    main()
