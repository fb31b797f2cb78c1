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
    """By the keys of each layer, which its input decides."""
    model, ids = ADMITTED["llama"](), torch.randint(5, 60, (3, 9))
    parts = low_rank(model, PATHS)

    def keys(model, merge, adapters=(), **settings):
        graph = passes.run(capture(model), passes.Settings(merge, (), Use(role=role), **settings))
        cache = Cache(graph, 3, 128)
        assert graph.has_adapters == bool(cache.adapters) == bool(adapters)
        assert len(calls(graph.gm, add_low_rank)) == (len(PATHS) if adapters else 0)
        if adapters:
            cache.adapters[0].copy_(torch.tensor(adapters))
        positions = torch.arange(9).expand_as(ids)
        graph.gm(ids, positions, torch.zeros(3, dtype=torch.int64), None, cache.argument, 9)
        return torch.stack([cache.layer(number)[0][:, :, :9] for number in range(2)])

    got = keys(model, merge, [1, 0, 1], low_rank=parts)
    without = keys(ADMITTED["llama"](), merge)
    with torch.no_grad():
        for path, part in parts.items():  # an adapter is an addition to the weight
            model.get_submodule(path).weight += part.scale[1] * part.up[1] @ part.down[1]
    within = keys(model, False)
    expected = torch.stack([within[:, 0], without[:, 1], within[:, 2]], 1)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert (within[1] - without[1]).abs().max() > 1e-2


def test_a_layer_that_is_not_found_is_refused():
    model = ADMITTED["llama"]()
    parts = low_rank(model, PATHS[:1])
    with pytest.raises(UnsupportedModelError, match=r"max_loras: the linear layer model\.layers\.7"):
        passes.run(capture(model), passes.Settings(low_rank={"model.layers.7.nothing": parts[PATHS[0]]}))


def test_without_adapters_nothing_changes():
    graph = passes.run(capture(ADMITTED["llama"]()), passes.Settings())
    assert add_adapters(graph, passes.Settings()) == "off" and not graph.has_adapters
