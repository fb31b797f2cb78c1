"""round_attention: attention that ends with the codes of the product after it."""

import dataclasses

import pytest
import torch
from captures import capture
from quantised_models import IDS, load
from toy_graphs import prefix_then_chunk, rewritten

from spec_compile import passes, speculate
from spec_compile.capture.checks import check_tree
from spec_compile.graph import ModelGraph, calls
from spec_compile.inventory import held_tensors
from spec_compile.kernels import linear
from spec_compile.kernels.attention import Use, attention_calls
from spec_compile.passes import Settings
from spec_compile.passes.fuse_residuals import fuse_residuals
from spec_compile.passes.round_attention import round_attention
from spec_compile.passes.row_invariance import variant_parts
from spec_compile.runtime.steps.regions import cut

own = torch.ops.spec_compile


@pytest.fixture
def graph(tmp_path_factory, monkeypatch):
    """A function: the heads' size -> the graph of a model in FP8, which passes take for one on a GPU."""
    for module in ("attention.tree_attention", "norm"):
        pytest.importorskip(f"spec_compile.kernels.{module}", exc_type=ImportError)
    monkeypatch.setattr(linear.small_m, "lack_of_device", lambda device: None)
    monkeypatch.setattr(linear, "FORMS", (dataclasses.replace(linear.SMALL_M, device="cpu"),))

    def captured(name="fp8_block", size=512):
        model = load(name, tmp_path_factory.mktemp("model"), torch.bfloat16, size=size)
        for tensor in held_tensors(model):  # a file need not be aligned in memory, as a GPU's is
            tensor.data = tensor.data.clone()
        graph = capture(model)
        monkeypatch.setattr(ModelGraph, "device", property(lambda graph: torch.device("cuda")))
        return graph

    return captured


def rounded(graph):
    return len(calls(graph.gm, own.rounded_attention.default))


def test_attention_ends_with_codes(graph, monkeypatch):
    """The same but for the order of sums on a CPU, also when cut into regions."""
    captured = graph()
    apart, ours = rewritten(captured, (round_attention,)), rewritten(captured)
    assert (rounded(apart), rounded(ours)) == (0, 2) == (0, len(attention_calls(ours)))
    assert any(report.summary.startswith("2 attention calls end with the codes") for report in ours.log)
    assert ["units" in node.kwargs for node in calls(ours.gm, linear.TO_STREAM)] == [True, False] * 2
    assert variant_parts(ours) == []
    want = prefix_then_chunk(apart.gm, captured)
    for function in (ours.gm, cut(ours)):
        for got, expected in zip(prefix_then_chunk(function, captured), want, strict=True):
            assert (got.float() - expected.float()).norm() < 0.02 * expected.float().norm()
    with monkeypatch.context() as on_cpu:
        on_cpu.setattr(ModelGraph, "device", torch.device("cpu"))
        check_tree("fp8_block", captured, ours)  # without rounding

    # What else reads attention, and what does not end at the stream, reads numbers.
    def read_twice(graph, settings):
        output = next(node for node in graph.gm.graph.nodes if node.op == "output")
        output.args = ((*output.args[0], attention_calls(graph)[0]),)
        return "the first attention is a result, too"

    place = passes.PIPELINE.index(round_attention)
    steps = [*passes.PIPELINE[:place], read_twice, *passes.PIPELINE[place:]]
    assert rounded(passes.run(captured, Settings(), steps)) == 1
    assert rounded(rewritten(captured, (fuse_residuals,))) == 0
    assert rounded(rewritten(captured, attention=Use(name="sdpa"))) == 0


@pytest.mark.parametrize("name, size", [("fp8_block", 256), ("plain", 512)])
def test_heads_of_half_a_block_and_other_formats_stay(graph, name, size):
    assert rounded(rewritten(graph(name, size))) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
def test_the_bits_of_an_answer_on_a_gpu(tmp_path, monkeypatch):
    """Those of activations that a kernel of its own rounds, in compiled and captured rounds."""
    model = load("fp8_block", tmp_path, torch.bfloat16, size=512).to("cuda")
    answers, pipeline = [], passes.PIPELINE
    for calls_rounded in (2, 0):
        steps = [each for each in pipeline if calls_rounded or each is not round_attention]
        monkeypatch.setattr(passes, "PIPELINE", steps)
        fast = speculate(model, exact="bits")
        assert rounded(fast.speculation.engine.runtime.verify) == calls_rounded
        greedy = dict(do_sample=False, max_new_tokens=48, eos_token_id=None, pad_token_id=0)
        answers.append(fast.generate(IDS.cuda(), output_logits=True, return_dict_in_generate=True, **greedy))
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    assert all(map(torch.equal, answers[0].logits, answers[1].logits))
