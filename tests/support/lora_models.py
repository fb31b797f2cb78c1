"""A tiny model with LoRA adapters of peft, which must be installed."""

import peft
import torch
from models import ADMITTED

NAMES = ["red", "__base__", "blue", "red"]  # the adapter of each row of a batch


def lora(rank, modules, **options):
    return peft.LoraConfig(r=rank, target_modules=modules, task_type="CAUSAL_LM", **options)


def fill(model, name, seed=0):
    """Give an adapter random values that are large enough to change answers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "lora_" in path and f".{name}." in path:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))


def two_adapters(model=None):
    """A model with "red", of rank 4, and "blue", of rank 7 and scaled otherwise, on other layers."""
    model = model or ADMITTED["llama"]()
    red, blue = lora(4, ["q_proj", "v_proj", "up_proj", "down_proj"]), lora(7, ["q_proj", "k_proj"], use_rslora=True)
    model = peft.get_peft_model(model, red, adapter_name="red")
    model.add_adapter("blue", blue)
    fill(model, "red", 1)
    fill(model, "blue", 2)
    return model.eval()


def ids(rows=4, width=12, seed=3):
    return torch.randint(5, 60, (rows, width), generator=torch.Generator().manual_seed(seed))


def call(prompts, **options):
    """Arguments of ``generate()``: greedy, 24 tokens, none of which ends a row."""
    fixed = dict(do_sample=False, max_new_tokens=24, pad_token_id=0, eos_token_id=None)
    return dict(input_ids=prompts, attention_mask=torch.ones_like(prompts)) | fixed | options
