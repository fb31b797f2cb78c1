"""Every architecture is served with the same tokens as transformers' generate(), or refused with the reason; and GPUs
without bfloat16."""

import logging

import accelerate
import models
import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.capture.admit import admit, admit_device, admit_training, in_served_dtype
from spec_compile.kernels.card import Card

NEW = 24


def generate(model, ids, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, eos_token_id=None)


def first_difference(got, want):
    assert got.shape == want.shape
    return [(int((a != b).nonzero()[0]) if (a != b).any() else None) for a, b in zip(got, want)]


def check_tokens(model, fast):
    """Prompts of 1 and 60 tokens (longer than any sliding window), then three rows padded on the left."""
    requests = [(prompt, None) for prompt in models.prompts((1, 60))[0]]
    requests.append(models.prompts()[1:])
    for ids, mask in requests:
        got, want = generate(fast, ids, mask), generate(model, ids, mask)
        differ = first_difference(got[:, ids.shape[1] :], want[:, ids.shape[1] :])
        assert differ == [None] * len(ids), f"prompt {tuple(ids.shape)}: first difference at {differ}"


@pytest.mark.sweep("llama gemma3 deepseek_v3 gpt_oss")
@pytest.mark.parametrize("name", models.ADMITTED)
def test_admitted(name):
    model = models.ADMITTED[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fast = spec_compile.speculate(model, compile=False)
    check_tokens(model, fast)
    assert max(fast.speculation.stats.nodes) > 1, "nothing was drafted"
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v3", "gpt2")]


@pytest.mark.parametrize("name", ["gemma2", *SLOW])
def test_compiled(name):
    """The compiled rounds, on two layers of each (for Gemma 2 one with a window and one without)."""
    config, cls, kwargs, *rest = models._ADMITTED[name]
    if name != "gpt2":
        kwargs = dict(kwargs, num_hidden_layers=2)
    if "layer_types" in kwargs:
        kwargs["layer_types"] = kwargs["layer_types"][:2]
    model = models.build(config, cls, kwargs, *rest)
    fast = spec_compile.speculate(model, num_draft_tokens=4)
    (ids,), _, _ = models.prompts((40,))
    for prompt in (ids, ids[:, :24]):
        assert first_difference(generate(fast, prompt), generate(model, prompt)) == [None]
    assert set(fast.speculation.stats.nodes) == {1, 4}
    assert fast.speculation.stats.seconds["compile"] > 0


ON_CPU = torch.device("cpu")


def test_models_that_are_offloaded_by_turns_are_loaded_again(tmp_path):
    """The next forward would move the weights away again. The advice works."""
    model = models.ADMITTED["llama"]()
    model.save_pretrained(tmp_path / "model")
    accelerate.cpu_offload_with_hook(model, ON_CPU)
    with pytest.raises(UnsupportedModelError, match=r"is offloaded by accelerate.*without device_map, or with dev"):
        spec_compile.speculate(model, compile=False)
    for given in ({}, {"device_map": "cpu"}):
        again = type(model).from_pretrained(tmp_path / "model", **given)
        check_tokens(again, spec_compile.speculate(again, compile=False, check=False))


def test_a_model_without_values():
    with torch.device("meta"):
        model = LlamaForCausalLM(models.ADMITTED["llama"]().config).eval()
    with pytest.raises(UnsupportedModelError, match=r"without values \(on the meta device\); load it by from_pre"):
        spec_compile.speculate(model, compile=False)


def test_an_encoder_and_decoder_is_refused():
    with pytest.raises(
        UnsupportedModelError, match=r"^model: SwitchTransformersForConditionalGeneration .*encoder-decoder"
    ):
        spec_compile.speculate(models.REFUSED["switch"](), compile=False)


# --- what looks like a Llama and is none: each would be generated from wrongly if it were let through


class PastMean(LlamaAttention):
    """Adds what all earlier tokens have in common, beside the interface."""

    def forward(self, hidden_states, *args, **kwargs):
        out, weights = super().forward(hidden_states, *args, **kwargs)
        steps = torch.arange(1, hidden_states.shape[1] + 1)[:, None]
        return out + 0.3 * hidden_states.cumsum(1) / steps, weights


class AsksForMore(LlamaAttention):
    """Passes a bias to the attention function under a name of its own."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, secret_bias=torch.ones(4), **kwargs)


class NonCausal(LlamaAttention):
    """Every token sees every other, in the model's own forward."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        self.is_causal = False
        return super().forward(hidden_states, attention_mask=None, **kwargs)


class OddLayersSkip(LlamaDecoderLayer):
    """Odd layers have no attention."""

    def forward(self, hidden_states, **kwargs):
        if self.self_attn.layer_idx % 2:
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return super().forward(hidden_states, **kwargs)


def mlp(name, forward):
    """A class of MLPs whose forward is that of a function of Llama's forward and x [B, T, H]."""
    return type(name, (LlamaMLP,), {"forward": lambda self, x: forward(lambda y: LlamaMLP.forward(self, y), x)})


def shifted(x):
    """Half of the channels come from the token before."""
    half, first = x.shape[2] // 2, torch.arange(x.shape[1])[:, None] == 0
    return torch.cat([x[..., :half].roll(1, 1).masked_fill(first, 0.0), x[..., half:]], 2)


TREE, CAPTURE = "the tree attention of the rewritten graph differs", "the captured graph differs"
VARIANTS = [
    (PastMean, TREE),
    (mlp("TokenShift", lambda own, x: own(shifted(x))), TREE),
    (mlp("ByIndex", lambda own, x: own(x) * (1 + 0.05 * torch.arange(x.shape[1]))[:, None]), TREE),
    (mlp("ByLength", lambda own, x: own(x) * (1 + x.shape[1] / 50)), TREE),
    (mlp("AcrossRows", lambda own, x: own(x - 0.5 * x.mean(0, keepdim=True))), TREE),
    (OddLayersSkip, "called attention through transformers' interface 1 times in 2 layers"),
    (AsksForMore, "passes secret_bias to"),
    (NonCausal, CAPTURE),
]


@pytest.mark.sweep("PastMean AcrossRows")
@pytest.mark.parametrize("part, reason", VARIANTS, ids=[part.__name__ for part, _ in VARIANTS])
def test_a_llama_that_is_none(part, reason):
    model = models.ADMITTED["llama"]()
    for module in model.modules():
        if type(module) is part.__base__:
            module.__class__ = part
    with pytest.raises(UnsupportedModelError) as error:
        spec_compile.speculate(model, compile=False)
    assert str(error.value).startswith("model: LlamaForCausalLM") and reason in str(error.value), error.value
    own = generate(model, models.prompts()[0][0])  # it still works on its own
    assert own.shape[1] == 24 + NEW


@pytest.mark.sweep("8 300")
@pytest.mark.parametrize("window", [8, 64, 300, 4096])
def test_a_window_that_attention_is_not_told_of(window):
    """The mask is a sliding window, but the attention function is not given its size (Llama's attention in Mistral)."""
    model = models.build("MistralConfig", "MistralForCausalLM", dict(models.GQA, sliding_window=window))
    for layer in model.model.layers:
        layer.self_attn.__class__ = LlamaAttention
    with pytest.raises(UnsupportedModelError, match=f"{CAPTURE}|sliding window of 4096"):
        spec_compile.speculate(model, compile=False)


def test_what_a_user_changed_in_the_modules_is_kept():
    """Another eps, another activation, and another scale."""
    model = models.ADMITTED["llama"]()
    model.model.norm.variance_epsilon = 0.5
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    model.model.layers[0].self_attn.scaling = 0.11
    check_tokens(model, spec_compile.speculate(model, compile=False))


# A GPU without bfloat16 serves float16 in its place; an older one is refused by name.


T4, A100, V100 = (Card(name, capability, 40, 65_536) for name, capability in
                  (("T4", (7, 5)), ("A100", (8, 0)), ("V100", (7, 0))))  # fmt: skip


@pytest.fixture
def on_card(monkeypatch):
    """A function: the card on which all models are from now on."""

    def be(card):
        monkeypatch.setattr("spec_compile.capture.admit.card_of", lambda device: card)

    return be


def in_bfloat16():
    return models.ADMITTED["llama"]().to(torch.bfloat16)


def test_weights_are_converted_with_one_warning(on_card, caplog):
    on_card(T4)
    model = in_bfloat16()
    model.register_buffer("more", torch.ones(2, dtype=torch.bfloat16))
    model.config.dtype = torch.bfloat16
    numbers = {name: weight.clone() for name, weight in model.named_parameters()}
    with caplog.at_level(logging.WARNING, "spec_compile"):
        in_served_dtype(admit(model), converts=True)
        in_served_dtype(admit(model), converts=True)
    (record,) = caplog.records
    assert "LlamaForCausalLM is in bfloat16, which T4 (compute capability 7.5) does not compute" in record.message
    assert {each.dtype for each in (*model.parameters(), model.more)} == {torch.float16}
    assert model.dtype == model.config.dtype == torch.float16
    assert all(torch.equal(weight, numbers[name].half()) for name, weight in model.named_parameters())


@pytest.mark.parametrize("card", [A100, Card()])
def test_other_devices_keep_bfloat16(on_card, card):
    on_card(card)
    model = in_bfloat16()
    in_served_dtype(admit(model), converts=False)
    assert model.dtype == torch.bfloat16


def test_what_cannot_be_converted_is_refused_before_any_change(on_card):
    on_card(T4)
    model = in_bfloat16()
    with pytest.raises(UnsupportedModelError, match=r"load it with dtype=torch.float16, or pass convert_bfloat16=True"):
        spec_compile.speculate(model, convert_bfloat16=False)
    with torch.no_grad():
        model.model.norm.weight[3] = 1e5
    with pytest.raises(UnsupportedModelError, match=r"model.norm.weight has values beyond float16; .*torch.float32"):
        in_served_dtype(admit(model), converts=True)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    in_served_dtype(admit(model.float()), converts=False)


def test_a_converted_model_answers_as_one_in_float16(on_card):
    """With a draft model in bfloat16, which is converted, too."""
    ids = models.prompts((9,))[1]
    same = in_bfloat16().to(torch.float16)
    expected = spec_compile.speculate(same, "draft_model", draft=in_bfloat16().half(), compile=False, check=False)
    on_card(T4)
    model, draft = in_bfloat16(), in_bfloat16()
    fast = spec_compile.speculate(model, "draft_model", draft=draft, compile=False, check=False)
    assert model.dtype == draft.dtype == torch.float16
    options = dict(max_new_tokens=6, do_sample=False)
    assert torch.equal(fast.generate(ids, **options), expected.generate(ids, **options))


def test_older_gpus_are_refused_by_name(on_card):
    model = in_bfloat16()
    on_card(V100)
    with pytest.raises(UnsupportedModelError, match=r"is on V100 \(compute capability 7.0\); the kernels need 7.5"):
        admit_device(model, torch.device("cuda"))
    on_card(T4)
    admit_device(model, torch.device("cuda"))
    with pytest.raises(UnsupportedModelError, match=r"is on T4 .*drafts are trained by kernels that need 8.0 or later"):
        admit_training(model)
    on_card(A100)
    admit_training(model)
