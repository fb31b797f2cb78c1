"""What keys and values in 8 bits change: accept lengths and answers, beside those of a cache in the model's own dtype.

    python benchmarks/kv_cache_dtype.py [--model examples/tiny_coder] [--prompts 10] [--new-tokens 128]

On a GPU, greedy, bfloat16, n-gram drafts. Such a cache changes what the target sees, so answers may differ; how many
tokens agree before they first do is counted over all sets of benchmarks/prompts.
"""

import argparse
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from common import DEMO_MODEL, HERE, RESULTS, answer_in_turn, prompts_of, stamp, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile

KINDS = ("auto", "fp8", "fp8_per_token_head")


def compared(answers: list[torch.Tensor], others: list[torch.Tensor]) -> tuple[int, float]:
    """How many answers are the same, and the share of all tokens that come before the first difference."""
    agreed, lengths = [], []
    for pair in zip(answers, others):
        tokens = zip(*(answer.tolist() for answer in pair))
        agreed.append(sum(1 for _ in takewhile(lambda both: both[0] == both[1], tokens)))
        lengths.append(max(map(len, pair)))
    return sum(map(int.__eq__, agreed, lengths)), sum(agreed) / sum(lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--prompts", type=int, default=10, help="of each set, the first ones")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, default=RESULTS / "kv_cache_dtype.json")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).cuda().eval()
    new = options.new_tokens
    longest = min(model.config.max_position_embeddings, 8192)
    ours = {kind: spec_compile.speculate(model, kv_cache_dtype=kind, max_cache_len=longest) for kind in KINDS}
    fixed = dict(do_sample=False, max_new_tokens=new, pad_token_id=tokenizer.pad_token_id)
    systems = {kind: partial(fast.generate, **fixed) for kind, fast in ours.items()}
    results, facts = {}, {**stamp(torch.device("cuda")), "new_tokens": new}
    for path in sorted((HERE / "prompts").glob("*.jsonl")):
        prompts = prompts_of(path.stem, path.parent, options.prompts, tokenizer, longest - new)
        answers, _ = answer_in_turn(systems, ours, [ids.cuda() for ids in prompts], repeats=1)
        accept = {kind: fast.speculation.stats.accept_length for kind, fast in ours.items()}
        same, before = {}, {}
        for kind in KINDS[1:]:
            same[kind], before[kind] = compared(answers["auto"], answers[kind])
        row = {"accept_length": accept, "same": same, "of": len(prompts), "tokens_before": before}
        results[path.stem] = {**row, "stamp": facts}
        print(f"{path.stem}: accept length {accept['auto']:.2f}")
        for kind in KINDS[1:]:
            print(f"  {kind}: {accept[kind]:.2f}; {same[kind]} of {len(prompts)} answers the same, {before[kind]:.0%} "
                  "of all tokens before the first difference", flush=True)  # fmt: skip
    write_json(options.json, {"sets": results})


if __name__ == "__main__":
    main()
