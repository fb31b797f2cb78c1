"""The self-check of a head that is loaded: how often it drafts the target's own tokens, and which reading is right."""

from unittest import mock

import changed_drafts as changed
import draft_checkpoints as drafts
import models
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spec_compile.capture.admit import admit
from spec_compile.config import Options
from spec_compile.drafters import self_check
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.modules.eagle import Head
from spec_compile.drafters.self_check import acceptance, calibrate
from spec_compile.drafters.shared_draft import tapped_states
from spec_compile.passes.outputs import FINAL


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_neox", "olmo2"])
@torch.no_grad()
def test_states_are_those_of_transformers(name):
    model, ids = models.ADMITTED[name](), torch.randint(3, drafts.V, (2, 6))
    out = model(input_ids=ids, output_hidden_states=True)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    found, choices = tapped_states(model, (0, 1, FINAL), ids)
    for ours, theirs in zip(found, (out.hidden_states[0], out.hidden_states[1], out.hidden_states[-1])):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(choices, out.logits.argmax(-1))
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]


class Oracle(Head):
    """Drafts what the target chose, as far as it is told to: its states are the row, and whether they went round."""

    def __init__(self, choices, first=1.0, second=1.0):
        super().__init__(nn.Parameter(torch.zeros(1)), nn.Parameter(torch.eye(drafts.V)), 2, (0,), layers=0)
        self.choices, self.until = choices, torch.tensor([first, second]) * (choices.shape[1] - 1)

    def project(self, features):
        rows = torch.arange(len(features[0])).view(-1, 1, 1).expand(-1, features[0].shape[1], -1)
        return torch.cat([rows, torch.zeros_like(rows)], 2).float()

    def forward(self, input_ids, positions, state):
        row, round_ = state.long().unbind(2)
        right = self.choices[row, positions + 1]
        draft = torch.where(positions < self.until[round_], right, (right + 1) % drafts.V)
        return torch.stack([row, torch.ones_like(row)], 2).float(), F.one_hot(draft, drafts.V).float()


@torch.no_grad()
def test_acceptance_counts_the_targets_next_tokens():
    model = drafts.llama()
    ids = torch.randint(3, drafts.V, (2, 21))
    _, choices = tapped_states(model, (), ids)
    assert acceptance(model, Oracle(choices), ids, 1) == (1,) and acceptance(model, Oracle(choices), ids) == (1, 1)
    assert acceptance(model, Oracle(choices, first=0.5), ids, 1) == (0.5,)
    assert acceptance(model, Oracle(choices, second=0.0), ids) == (1, 0)
    assert max(acceptance(model, Oracle(choices.roll(1, 1)), ids)) < 0.3
    mapped = Oracle(choices)
    mapped.draft_to_target = torch.arange(drafts.V).flip(0)
    mapped.head_weight = nn.Parameter(torch.eye(drafts.V).flip(0))
    assert acceptance(model, mapped, ids) == (1, 1)


@torch.no_grad()
def test_own_texts_are_read_if_the_target_still_writes_them(tmp_path):
    model, options = drafts.llama(), Options(cache=str(tmp_path))
    text, written = self_check.own_text(admit(model), options), mock.Mock(wraps=self_check._write)
    with mock.patch.object(self_check, "_write", written):
        assert torch.equal(self_check.own_text(admit(model), options), text)
        (file,) = tmp_path.rglob("own_text*")
        assert not written.called
        torch.nn.init.normal_(model.get_output_embeddings().weight)
        other = self_check.own_text(admit(model), options)
        assert written.call_count == 1 and not torch.equal(other, text), "of other weights"
        assert torch.equal(self_check.own_text(admit(model), options), other) and written.call_count == 1
        for damaged in (b"", file.read_bytes()[:-9], b"[[1]]"):
            file.write_bytes(damaged)
            assert torch.equal(self_check.own_text(admit(model), options), other)
        assert written.call_count == 4


@torch.no_grad()
def test_the_best_reading_is_kept():
    model = drafts.llama()
    ids = self_check.own_text(admit(model), Options(cache=False))
    _, choices = tapped_states(model, (), ids)
    readings = [Oracle(choices, *shares) for shares in ((0.5, 0.2), (0.5, 0.9), (0.6, 0.1))]
    best = calibrate(model, readings, ids)
    assert best is readings[1]
    assert best.report[0].startswith("self-check: 51% and 8") and best.report[1].startswith("the best of 3 readings")
    readings = [Oracle(choices, *shares) for shares in ((0.5, 0.9), (0.6, 0.1), (0.6, 0.2))]
    best = calibrate(model, readings, ids, 1)
    assert best is readings[1] and best.report[0].endswith(" of first drafts are the target's own tokens")
    assert " and " not in "".join(best.report)
    equal = [Oracle(choices), Oracle(choices)]
    assert calibrate(model, equal, ids) is equal[0]


@torch.no_grad()
def test_calibration_finds_how_a_head_was_trained(tmp_path):
    """Its output matrix is fitted with taps and a RoPE base that are not what its config seems to say."""
    listed = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, "rope_theta": 20.0}
    written = changed.write(tmp_path, "eagle3_full", **listed)
    true = load_head(tmp_path, written.target, taps=(3, 5, 7), rope_theta=10000.0)
    ids = self_check.own_text(admit(written.target), Options(cache=False))
    features, choices = tapped_states(written.target, true.taps, ids)
    positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    _, normed = true(ids[:, 1:], positions, true.project([feature[:, :-1] for feature in features]))
    wanted = F.one_hot(choices[:, 1:], drafts.V).float()
    fitted = torch.linalg.lstsq(normed.flatten(0, 1), wanted.flatten(0, 1)).solution.t().contiguous()
    written = changed.write(tmp_path, "eagle3_full", {"lm_head.weight": fitted}, **listed)

    head = load_head(tmp_path, written.target)
    best = calibrate(written.target, head.readings(), ids)
    assert head.taps == (2, 4, 6) and best.taps == (3, 5, 7)
    assert best.rotary_emb.config.rope_parameters["rope_theta"] == 10000.0
    assert "read as: taps 3, 5, 7" in best.report and "read as: rope_theta=10000" in best.report
    reached = [acceptance(written.target, reading, ids)[0] for reading in (best, head)]
    assert reached[0] > 0.8 > 0.7 > reached[1]
