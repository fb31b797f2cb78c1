"""What two GPUs answer with quantised weights and with experts; tests/parallel/test_quantised_ranks.py starts it by
torchrun. Both ranks have equal answers, and the logits of their first token are nearly those of one GPU.

Without GPUs it runs on two CPU processes.
"""

import gc
import os

import models
import torch
import torch.distributed as dist
from packed_layers import DRAWN, packed

from spec_compile import speculate
from spec_compile.parallel.start import find_ranks

SIZES = dict(models.BASE, hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2)
FORMATS = {
    "fp8": torch.bfloat16, "ct fp8": torch.bfloat16, "ct128": torch.bfloat16, "table": torch.bfloat16,
    "nvfp4": torch.bfloat16, "w4a8 fp8": torch.bfloat16, "gptq": torch.float16, "awq": torch.float16,
}  # fmt: skip
"""Formats of `DRAWN`, and the dtype that their kernels read."""
GREEDY = dict(
    max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True,
    output_logits=True,
)  # fmt: skip
FAR = 0.5
"""Bound of the distance of logits, relative to their spread. On CPUs rounding to 16 bits, which can move activations of
8 bits, gives up to 0.18 (5e-6 in float32), and layers whose inputs have a wrong share 2.8."""


def cases():
    """Names, models on the CPU, and options."""
    for name, dtype in FORMATS.items():
        yield name, packed(models.build("LlamaConfig", "LlamaForCausalLM", SIZES).to(dtype), name, DRAWN), {}
    for name in ("mixtral", "gpt_oss"):
        for by_number in (False, True):
            yield name, models.ADMITTED[name]().to(torch.bfloat16), dict(expert_parallel=by_number)


def main():
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    prompt, plain = models.prompts()[0][0].to(device), dict(max_cache_len=200, compile=False)
    ranks = find_ranks("auto", torch.nn.Linear(1, 1, device=device))
    for name, model, options in cases():
        model = model.to(device)
        alone = speculate(model, "ngram", **plain).generate(prompt, **GREEDY)
        fast = speculate(model, "ngram", **plain, **options, tensor_parallel="auto")
        shared = fast.generate(prompt, **GREEDY)
        answer, expected = shared.sequences, alone.logits[0].float()
        both = [torch.empty_like(answer) for _ in range(ranks.size)]
        dist.all_gather(both, answer)
        assert torch.equal(*both), (name, options)
        begin = prompt.shape[1]
        alike = (answer == alone.sequences)[0, begin:].int().cumprod(0).sum().item()
        distance = float((shared.logits[0].float() - expected).abs().max() / expected.std())
        assert distance < FAR, (name, options, distance)
        if ranks.leads:
            print(f"{name} {options}: {distance:.1e} away; {alike} tokens are one process's", flush=True)
        del fast
        gc.collect()  # NCCL waits for captured graphs before its communicators end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
