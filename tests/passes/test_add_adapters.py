"""add_adapters: one addition after each linear layer with adapters, merged or not."""

import pytest
import torch
from captures import capture
from models import ADMITTED

from spec_compile import UnsupportedModelError, passes
from spec_compile.cache import Cache
from spec_compile.graph import calls
from spec_compile.kernels.attention import Use
from spec_compile.kernels.linear.low_rank import LowRank, add_low_rank
from spec_compile.passes.linears import add_adapters

PATHS = ["model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.up_proj"]


def low_rank(model, paths):
    parts = {path: LowRank(2, 3, model.get_submodule(path).weight, torch.float32) for path in paths}
    for part in parts.values():
        part.put(1, torch.randn(3, part.down.shape[2]) / 8, torch.randn(part.up.shape[1], 3) / 8, 0.7)
    return parts


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("role", ["verify", "prefill"])
def test_rows_with_and_without_an_adapter(merge, role):
    model = ADMITTED["llama"]()
    parts = low_rank(model, PATHS)
    graph = passes.run(capture(model), passes.Settings(merge, (), Use(role=role), low_rank=parts))
    assert graph.has_adapters and len(calls(graph.gm, add_low_rank)) == len(PATHS)
    ids = torch.randint(5, 60, (3, 9))
    positions, cache = torch.arange(9).expand_as(ids), Cache(graph, 3, 128)
    cache.adapters[0].copy_(torch.tensor([1, 0, 1]))
    graph.gm(ids, positions, torch.zeros(3, dtype=torch.int64), None, cache.argument, 9)
    got = [cache.layer(number)[0][:, :, :9] for number in range(2)]  # keys, which a layer's input decides

    plain = passes.run(capture(ADMITTED["llama"]()), passes.Settings(merge, (), Use(role=role)))
    without = Cache(plain, 3, 128)
    assert not without.adapters
    plain.gm(ids, positions, torch.zeros(3, dtype=torch.int64), None, without.argument, 9)
    with torch.no_grad():
        for path, part in parts.items():  # an adapter is an addition to the weight
            model.get_submodule(path).weight += part.scale[1] * part.up[1] @ part.down[1]
    changed = passes.run(capture(model), passes.Settings(False, (), Use(role=role)))
    within = Cache(changed, 3, 128)
    changed.gm(ids, positions, torch.zeros(3, dtype=torch.int64), None, within.argument, 9)
    for number in range(2):
        for row, other in ((0, within), (1, without), (2, within)):
            expected = other.layer(number)[0][row, :, :9]
            torch.testing.assert_close(got[number][row], expected, atol=1e-4, rtol=1e-4)
    assert (within.layer(1)[0] - without.layer(1)[0]).abs().max() > 1e-2


def test_a_layer_that_is_not_found_is_refused():
    model = ADMITTED["llama"]()
    parts = low_rank(model, PATHS[:1])
    with pytest.raises(UnsupportedModelError, match=r"max_loras: the linear layer model\.layers\.7"):
        passes.run(capture(model), passes.Settings(low_rank={"model.layers.7.nothing": parts[PATHS[0]]}))


def test_without_adapters_nothing_changes():
    graph = passes.run(capture(ADMITTED["llama"]()), passes.Settings())
    assert add_adapters(graph, passes.Settings()) == "off" and not graph.has_adapters
