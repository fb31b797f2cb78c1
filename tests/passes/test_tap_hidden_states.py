"""tap_hidden_states: hidden states of layers among the outputs."""

import pytest
import torch
from toy_graphs import Rewritten, example, toy

from spec_compile.passes.outputs import tap_hidden_states


@pytest.mark.parametrize("wanted", [(0,), (3,), (0, 1, 2, 3), (2, 0)])
def test_taps_of_a_toy(wanted):
    model, graph = toy({}, {}, {})
    ids, positions = example(3, 6)
    result = Rewritten(graph, tap_hidden_states, taps=wanted)
    assert result.log.nodes_before == result.log.nodes_after, str(result)
    logits, *states = result.gm(ids, positions)
    want_logits, want = model.states(ids, positions)
    torch.testing.assert_close(logits, want_logits)
    assert len(states) == len(wanted)
    for number, state in zip(wanted, states):
        assert torch.allclose(state, want[number], atol=1e-5), f"hidden state {number}\n{result}"


@pytest.mark.parametrize("wanted", [(3,), (-2,), (0, 7)])
def test_taps_out_of_range_are_refused(wanted):
    _, graph = toy({}, {})
    with pytest.raises(ValueError, match=r"taps: expected 0 to 2 .*got \["):
        Rewritten(graph, tap_hidden_states, taps=wanted)


@pytest.mark.sweep("llama gpt2 deepseek_v3")
@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "gemma", "gemma2", "phi", "gpt2", "gpt_neox", "olmo2", "granite", "cohere", "glm4",
     "deepseek_v3", "opt", "gpt_oss", "gpt_bigcode", "stablelm"],
)  # fmt: skip
def test_taps_of_real_architectures(name, captured):
    """The values of transformers' hidden_states; the last is compared before the final norm."""
    model, graph = captured(name)
    layers = len(graph.layers)
    ids = torch.randint(3, graph.vocab_size, (2, 12))
    last = []
    final = next(m for n, m in model.named_modules() if n.endswith((f"layers.{layers - 1}", f"h.{layers - 1}")))
    hook = final.register_forward_hook(lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        own = model(ids, output_hidden_states=True, use_cache=False)
        hook.remove()
        result = Rewritten(graph, tap_hidden_states, taps=tuple(range(layers + 1)))
        logits, *states = result.gm(ids, torch.arange(12).expand(2, -1))
    torch.testing.assert_close(logits, own.logits, rtol=1e-4, atol=1e-4)
    for number, (got, want) in enumerate(zip(states, [*own.hidden_states[:layers], last[0]], strict=True)):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), f"hidden state {number}\n{result}"
