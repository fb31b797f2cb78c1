"""peft: adapters are part of what is captured, and a change of them is noticed."""

import pytest
import torch
from models import ADMITTED, prompts

from spec_compile import UnsupportedModelError, speculate

peft = pytest.importorskip("peft")
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
    model.merge_adapter()
    with pytest.raises(RuntimeError, match="speculate"):
        fast.generate(**OPTIONS)
    assert torch.equal(speculate(base, compile=False).generate(**OPTIONS), model.generate(**OPTIONS))


def test_adapters_added_afterwards_are_noticed():
    model = ADMITTED["llama"]()
    fast = speculate(model, compile=False)
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(RuntimeError, match="speculate"):
        fast.generate(**OPTIONS)


def test_prompt_learning_is_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match="PromptTuning"):
        speculate(peft.get_peft_model(ADMITTED["llama"](), config).eval())
