"""The answers of several GPUs, compared with one GPU's; tests/parallel starts it by torchrun.

several_gpus.py: with each algorithm, on two or four. In float32 the tokens are those of the CPU. In bfloat16 all ranks
compare every outcome, and their answers here.

several_gpus.py quantised: with quantised weights and with experts, on two, or on two CPU processes without GPUs. The
logits of the first token are nearly one GPU's.
"""

import copy
import gc
import os
import sys

import dflash_drafts as dflash
import draft_rounds as rounds
import models
import torch
import torch.distributed as dist
from packed_layers import DRAWN, packed

from spec_compile import speculate
from spec_compile.parallel.start import find_ranks

GREEDY = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
SYSTEMS = {"ngram": {}, "eagle3": rounds.SCHEDULES["tree"], "dflash": {}}


def draft_for(algorithm, target, dtype):
    """A draft on the target's device that shares its embedding and output matrix, as it did on the CPU."""
    made = dflash.trained("llama") if algorithm == "dflash" else rounds.draft_of(algorithm, "llama")
    draft = copy.deepcopy(made).to(target.device, dtype)
    draft.embedding, draft.head_weight = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return draft


def is_everyones(answer):
    """Whether all ranks have this answer."""
    every = [torch.empty_like(answer) for _ in range(dist.get_world_size())]
    dist.all_gather(every, answer)
    return all(torch.equal(each, answer) for each in every)


def compare_algorithms():
    rows, ids, mask = models.prompts()
    greedy = dict(GREEDY, max_new_tokens=40)
    plain = [rounds.target("llama").generate(rows[0], **greedy)]
    plain += [rounds.target("llama").generate(ids, attention_mask=mask, **greedy)]
    for dtype in (torch.float32, torch.bfloat16):
        target = copy.deepcopy(rounds.target("llama")).to("cuda", dtype)
        for algorithm, options in SYSTEMS.items():
            for size in (1, dist.get_world_size()) if algorithm != "ngram" else (None,):
                more = {} if size is None else dict(
                    draft=draft_for(algorithm, target, dtype), draft_tensor_parallel_size=size)  # fmt: skip
                more |= dict(max_cache_len=200, tensor_parallel="auto", compile=False)
                fast = speculate(target, algorithm, **options, **more)
                answers = [fast.generate(rows[0].cuda(), **greedy)]
                answers += [fast.generate(ids.cuda(), attention_mask=mask.cuda(), **greedy)]
                torch.manual_seed(dist.get_rank())  # the seed is rank 0's
                answers += [fast.generate(rows[0].cuda(), **greedy | dict(do_sample=True))]
                if dtype == torch.float32:
                    assert all(torch.equal(a.cpu(), b) for a, b in zip(answers, plain)), (algorithm, size)
                assert all(map(is_everyones, answers)), (algorithm, size, dtype)
                if dist.get_rank() == 0:
                    notes = fast.speculation.options.ranks.notes
                    print(algorithm, size, dtype, f"{fast.speculation.stats.accept_length:.2f}", *notes, flush=True)
                del fast
                gc.collect()  # NCCL waits for captured graphs before its communicators end


SIZES = dict(models.BASE, hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=2)
FORMATS = {
    "fp8": torch.bfloat16, "ct fp8": torch.bfloat16, "ct128": torch.bfloat16, "table": torch.bfloat16,
    "nvfp4": torch.bfloat16, "w4a8 fp8": torch.bfloat16, "gptq": torch.float16, "awq": torch.float16,
}  # fmt: skip
"""Formats of `DRAWN`, and the dtype that their kernels read."""
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


def compare_quantised(device):
    prompt, plain = models.prompts()[0][0].to(device), dict(max_cache_len=200, compile=False)
    greedy = dict(GREEDY, max_new_tokens=24, return_dict_in_generate=True, output_logits=True)
    ranks = find_ranks("auto", torch.nn.Linear(1, 1, device=device))
    for name, model, options in cases():
        model = model.to(device)
        alone = speculate(model, "ngram", **plain).generate(prompt, **greedy)
        fast = speculate(model, "ngram", **plain, **options, tensor_parallel="auto")
        shared = fast.generate(prompt, **greedy)
        answer, expected = shared.sequences, alone.logits[0].float()
        assert is_everyones(answer), (name, options)
        begin = prompt.shape[1]
        alike = (answer == alone.sequences)[0, begin:].int().cumprod(0).sum().item()
        distance = float((shared.logits[0].float() - expected).abs().max() / expected.std())
        assert distance < FAR, (name, options, distance)
        if ranks.leads:
            print(f"{name} {options}: {distance:.1e} away; {alike} tokens are one process's", flush=True)
        del fast
        gc.collect()  # NCCL waits for captured graphs before its communicators end


def main():
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    compare_quantised(device) if "quantised" in sys.argv else compare_algorithms()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
