"""Encoder-decoders on a GPU: captured rounds over states of sources."""

import encoder_decoders as tiny
import pytest
import torch

import spec_compile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_gpu(options):
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in options.items()}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("family", ["bart", "m2m_100", "t5", "whisper"])
def test_answers_are_the_cpus(family, compile):
    model = tiny.BUILDERS[family]()
    inputs = [tiny.sources(family, batch, seed=batch) for batch in (1, 3)]
    expected = [model.generate(**each, max_new_tokens=40) for each in inputs]
    fast = spec_compile.speculate(model.cuda(), compile=compile, cache=False, adaptive=False)
    for each, tokens in zip(inputs, expected):
        fast.speculation.stats.reset()
        assert torch.equal(fast.generate(**on_gpu(each), max_new_tokens=40).cpu(), tokens)
        assert fast.speculation.stats.accept_length > 1
