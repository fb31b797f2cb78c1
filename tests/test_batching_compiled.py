"""Many requests at once over compiled rounds: all numbers of rows above one share what is compiled."""

import random

import pytest
import torch
from test_batching import config
from torch._dynamo.utils import counters
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from spec_compile import speculate
from spec_compile.batching.prompts import LANES


@pytest.mark.slow
def test_rows_of_any_number_share_what_is_compiled(monkeypatch):
    monkeypatch.setitem(LANES, "cpu", 8)
    torch.manual_seed(0)
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=1024)).eval()
    fast = speculate(model, num_draft_tokens=4, adaptive=False, max_cache_len=256, check=False)
    slots = config(max_requests_per_batch=8)
    scheduler = fast.init_continuous_batching(GenerationConfig(pad_token_id=0, do_sample=False), slots).scheduler
    for lanes in (scheduler.decoder.lanes, scheduler.prompts.lanes):
        graphs = {}
        for width in lanes.widths:
            before = counters["stats"]["unique_graphs"]
            session = lanes.session(width)
            session.build_prefill() if lanes is scheduler.prompts.lanes else session.step("round", 4)
            graphs[width] = counters["stats"]["unique_graphs"] - before
        assert [width for width, count in graphs.items() if count] == lanes.widths[:2], graphs
    scheduler.clear(RuntimeError())
    fast.speculation.engine.idle_batch = scheduler
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0, do_sample=False), slots)
    assert manager.scheduler is scheduler
    rng = random.Random(1)
    prompts = {f"r{n}": [rng.randrange(5, 20) for _ in range(rng.choice((3, 40, 90)))] for n in range(12)}
    for name, prompt in prompts.items():
        manager.add_request(prompt, name, max_new_tokens=rng.randint(10, 20), eos_token_id=-1)
    with torch.no_grad():
        while scheduler.is_busy:
            manager._deliver(scheduler.step())
    for output in manager.output_router.output_queue.queue:
        ids = torch.tensor([prompts[output.request_id]])
        options = dict(attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0, do_sample=False)
        expected = model.generate(ids, max_new_tokens=len(output.generated_tokens), **options)
        assert output.generated_tokens == expected[0, ids.shape[1] :].tolist()
