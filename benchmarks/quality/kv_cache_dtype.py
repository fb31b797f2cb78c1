"""Keys and values in 8 bits: accept lengths and answers, compared with a cache in the model's own dtype.

    python -m benchmarks.quality.kv_cache_dtype [--model examples/tiny_coder] [--prompts 10] [--new-tokens 128]

On a GPU, greedy, bfloat16, n-gram drafts, over all sets of benchmarks/prompts. Such a cache changes the keys and values
that the target sees, so answers may differ; the tokens before the first difference are counted.
"""

import argparse
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from benchmarks.common import DEMO_MODEL, PROMPTS, RESULTS, answer_in_turn, prompts_of, stamp, write_json

DTYPES = ("auto", "fp8", "fp8_per_token_head")


def compared(answers: list[torch.Tensor], others: list[torch.Tensor]) -> tuple[int, float]:
    """The number of equal answers, and the share of all tokens that come before the first difference."""
    agreed, lengths = [], []
    for pair in zip(answers, others):
        tokens = zip(*(answer.tolist() for answer in pair))
        agreed.append(sum(1 for _ in takewhile(lambda both: both[0] == both[1], tokens)))
        lengths.append(max(map(len, pair)))
    return sum(map(int.__eq__, agreed, lengths)), sum(agreed) / sum(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--prompts", type=int, default=10, help="first prompts of each set")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, default=RESULTS / "kv_cache_dtype.json")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).cuda().eval()
    new = options.new_tokens
    longest = min(model.config.max_position_embeddings, 8192)
    ours = {dtype: spec_compile.speculate(model, kv_cache_dtype=dtype, max_cache_len=longest) for dtype in DTYPES}
    fixed = dict(do_sample=False, max_new_tokens=new, pad_token_id=tokenizer.pad_token_id)
    systems = {dtype: partial(fast.generate, **fixed) for dtype, fast in ours.items()}
    results, facts = {}, {**stamp(torch.device("cuda")), "new_tokens": new}
    for path in sorted(PROMPTS.glob("*.jsonl")):
        prompts = prompts_of(path.stem, path.parent, options.prompts, tokenizer, longest - new)
        answers, _ = answer_in_turn(systems, ours, [ids.cuda() for ids in prompts], repeats=1)
        accept = {dtype: fast.speculation.stats.accept_length for dtype, fast in ours.items()}
        same, before = {}, {}
        for dtype in DTYPES[1:]:
            same[dtype], before[dtype] = compared(answers["auto"], answers[dtype])
        row = {"accept_length": accept, "same": same, "of": len(prompts), "tokens_before": before}
        results[path.stem] = {**row, "stamp": facts}
        print(f"{path.stem}: accept length {accept['auto']:.2f}")
        for dtype in DTYPES[1:]:
            print(
                f"  {dtype}: {accept[dtype]:.2f}; {same[dtype]} of {len(prompts)} answers the same, "
                f"{before[dtype]:.0%} of all tokens before the first difference", flush=True,
            )  # fmt: skip
    write_json(options.json, {"sets": results})


if __name__ == "__main__":
    main()
