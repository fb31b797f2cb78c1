"""The pipeline of passes: it reports each pass, leaves the captured graph alone, and refuses a wrong order."""

import pytest
from toy_graphs import toy

from spec_compile import passes
from spec_compile.graph import calls
from spec_compile.passes import Settings
from spec_compile.passes.apply import check_order
from spec_compile.passes.fuse_attention import fuse_rotary
from spec_compile.passes.linears import merge_linears
from spec_compile.passes.tidy import tidy


def test_the_pipeline_reports_each_pass_and_leaves_the_captured_graph_alone():
    _, graph = toy({}, {})
    before = graph.gm.print_readable(print_output=False)
    result = passes.run(graph, Settings(), keep_code=True)
    assert graph.gm.print_readable(print_output=False) == before
    assert graph.log == []
    assert [report.name for report in result.log] == [rewrite.__name__ for rewrite in passes.PIPELINE]
    assert result.log[0].nodes_before == len(calls(graph.gm))
    for report, following in zip(result.log, result.log[1:]):
        assert report.nodes_after == following.nodes_before
    assert result.log[-1].nodes_after == len(calls(result.gm))
    assert all(report.summary and "def forward" in report.code for report in result.log)


def test_a_pass_before_one_that_it_relies_on_is_refused():
    check_order(passes.PIPELINE)
    with pytest.raises(ValueError, match="pipeline: merge_linears has to come after tidy"):
        check_order([merge_linears, tidy])
    with pytest.raises(ValueError, match="fuse_qk_norms has to come after fuse_rotary"):
        check_order([rewrite for rewrite in passes.PIPELINE if rewrite is not fuse_rotary])
