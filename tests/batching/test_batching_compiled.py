"""Many requests at once over compiled rounds: all numbers of rows above one share what is compiled."""

import random

import pytest
import torch
from batch_requests import config
from toy_graphs import rewritten
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from spec_compile import speculate
from spec_compile.batching.prefill import PREFILL_ROWS
from spec_compile.compile import part as compiling
from spec_compile.compile.part import counts
from spec_compile.compile.regions import compile_regions
from spec_compile.compile.serialise import graph_of
from spec_compile.kernels import linear
from spec_compile.runtime.compiled_steps import SMALL_PRIMES
from spec_compile.runtime.session import StepKind
from spec_compile.tree import ancestry


@pytest.mark.slow
def test_rows_of_any_number_share_what_is_compiled(monkeypatch):
    monkeypatch.setitem(PREFILL_ROWS, "cpu", 8)
    torch.manual_seed(0)
    sizes = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=1024)).eval()
    fast = speculate(model, num_draft_tokens=4, adaptive=False, max_cache_len=256, check=False)
    slots = config(max_requests_per_batch=8)
    scheduler = fast.init_continuous_batching(GenerationConfig(pad_token_id=0, do_sample=False), slots).scheduler
    for lanes in (scheduler.decoder, scheduler.prefill):
        graphs = {}
        for width in lanes.widths:
            before = counts["traced"]
            session = lanes.session(width)
            session.make(session.prompt_steps() if lanes is scheduler.prefill else [(StepKind.ROUND, 4)])
            graphs[width] = counts["traced"] - before
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


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 0])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_graphs_for_a_gpu_serve_any_number_of_rows(half_on_gpu, monkeypatch, name, nodes):
    """What the passes make for a GPU is traced once, with rows and slots that may vary; the ops' plain meanings run
    here."""
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SKINNY_GEMM)
    monkeypatch.setattr(compiling, "compile_part", lambda job: job.rows)  # without Inductor
    monkeypatch.setattr(compiling, "load_part", graph_of)
    graph = rewritten(half_on_gpu(name))
    static = {size for part in [*graph.gm.parameters(), *graph.gm.buffers()] for size in part.shape} | {128}
    rows, pages = [prime for prime in SMALL_PRIMES if all(size % prime for size in static)][:2]
    example = nodes or 37
    varying = (41, rows, pages) if nodes else (41, rows, pages, example)
    compiler = compiling.PartCompiler(torch.device("cpu"), "test", varying, example, 41, bool(nodes))
    compiled = compile_regions(graph, compiler, "verify")

    def run(model, batch, nodes, slots):
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(3, graph.vocab_size, (batch, nodes), generator=generator)
        ancestors, depth = ancestry(torch.arange(-1, nodes - 1).expand(batch, -1))
        shapes = [(layer.kv_heads, slots, size) for layer in graph.layers for size in (layer.key_dim, layer.value_dim)]
        cache = [torch.randn(batch, *shape, generator=generator).to(graph.dtype) for shape in shapes]
        lengths = torch.arange(batch) + 3
        with torch.no_grad():
            return [*model(ids, lengths[:, None] + depth, lengths, ancestors, cache, 128), *cache]

    for batch, count, slots in ((rows, example, 128 * pages), (2, nodes or 16, 128), (64, nodes or 2, 256)):
        for want, got in zip(run(graph.gm, batch, count, slots), run(compiled, batch, count, slots), strict=True):
            assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()
