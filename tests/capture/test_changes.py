"""Changes after speculate(): what is noticed, how it is described, and what training mode may change."""

import gc
import re
import types
import weakref

import models
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize, prune

from spec_compile import speculate
from spec_compile.capture.changes import Watch, describe, effects
from spec_compile.capture.copies import shallow
from spec_compile.capture.trace import capture
from spec_compile.capture.weights import SharedWeights

OPTIONS = dict(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
IDS = models.prompts()[0][0]


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def layer(model, number=1):
    return model.model.layers[number]


def hook(module, args, output):
    return 2 * output


def double_input(module, args):
    return tuple(2 * each for each in args)


def set_in(path, name, value):
    """A change of one attribute."""
    return lambda model, fast: setattr(model.get_submodule(path), name, value)


def replace_head(model):
    model.lm_head = nn.Linear(64, models.VOCAB, bias=False)


def method(name):
    """A change of one method of generate(), as a function that is bound to the model."""

    def make(model, fast):
        own = getattr(model, name)
        setattr(model, name, types.MethodType(lambda self, *args, **kwargs: own(*args, **kwargs), model))

    return make


ROPE, UP_PROJ, HEAD = "model.rotary_emb", "model.layers.1.mlp.up_proj", r"lm_head \(Linear\) was replaced"
CHANGES = {
    "hook": (lambda m, f: layer(m).mlp.register_forward_hook(hook), r"model\.layers\.1\.mlp got a forward hook"),
    "pre-hook": (
        lambda m, f: layer(m).mlp.register_forward_pre_hook(double_input),
        r"model\.layers\.1\.mlp got a forward hook \(double_input\)",
    ),
    "hook of fast": (lambda m, f: f.lm_head.register_forward_hook(hook), "lm_head got a forward hook"),
    "hook of all modules": (
        lambda m, f: nn.modules.module.register_module_forward_hook(lambda module, args, output: None),
        "all modules got a forward hook",
    ),
    "parametrization": (
        lambda m, f: parametrize.register_parametrization(layer(m).mlp.up_proj, "weight", Double()),
        r"model\.layers\.1\.mlp\.up_proj was parametrized",
    ),
    "pruning": (
        lambda m, f: prune.l1_unstructured(layer(m).mlp.up_proj, "weight", 0.5),
        r"model\.layers\.1\.mlp\.up_proj got a forward hook \(L1Unstructured\)",
    ),
    "scaling": (
        set_in("model.layers.1.self_attn", "scaling", 0.5),
        r"model\.layers\.1\.self_attn\.scaling was 0\.25 at speculate\(\) and is 0\.5 now; call speculate\(\) again",
    ),
    "epsilon": (set_in("model.norm", "variance_epsilon", 1e-2), r"model\.norm\.variance_epsilon was 1e-06 .* is 0\.01"),
    "groups": (set_in("model.layers.0.self_attn", "num_key_value_groups", 1), "self_attn.num_key_value_groups was 2"),
    "rope": (set_in(ROPE, "attention_scaling", 2.0), r"rotary_emb\.attention_scaling was 1\.0"),
    "activation": (set_in("model.layers.0.mlp", "act_fn", nn.ReLU()), r"mlp\.act_fn \(SiLUActivation\) was replaced"),
    "forward": (set_in("model.layers.0.mlp", "forward", lambda x: x), r"layers\.0\.mlp\.forward was replaced"),
    "bias": (set_in("lm_head", "bias", nn.Parameter(torch.ones(96))), r"lm_head\.bias was added"),
    "class": (
        lambda m, f: setattr(type(layer(m).mlp), "forward", lambda self, x: x),
        r"model\.layers\.0\.mlp\.forward was replaced",
    ),
    "head": (lambda m, f: replace_head(m), HEAD),
    "head of fast": (lambda m, f: replace_head(f), HEAD),
    "layer": (
        lambda m, f: m.model.layers.__setitem__(1, layer(m, 0)),
        r"model\.layers\.1 \(LlamaDecoderLayer\) was replaced",
    ),
    "more layers": (lambda m, f: m.model.layers.append(layer(m)), r"layers\.2 \(LlamaDecoderLayer\) was added"),
    "train": (
        lambda m, f: m.train(),
        r"in training mode, and model\.layers\.0\.mlp\.drop\.p is 0\.5; call model\.eval",
    ),
    "train of fast": (lambda m, f: f.train(), r"in training mode, and model\.layers\.0\.mlp\.drop\.p is 0\.5"),
    "train of a part": (lambda m, f: layer(m, 0).mlp.drop.train(), r"model\.layers\.0\.mlp\.drop\.p is 0\.5"),
    "buffer": (set_in(ROPE, "inv_freq", torch.ones(8)), r"rotary_emb\.inv_freq was moved or replaced .*refresh\(\)"),
    "weight": (
        set_in(UP_PROJ, "weight", nn.Parameter(torch.randn(96, 64))),
        r"model\.layers\.1\.mlp\.up_proj\.weight was moved or replaced .*refresh\(\)",
    ),
    "transposed": (
        lambda m, f: setattr(weight := layer(m).self_attn.q_proj.weight, "data", weight.data.t()),
        r"model\.layers\.1\.self_attn\.q_proj\.weight was moved",
    ),
    "float64": (lambda m, f: m.double(), r"weight was float32 .* is float64 .*speculate\(\) again"),
    "processors": (method("_get_logits_processor"), r"_get_logits_processor was replaced after speculate\(\)"),
    "criteria": (method("_get_stopping_criteria"), r"_get_stopping_criteria was replaced after speculate\(\)"),
    "inputs": (method("prepare_inputs_for_generation"), r"prepare_inputs_for_generation was replaced"),
    "inputs of steps": (method("_update_model_kwargs_for_generation"), r"_update_model_kwargs_for_generation was rep"),
    "gone": (lambda m, f: delattr(layer(m).mlp.up_proj, "weight"), r"up_proj\.weight is"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(change):
    """By a watch of a model that was not captured, which would take longer."""
    model = models.ADMITTED["llama"]()
    layer(model, 0).mlp.drop = nn.Dropout(0.5).eval()
    fast = shallow(model)
    watch = Watch({part: path for path, part in model.named_modules()}, fast, SharedWeights(model).slots, [])
    assert watch.changes() == []
    make, message = CHANGES[change]
    mlp = type(layer(model).mlp)
    forward = mlp.forward
    try:
        made = make(model, fast)
        for _ in range(2):
            assert re.search(message, describe(watch.changes()))
    finally:
        mlp.forward = forward
        if change == "hook of all modules":
            made.remove()


def test_generate_raises_until_a_change_is_taken_back():
    model = models.ADMITTED["llama"]()
    layer(model).mlp.drop = nn.Dropout(0.5).eval()
    fast = speculate(model, compile=False, check=False)
    expected, head, attention = model.generate(IDS, **OPTIONS), model.lm_head, layer(model).self_attn
    handles = []
    todo = {
        "got a forward hook": (
            lambda: handles.append(layer(model).mlp.register_forward_hook(hook)), lambda: handles[0].remove(),
        ),
        r"self_attn\.scaling was 0\.25": (
            lambda: setattr(attention, "scaling", 1.0), lambda: setattr(attention, "scaling", 0.25),
        ),
        "lm_head .* was replaced": (
            lambda: replace_head(fast), lambda: setattr(fast, "lm_head", head),
        ),
        "training mode": (model.train, model.eval),
    }  # fmt: skip
    for message, (make, undo) in todo.items():
        make()
        with pytest.raises(RuntimeError, match=message):
            fast.generate(IDS, **OPTIONS)
        undo()
        assert torch.equal(fast.generate(IDS, **OPTIONS), expected)


def test_a_value_of_the_config_that_a_forward_reads():
    model = models.ADMITTED["gemma2"]()
    fast = speculate(model, compile=False, check=False)
    model.config.final_logit_softcapping = 3.0
    with pytest.raises(RuntimeError, match=r"config\.final_logit_softcapping was 10\.0 at speculate\(\) and is 3\.0"):
        fast.generate(IDS, **OPTIONS)
    model.config.final_logit_softcapping = 10.0
    assert torch.equal(fast.generate(IDS, **OPTIONS), model.generate(IDS, **OPTIONS))
    assert type(model.config) is transformers.Gemma2Config


def test_hooks_that_were_there_are_captured_and_missed_when_they_are_gone():
    model = models.ADMITTED["llama"]()
    handles = [
        layer(model).mlp.register_forward_hook(hook),
        layer(model, 0).mlp.register_forward_pre_hook(double_input),
    ]
    fast = speculate(model, compile=False)
    assert torch.equal(fast.generate(IDS, **OPTIONS), model.generate(IDS, **OPTIONS))
    handles[0].remove()
    with pytest.raises(RuntimeError, match=r"model\.layers\.1\.mlp lost a forward hook \(hook\)"):
        fast.generate(IDS, **OPTIONS)


def test_a_model_whose_forward_has_unpacked_it_is_loaded_again():
    """As compressed-tensors does: another speculate() would refuse the unpacked layers."""

    def ct_decompress_hook(*_):
        handle.remove()

    model = models.ADMITTED["llama"]()
    handle = model.register_forward_pre_hook(ct_decompress_hook)
    fast = speculate(model, compile=False, check=False)
    model(IDS)
    with pytest.raises(RuntimeError, match=r"ct_decompress_hook.*: load it again, then call speculate\(\)"):
        fast.generate(IDS, **OPTIONS)


def test_bookkeeping_is_no_change():
    model = models.ADMITTED["llama"]()
    fast = speculate(model, compile=False, check=False)
    expected = model.generate(IDS, **OPTIONS)
    asked = dict(OPTIONS, return_dict_in_generate=True, output_attentions=True, output_hidden_states=True)

    def settings():
        model.config.pad_token_id, model.config.use_cache, model.generation_config.max_length = 3, False, 99
        fast.add_model_tags(["trained"])

    def forward():
        model.forward = torch.compile(model.forward, backend="eager")

    def methods():
        for name in ("generate", "prepare_inputs_for_generation", "_get_logits_processor"):
            setattr(model, name, getattr(model, name))
        fast._get_logits_processor = fast._get_logits_processor

    todo = {
        "outputs": lambda: fast.generate(IDS, **asked),
        "a static cache": lambda: fast.generate(IDS, **OPTIONS, cache_implementation="static", disable_compile=True),
        "an assistant": lambda: fast.generate(IDS, **OPTIONS, assistant_model=models.ADMITTED["llama"]()),
        "beams": lambda: fast.generate(IDS, **OPTIONS, num_beams=2),
        "modes": lambda: (model.train(), model.eval(), fast.eval(), fast.train()),
        "gradients": lambda: (model.requires_grad_(False), model.requires_grad_(True)),
        "training": lambda: model(IDS, labels=IDS).loss.backward(),
        "checkpointing": lambda: (model.gradient_checkpointing_enable(), model.enable_input_require_grads()),
        "settings": settings,
        "compiled": lambda: (torch.compile(model, backend="eager")(IDS), model.compile(backend="eager")),
        "a compiled forward": forward,
        "its own methods": methods,
        "the same tensor": lambda: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.data)),
        "the same value": lambda: setattr(layer(model).self_attn, "scaling", float("0.25")),
        "in place": lambda: model.model.norm.weight.data.mul_(1.0),
    }
    with pytest.warns(UserWarning, match="only transformers"):
        for name, use in todo.items():
            use()
            assert torch.equal(fast.generate(IDS, **OPTIONS), expected), name


def test_an_object_that_speculates_is_freed_without_the_garbage_collector():
    fast = speculate(models.ADMITTED["llama"](), compile=False, check=False)
    fast.generate(IDS, **OPTIONS)
    reference = weakref.ref(fast)
    gc.disable()
    try:
        del fast
        assert reference() is None
    finally:
        gc.enable()


# Training mode is admitted if it changes no answer, and otherwise refused with the number that changes it.


MODELS = models.ADMITTED | models.HYBRIDS
NOISY = {"gpt2", "gpt_bigcode", "opt"}
"""Models of these classes have dropout by default."""


def found(model):
    return [*effects(model.named_modules())]


@torch.no_grad()
def logits(model):
    torch.manual_seed(0)
    return model(IDS).logits


@pytest.mark.sweep(["llama", "opt", "qwen3_moe"])
@pytest.mark.parametrize("name", MODELS)
def test_a_mode_without_effects_changes_no_logit(name):
    model = MODELS[name]()
    assert found(model) == []
    plain = logits(model)
    assert bool(found(model.train())) == (name in NOISY)
    assert torch.equal(logits(model), plain) == (name not in NOISY)


class Odd(nn.Module):
    def forward(self, x):
        return x + 1 if self.training else x


class Named(nn.Module):
    """Drops by a number that its method names in another way."""

    def __init__(self):
        super().__init__()
        self.share = 0.5

    def forward(self, x):
        return nn.functional.dropout(x, self.share, self.training)


def with_part(part):
    model = models.ADMITTED["llama"]()
    model.model.layers[1].mlp.part = part
    return model


def configured(cls, **fields):
    config, model, kwargs, *over = models._ADMITTED[cls]
    return models.build(config, model, kwargs | fields, *over)


def adapted():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.1)
    return peft.get_peft_model(models.ADMITTED["llama"](), config).get_base_model()


PART = r"^model\.layers\.1\.mlp\.part"
EFFECTS = {
    "dropout of attention": (
        lambda: configured("llama", attention_dropout=0.1), r"0\.self_attn\.attention_dropout is 0\.1",
    ),
    "dropout in a module": (lambda: configured("phi", resid_pdrop=0.2), r"dropout\.p is 0\.2"),
    "number in the config": (lambda: configured("opt", dropout=0.0, layerdrop=0.3), r"layerdrop is 0\.3"),
    "jitter of a router": (lambda: configured("mixtral", router_jitter_noise=0.1), r"mlp\.jitter_noise is 0\.1"),
    "adapter": (adapted, r"q_proj\.lora_dropout\.default\.p is 0\.1"),
    "batch norm": (lambda: with_part(nn.BatchNorm1d(4)), rf"the code of {PART[1:]} \(BatchNorm1d\) reads `training`"),
    "random slope": (lambda: with_part(nn.RReLU()), r"\(RReLU\) reads `training`"),
    "code of its own": (lambda: with_part(Odd()), r"\(Odd\) reads `training`"),
    "number of another name": (lambda: with_part(Named()), r"\(Named\) reads `training`"),
    "heads": (lambda: with_part(nn.MultiheadAttention(4, 2, dropout=0.25)), PART + r"\.dropout is 0\.25"),
}  # fmt: skip


@pytest.mark.parametrize("case", EFFECTS)
def test_effects_are_named(case):
    make, message = EFFECTS[case]
    model = make().eval()
    assert found(model) == []
    with pytest.raises(ValueError, match=rf"is in training mode, and .*{message.removeprefix('^')}.*model\.eval\(\)"):
        speculate(model.train())


QUIET = {
    "no dropout": lambda: nn.Dropout(0.0),
    "heads": lambda: nn.MultiheadAttention(4, 2),
    "linear": lambda: nn.Linear(2, 2),
}


@pytest.mark.parametrize("part", QUIET)
def test_parts_without_noise_have_no_effect(part):
    assert found(with_part(QUIET[part]()).train()) == []


@pytest.mark.sweep("llama")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_model_in_training_mode_is_served(name):
    """With checkpoints of gradients, too. Neither speculate() nor generate() changes a mode."""
    model = models.ADMITTED[name]()
    expected = model.generate(IDS, **OPTIONS)
    model.train().gradient_checkpointing_enable()
    model.enable_input_require_grads()
    fast = speculate(model, compile=False)
    assert torch.equal(fast.generate(IDS, **OPTIONS), expected)
    with torch.no_grad():
        assert torch.equal(fast.generate(IDS, **OPTIONS), expected)
    batch = fast.generate_batch([IDS[0].tolist()], **OPTIONS, warmup=False)
    assert [output.generated_tokens for output in batch.values()] == [expected[0, IDS.shape[1] :].tolist()]
    assert all(part.training for part in [*model.modules(), *fast.modules()])


@pytest.mark.slow
def test_both_modes_are_captured_alike():
    model = configured("phi", num_hidden_layers=6)  # it has dropout of 0
    graphs = [str(capture(model.train(mode)).gm.graph) for mode in (True, False)]
    assert "dropout.default](args = (%embedding, 0.0, False)" in graphs[0]
    assert graphs[0] == graphs[1]
