"""The graphs of drafts between processes."""

from unittest import mock

import draft_checkpoints as drafts
import pytest
import torch

from spec_compile.artefacts.draft_graph import ITEM, draft_graph
from spec_compile.artefacts.start import StartArtefact
from spec_compile.capture.trace import capture_head
from spec_compile.config import Options
from spec_compile.drafters.checkpoints.load import load_head


@pytest.mark.parametrize("name", ["eagle3_wide", "mtp_qwen35"])
@torch.no_grad()
def test_a_head_like_an_earlier_one_is_not_traced(tmp_path, caplog, name):
    written = drafts.write(name, tmp_path / name)
    head = load_head(written.folder, written.target, None)
    options, trace = Options(cache=str(tmp_path)), mock.Mock(side_effect=lambda: capture_head(head, head.hidden_size))
    first = draft_graph(head, options, trace)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter)
    graph = draft_graph(head, options, trace)
    assert trace.call_count == 1 and graph.layers == first.layers and graph.dtype == first.dtype
    ids, state = torch.randint(0, drafts.V, (3, 4)), torch.randn(3, 4, head.hidden_size)
    positions = torch.arange(4).expand(3, -1)
    for ours, eager in zip(graph.gm(ids, positions, state), head(ids, positions, state)):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    (file,) = tmp_path.rglob("draft.part")
    file.write_bytes(file.read_bytes()[:-9])
    draft_graph(head, options, trace)
    assert trace.call_count == 2 and "it is made anew" in caplog.text
    StartArtefact(head, None, options, ITEM, {}).keep(ITEM, b"{}")
    draft_graph(head, options, trace)
    assert trace.call_count == 3 and "is captured anew" in caplog.text
    draft_graph(head, Options(cache=False), trace)
    assert trace.call_count == 4
