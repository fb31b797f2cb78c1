"""A model quantised on the fly to several formats: lossless answers, and tokens a second, compared with 16 bits.

    python -m benchmarks.quality.quantised [--model examples/tiny_coder] [--device cuda|cpu]
                                           [--formats fp8 int8 int4 nf4]
    python -m benchmarks.quality.quantised --model FOLDER --as-chat --workloads chat maths bug_fixing

Every linear layer is packed, except the output head (see rounds/quantised_layers.py). An answer is lossless if it
equals that of transformers' own loop over the layers' plain meaning, except at near-ties (see docs/audit.md). Tokens a
second are the median over the repeats of (all tokens) / (all seconds), for plain steps and for n-gram drafts. The
agreement is the share of tokens before the first that 16 bits would not give; it shows the loss by rounding.
"""

import argparse
import copy
from functools import partial
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import spec_compile
from benchmarks.common import DEMO_MODEL, PROMPTS, RESULTS, answer_in_turn, prompts_of, stamp, write_json
from benchmarks.rounds.quantised_layers import FORMATS, pack_layers
from spec_compile.inventory import held_tensors


def agreement(answers: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The share of all tokens that come before the first difference of two answers."""
    agreed = 0
    for pair in zip(answers, others):
        agreed += sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*(each.tolist() for each in pair))))
    return agreed / sum(max(map(len, pair)) for pair in zip(answers, others))


def quantised(model: PreTrainedModel, pack) -> tuple[PreTrainedModel, list[str]]:
    """A copy of `model` with packed linear layers, and the paths of layers whose sizes the format does not take."""
    model = copy.deepcopy(model)
    return model, pack_layers(model, pack)


def layer_bytes(model: PreTrainedModel) -> int:
    """Bytes of the parameters and buffers of the decoder's layers."""
    layers = model.get_decoder().layers
    return sum(tensor.nbytes for tensor in held_tensors(layers))


def measure(model: PreTrainedModel, tokenizer, prompts: list[Tensor], options) -> tuple[dict, list[Tensor]]:
    """The figures of one format, and its answers."""
    fixed = dict(do_sample=False, max_new_tokens=options.new_tokens, pad_token_id=tokenizer.pad_token_id)
    common = dict(compile=not options.eager, max_cache_len=options.longest + options.new_tokens)
    ours = {
        "plain steps": spec_compile.speculate(model, num_draft_tokens=1, **common),
        "n-gram": spec_compile.speculate(model, **common),
    }
    for fast in ours.values():
        fast.speculation.warmup()
    systems = {name: partial(fast.generate, **fixed) for name, fast in ours.items()}
    answers, rates = answer_in_turn(systems, ours, prompts, options.repeats)
    fast = ours["n-gram"]
    accept_length = fast.speculation.stats.accept_length
    report = spec_compile.audit(fast, prompts[: options.audited], max_new_tokens=min(32, options.new_tokens))
    row = {
        "tokens_per_s": rates, "accept_length": accept_length, "layer_bytes": layer_bytes(model),
        "verdict": report.verdict, "audited": options.audited,
    }  # fmt: skip
    return row, answers["n-gram"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--workloads", nargs="+", default=["code_editing", "chat"])
    parser.add_argument("--as-chat", action="store_true", help="prompts are turns of the tokenizer's chat template")
    parser.add_argument("--prompts", type=int, default=5, help="prompts of each workload")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt, the last ones")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--audited", type=int, default=4, help="prompts to audit, 32 tokens each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without the compiler")
    parser.add_argument("--json", type=Path, default=RESULTS / "quantised.json")
    options = parser.parse_args()

    device = torch.device(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(device).eval()
    prompts = [
        ids.to(device)
        for name in options.workloads
        for ids in prompts_of(name, PROMPTS, options.prompts, tokenizer, options.longest, options.as_chat)
    ]
    facts = {**stamp(device), "new_tokens": options.new_tokens, "model": Path(options.model).name}
    results, wanted = {}, None
    for name in ("bf16", *options.formats):
        target, left = (model, []) if name == "bf16" else quantised(model, FORMATS[name])
        row, answers = measure(target, tokenizer, prompts, options)
        wanted = answers if wanted is None else wanted
        row |= {"agreement": agreement(wanted, answers), "left_in_16_bits": len(left), "stamp": facts}
        results[name] = row
        rates = ", ".join(f"{system} {rate:.1f}" for system, rate in row["tokens_per_s"].items())
        print(
            f"{name}: {row['verdict']}; tokens/s {rates}; accept length {row['accept_length']:.2f}; layers "
            f"{row['layer_bytes'] / 1e6:.1f} MB, {len(left)} left in 16 bits; {row['agreement']:.0%} as in 16 bits",
            flush=True,
        )
        write_json(options.json, results)


if __name__ == "__main__":
    main()
