"""Models that torch.compile was applied to are captured as the functions under it, and compiling changes nothing."""

import pytest
import torch
from models import ADMITTED, HYBRIDS, prompts

from spec_compile import UnsupportedModelError, speculate, train_draft

IDS = prompts()[0][0]
OPTIONS = dict(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)


class Backend:
    """Counts the graphs that torch.compile gives it, and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, gm, inputs):
        self.graphs += 1
        return gm.forward


def forward(model, **compiler):
    model.forward = torch.compile(model.forward, **compiler)


def twice(model, **compiler):
    forward(model, **compiler)
    forward(model, **compiler)


def never(model, **compiler):
    model.forward = torch.compiler.disable(torch.compile(model.forward, **compiler))


def in_place(model, **compiler):
    model.compile(**compiler)


def forwards_of_layers(model, **compiler):
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, **compiler)
        layer.self_attn.forward = torch.compile(layer.self_attn.forward, **compiler)


def layers_in_place(model, **compiler):
    for layer in model.model.layers:
        layer.compile(**compiler)


def layers(model, **compiler):
    for number, layer in enumerate(model.model.layers):
        layer.mlp = torch.compile(layer.mlp, **compiler)
        model.model.layers[number] = torch.compile(layer, **compiler)


def decoder(model, **compiler):
    model.model = torch.compile(model.model, **compiler)


def whole(model, **compiler):
    return torch.compile(model, **compiler)


def generate(model, **compiler):
    model.generate = torch.compile(model.generate, **compiler)


RECIPES = [forward, twice, never, in_place, forwards_of_layers, layers_in_place, layers, decoder, whole, generate]


@pytest.fixture(scope="module")
def expected():
    return ADMITTED["llama"]().generate(IDS, **OPTIONS)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_compiled_before(recipe, expected):
    """Nothing of the user's is compiled for it."""
    model, backend = ADMITTED["llama"](), Backend()
    given = recipe(model, backend=backend)
    fast = speculate(model if given is None else given, compile=False, check=recipe in (forward, layers))
    assert torch.equal(fast.generate(IDS, **OPTIONS), expected) and fast.speculation.stats.tokens == 12
    assert backend.graphs == 0 and fast.speculation.original is model and isinstance(fast, type(model))


@pytest.mark.parametrize("recipe", RECIPES[:-1], ids=lambda recipe: recipe.__name__)
def test_compiled_afterwards(recipe, expected):
    model = ADMITTED["llama"]()
    fast = speculate(model, compile=False, check=False)
    recipe(model, backend="eager")
    for _ in range(2):
        assert torch.equal(fast.generate(IDS, **OPTIONS), expected)
    assert fast.speculation.stats.tokens == 24


def test_a_change_under_a_compiled_forward_is_noticed():
    model = ADMITTED["llama"]()
    forward(model, backend="eager")
    layers(model, backend="eager")
    fast = speculate(model, compile=False, check=False)
    model.model.layers[1]._orig_mod.self_attn.scaling = 0.5
    with pytest.raises(RuntimeError, match=r"self_attn\.scaling was 0\.25"):
        fast.generate(IDS, **OPTIONS)
    model.model.layers[1]._orig_mod.self_attn.scaling = 0.25
    model.model.layers[1] = torch.compile(ADMITTED["llama"]().model.layers[1], backend="eager")
    with pytest.raises(RuntimeError, match=r"layers\.1 \(LlamaDecoderLayer\) was replaced"):
        fast.generate(IDS, **OPTIONS)


def test_new_weights_of_compiled_layers_are_taken_over():
    model = ADMITTED["llama"]()
    layers(model, backend="eager")
    fast = speculate(model, compile=False, check=False)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.load_state_dict(model.state_dict(), assign=True)
    fast.speculation.refresh()
    plain = ADMITTED["llama"]()
    with torch.no_grad():
        plain.lm_head.weight.neg_()
    assert torch.equal(fast.generate(IDS, **OPTIONS), plain.generate(IDS, **OPTIONS))


@pytest.mark.sweep("qwen3_moe qwen3_5")
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "qwen3_5"])
def test_families(name):
    model = (ADMITTED | HYBRIDS)[name]()
    expected = model.generate(IDS, **OPTIONS)
    forward(model, backend="eager")
    layers_in_place(model, backend="eager")
    assert torch.equal(speculate(model, compile=False).generate(IDS, **OPTIONS), expected)


def test_drafts_adapters_and_models_that_speculate(expected):
    model = ADMITTED["llama"]()
    draft = whole(ADMITTED["llama"](), backend="eager")
    fast = speculate(model, "draft_model", draft=draft, adaptive=False, compile=False)
    assert torch.equal(fast.generate(IDS, **OPTIONS), expected) and fast.speculation.stats.rounds < 12
    again = speculate(whole(fast, backend="eager"), compile=False, check=False)
    assert again.speculation.original is model and torch.equal(again.generate(IDS, **OPTIONS), expected)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(ADMITTED["llama"](), config).eval()
    adapted = wrapped.generate(input_ids=IDS, **OPTIONS)
    forward(wrapped.get_base_model(), backend="eager")
    fast = speculate(whole(wrapped, backend="eager"), compile=False)
    assert type(fast).__name__ == type(wrapped).__name__
    assert torch.equal(fast.generate(input_ids=IDS, **OPTIONS), adapted)


def test_training_a_head(tmp_path):
    model, backend = ADMITTED["llama"](), Backend()
    layers(model, backend=backend)
    forward(model, backend=backend)
    data = [list(range(3, 80))] * 4
    arguments = dict(data=data, output=tmp_path / "head", steps=1, validation=0, batch_size=2)
    train_draft(whole(model, backend=backend), "eagle3", progress=print, **arguments)
    assert backend.graphs == 0
    assert train_draft(ADMITTED["llama"](), "eagle3", progress=print, **arguments).steps == 1  # the same training


def test_a_function_that_calls_the_model_is_named():
    model = ADMITTED["llama"]()
    own = model.forward
    model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(UnsupportedModelError, match=r"A function was set as forward; remove it"):
        speculate(model, compile=False)
