"""Lightning attention (MiniMax), RG-LRU (RecurrentGemma) and WKV (RWKV 4): transformers' own answer, row by row.
`test_hybrids` runs them compiled, by kernels and on a GPU.

Padding changes what transformers answers itself: MiniMax's cached steps read a mask from its first place if the first
layer is linear, RecurrentGemma and RWKV take no mask. RWKV's cached steps also mix the rows of a batch.
"""

import warnings

import models
import pytest
import torch
from batch_requests import collect, config
from hybrids import answer, batch, texts
from transformers import DynamicCache, GenerationConfig

import spec_compile
from spec_compile.capture.checks import ANY, SINGLE, UNPADDED
from spec_compile.capture.recurrences import DECAYS
from spec_compile.compat import CACHE

BATCHES = {"minimax": UNPADDED, "recurrent_gemma": UNPADDED, "rwkv": SINGLE}


@pytest.fixture(scope="module", params=BATCHES)
def served(request):
    """The name of a model, the model, and what `speculate` makes of another copy, which shares no states with it."""
    fast = spec_compile.speculate(models.UNMASKED[request.param](), compile=False, adaptive=False)
    return request.param, models.UNMASKED[request.param](), fast


def plain(model, *request, **options):
    """`answer` of a model without what RecurrentGemma keeps of the call before, which a prompt of one token reads."""
    for part in model.modules():
        if hasattr(part, "conv1d_state"):
            part.conv1d_state = None
    return answer(model, *request, **options)


def states_after(name, model, ids):
    """The states of the model's recurrences after a text [1, T], as `cache.States` has them."""
    output = model(input_ids=ids, use_cache=True)
    if name == "minimax":
        return [state for state in output[CACHE].linear_cache if len(state)]
    if name == "recurrent_gemma":
        blocks = [part for part in model.modules() if hasattr(part, "conv1d_state")]
        return [state for b in blocks for state in (b.conv1d_state.transpose(1, 2), b.rg_lru.recurrent_states)]
    feed_forward, attention, *sums = (part.unbind(2) for part in output.state)
    layers = zip(attention, zip(*sums), feed_forward)
    return [state for a, wkv, f in layers for state in (a[:, None], torch.stack(wkv, dim=1), f[:, None])]


@pytest.mark.parametrize("length, new", [(1, 12), (2, 12), (70, 32)])
def test_the_answer_and_the_states(served, length, new):
    """Prompts that end inside a convolution's window, and one longer than a block, with drafts that are mostly right;
    then drafts of another text, which leave no trace; then a prompt in chunks."""
    name, model, fast = served
    ids, mask = batch((length,))
    expected = plain(model, ids, mask, new=new)
    fast.speculation.stats.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(answer(fast, ids, mask, new, reference=[*expected]), expected)
        assert 0 < fast.speculation.stats.rounds < new / 2
        states = fast.speculation.engine.session(1).state.kv.states
        ours = [states[number][0] for number in range(len(states.kinds))]
        mixed = [torch.cat([expected[0, ::2], expected[0].flip(0), expected[0]])]
        for options in ({"reference": mixed}, {"prefill_chunk_size": 32}):
            assert torch.equal(answer(fast, ids, mask, new, **options), expected)
    with torch.no_grad():
        theirs = states_after(name, model, expected[:, :-1])
    for one, other in zip(ours, theirs, strict=True):
        one = one[:, -other.shape[1] :]  # a convolution's state has one more past input here
        assert (one - other).abs().max() <= 2e-5 * other.abs().max()


def test_batches(served):
    """Rows of one length are served if transformers keeps them apart, rows with padding are left to its loop."""
    name, model, fast = served
    engine = fast.speculation.engine
    assert engine.served_batches == BATCHES[name]
    for lengths, is_served in (((40, 40), BATCHES[name] == UNPADDED), ((5, 40), False)):
        ids, mask = batch(lengths)
        engine._announced.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = answer(fast, ids, mask, 16)
        assert torch.equal(got, answer(model, ids, mask, 16))
        said = "padding on the left" if 5 in lengths else "several rows, which the model itself mixes"
        assert [said in str(warning.message) for warning in caught] == [True] * (not is_served)


def test_requests_share_rounds(served):
    """Requests of several lengths share rounds, in any model: a row of ours reads no padding."""
    _, model, fast = served
    prompts = [batch((length,), seed)[0] for seed, length in enumerate((1, 33, 8))]
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0), config(max_requests_per_batch=2))
    manager.start()
    try:
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt[0].tolist(), f"r{number}", max_new_tokens=12, eos_token_id=-1)
        outputs = collect(manager, len(prompts))
    finally:
        manager.destroy()
    for number, prompt in enumerate(prompts):
        expected = plain(model, prompt, torch.ones_like(prompt), new=12)[0, prompt.shape[1] :]
        assert outputs[f"r{number}"].generated_tokens == expected.tolist()


def test_caches_are_those_of_transformers(served):
    """A model that makes its own cache fills it in transformers' loop."""
    name, model, fast = served
    ids, mask = batch((20,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, expected = (answer(each, ids, mask, 8, return_dict_in_generate=True) for each in (fast, model))
        assert torch.equal(got.sequences, expected.sequences) and got.keys() == expected.keys()
        assert type(got[CACHE]) is type(expected[CACHE])
        if name == "minimax":
            more = torch.cat([got.sequences, ids[:, :3]], dim=1)
            pairs = zip((fast, model), (got, expected))
            assert torch.equal(*(answer(each, more, None, 8, **{CACHE: out[CACHE]}) for each, out in pairs))
    if name == "recurrent_gemma":
        assert isinstance(got[CACHE], DynamicCache)


@pytest.mark.slow
def test_padding_that_minimax_masks():
    """If the first layer attends, transformers' steps find the mask of their token."""
    cls, model, sizes = models._UNMASKED["minimax"]
    model = models.build(cls, model, dict(sizes, layer_types=[models.FULL, models.LIN]))
    fast = spec_compile.speculate(model, compile=False)
    ids, mask = batch((5, 40))
    expected = answer(model, ids, mask, 16)
    assert fast.speculation.engine.served_batches == ANY
    assert torch.equal(answer(fast, ids, mask, 16, reference=texts(expected, mask)), expected)


def test_tables_that_minimax_rounds():
    """In 16 bits. They stay as they are, and the system reads `slope_rate`, as the model's own steps do."""
    model = models.UNMASKED["minimax"]().bfloat16()
    attention = model.model.layers[0].self_attn
    tables = [getattr(attention, name).clone() for name in DECAYS]
    spec_compile.speculate(model, compile=False)
    assert all(torch.equal(getattr(attention, name), table) for name, table in zip(DECAYS, tables))
    attention.key_decay *= 0.9
    with pytest.raises(spec_compile.UnsupportedModelError, match="key_decay of its lightning attention"):
        spec_compile.speculate(model, compile=False)


def test_weights_that_rwkv_halves_in_place():
    """Its first forward in evaluation mode halves them, its first one in training mode undoes that."""
    model = models.UNMASKED["rwkv"]()
    before = model.rwkv.blocks[1].attention.output.weight.detach().clone()
    fast = spec_compile.speculate(model, compile=False, check=False)
    assert torch.equal(model.rwkv.blocks[1].attention.output.weight, before / 2)
    ids, mask = batch((9,))
    assert torch.equal(answer(fast, ids, mask, 8), answer(model, ids, mask, 8))
    with pytest.raises(ValueError, match=r"training mode.*RwkvModel\) reads `training`"):
        spec_compile.speculate(model.train(), compile=False)
    model(input_ids=ids)
    model.eval()
    with pytest.raises(RuntimeError, match="layers_are_rescaled was True at speculate"):
        answer(fast, ids, mask, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["minimax", "recurrent_gemma"])
def test_the_same_bits_on_a_gpu(name):
    """Of tokens, in plain steps and in rounds with drafts mostly right."""
    model = models.UNMASKED[name]().to("cuda", torch.bfloat16)
    ids, mask = (tensor.cuda() for tensor in batch((70,)))
    plain_steps = spec_compile.speculate(model, compile=False, num_draft_tokens=1, max_cache_len=512)
    expected = answer(plain_steps, ids, mask)
    for nodes in (4, 16, 64):
        fast = spec_compile.speculate(model, compile=False, num_draft_tokens=nodes, max_cache_len=512)
        assert torch.equal(answer(fast, ids, mask, reference=[*expected.cpu()]), expected)
        assert fast.speculation.stats.accept_length > 2
