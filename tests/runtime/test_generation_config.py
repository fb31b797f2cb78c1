"""The generation config of a model that speculates: the original's, with what was changed here."""

import copy
import pickle

import pytest
import torch
from models import ADMITTED, prompts
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import WatermarkingConfig

from spec_compile import speculate

ROWS, IDS, MASK = prompts()
ONE = ROWS[0]


@pytest.fixture
def pair():
    """A tiny model whose config asks for five tokens, and its shadow."""
    model = ADMITTED["llama"]()
    model.generation_config.update(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model, speculate(model, compile=False, check=False)


def in_place(config):
    config.max_new_tokens = 7


def a_list(config):
    config.suppress_tokens = [*range(40)]
    config.suppress_tokens += range(40, 60)


def several(config):
    config.update(sequence_bias={(70,): 99.0}, no_repeat_ngram_size=2, min_new_tokens=3)


CHANGES = [in_place, a_list, several]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_warm", [False, True])
def test_changes_of_the_original_are_followed(pair, change, is_warm):
    """Also by a call that transformers has prepared before."""
    model, fast = pair
    for _ in range(2 * is_warm):
        assert torch.equal(fast.generate(ONE), model.generate(ONE))
    config, before = fast.generation_config, model.generate(ONE)
    change(model.generation_config)
    after = model.generate(ONE)
    assert before.tolist() != after.tolist()
    for _ in range(2):
        assert torch.equal(fast.generate(ONE), after)
    assert fast.generation_config is config is not model.generation_config


def test_a_list_that_is_changed_in_place(pair):
    model, fast = pair
    model.generation_config.eos_token_id = [90]
    assert fast.generation_config.eos_token_id == [90]
    model.generation_config.eos_token_id.append(int(model.generate(ONE)[0, -2]))
    assert torch.equal(fast.generate(ONE), model.generate(ONE)) and fast.generate(ONE).shape[1] < 24 + 5
    fast.generation_config.eos_token_id.append(3)
    assert model.generation_config.eos_token_id[-1] != 3 == fast.generation_config.eos_token_id[-1]


def test_another_config_of_the_original_is_followed(pair):
    model, fast = pair
    fast.generate(ONE)
    model.generation_config = GenerationConfig(max_new_tokens=9, pad_token_id=0, repetition_penalty=1.3)
    assert torch.equal(fast.generate(ONE), model.generate(ONE)) and fast.generate(ONE).shape[1] == 24 + 9
    mine = type("Mine", (GenerationConfig,), {})(max_new_tokens=3, pad_token_id=0)
    model.generation_config = mine
    assert torch.equal(fast.generate(ONE), model.generate(ONE)) and type(fast.generation_config) is type(mine)
    model.generation_config.max_new_tokens = 4
    assert fast.generate(ONE).shape[1] == 24 + 4


def test_what_is_changed_here_stays(pair):
    model, fast = pair
    fast.generation_config.max_new_tokens = 6
    model.generation_config.repetition_penalty = 1.8
    expected = model.generate(ONE, max_new_tokens=6)
    assert torch.equal(fast.generate(ONE), expected) and model.generation_config.max_new_tokens == 5
    model.generation_config.max_new_tokens = 6  # the value that it has here, by its own choice
    model.generation_config.max_new_tokens = 8
    assert fast.generate(ONE).shape[1] == 24 + 6 and model.generate(ONE).shape[1] == 24 + 8
    fast.generation_config.repetition_penalty = 1.0
    model.generation_config.repetition_penalty = 1.2
    assert torch.equal(fast.generate(ONE), model.generate(ONE, repetition_penalty=1.0, max_new_tokens=6))


def test_a_config_that_is_assigned_is_used_as_it_is(pair):
    model, fast = pair
    before, mine = fast.generation_config, GenerationConfig(max_new_tokens=3, pad_token_id=0)
    fast.generation_config = mine
    model.generation_config.max_new_tokens = 8
    assert fast.generation_config is mine and fast.generate(ONE).shape[1] == 24 + 3
    mine.max_new_tokens = 4
    assert fast.generate(ONE).shape[1] == 24 + 4 and model.generation_config.max_new_tokens == 8
    fast.generation_config = before
    assert fast.generate(ONE).shape[1] == 24 + 8
    fast.generation_config.max_new_tokens = 2
    fast.generation_config = model.generation_config
    assert fast.generation_config is not model.generation_config and fast.generate(ONE).shape[1] == 24 + 8
    fast.generation_config.max_new_tokens = 2
    assert model.generation_config.max_new_tokens == 8


def test_objects_inside_are_compared_by_their_values(pair):
    model, fast = pair
    model.generation_config.watermarking_config = WatermarkingConfig(bias=1.0)
    fast.generation_config.temperature = 0.5
    model.generation_config.top_k = 7
    mine = fast.generation_config
    assert mine.watermarking_config.bias == 1.0 and (mine.temperature, mine.top_k) == (0.5, 7)
    model.generation_config.watermarking_config.bias = 2.0
    assert fast.generation_config.watermarking_config.bias == 2.0
    fast.generation_config.watermarking_config.bias = 3.0
    model.generation_config.top_k = 8
    assert (fast.generation_config.watermarking_config.bias, fast.generation_config.top_k) == (3.0, 8)
    assert model.generation_config.watermarking_config.bias == 2.0
    model.generation_config.eos_token_id = torch.tensor([3, 4])
    model.generation_config.eos_token_id = torch.tensor([3, 5])
    assert fast.generation_config.eos_token_id.tolist() == [3, 5]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))], ids=["copy", "pickle"])
def test_copies_have_what_was_changed_here(pair, how):
    model, fast = pair
    fast.generation_config.max_new_tokens = 6
    model.generation_config.repetition_penalty = 1.8
    copied = how(fast)
    assert copied.generation_config.max_new_tokens == 6 and torch.equal(copied.generate(ONE), fast.generate(ONE))
    copied.speculation.original.generation_config.update(max_new_tokens=9, repetition_penalty=1.0)
    assert (copied.generation_config.max_new_tokens, copied.generation_config.repetition_penalty) == (6, 1.0)
    assert (fast.generation_config.max_new_tokens, fast.generation_config.repetition_penalty) == (6, 1.8)
    fast.generation_config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
    assert how(fast).generate(ONE).shape[1] == 24 + 3


def test_a_saved_model_has_the_config_of_now(pair, tmp_path):
    model, fast = pair
    model.generation_config.repetition_penalty = 1.8
    fast.generation_config.max_new_tokens = 6
    fast.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (saved.repetition_penalty, saved.max_new_tokens) == (1.8, 6)


def test_a_model_of_peft():
    """Its generate() gives the wrapper's config to the model inside, which serves requests."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(ADMITTED["llama"](), config).eval()
    model.generation_config.update(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    fast = speculate(model, compile=False, check=False)
    for change in CHANGES:
        change(model.get_base_model().generation_config)
        assert torch.equal(fast.generate(input_ids=ONE), model.generate(input_ids=ONE))
        assert fast.get_base_model().generation_config is fast.generation_config
    fast.generation_config.max_new_tokens = 3
    model.generation_config.repetition_penalty = 1.0
    assert torch.equal(fast.generate(input_ids=ONE), model.generate(input_ids=ONE, max_new_tokens=3))
    assert model.generate(input_ids=ONE).shape[1] > 24 + 3 and fast.generate(input_ids=ONE).shape[1] == 24 + 3
    assert copy.deepcopy(fast).generate(input_ids=ONE).shape[1] == 24 + 3
    mine = GenerationConfig(max_new_tokens=2, pad_token_id=0)
    fast.generation_config = mine
    assert fast.generate(input_ids=ONE).shape[1] == 24 + 2 and fast.get_base_model().generation_config is mine
    model.generation_config = GenerationConfig(max_new_tokens=4, pad_token_id=0)
    fast.generation_config = model.generation_config
    assert fast.generate(input_ids=ONE).shape[1] == 24 + 4


def test_requests_follow(pair):
    model, fast = pair
    prompt = ONE[0].tolist()
    with fast.continuous_batching_context_manager() as manager:
        for change in (lambda config: None, in_place, several):
            change(model.generation_config)
            name = manager.add_request(prompt)
            output = manager.get_result(request_id=name, timeout=60)
            assert output.generated_tokens == model.generate(ONE)[0, 24:].tolist()
