"""Training mode is admitted if it changes no answer, and otherwise refused with the number that changes it."""

import models
import peft
import pytest
import torch
from torch import nn

from spec_compile import speculate
from spec_compile.capture.changes import effects
from spec_compile.capture.trace import capture

MODELS = models.ADMITTED | models.HYBRIDS
NOISY = {"gpt2", "gpt_bigcode", "opt"}
"""Models of these classes have dropout by default."""
IDS = models.prompts()[0][0]
OPTIONS = dict(do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)


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


def test_dropout_of_a_model_that_trains_is_refused_at_the_next_call():
    model = models.ADMITTED["opt"]()
    fast = speculate(model, compile=False, check=False)
    expected = model.generate(IDS, **OPTIONS)
    for trained in (model, fast):
        trained.train()
        with pytest.raises(
            RuntimeError, match=r"in training mode, and .*dropout is 0\.1 \(and \d+ more\); call model\.ev"
        ):
            fast.generate(IDS, **OPTIONS)
        fast.eval()
        assert torch.equal(fast.generate(IDS, **OPTIONS), expected)
