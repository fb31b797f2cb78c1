"""Models with recurrences and short convolutions: the answer of transformers' generate(), and its states."""

import functools
import warnings
from dataclasses import replace

import models
import pytest
import torch
from captures import capture
from hybrids import DELAYS, NEW, NOISY, PURE, answer, batch, bits_of_answers, heads_of, states_of, system, texts

import spec_compile
from spec_compile import UnsupportedModelError, passes
from spec_compile.capture.checks import check_tree
from spec_compile.compat import CACHE
from spec_compile.graph import ModelGraph
from spec_compile.kernels import recurrence as recurrences
from spec_compile.passes.row_invariance import require_same_bits, variant_parts
from spec_compile.runtime.session import StepKind
from spec_compile.tools.audit_logits import _both

OFTEN = ("lfm2", "qwen3_5", "falcon_h1", "nemotron_h", "jamba")
NAMES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in models.HYBRIDS]


UNMASKED = [pytest.param(name, marks=pytest.mark.slow) for name in models.UNMASKED]


def made(name):
    return (models.HYBRIDS | models.UNMASKED)[name]()


def rows(name, *lengths):
    """`lengths` as one batch, or one by one if transformers itself reads the padding of a batch."""
    return [(length,) for length in lengths] if name in models.UNMASKED else [lengths]


def as_cached(state):
    """The states of a session in the form of transformers' cache, where Mamba-2's have their two sizes swapped."""
    ours = [(kind, state.kv.states[number][0]) for number, kind in enumerate(state.kv.states.kinds)]
    scans = []  # Zamba has one for each head
    for (kind, tensor), (following, _) in zip(ours, [*ours[1:], ("", None)]):
        scans.append(tensor.transpose(2, 3) if kind == "decay" else tensor)
        if kind == "selective" == following:
            continue
        yield torch.stack(scans, dim=1) if len(scans) > 1 else scans[0]
        scans = []


@pytest.mark.sweep("lfm2 qwen3_5 falcon_h1 jamba")
@pytest.mark.parametrize("name", NAMES)
def test_the_answer_and_the_states_are_those_of_transformers(name):
    """A batch of three lengths, with drafts that are mostly right, twice: prompts that end inside a convolution's
    window, and ones that are longer than a block."""
    model, fast = system(name, adaptive=False)
    stats = fast.speculation.stats
    for lengths, new in (((1, 2, 65), 12), ((5, 33, 70), NEW)):
        ids, mask = batch(lengths)
        stats.reset()
        plain = answer(model, ids, mask, new, return_dict_in_generate=name not in PURE)
        expected = plain if name in PURE else plain.sequences
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = answer(fast, ids, mask, new, reference=texts(expected, mask))
        assert torch.equal(got, expected)
        assert 0 < stats.rounds < new / 2
        if name in (*PURE, *DELAYS):
            continue
        state = fast.speculation.engine.session(3).state
        for ours, theirs in zip(as_cached(state), states_of(plain[CACHE]), strict=True):
            assert (ours - theirs).abs().max() <= NOISY.get(name, 1e-5) * theirs.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_trees_that_are_wrong_leave_no_trace(name):
    """Drafts of another text are hardly ever right; a reference shared with another row is right now and then."""
    model, fast = system(name)
    ids, mask = batch((9, 33), seed=1)
    plain = answer(model, ids, mask, 24)
    mixed = [torch.cat([row, row[::2], row.flip(0), row]) for row in texts(plain, mask)]
    assert torch.equal(answer(fast, ids, mask, 24, reference=mixed), plain)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_rows_that_end_and_what_comes_back(name):
    """An end of sequence inside what was drafted, rows of unequal ends, a cache that is handed out, a second call."""
    model, fast = system(name)
    ids, mask = batch((5, 40, 23), seed=2)
    long = answer(model, ids, mask)
    eos = [int(long[0, ids.shape[1] + 9]), int(long[1, ids.shape[1] + 30])]
    plain = answer(model, ids, mask, eos_token_id=eos, return_dict_in_generate=True)
    got = answer(fast, ids, mask, eos_token_id=eos, return_dict_in_generate=True, reference=texts(long, mask))
    assert torch.equal(got.sequences, plain.sequences)
    for ours, theirs in zip(states_of(got[CACHE]), states_of(plain[CACHE]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    assert torch.equal(answer(fast, ids, mask, reference=texts(long, mask)), long)
    assert torch.equal(answer(fast, ids, mask, prefill_chunk_size=32), long)


@pytest.mark.sweep("lfm2")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "jamba", *UNMASKED])
def test_kernels_give_the_same_answer(monkeypatch, name):
    """In Triton's interpreter; `test_on_a_gpu` runs them on a GPU."""
    if pytest.importorskip("places").GPU:
        pytest.skip("the kernels run on the CUDA device")
    model, fast = made(name), spec_compile.speculate(made(name), compile=False)
    ids, mask = batch(rows(name, 3, 5)[-1], seed=3)
    plain = answer(model, ids, mask, 6)
    monkeypatch.setattr(recurrences.launch, "supports", lambda kind, state: True)
    references = [torch.cat([row, row]) for row in texts(plain, mask)]
    assert torch.equal(answer(fast, ids, mask, 6, reference=references), plain)


def test_an_audit_leads_states_over_plain_steps():
    """What it compares the bits of is the same but for rounding."""
    _, fast = system("qwen3_5")
    ids, _ = batch((20,), seed=4)
    for in_tree, alone in zip(*_both(fast.speculation.engine.runtime.verify, ids, 12)):
        torch.testing.assert_close(in_tree, alone, rtol=1e-4, atol=1e-4)


def test_sampling_runs_rounds_in_two_halves():
    model, fast = system("qwen3_5")
    ids, mask = batch((5, 40))
    drawn = [answer(fast, ids, mask, 16, do_sample=True, top_k=1, temperature=0.7) for _ in range(2)]
    assert torch.equal(drawn[0], answer(model, ids, mask, 16)) and torch.equal(*drawn)
    assert fast.speculation.stats.rounds > 0


def test_building_steps_leaves_states_alone():
    """Steps that are tried in the middle of a call find every row finished, and prompts that are over."""
    _, fast = system("qwen3_5")
    ids, mask = batch((5, 40))
    answer(fast, ids, mask, 8)
    session = fast.speculation.engine.session(2)
    session.state.finished.fill_(False)  # as in the middle of a call
    session.state.max_lengths.add_(16)
    before = [session.state.kv.states[number][0].clone() for number in range(2)]
    flags = session.state.finished.clone(), session.state.prompt_lengths.clone()
    with torch.no_grad(), session._untouched():
        session.get(StepKind.ROUND, 4)(128)
        session.get(StepKind.PREFILL)(32, 128)
    for number, state in enumerate(before):
        assert torch.equal(session.state.kv.states[number][0], state)
    assert torch.equal(session.state.finished, flags[0]) and torch.equal(session.state.prompt_lengths, flags[1])


@pytest.mark.sweep("qwen3_5-eagle3 lfm2-draft_model")
@pytest.mark.parametrize("name, algorithm", [("qwen3_5", "eagle3"), ("nemotron_h", "eagle3"), ("lfm2", "draft_model")])
def test_drafts_of_a_head_and_of_a_model(name, algorithm):
    model = models.HYBRIDS[name]()
    draft = heads_of(model) if algorithm == "eagle3" else models.ADMITTED["llama"]()
    fast = spec_compile.speculate(
        model, algorithm, draft=draft, num_steps=3, topk=3, num_draft_tokens=8, compile=False, check=False
    )
    ids, mask = batch((5, 40, 23))
    assert torch.equal(answer(fast, ids, mask, 24), answer(model, ids, mask, 24))


def test_what_is_refused_by_name():
    model, fast = system("lfm2")
    with pytest.raises(UnsupportedModelError, match=r"draft: Lfm2ForCausalLM keeps recurrent states"):
        spec_compile.speculate(models.ADMITTED["llama"](), "draft_model", draft=model, compile=False)
    with pytest.raises(UnsupportedModelError, match=r"exact: bits are promised"):
        spec_compile.speculate(model, compile=False, exact="bits")
    assert "convolution" in fast.speculation.explain()


def test_a_cache_that_single_steps_would_fill_otherwise_is_left_to_transformers():
    """Nemotron-H clamps time steps in a forward over several tokens alone, by which we would fill the cache."""
    model, fast = system.__wrapped__("nemotron_h")  # not the shared one, which may have warned before
    ids, mask = batch((40,))
    with pytest.warns(UserWarning, match=rf"{CACHE} \(the model's forward over several tokens leaves"):
        got = answer(fast, ids, mask, 8, return_dict_in_generate=True)
    assert torch.equal(got.sequences, answer(model, ids, mask, 8))


def test_a_projection_with_a_bias_shares_no_padding():
    """Padding is not nothing behind a bias, so such batches go to transformers' loop; rows of one length are served."""
    config, cls, sizes, *_ = models._HYBRID["bamba"]
    model = models.build(config, cls, dict(sizes, mamba_proj_bias=True))
    fast = spec_compile.speculate(model, compile=False)
    ids, mask = batch((5, 20))
    with pytest.warns(UserWarning, match="padding on the left"):
        assert torch.equal(answer(fast, ids, mask, 8), answer(model, ids, mask, 8))
    whole = torch.ones_like(mask)
    assert torch.equal(answer(fast, ids, whole, 8), answer(model, ids, whole, 8))
    assert fast.speculation.stats.rounds > 0


def commit_of_one_token_too_few(kind, inputs, state, valid):
    return kind.chunk(inputs, state, (valid - 1).clamp(min=0) if inputs[0] is None else valid)


def commit_of_nothing(kind, inputs, state, valid):
    out, after = kind.chunk(inputs, state, valid)
    return out, state if inputs[0] is None else after


def chunks_that_forget(kind, inputs, state, valid):
    return kind.chunk(inputs, torch.zeros_like(state), valid)


def test_the_check_of_a_tree_sees_states(monkeypatch):
    model = models.HYBRIDS["qwen3_5"]()
    model.model.layers[0].linear_attn.A_log.data.fill_(-4.0)  # decays so slow that nothing is forgotten by itself
    graph = capture(model)
    verify, kind = passes.run(graph, passes.Settings()), recurrences.KINDS["delta"]
    check_tree("Qwen", graph, verify)
    for fault in (commit_of_one_token_too_few, commit_of_nothing, chunks_that_forget):
        wrong = replace(kind, chunk=functools.partial(fault, kind))
        monkeypatch.setitem(recurrences.KINDS, "delta", wrong)
        with pytest.raises(UnsupportedModelError, match="tree attention"):
            check_tree("Qwen", graph, verify)


def test_bits_are_not_promised_without_kernels(monkeypatch):
    graph = passes.run(capture(models.HYBRIDS["lfm2"]()), passes.Settings())
    monkeypatch.setattr(recurrences.launch, "has_kernels", lambda kind: False)
    monkeypatch.setattr(ModelGraph, "device", torch.device("cuda"))
    graph.dtype = torch.bfloat16
    assert any("layers.0.conv: recurrence of kind convolution" in part for part in variant_parts(graph))
    with pytest.raises(UnsupportedModelError, match=r"exact: 'bits' cannot be kept.*recurrence of kind convolution"):
        require_same_bits("bits", {"verify": graph})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "falcon_h1", "jamba", "recurrent_gemma", "rwkv"])
def test_compiled(name):
    ids, mask = batch(rows(name, 5, 131, 70)[-1])
    plain = answer(made(name), ids, mask, 24)
    fast = spec_compile.speculate(made(name))
    assert torch.equal(answer(fast, ids, mask, 24, reference=texts(plain, mask)), plain)
    assert fast.speculation.stats.rounds < 12


GPU_NAMES = ["lfm2", "qwen3_5", "kimi_linear", "falcon_h1", "nemotron_h", "jamba", "mamba2", *models.UNMASKED]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", GPU_NAMES)
def test_on_a_gpu(name, compile):
    """Captured rounds, uncompiled ones too, in float32: the answer, and the states of a model with a cache."""
    model = made(name).cuda()
    fast = spec_compile.speculate(model, compile=compile, max_cache_len=512)
    several = [((1, 2, 65), 1)] if name in models.HYBRIDS else []
    for lengths, seed in [*((lengths, 0) for lengths in rows(name, 5, 70, 131)), *several]:
        ids, mask = (tensor.cuda() for tensor in batch(lengths, seed))
        plain = answer(model, ids, mask)
        references = [row.cpu() for row in texts(plain, mask)]
        assert torch.equal(answer(fast, ids, mask, reference=references), plain)
    assert fast.speculation.stats.accept_length > 3


BITS = ["lfm2", "lfm2_moe", "lfm3", "qwen3_next", "qwen3_5", "olmo_hybrid", "bamba", "falcon_h1", "granitemoehybrid"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [name for name in (*BITS, "nemotron_h") if name in models.HYBRIDS])
def test_the_same_bits_on_a_gpu(name):
    """Of tokens, and of logits where they are handed out, in plain steps and in rounds with drafts mostly right."""
    model = models.HYBRIDS[name]().to("cuda", torch.bfloat16)
    plain, logits, _ = bits_of_answers(model, 1, exact="bits")
    for nodes in (4, 16, 64):
        tokens, same, accepted = bits_of_answers(model, nodes, plain, exact="bits")
        assert torch.equal(tokens, plain) and torch.equal(same, logits)
        assert accepted > 2
