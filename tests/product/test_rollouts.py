"""A speculative model writes the rollouts of a training: a trainer treats it as any model, and each answer is that of
the weights as they are."""

import draft_rounds as drafts
import models
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from spec_compile import speculate

NEW = 20
OPTIONS = dict(do_sample=False, max_new_tokens=NEW, pad_token_id=0)
IDS = drafts.prompts(2, 40)
PROMPTS = [*IDS.tolist(), IDS[0, :30].tolist()]
EAGER = dict(compile=False, adaptive=False, check=False)


def trained(algorithm="ngram", **options):
    """A model in training mode, and its speculative form."""
    model = models.ADMITTED["llama"]().train()
    model.generation_config.eos_token_id = None
    draft = {} if algorithm == "ngram" else {"draft": drafts.draft_of(algorithm, "llama")}
    return model, speculate(model, algorithm, **EAGER, **draft, **options)


def rollouts(fast, **options):
    outputs = fast.generate_batch(PROMPTS, **OPTIONS | options, warmup=False)
    return [output.generated_tokens for output in outputs.values()]


def own(model):
    """Answers of transformers' own loop."""
    return [model.generate(torch.tensor([ids]), **OPTIONS)[0, len(ids) :].tolist() for ids in PROMPTS]


def step(module, optimizer):
    """One step of training through a forward of `module`."""
    optimizer.zero_grad()
    module(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "with checkpoints"])
def test_gradients_flow_through_the_forward(checkpoints):
    model, fast = trained()
    if checkpoints:
        fast.gradient_checkpointing_enable()
    rollouts(fast)
    outputs = fast(input_ids=IDS, labels=IDS)
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in fast.named_parameters()}
    other = models.ADMITTED["llama"]().train()
    expected = other(input_ids=IDS, labels=IDS)
    expected.loss.backward()
    assert torch.equal(outputs.logits, expected.logits) and torch.equal(outputs.loss, expected.loss)
    assert gradients.keys() == {name for name, _ in other.named_parameters()}
    for name, parameter in other.named_parameters():
        assert torch.equal(gradients[name], parameter.grad) and parameter.grad.abs().sum() > 0, name
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters()))


OPTIMIZERS = {
    "for each": lambda parameters: torch.optim.AdamW(parameters, lr=3e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=3e-2, fused=True),
    "one by one": lambda parameters: torch.optim.SGD(parameters, lr=3.0, foreach=False),
}


@pytest.mark.sweep(["ngram-for each", "eagle3-fused"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ["ngram", "eagle3", "draft_model"])
def test_rollouts_after_a_step_are_those_of_a_fresh_start(algorithm, optimizer):
    """The same prompts come again, so keys and values of the weights before the step must not be used."""
    model, fast = trained(algorithm)
    take, seen = OPTIMIZERS[optimizer](fast.parameters()), [rollouts(fast)]
    for _ in range(2):
        step(fast, take)
        now = rollouts(fast)
        assert now == rollouts(speculate(model, **EAGER)) == own(model)
        assert fast.generate(IDS, **OPTIONS)[:, IDS.shape[1] :].tolist() == now[:2]
        assert now not in seen
        seen.append(now)


def test_steps_are_seen_by_a_manager_that_is_kept():
    model, fast = trained()
    optimizer = OPTIMIZERS["for each"](model.parameters())
    for _ in range(3):
        assert rollouts(fast, persistent_manager=True) == own(model)
        step(model, optimizer)
    fast.destroy_cached_continuous_batching_manager()


def test_weights_of_a_trainer_that_copies_them():
    """Each assignment through `data` is a write that torch does not count."""
    model, fast = trained()
    assert rollouts(fast) == own(model)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.8)
    assert rollouts(fast) == own(model)


def test_what_a_trainer_does_to_a_model_changes_nothing():
    model, fast = trained()
    expected, graph = rollouts(fast), fast.speculation.engine.runtime.verify
    todo = {
        "to": lambda each: each.to(torch.float32).to("cpu").to(device="cpu", dtype=torch.float32).float(),
        "modes": lambda each: each.eval() and each.train(),
        "parts": lambda each: [part.eval() for part in each.modules()],
        "gradients": lambda each: each.requires_grad_(False).requires_grad_(True),
        "some gradients": lambda each: each.get_input_embeddings().weight.requires_grad_(False),
        "checkpoints": lambda each: each.gradient_checkpointing_enable(),
        "inputs": lambda each: each.enable_input_require_grads(),
        "tags": lambda each: each.add_model_tags(["grpo"]),
        "use_cache": lambda each: setattr(each.config, "use_cache", False),
        "no gradients": lambda each: each.zero_grad(),
    }
    for name, act in todo.items():
        for each in (fast, model):
            act(each)
            assert rollouts(fast) == expected, name
            with torch.inference_mode():
                assert rollouts(fast) == expected, name
    assert fast.speculation.engine.runtime.verify is graph


def test_another_dtype_is_refused_by_name():
    _, fast = trained()
    expected = rollouts(fast)
    fast.to(torch.float64)
    with pytest.raises(RuntimeError, match=r"weight was float32 .* and is float64 .*call speculate\(\) again"):
        fast.generate(IDS, **OPTIONS)
    with pytest.raises(RuntimeError, match=r"weight was float32 .* and is float64 .*call speculate\(\) again"):
        rollouts(fast)
    fast.to(torch.float32)
    with pytest.raises(RuntimeError, match=r"moved or replaced .*call model\.speculation\.refresh\(\)"):
        fast.generate(IDS, **OPTIONS)
    fast.speculation.refresh()
    assert rollouts(fast) == expected


def test_mixed_precision_is_of_the_forward_only():
    """accelerate wraps the forward of the object that it is given. Rollouts have the dtype of the weights."""
    model, fast = trained()
    expected = rollouts(fast)
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(fast)
    assert prepared is fast and "forward" in vars(fast)
    assert not torch.equal(fast(IDS).logits, model(IDS).logits)
    for _ in range(2):
        assert rollouts(fast) == expected == own(model)
    fast.forward = lambda *args, **kwargs: None
    fast._original_forward = fast.forward
    with pytest.raises(RuntimeError, match=r"forward was replaced after speculate\(\)"):
        fast.generate(IDS, **OPTIONS)


class Texts(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"input_ids": IDS[index % 2], "labels": IDS[index % 2]}


def test_a_trainer_of_transformers_trains_it(tmp_path):
    model, fast = trained()
    before = rollouts(fast)
    during = []

    class Rollouts(Trainer):
        """Writes rollouts before each step."""

        def training_step(self, *args, **kwargs):
            with torch.no_grad():
                during.append(rollouts(self.model) == own(model))
            return super().training_step(*args, **kwargs)

    settings = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=3e-2, report_to=[],
        gradient_checkpointing=True, bf16=True, use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    Rollouts(model=fast, args=settings, train_dataset=Texts()).train()
    assert during == [True] * 3
    assert rollouts(fast) == own(model) != before
