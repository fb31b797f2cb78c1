"""The graphs of drafts between processes."""

from unittest import mock

import draft_checkpoints as drafts
import models
import pytest
import torch

from spec_compile import speculate
from spec_compile.capture.trace import capture_head
from spec_compile.compile.start import DRAFT, StartArtefact, draft_graph
from spec_compile.config import Options
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.runtime.compiled_steps import _classes, _facts, identity_of

TIED = "gpt2"
"""A draft model whose output matrix is its embedding."""


@pytest.mark.parametrize("name", ["eagle3_wide", pytest.param("mtp_qwen35", marks=pytest.mark.slow)])
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
    (file,) = tmp_path.rglob("draft")
    file.write_bytes(file.read_bytes()[:-9])
    draft_graph(head, options, trace)
    assert trace.call_count == 2 and "it is made anew" in caplog.text
    StartArtefact(head, None, options, DRAFT, {}).keep(DRAFT, b"{}")
    draft_graph(head, options, trace)
    assert trace.call_count == 3 and "is captured anew" in caplog.text
    draft_graph(head, Options(cache=False), trace)
    assert trace.call_count == 4


@pytest.mark.sweep("eagle3 dflash llama")
@pytest.mark.parametrize("name", ["eagle3", "mtp_qwen", "p_eagle", "dflash", "dflash2", "domino", "llama", TIED])
def test_a_second_start_has_the_code_and_the_drafts_of_the_first(tmp_path, name):
    """It finds compiled parts by the identity. DFlash 2 pads its tokens by one and cuts the last off."""
    if name in models.ADMITTED:
        target, algorithm, draft = models.ADMITTED[name](), "draft_model", models.ADMITTED[name]()
    else:
        written = drafts.write(name, tmp_path / name)
        flavours = drafts.FLAVOURS | drafts.PARALLEL | drafts.DFLASH | drafts.LINKED
        target, algorithm = written.target, flavours[name].algorithm
        draft = None if algorithm == "mtp" else written.folder
    ids = torch.randint(3, drafts.V, (2, 9), generator=torch.Generator().manual_seed(2))
    wanted = dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=12)
    plain, found = target.generate(ids, **wanted), []
    for is_second in (False, True):
        options = dict(compile=False, check=False, adaptive=False, max_cache_len=64, cache=str(tmp_path / "cache"))
        fast = speculate(target, algorithm, draft=draft, **options)
        engine = fast.speculation.engine
        assert fast.speculation.is_from_artefact == is_second
        identity = identity_of(_facts(engine.name, engine.runtime), _classes(engine.runtime))
        assert torch.equal(fast.generate(ids, **wanted), plain) and identity
        found.append((identity, fast.speculation.stats.trace))
    assert found[0] == found[1]
