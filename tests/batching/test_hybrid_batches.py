"""Models with recurrences in continuous batching: each request gets what its own ``generate()`` gives."""

import hybrids
import models
import pytest
import torch
from batch_requests import AtLength, answer, collect, config, running
from transformers import DynamicCache, GenerationConfig

import spec_compile
from spec_compile.runtime.pipeline import RoundPipeline

OFTEN = ["lfm2", "qwen3_5", "jamba", "mamba2"]
NAMES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in models.HYBRIDS]
LENGTHS = [(1, 20), (2, 25), (70, 8), (131, 12), (5, 25), (40, 6), (33, 16)]
"""Tokens of a prompt, and of its answer."""


def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, models.VOCAB, (length,), generator=generator).tolist() for length, _ in LENGTHS]


def generated(model, prompt, new, **options):
    ids = torch.tensor([prompt], device=model.device)
    return hybrids.answer(model, ids, torch.ones_like(ids), new, **options)[0, len(prompt) :].tolist()


def answers_are_those_of_generate(model, fast, slots=3):
    """More requests than slots, so that rows are entered again and copied to others; one of them is cancelled."""
    with running(fast, max_requests_per_batch=slots) as manager:
        manager.add_request(prompts()[3], "cancelled", max_new_tokens=300, eos_token_id=-1, streaming=True)
        next(iter(manager))
        for number, (prompt, (_, new)) in enumerate(zip(prompts(), LENGTHS)):
            manager.add_request(prompt, f"r{number}", max_new_tokens=new, eos_token_id=-1)
        manager.cancel_request("cancelled")
        outputs = collect(manager, len(LENGTHS) + 1)
    for number, (prompt, (_, new)) in enumerate(zip(prompts(), LENGTHS)):
        output = outputs[f"r{number}"]
        assert output.error is None and output.generated_tokens == generated(model, prompt, new)
    return outputs


@pytest.mark.sweep("qwen3_5 lfm2 mamba2")
@pytest.mark.parametrize("name", NAMES)
def test_rows_enter_and_leave(name):
    answers_are_those_of_generate(*hybrids.system(name))


def test_a_draft_model_beside():
    model = models.HYBRIDS["lfm2"]()
    fast = spec_compile.speculate(
        model, "draft_model", draft=models.ADMITTED["llama"](), num_steps=3, topk=2, num_draft_tokens=8, compile=False,
        check=False,
    )  # fmt: skip
    outputs = answers_are_those_of_generate(model, fast)
    assert outputs["r3"].speculation.reused_prompt_tokens == 130, "the end of the same prompt, which was cancelled"


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nemotron_h", "mamba2"))]
)
def test_a_prompt_that_goes_on_with_a_whole_answer_starts_behind_it(name):
    """Of a text that shares less, its prompt counts, if it has a whole page; and that only, if a prompt's states are
    not an answer's."""
    model, fast = hybrids.system(name)
    prompt, reused = prompts()[5], []
    with running(fast, max_requests_per_batch=2) as manager:
        for turn in range(4):
            output = answer(manager, prompt, max_new_tokens=20, eos_token_id=-1)
            assert output.generated_tokens == generated(model, prompt, 20)
            reused.append(output.speculation.reused_prompt_tokens)
            prompt = prompt + output.generated_tokens + [7, 8, 9][: turn * 3]
            prompt = prompt if turn < 2 else prompt[:-5]
    assert reused == ([0, 0, 0, 82] if name == "nemotron_h" else [0, 0, 79, 82])


def test_an_answer_that_was_cut_is_not_gone_on_with(monkeypatch):
    """Its row has tokens behind the end that a criterion has set."""
    monkeypatch.setattr(RoundPipeline, "_choose_nodes", lambda self, policy, sequences: self.runtime.sizes[-1])
    model, fast = hybrids.system("lfm2")
    prompt = prompts()[5]
    whole = generated(model, prompt, 20)
    with running(fast, max_requests_per_batch=2) as manager:
        options = dict(max_new_tokens=20, eos_token_id=-1)
        answer(manager, prompt, **options)  # so that drafts are right
        cut = answer(manager, prompt, stopping_criteria=[AtLength(len(prompt) + 6)], **options)
        assert cut.generated_tokens == whole[:6] and sum(cut.speculation.per_step_tokens) > 6
        prompt = prompt + whole[:6] + [7, 8]
        output = answer(manager, prompt, max_new_tokens=9, eos_token_id=-1)
        assert output.generated_tokens == generated(model, prompt, 9) and not output.speculation.reused_prompt_tokens


def test_the_memory_of_slots_counts_states():
    _, fast = hybrids.system("lfm2")
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0), config(max_requests_per_batch=2))
    state = manager.scheduler.decoder.state
    states = sum(tensor.nbytes for tensor in state.kv.states.tensors)
    keys = sum(tensor.nbytes for tensor in state.kv.tensors)
    total = manager.metrics()["cache_bytes"]
    manager.destroy()
    assert states > 0 and total >= states + keys


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "falcon_h1", "jamba"])
@pytest.mark.parametrize("mode", [{}, {"compile": False}, {"compile": False, "cuda_graphs": False}])
def test_on_a_gpu(name, mode):
    """Rounds in flight while rows are copied; a cache that goes from call to call; a prompt that goes on."""
    model = models.HYBRIDS[name]().cuda()
    fast = spec_compile.speculate(model, max_cache_len=512, **mode)
    answers_are_those_of_generate(model, fast)
    if name != "jamba":
        (*_, (got, _)), (*_, (wanted, _)) = [
            hybrids.turns(system, (5, 33, 20), DynamicCache(config=model.config)) for system in (fast, model)
        ]
        assert torch.equal(got, wanted)
    prompt = prompts()[5] * 8  # shorter ones are computed again
    with running(fast, max_requests_per_batch=2) as manager:
        for turn in range(2):
            output = answer(manager, prompt, max_new_tokens=20, eos_token_id=-1)
            assert output.generated_tokens == generated(model, prompt, 20)
            assert output.speculation.reused_prompt_tokens == 339 * turn
            prompt = prompt + output.generated_tokens + [7, 8]
