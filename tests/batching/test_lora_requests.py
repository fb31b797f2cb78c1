"""Requests with a LoRA adapter each: answers as in peft, and keys and values that no other adapter reuses."""

import functools

import pytest
import torch

pytest.importorskip("peft")
from batch_requests import ALGORITHMS, MODEL, collect, generated, managed, stopped
from lora_models import NAMES, call, fill, ids, lora, two_adapters
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.cache import PAGE

NEW = 24
PROMPTS = [ids(1, width, seed=width)[0].tolist() for width in (12, 30, 7, 40)]
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU])]


def of_peft(model, prompt, name, new=NEW):
    """The tokens of peft's own ``generate()``, greedy."""
    prompts = torch.tensor([prompt], device=model.device)
    return model.generate(**call(prompts, max_new_tokens=new), adapter_names=[name])[0, len(prompt) :].tolist()


def ask(manager, prompt, name, **options):
    return manager.add_request(prompt, adapter_name=name, **dict(max_new_tokens=NEW, eos_token_id=-1) | options)


def answer(manager, *asked, **options):
    name = ask(manager, *asked, **options)
    return collect(manager, 1)[name]


@functools.cache
def models(device="cpu"):
    model = two_adapters().to(device)
    return model, speculate(model, compile=False, max_loras=2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_as_in_peft(device):
    model, fast = models(device)
    outputs = fast.generate_batch(PROMPTS, adapter_names=NAMES, max_new_tokens=NEW, eos_token_id=-1)
    for prompt, name, output in zip(PROMPTS, NAMES, outputs.values(), strict=True):
        assert output.generated_tokens == of_peft(model, prompt, name)


@pytest.mark.sweep(["cpu-eagle3 tree"])
@pytest.mark.parametrize("name", ["eagle3 tree", "eagle3 union", "draft_model"])
@pytest.mark.parametrize("device", DEVICES)
def test_drafts_of_the_base_model(device, name):
    """Adapters are small, so that a head that was trained for the base model is right sometimes."""
    model = two_adapters(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)).to(device)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.mul_(0.2 if "lora_B" in path else 1.0)
    options = ALGORITHMS[name] | dict(adaptive=False)
    if options["draft"] == "itself":
        options["draft"] = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device)
    fast = speculate(model, name.split()[0], compile=False, check=False, max_loras=2, **options)
    outputs = fast.generate_batch(PROMPTS[:3], adapter_names=NAMES[:3], max_new_tokens=12, eos_token_id=-1)
    for prompt, adapter, output in zip(PROMPTS, NAMES, outputs.values()):
        assert output.generated_tokens == of_peft(model, prompt, adapter, 12)
    assert sum(output.speculation.accepted for output in outputs.values()) > 0


def test_sampled_requests_are_those_of_generate():
    fast, options = models()[1], dict(do_sample=True, temperature=0.8, top_k=20)
    with managed(fast, 4) as manager:
        names = [ask(manager, *pair, seed=5, **options) for pair in zip(PROMPTS, NAMES)]
        outputs = collect(manager, len(names))
    settings = dict(options, max_new_tokens=NEW, pad_token_id=0, eos_token_id=None, seed=5)
    for name, prompt, adapter in zip(names, PROMPTS, NAMES):
        assert outputs[name].generated_tokens == generated(fast, prompt, adapter_names=[adapter], **settings)


def test_requests_whose_rows_are_taken_keep_their_adapters():
    """They come back before those that wait for a slot of theirs."""
    model, fast = models()
    manager, run = stopped(fast, max_requests_per_batch=3)
    rounds = iter(range(1000))
    for number, (prompt, name) in enumerate(zip(PROMPTS, NAMES)):
        manager.add_request(prompt, f"r{number}", adapter_name=name, max_new_tokens=NEW, eos_token_id=-1)

    def take_a_row():
        begun = manager.scheduler.begun
        if next(rounds) % 4 == 3 and len(begun) > 1:
            manager.scheduler._preempt(max(begun, key=lambda each: each.turn))

    outputs = run(take_a_row)
    assert manager.scheduler.preemptions > 1
    for number, (prompt, name) in enumerate(zip(PROMPTS, NAMES)):
        assert outputs[f"r{number}"].generated_tokens == of_peft(model, prompt, name)
    assert not any(slot.users for slot in fast.speculation.engine.loras._slots if slot is not None)
    manager.destroy()


def test_without_a_name_a_request_has_the_active_adapter():
    model, fast = models()
    with managed(fast, 4) as manager:
        for name in ("blue", "red"):
            model.set_adapter(name)
            assert answer(manager, PROMPTS[0], None).generated_tokens == of_peft(model, PROMPTS[0], name)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_keys_and_values_belong_to_one_adapter(device, slots):
    """With one slot the earlier texts are kept prefixes, with four they lie in rows."""
    model = two_adapters().to(device)
    fast = speculate(model, compile=False, max_loras=2, max_cache_len=512, prefix_cache_host_bytes=1 << 24)
    prompt = ids(1, 4 * PAGE + 9)[0].tolist()
    with managed(fast, slots) as manager:

        def reused(name):
            output = answer(manager, prompt, name)
            assert output.generated_tokens == of_peft(model, prompt, name)
            return output.speculation.reused_prompt_tokens

        assert [reused(name) for name in ("red", "blue", "__base__")] == [0, 0, 0]
        for _ in range(slots):  # other texts in every row
            answer(manager, PROMPTS[0], "__base__")
        assert all(reused(name) >= 4 * PAGE for name in ("blue", "red", "__base__"))
        with manager.pause():
            fill(model, "red", 9)
            for path, parameter in model.named_parameters():
                if "lora_B.blue" in path:
                    parameter.data.mul_(0.5)  # which torch does not count
        assert [reused(name) for name in ("red", "blue")] == [0, 0]
        assert reused("red") >= 4 * PAGE and reused("__base__") >= 4 * PAGE


def test_a_request_is_passed_a_bounded_number_of_times():
    fast = speculate(two_adapters(), compile=False, max_loras=1)
    with managed(fast, slots=2) as manager:
        with manager.pause():
            names = [
                ask(manager, PROMPTS[0], name, max_new_tokens=new, speculation=False)
                for name, new in [("red", 24), ("blue", 4), ("red", 36), *[("red", 24)] * 4, ("__base__", 4)]
            ]
        outputs = collect(manager, len(names))
    order = sorted(names, key=lambda name: outputs[name].lifespan[0])
    assert order.index(names[1]) == 4  # after a "red", two that passed it, and the request without an adapter


def test_adapters_come_and_go_while_requests_run():
    model = two_adapters()
    fast = speculate(model, compile=False, max_loras=2, max_lora_rank=8)
    before = of_peft(model, PROMPTS[0], "red")
    with managed(fast, slots=2) as manager:
        running_one = ask(manager, PROMPTS[0], "red", streaming=True)
        ask(manager, PROMPTS[1], "__base__", request_id="base", max_new_tokens=200)
        assert manager.get_result(running_one, timeout=60) is not None  # it has a row
        with manager.pause():
            waits = ask(manager, PROMPTS[2], "red")
            model.delete_adapter("red")
            model.add_adapter("green", lora(8, ["v_proj"], lora_alpha=3))
            fill(model, "green", 6)
            new = ask(manager, PROMPTS[3], "green")
        with pytest.raises(ValueError, match="adapter_name: there is no adapter 'red'; known are blue, green"):
            ask(manager, PROMPTS[0], "red")
        outputs = collect(manager, 4)
        assert outputs[running_one].generated_tokens == before  # with the values that it began with
        assert "there is no adapter 'red'" in outputs[waits].error
        assert outputs[new].generated_tokens == of_peft(model, PROMPTS[3], "green")
        assert outputs["base"].generated_tokens[:NEW] == of_peft(model, PROMPTS[1], "__base__")
        model.add_adapter("red", lora(2, ["up_proj", "k_proj"]))
        fill(model, "red", 7)
        assert answer(manager, PROMPTS[0], "red").generated_tokens == of_peft(model, PROMPTS[0], "red") != before


def test_requests_end_with_their_adapters():
    fast = speculate(two_adapters(), compile=False, max_loras=1)
    with managed(fast, 4) as manager:
        cancelled = ask(manager, PROMPTS[0], "red", max_new_tokens=300)
        manager.cancel_request(cancelled)
        collect(manager, 1)
        assert answer(manager, PROMPTS[0], "blue").error is None
        assert answer(manager, PROMPTS[0], "red").error is None  # the only slot is free again
        ask(manager, PROMPTS[0], "red", max_new_tokens=300)
    assert fast.generate(**call(ids()), adapter_names=["blue"] * 4).shape == (4, 36)  # the stopped one has left


WAYS = {
    "generate": lambda fast, names: fast.generate(**call(ids()), adapter_names=names),
    "generate_batch": lambda fast, names: fast.generate_batch(PROMPTS, adapter_names=names),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "names, error, message",
    [
        (["green"] * 4, ValueError, "no adapter 'green'; known are blue, red, __base__"),
        ([1] * 4, TypeError, "expected names of adapters"),
        (["red"] * 3, ValueError, "one name for each of 4 prompts, got 3"),
        ("reds", TypeError, "expected a list of names"),
    ],
)
def test_wrong_names(names, error, message, way):
    with pytest.raises(error, match=f"^adapter_name.*{message}"):
        WAYS[way](models()[1], names)


@pytest.mark.parametrize("way", WAYS)
def test_without_max_loras_names_are_refused(way):
    fast = speculate(two_adapters().get_base_model(), compile=False)
    with pytest.raises((NotImplementedError, ValueError), match=r"adapter_name.*pass max_loras"):
        WAYS[way](fast, NAMES)
