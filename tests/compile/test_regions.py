"""Regions: a graph cut behind its layers computes the same, and layers alike share one body."""

import gc
import weakref
from types import SimpleNamespace

import models
import pytest
import torch
from captures import capture
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from spec_compile import passes
from spec_compile.compile.part import PartCompiler, Shape
from spec_compile.compile.regions import cut
from spec_compile.drafting import DraftPlan
from spec_compile.runtime.compiled_steps import PRIMES, CompiledSteps, example_size
from spec_compile.runtime.state import State


def run(function, graph, ids, prefix):
    """Logits and cache after a prefix and then a chunk."""
    state = State(graph, len(ids), 64, torch.device("cpu"))
    steps = torch.arange(ids.shape[1]).expand_as(ids)
    lengths = torch.zeros(len(ids), dtype=torch.int64)
    function(ids[:, :prefix], steps[:, :prefix], lengths, None, state.cache, 64)
    (logits,) = function(ids[:, prefix:], steps[:, prefix:], lengths + prefix, None, state.cache, 64)
    return [logits, *state.cache]


@pytest.mark.sweep("llama gemma3 gpt_oss")
@pytest.mark.parametrize("name", models.ADMITTED)
def test_the_same_computation(name, captured):
    _, graph = captured(name)
    verify = passes.run(graph, passes.Settings())
    regions = cut(verify)
    ids = torch.randint(3, models.VOCAB, (2, 19))
    with torch.no_grad():
        for got, want in zip(run(regions, verify, ids, 12), run(verify.gm, verify, ids, 12)):
            assert torch.equal(got, want)
    assert len(regions.regions) == len(graph.layers) + 1


def test_layers_alike_have_one_body_and_small_ones_share_a_region():
    model = models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, num_hidden_layers=6))
    verify = passes.run(capture(model), passes.Settings())
    regions = cut(verify)
    assert len(regions.regions) == 7 and len(regions.bodies) == 3  # the first layer, the others, and the head
    assert len({id(region.body) for region in regions.regions}) == 3
    layer = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)  # bytes
    assert len(cut(verify, 2 * layer).regions) == 4  # two layers each, and the head
    assert len(cut(verify, 1 << 40).regions) == 1


def test_an_example_size_divides_no_static_size():
    assert example_size([1, 64, 128, 0]) == PRIMES[0]
    assert example_size([2 * PRIMES[0], PRIMES[1], 64]) == PRIMES[2]
    assert example_size([], at_most=64) <= 64


def test_dimensions_of_an_example_size_vary_and_others_do_not():
    """A batch as large as the first prime: which dimensions vary is known from the size that the caller chose."""
    batch = PRIMES[0]
    nodes = example_size([batch, 8])
    compiler = PartCompiler(torch.device("cpu"), "test", (nodes,), nodes, 1, exact=False)
    double = compiler(lambda x, y: (x * 2, y.sum()), "double")
    for size in (nodes, 2, 5):
        x, y = torch.randn(batch, size, 8), torch.randn(batch, 2 * size)
        got, total = double(x, y)
        assert torch.equal(got, x * 2) and torch.allclose(total, y.sum())


def test_a_compilation_leaves_no_shapes_behind_and_its_code_goes_with_the_compiler():
    before = {id(each) for each in gc.get_objects() if type(each) is ShapeEnv}
    compiler = PartCompiler(torch.device("cpu"), "test", (37,), 37, 1, exact=False)
    compiler(lambda x: (x.T @ x).relu(), "product")(torch.ones(37, 37))
    made = [each for each in gc.get_objects() if type(each) is ShapeEnv and id(each) not in before]
    assert all(not each.tracked_fakes and not each.fake_tensor_cache for each in made)
    cached = [each for each in vars(ShapeEnv).values() if hasattr(each, "cache_info")]
    assert all(each.cache_info().currsize == 0 for each in cached)
    (part,) = compiler._made.values()
    gone = weakref.ref(part.loaded)
    assert gone() is not None
    del compiler, part
    gc.collect()
    assert gone() is None


def test_rounds_that_propose_parts_of_trees_are_apart_on_a_gpu():
    """Of trees of 4 nodes with 3 levels, a round over 2 nodes proposes 2. All others above one are the same round."""
    runtime = SimpleNamespace(
        on_gpu=True, algorithm=SimpleNamespace(plan=DraftPlan(4, levels=3)), options=SimpleNamespace(compile=False),
        parts=None, verify=SimpleNamespace(gm=None), guard=None,
    )  # fmt: skip
    steps = CompiledSteps(runtime, None, None, shape=Shape(1))
    few, whole, plain = (steps.round(nodes) for nodes in (2, 4, 1))
    assert [each.next_nodes for each in (few, whole, plain)] == [2, None, 1]
    assert steps.round(2) is few and steps.round(4) is whole and len({few, whole, plain}) == 3
