"""Caches of 8 bits, with and without a scale for each token and KV head: kernels, bits and answers."""

import models
import pytest
import torch
from attention_cases import FP8, SMALL, TOLERANCE, Case, bits, random_tree
from places import ON_GPU
from transformers import DynamicCache

import spec_compile
from spec_compile.compat import CACHE
from spec_compile.config import Options
from spec_compile.kernels import ops
from spec_compile.kernels.attention import BACKENDS
from spec_compile.kernels.attention import tree_attention as attention

NAME = "fp8_per_token_head"
WRITTEN = ("key_cache", "value_cache", "scales")
WANTED = dict(do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)


def scaled_call(place, lengths, nodes, **options):
    """A call with scales, NaN where nobody may look, and the same call with finite numbers there, in float32 on
    a CPU."""
    case = Case(place, lengths, nodes, random_tree(nodes), (4, 2), (32, 16), kept=FP8, **options)
    case.v[:, :, :, 0] *= 1000  # rounded to FP8 without a scale, it would be cut off
    clean = torch.rand(*case.caches[0].shape[:3], 2) + 0.5
    scales = clean.masked_fill(case.caches[0].float().isnan().any(dim=3, keepdim=True), torch.nan)
    call = case.inputs()
    plain = {name: x.cpu() for name, x in call._asdict().items() if isinstance(x, torch.Tensor)}
    plain |= {name: plain[name].float() for name in ("q", "k", "v", "sinks") if name in plain}
    plain |= dict(key_cache=case.clean[0], value_cache=case.clean[1], scales=clean)
    return call._replace(scales=scales.to(place[0])), call._replace(**plain)


FORMS = (1, {}), (7, dict(window=20, softcap=2.0, sinks=True)), (17, dict(causal=True)), (70, dict(causal=True))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("nodes, options", FORMS)
def test_kernels(place, nodes, options):
    call, plain = scaled_call(place, [70, 0, 33] if nodes <= 16 else [40], nodes, **options)
    expected = attention.tree_attention(*plain)
    small = SMALL._replace(block_m=16, block_n=16)
    got = attention.launch(call, small).float().cpu()
    unit = torch.ones(16)
    unit[0] = 1000
    torch.testing.assert_close(got / unit, expected / unit, atol=TOLERANCE[place[1]], rtol=TOLERANCE[place[1]])
    for row, length in enumerate(call.lengths.tolist()):
        there = slice(length, length + nodes)
        for name in WRITTEN:
            cache, meant = getattr(call, name)[row, :, there].cpu(), getattr(plain, name)[row, :, there]
            assert torch.equal(bits(cache.contiguous()), bits(meant.contiguous())), name


def test_a_scale_is_of_one_token_and_head(place):
    """The others of the block have nothing to do with it: a token alone leaves the same bytes."""
    call, _ = scaled_call(place, [40], 7)
    attention.launch(call, SMALL)
    before = [getattr(call, name)[:, :, 43].clone() for name in WRITTEN]
    alone = {name: getattr(call, name)[:, :, 3:4] for name in ("q", "k", "v")}
    alone |= dict(lengths=call.lengths + 3, positions=call.positions[:, 3:4], ancestors=call.ancestors[:, :1])
    attention.launch(call._replace(**alone), SMALL)
    for name, cache in zip(WRITTEN, before):
        assert torch.equal(bits(getattr(call, name)[:, :, 43].contiguous()), bits(cache.contiguous()))


def test_rows_of_zeros_have_a_scale():
    codes, scales = ops.over_scale(torch.tensor([[0.0, 0.0], [3.0, -896.0]]))
    assert scales.tolist() == [[1.0], [2.0]] and codes.tolist() == [[0.0, 0.0], [1.5, -448.0]]


class Rounding(DynamicCache):
    """transformers' cache with the plain meaning: what it returns are codes times scales."""

    def update(self, keys, values, *rest, **named):
        rounded = []
        for x in (keys, values):
            codes, scales = ops.over_scale(x)
            rounded.append((codes.to(FP8).float() * scales).to(x.dtype))
        return super().update(*rounded, *rest, **named)


def test_answers():
    """Token for token those of the model with such a cache, whatever is drafted, and an answer can be continued."""
    model = models.ADMITTED["llama"]()
    ids = torch.randint(3, models.VOCAB, (2, 40)).repeat(1, 2)
    expected = model.generate(ids, **{CACHE: Rounding()}, **WANTED)
    assert not torch.equal(model.generate(ids, **WANTED), expected)  # rounding is noticed
    for nodes in (1, 16):
        fast = spec_compile.speculate(model, kv_cache_dtype=NAME, num_draft_tokens=nodes, compile=False)
        first = fast.generate(ids, return_dict_in_generate=True, **{**WANTED, "max_new_tokens": 20})
        assert torch.equal(first.sequences, expected[:, :100])
        assert fast.speculation.stats.accept_length >= 1
        again = fast.generate(first.sequences, **{CACHE: first[CACHE]}, **{**WANTED, "max_new_tokens": 20})
        assert torch.equal(again, expected)
    cache = fast.speculation.engine.session(2).state.kv
    assert [tensor.dtype for tensor in cache.layer(0)] == [FP8, FP8, torch.float32]
    verify, slots = fast.speculation.engine.runtime.verify, cache.slots
    assert verify.token_bytes * 2 * slots == sum(tensor.nbytes for tensor in cache.tensors)


def test_the_cache_of_a_draft_model_is_not_rounded():
    """Prompts of the draft, too, go into a cache of the draft's own dtype."""
    model, draft = models.ADMITTED["llama"](), models.ADMITTED["llama"]()
    ids = torch.randint(3, models.VOCAB, (2, 40))
    options = dict(kv_cache_dtype=NAME, compile=False, check=False)
    plain = spec_compile.speculate(model, num_draft_tokens=1, **options)
    fast = spec_compile.speculate(model, "draft_model", draft=draft, num_steps=3, adaptive=False, **options)
    assert torch.equal(fast.generate(ids, **WANTED), plain.generate(ids, **WANTED))
    assert fast.speculation.stats.accept_length > 2.5
    cache = fast.speculation.engine.session(2).drafter.cache
    assert {tensor.dtype for tensor in cache.tensors} == {torch.float32}


def test_the_target_and_some_backends_have_scales():
    options = Options(kv_cache_dtype=NAME)
    assert [options.attention(role).scaled for role in ("prefill", "verify", "draft")] == [True, True, False]
    assert not options.attention("prefill", of_draft=True).scaled
    assert {name for name, backend in BACKENDS.items() if backend.scaled} == {"triton", "sdpa"}


@pytest.mark.gpu
@pytest.mark.parametrize("kept, dtype", [("fp8", torch.float32), (NAME, torch.float32), (NAME, torch.bfloat16)])
def test_answers_on_a_gpu(kept, dtype):
    """Whatever was drafted, and however the prompt was cut, every token sees the same rounded keys and values."""
    ids = torch.randint(3, models.VOCAB, (2, 150)).repeat(1, 2).cuda()
    answers = []
    for more in (dict(num_draft_tokens=1), dict(num_draft_tokens=16), dict(num_draft_tokens=16, cuda_graphs=False)):
        model = models.ADMITTED["llama"]().to("cuda", dtype)
        fast = spec_compile.speculate(model, kv_cache_dtype=kept, max_cache_len=700, **more)
        answers.append(fast.generate(ids, **WANTED))
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
    if kept == "fp8":
        assert all(held.dtype == FP8 for held in fast.speculation.engine.session(2).state.kv.tensors)
        past = fast.generate(ids, return_dict_in_generate=True, **WANTED)[CACHE]
        assert past.layers[0].keys.dtype == torch.float32 and past.layers[0].keys.isfinite().all()


@pytest.mark.parametrize("nodes", [pytest.param(nodes, marks=ON_GPU) for nodes in (7, 33)])
def test_bits_of_a_token_on_a_gpu(nodes):
    """The first node of a tree has the bits of a root alone."""
    call, _ = scaled_call(("cuda", torch.bfloat16), [300], nodes)
    tree = attention.launch(call)
    root = {name: getattr(call, name)[:, :, :1] for name in ("q", "k", "v")}
    root |= {name: getattr(call, name)[:, :1] for name in ("positions", "ancestors")}
    assert torch.equal(bits(attention.launch(call._replace(**root))), bits(tree[:, :1]))
