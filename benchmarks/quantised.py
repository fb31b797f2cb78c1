"""A model quantised on the fly to several formats: whether answers are lossless, and tokens a second, beside 16 bits.

    python benchmarks/quantised.py [--model examples/tiny_coder] [--device cuda|cpu] [--formats fp8 int8 int4 nf4]
    python benchmarks/quantised.py --model FOLDER --as-chat --workloads chat maths bug_fixing

Every linear layer but the output head is rounded to nearest and kept packed as the format's library would hold it; no
library is needed. An answer is lossless if it is that of transformers' own loop over the layers' plain meaning, but
for near-ties (see docs/audit.md). Tokens a second are the median over the repeats of (all tokens) / (all seconds), of
plain steps and of rounds with n-gram drafts. The agreement is the share of tokens before the first that 16 bits would
not give, which says what rounding costs.
"""

import argparse
import copy
from functools import partial
from pathlib import Path

import torch
from common import DEMO_MODEL, HERE, RESULTS, answer_in_turn, prompts_of, stamp, write_json
from kv_cache_dtype import compared
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import spec_compile
from spec_compile.capture.quantised import QuantisedLinear
from spec_compile.kernels.linear.quantised import Packed
from spec_compile.kernels.linear.quantised.bitsandbytes import Table4
from spec_compile.kernels.linear.quantised.compressed_tensors import Int4Group
from spec_compile.kernels.linear.quantised.fp8_block import FP8, Fp8Block
from spec_compile.kernels.linear.quantised.torchao import Int8Weight

GROUP = 64
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E)."""


def fp8(weight: Tensor) -> Packed:
    """Fine-grained FP8: a scale for each 128 x 128 weights, and activations in FP8, too. weight [O, I]."""
    outputs, inputs = weight.shape
    padded = F.pad(weight.float(), (0, -inputs % 128, 0, -outputs % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scales[:, None, :, None]).to(FP8).flatten(2).flatten(0, 1)[:outputs, :inputs].contiguous()
    return Packed(Fp8Block(128, 128), {"weight": codes, "weight_scale_inv": scales}, None)


def int8(weight: Tensor) -> Packed:
    """torchao's int8 weights, with a scale for each output."""
    scales = weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return Packed(Int8Weight(), {"qdata": (weight.float() / scales).round().to(torch.int8), "scale": scales}, None)


def int4(weight: Tensor) -> Packed | None:
    """compressed-tensors W4A16, symmetric, in groups of 64."""
    if weight.shape[1] % GROUP:
        return None
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(dim=2).clamp(min=1e-12) / 7.5).to(weight.dtype)
    codes = (groups / scales.float()[:, :, None]).round().clamp(-8, 7).flatten(1).long() + 8
    words = (codes.unflatten(1, (-1, 8)) << (4 * torch.arange(8, device=codes.device))).sum(dim=2).to(torch.int32)
    return Packed(Int4Group(GROUP), {"weight_packed": words, "weight_scale": scales}, None)


def nf4(weight: Tensor) -> Packed | None:
    """bitsandbytes NF4 in blocks of 64."""
    if weight.shape[1] % GROUP:
        return None
    table = torch.tensor(NF4, device=weight.device)
    blocks = weight.float().view(-1, GROUP)
    scales = blocks.abs().amax(dim=1)
    between = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp(min=1e-12)[:, None], between).to(torch.uint8).view(-1, 2)
    return Packed(Table4(GROUP, 0), {"weight": codes[:, :1] << 4 | codes[:, 1:], "absmax": scales, "code": table}, None)


FORMATS = {"fp8": fp8, "int8": int8, "int4": int4, "nf4": nf4}


def quantised(model: PreTrainedModel, pack) -> tuple[PreTrainedModel, list[str]]:
    """A copy of `model` with packed linear layers, and the paths of those whose sizes the format does not take."""
    model, left = copy.deepcopy(model), []
    for path, layer in [*model.named_modules()]:
        if type(layer) is nn.Linear and layer is not model.get_output_embeddings():
            packed = pack(layer.weight.detach())
            if packed is None:
                left.append(path)
            else:
                model.set_submodule(path, QuantisedLinear(packed._replace(bias=layer.bias)))
    return model, left


def layer_bytes(model: PreTrainedModel) -> int:
    """Bytes of the parameters and buffers of the decoder's layers."""
    layers = model.get_decoder().layers
    return sum(tensor.numel() * tensor.element_size() for tensor in (*layers.parameters(), *layers.buffers()))


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
    parser.add_argument("--prompts", type=int, default=5, help="of each workload")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt, the last ones")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--audited", type=int, default=4, help="prompts that are audited, 32 tokens each")
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
        for ids in prompts_of(name, HERE / "prompts", options.prompts, tokenizer, options.longest, options.as_chat)
    ]
    facts = {**stamp(device), "new_tokens": options.new_tokens, "model": Path(options.model).name}
    results, wanted = {}, None
    for name in ("bf16", *options.formats):
        target, left = (model, []) if name == "bf16" else quantised(model, FORMATS[name])
        row, answers = measure(target, tokenizer, prompts, options)
        wanted = answers if wanted is None else wanted
        row |= {"agreement": compared(wanted, answers)[1], "left_in_16_bits": len(left), "stamp": facts}
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
