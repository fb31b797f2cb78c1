"""The answers of two or four GPUs, compared with those of one; tests/parallel/test_tensor_parallel.py starts it.

In float32 the tokens are those of the CPU. In bfloat16 all ranks compare every outcome, and their answers here.
"""

import copy
import gc
import os

import dflash_drafts as dflash
import draft_rounds as rounds
import models
import torch
import torch.distributed as dist

from spec_compile import speculate

SYSTEMS = {
    "ngram": {},
    "eagle3": rounds.SCHEDULES["tree"],
    "dflash": {},
}


def draft_for(algorithm, target, dtype):
    """A draft on the target's device that shares its embedding and output matrix, as it did on the CPU."""
    made = dflash.trained("llama") if algorithm == "dflash" else rounds.draft_of(algorithm, "llama")
    draft = copy.deepcopy(made).to(target.device, dtype)
    draft.embedding, draft.head_weight = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    return draft


def main():
    torch.set_num_threads(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rows, ids, mask = models.prompts()
    greedy = dict(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
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
                for answer in answers:
                    every = [torch.empty_like(answer) for _ in range(dist.get_world_size())]
                    dist.all_gather(every, answer)
                    assert all(torch.equal(each, answer) for each in every), (algorithm, size, dtype)
                if dist.get_rank() == 0:
                    notes = fast.speculation.options.ranks.notes
                    print(algorithm, size, dtype, f"{fast.speculation.stats.accept_length:.2f}", *notes, flush=True)
                del fast
                gc.collect()  # NCCL waits for captured graphs before its communicators end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
