"""Regions: a graph cut behind its layers computes the same, and layers alike share one body."""

import models
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from spec_compile import passes
from spec_compile.capture.trace import capture
from spec_compile.runtime.state import State
from spec_compile.runtime.steps.regions import cut


def run(function, graph, ids, prefix):
    """Logits and cache after a prefix and then a chunk."""
    state = State(graph, len(ids), 64, torch.device("cpu"))
    steps = torch.arange(ids.shape[1]).expand_as(ids)
    lengths = torch.zeros(len(ids), dtype=torch.int64)
    function(ids[:, :prefix], steps[:, :prefix], lengths, None, state.cache, 64)
    (logits,) = function(ids[:, prefix:], steps[:, prefix:], lengths + prefix, None, state.cache, 64)
    return [logits, *state.cache]


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


def test_layers_alike_have_one_body():
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes)).eval()
    regions = cut(passes.run(capture(model), passes.Settings()))
    assert len(regions.regions) == 7 and len(regions.bodies) == 3  # the first layer, the others, and the head
    assert len({id(region.body) for region in regions.regions}) == 3
