"""select_logits: logits of all rows, of some, or of none."""

import pytest
import torch
from toy_graphs import LINEAR, PREFILL, VOCAB, Rewritten, Toy, aten, example, new_cache, toy, trace, with_table

from spec_compile import passes
from spec_compile.graph import calls
from spec_compile.kernels import ops
from spec_compile.kernels.attention import Use, attention_calls
from spec_compile.passes import Settings
from spec_compile.passes.outputs import select_logits, tap_hidden_states


@pytest.mark.parametrize("rows", [[[0], [4]], [[4, 0, 4], [1, 2, 3]], [[0, 1, 2, 3, 4]] * 2])
def test_logits_of_chosen_rows(rows):
    _, graph = toy({}, {})
    inputs, rows = example(2, 5), torch.tensor(rows)
    result = Rewritten(graph, select_logits, attention=Use(role="draft"))
    assert result.count(ops.gather_rows) == (0, 1) and result.count(LINEAR)[0] == result.count(LINEAR)[1], str(result)
    assert [n.name for n in result.gm.graph.nodes if n.op == "placeholder"][-1] == "rows", str(result)
    (got,) = result.gm(*inputs, rows)
    want = graph.gm(*inputs)[0].gather(1, rows[:, :, None].expand(-1, -1, VOCAB))
    torch.testing.assert_close(got, want, msg=lambda m: f"{m}\n{result}")


def test_no_logits():
    """The head and the norm before it are dropped; what was tapped stays."""
    model, graph = toy({}, {})
    inputs = example(2, 5)
    result = Rewritten(graph, select_logits, attention=PREFILL)
    assert result.gm(*inputs) == (), str(result)
    assert result.count(aten.layer_norm.default) == (1, 0), str(result)
    assert result.count(LINEAR)[1] == 0, str(result)
    tapped = passes.run(graph, Settings(taps=(1,), attention=PREFILL), [tap_hidden_states, select_logits])
    (state,) = tapped.gm(*inputs)
    torch.testing.assert_close(state, model.states(*inputs)[1][1])
    assert not calls(tapped.gm, aten.layer_norm.default)


def test_no_logits_still_writes_every_layer_of_the_cache():
    """The last layer's attention output is not needed any more, but its keys and values are."""
    _, graph = toy({}, {})
    graph = passes.run(graph, Settings(attention=PREFILL))
    ids, positions = example(1, 5)
    cache = new_cache(2, 1, 8)
    graph.gm(ids, positions, torch.zeros(1, dtype=torch.int64), None, with_table(cache), 5)
    assert all(slots[:, :, :5].abs().amin() > 0 for slots in cache)
    assert len(attention_calls(graph)) == 2


def test_logits_rows_needs_one_head():
    class TwoHeads(Toy):
        def forward(self, ids, positions):
            logits = super().forward(ids, positions)
            return logits, self.head(self.embed(ids))

    graph = trace(TwoHeads({}), *example(2, 7))
    with pytest.raises(ValueError, match="expected one output head, found 2"):
        Rewritten(graph, select_logits, attention=Use(role="draft"))
