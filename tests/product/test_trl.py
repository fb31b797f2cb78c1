"""TRL's trainers take a speculative model as it is: it writes their rollouts, and its forward gives their losses."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile import speculate

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

DEMO = Path(__file__).parents[2] / "examples" / "tiny_coder"
TEXTS = ["def mean(values):\n", "def read_lines(path):\n"]
NEW = 8
GREEDY = dict(max_new_tokens=NEW, do_sample=False)
SETTINGS = dict(
    per_device_train_batch_size=4, num_generations=2, max_completion_length=NEW, max_steps=2, learning_rate=1e-2,
    report_to=[], save_strategy="no", use_cpu=True, bf16=False, disable_tqdm=True, shuffle_dataset=False,
)  # fmt: skip


def demo(dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").to(dtype)


def speculative(model):
    return speculate(model, "ngram", compile=False, check=False, cache=False)


def rewards(completions, **_):
    """1 for every second answer, so that each group has an advantage."""
    return [float(number % 2) for number in range(len(completions))]


def train(fast, trainer_class, config_class, folder, **settings):
    """Train two steps. Returns the answers to each step's prompts: the rollouts, which are sampled, greedy ones of the
    speculative model, and those of transformers' own loop with the same weights."""
    seen = []

    class Recorded(trainer_class):
        def _generate_single_turn(self, prompts, *arguments):
            result = super()._generate_single_turn(prompts, *arguments)
            ours = fast.generate_batch(prompts, **GREEDY, warmup=False).values()
            original = fast.speculation.original
            own = [original.generate(input_ids=torch.tensor([ids]), **GREEDY)[0, len(ids) :] for ids in prompts]
            rollouts = result[0] if isinstance(result, tuple) else result
            seen.append((rollouts, [output.generated_tokens for output in ours], [ids.tolist() for ids in own]))
            return result

    arguments = config_class(output_dir=str(folder), **SETTINGS | settings)
    dataset, tokenizer = datasets.Dataset.from_dict({"prompt": TEXTS}), AutoTokenizer.from_pretrained(DEMO)
    Recorded(fast, rewards, args=arguments, train_dataset=dataset, processing_class=tokenizer).train()
    return seen


def check(seen):
    assert len(seen) == 2
    for rollouts, greedy, own in seen:
        assert [*map(len, rollouts)] == [NEW] * 4 and greedy == own and rollouts != greedy
    assert seen[0][1] != seen[1][1], "training has changed no answer"


@pytest.mark.sweep(["grpo-batched"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "padded"])
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_rollouts_are_those_of_the_weights_as_they_are(name, batched, tmp_path):
    trainer, config = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}[name]
    fast = speculative(demo().train())
    check(train(fast, trainer, config, tmp_path, use_transformers_continuous_batching=batched))
    assert fast.speculation.stats.steps > 0

    # Log-probabilities that come with an answer are those of the forward that the trainer differentiates.
    prompt = fast.speculation.original.generation_config.eos_token_id or 5
    (output,) = fast.generate_batch([[prompt, 7, 9]], max_new_tokens=NEW, do_sample=True, logprobs=0).values()
    ids = torch.tensor([output.prompt_ids + output.generated_tokens])
    logits = fast(ids).logits[0, len(output.prompt_ids) - 1 : -1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_adapters_of_peft_are_trained(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(demo(), peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    settings = dict(use_transformers_continuous_batching=True, learning_rate=0.1)
    check(train(speculative(adapted), trl.GRPOTrainer, trl.GRPOConfig, tmp_path, **settings))


@pytest.mark.slow
def test_bf16_converts_the_buffers_too(tmp_path):
    """TRL calls ``to(torch.bfloat16)`` before each rollout."""
    settings = dict(use_transformers_continuous_batching=True, bf16=True)
    fast = speculative(demo(torch.bfloat16))
    assert len(train(fast, trl.GRPOTrainer, trl.GRPOConfig, tmp_path, **settings)) == 2
    with pytest.raises(RuntimeError, match=r"was float32 .* and is bfloat16 .*call speculate\(\) again"):
        train(speculative(demo()), trl.GRPOTrainer, trl.GRPOConfig, tmp_path, **settings)


def test_another_forward_is_no_loss_of_a_trainer():
    """A function that TRL does not wrap around the model's own forward, or that another package wraps, is a change."""
    fast = speculative(demo())
    trl.trainer.utils.add_fused_lm_head(fast)
    fast.generate(torch.tensor([[5, 7]]), **GREEDY)
    fast.forward = trl.trainer.utils.pad
    with pytest.raises(RuntimeError, match=r"forward was replaced after speculate\(\)"):
        fast.generate(torch.tensor([[5, 7]]), **GREEDY)
