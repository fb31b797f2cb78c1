"""Features, which heads learn from, are the model's own, and are captured once a shape."""

from unittest import mock

import models
import pytest
import torch
from trainings import NEEDS_GPU, sequences, target

from spec_compile.passes.outputs import FINAL
from spec_compile.train import data as texts
from spec_compile.train.data import read
from spec_compile.train.features import TargetFeatures


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(("rows", "plain"), [(1, True), (2, False), (99, True), (99, False)])
def test_features_are_the_models_own(rows, plain):
    """A model that bounds its logits behind the output matrix makes them itself, row by row."""
    model = target() if plain else target("gemma2")
    batch = texts.collate(read([row[: 20 - 3 * n] for n, row in enumerate(sequences(3))], None, models.VOCAB))
    kept, before = torch.tensor([3, 4, 90]), hooks(model)
    features = TargetFeatures(model, (0, 1, model.config.num_hidden_layers, FINAL), kept)
    with (
        mock.patch("spec_compile.train.features.LOGITS", rows * 20 * models.VOCAB * 4),
        mock.patch("spec_compile.train.features.TOKENS", rows * 20),
        mock.patch.object(model.model, "forward", wraps=model.model.forward) as runs,
        mock.patch.object(model.lm_head, "forward", wraps=model.lm_head.forward) as products,
        torch.autocast("cpu", torch.bfloat16),  # which would cast the target's weights
    ):
        found = features(batch.ids)
    assert runs.call_count == {1: 3, 2: 2, 99: 1}[rows] and hooks(model) == before
    assert all((call.args[0].shape[1] == 0) == plain for call in products.call_args_list)
    logits = found.logits(torch.arange(batch.ids.numel())).view(*batch.ids.shape, -1)
    for row, document in enumerate(sequences(3)):
        ids = torch.tensor([document[: 20 - 3 * row]])
        out = model(ids, output_hidden_states=True)
        states = [*out.hidden_states[:2], found.states[2][row : row + 1, : ids.shape[1]], out.hidden_states[-1]]
        for mine, theirs in zip(found.states, states):
            assert torch.allclose(mine[row, : ids.shape[1]], theirs[0], atol=1e-5)
        assert torch.equal(found.choices[row, : ids.shape[1]], out.logits[0].argmax(-1))
        assert torch.allclose(logits[row, : ids.shape[1]], out.logits[0][:, kept], atol=1e-5)
    assert torch.allclose(model.model.norm(found.states[2]), found.states[3])


def test_features_are_captured_once_a_shape(monkeypatch):
    """Ids of a shape that has come before are computed by what was captured of it; without it, as before."""
    features, seen = TargetFeatures(target(), (1, 2)), []
    features._graphs.captures = True
    batches = [torch.tensor(sequences(2, size, seed)) for seed, size in enumerate((9, 9, 7, 9, 7, 9))]

    class Captured:
        def __init__(self, function, arguments, pool):
            self.function = function
            seen.append(tuple(arguments[0].shape))

        def __call__(self, ids):
            seen.append("replayed")
            return self.function(ids)

    monkeypatch.setattr("spec_compile.train.features.Captured", Captured)
    found = [features(ids).states for ids in batches]
    assert seen == [(2, 9), "replayed", "replayed", (2, 7), "replayed", "replayed"]
    monkeypatch.setattr("spec_compile.train.features.Captured", mock.Mock(side_effect=RuntimeError("it waits")))
    features._graphs.captured.clear()
    with pytest.warns(UserWarning, match="LlamaForCausalLM cannot be captured.*slower: it waits"):
        again = [features(ids).states for ids in batches]
    assert all(torch.equal(*pair) for states in zip(found, again) for pair in zip(*states))


@pytest.mark.gpu
@NEEDS_GPU
def test_features_on_a_gpu(recwarn):
    """What is captured and replayed is what the model computes."""
    model = models.ADMITTED["llama"]().cuda()
    features = TargetFeatures(model, (0, 1, FINAL))
    for seed, size in enumerate((70, 70, 130, 70, 130, 70, 130)):
        ids = torch.tensor(sequences(4, size, seed)).cuda()
        found, out = features(ids), model(ids, output_hidden_states=True)
        for mine, theirs in zip(found.states, (*out.hidden_states[:2], out.hidden_states[2])):
            assert torch.allclose(mine, theirs, atol=1e-4)
        assert (found.choices == out.logits.argmax(-1)).float().mean() > 0.99
    assert len(features._graphs.captured) == 2 and None not in features._graphs.captured.values()
    assert not [w for w in recwarn if "captured" in str(w.message)]
