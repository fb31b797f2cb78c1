"""LoRA adapters: captured with the layers, or chosen by each row."""

import pytest
import torch
from models import ADMITTED, prompts

peft = pytest.importorskip("peft")
from lora_models import NAMES, call, fill, ids, lora, two_adapters  # noqa: E402

from spec_compile import UnsupportedModelError, speculate  # noqa: E402
from spec_compile.capture.loras import BASE, Loras, SlotsTakenError, of_adapters, without_adapters  # noqa: E402

IDS = prompts()[0][0]
OPTIONS = dict(input_ids=IDS, do_sample=False, max_new_tokens=24, pad_token_id=0, eos_token_id=None)


def adapted(task):
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, task_type=task
    )
    return peft.get_peft_model(ADMITTED["llama"](), config).eval()


@pytest.mark.sweep("CAUSAL_LM")
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_wrapped_model(task):
    model = adapted(task)
    fast = speculate(model, compile=False)
    assert isinstance(fast, type(model)) and type(fast).__name__ == type(model).__name__
    assert torch.equal(fast.generate(**OPTIONS), model.generate(**OPTIONS))
    assert fast.speculation.stats.tokens == 24
    with model.disable_adapter():
        with pytest.raises(RuntimeError, match="speculate"):
            fast.generate(**OPTIONS)
    assert torch.equal(fast.generate(**OPTIONS), model.generate(**OPTIONS))
    with pytest.raises(NotImplementedError, match="adapter_names"):
        fast.generate(**OPTIONS, adapter_names=["default"])


def test_the_base_model_and_merged_adapters():
    model = adapted("CAUSAL_LM")
    base = model.get_base_model()
    fast = speculate(base, compile=False)
    assert torch.equal(fast.generate(**OPTIONS), model.generate(**OPTIONS))
    model.add_adapter("later", peft.LoraConfig(r=4, target_modules=["down_proj"]))
    with pytest.raises(RuntimeError, match="speculate"):
        fast.generate(**OPTIONS)
    fast = speculate(base, compile=False, check=False)
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="speculate"):
        fast.generate(**OPTIONS)
    assert torch.equal(speculate(base, compile=False).generate(**OPTIONS), model.generate(**OPTIONS))


def test_prompt_learning_is_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match="PromptTuning"):
        speculate(peft.get_peft_model(ADMITTED["llama"](), config).eval())


# Adapters that rows choose: what is refused, the slots, and what is still noticed of the model.


def wrapped(**options):
    return peft.get_peft_model(ADMITTED["llama"](), lora(4, **options), adapter_name="red").eval()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(modules=["q_proj"], use_dora=True), "the adapter 'red' is a Dora adapter"),
        (dict(modules=["q_proj"], bias="lora_only"), r"the adapter 'red' trains biases \(bias='lora_only'\)"),
        (dict(modules=["q_proj"], lora_bias=True), "the adapter 'red' has a bias of its own"),
        (dict(modules=["embed_tokens"]), "an adapter changes model.embed_tokens, of class Embedding"),
        (dict(modules=["q_proj", "lm_head"]), "an adapter changes lm_head, the output head"),
        (dict(modules=["q_proj"], modules_to_save=["norm"]), "input_layernorm, of class ModulesToSaveWrapper"),
    ],
)
def test_other_adapters_are_refused_by_name(options, message):
    with pytest.raises(UnsupportedModelError, match=message):
        speculate(wrapped(**options), compile=False, max_loras=1)


def test_models_without_adapters_and_merged_ones_are_refused():
    with pytest.raises(ValueError, match="max_loras: the model has no LoRA adapters; wrap it with peft"):
        speculate(ADMITTED["llama"](), compile=False, max_loras=1)
    with pytest.raises(ValueError, match="max_lora_rank: without max_loras"):
        speculate(ADMITTED["llama"](), compile=False, max_lora_rank=4)
    model = two_adapters()
    fast = speculate(model, compile=False, max_loras=1)
    model.merge_adapter(["red"])
    with pytest.raises(UnsupportedModelError, match=r"merged into model.layers.0.self_attn.q_proj; call unmerge"):
        fast.generate(**call(ids()), adapter_names=NAMES)


def test_a_rank_beyond_the_slots():
    with pytest.raises(UnsupportedModelError, match=r"max_lora_rank: the adapter 'blue' has rank 7.* room for 4"):
        speculate(two_adapters(), compile=False, max_loras=2, max_lora_rank=4)


def test_slots_keep_what_is_in_use():
    model = two_adapters().get_base_model()
    loras = Loras(model, 2, None)
    assert loras.rank == 7 and loras.names == ["blue", "red"] and loras.take(BASE).index == 0
    red, again = loras.take("red"), loras.take("red")
    assert red is again and red.users == 2
    before = {path: part.up[red.index].clone() for path, part in loras.parts.items()}
    fill(model, "red", 9)
    changed = loras.take("red")
    assert changed.index != red.index and changed.version != red.version
    assert all(torch.equal(part.up[red.index], before[path]) for path, part in loras.parts.items())
    assert not loras.has_room("blue") and loras.has_room("red") and loras.has_room(BASE)
    with pytest.raises(SlotsTakenError, match="pass a larger max_loras"):
        loras.take("blue")
    loras.release(red)
    loras.release(again)
    blue = loras.take("blue")
    assert blue.index == red.index
    loras.release(blue)
    loras.release(changed)
    assert loras.take("red") is changed  # it is still there
    loras.release(changed)
    assert loras.take("blue").version == blue.version, "it comes back"
    loras.forget()
    assert loras.take("red").version not in (red.version, blue.version, changed.version)


def test_the_model_without_adapters():
    model = two_adapters().get_base_model()
    plain = without_adapters(model)
    assert not of_adapters(plain) and not hasattr(plain, "peft_config") and hasattr(model, "peft_config")
    assert plain.config is model.config
    layer = model.model.layers[0].self_attn.q_proj
    assert plain.model.layers[0].self_attn.q_proj is layer.base_layer
    assert layer in of_adapters(model) and layer.base_layer not in of_adapters(model)
    torch.testing.assert_close(plain(ids()).logits, ADMITTED["llama"]()(ids()).logits)


def test_other_changes_of_the_model_are_noticed():
    model = two_adapters()
    fast = speculate(model, compile=False, max_loras=2)
    layer = model.get_base_model().model.layers[0]
    layer.self_attn.scaling *= 2
    with pytest.raises(RuntimeError, match=r"scaling.*call speculate"):
        fast.generate(**call(ids()), adapter_names=NAMES)
    layer.self_attn.scaling /= 2
    model.add_adapter("green", lora(2, ["gate_proj"]))  # on layers that no adapter had
    with pytest.raises(RuntimeError, match=r"gate_proj \(Linear\) was replaced.*call speculate"):
        fast.generate(**call(ids()), adapter_names=NAMES)


def test_there_is_no_artefact(tmp_path):
    fast = speculate(two_adapters(), compile=False, max_loras=1, cache=tmp_path)
    with pytest.raises(ValueError, match="because it chooses an adapter for each row"):
        fast.speculation.save("nowhere")
