"""spec_compile as an engine of compare.py. A setting: "algo" and options of `speculate`."""

import torch
from transformers import AutoModelForCausalLM

import spec_compile


class Ours:
    """A speculative model."""

    version = spec_compile.__version__

    def __init__(self, task: dict):
        model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=getattr(torch, task["dtype"]))
        model = model.to(task["device"]).eval()
        options = {
            "max_cache_len": task["max_len"] + 64,
            "compile": task["compile"],
            "weights": task["weights"],
        } | task["setting"]
        if task["weights"] and "draft" in options:
            options["draft_weights"] = task["weights"]
        self.fast = spec_compile.speculate(model, **options)
        self.fast.speculation.warmup()
        self.fixed = dict(
            do_sample=False, max_new_tokens=task["new_tokens"], eos_token_id=task["eos"], pad_token_id=0,
            repetition_penalty=1.0,
        )  # fmt: skip

    def forget(self) -> None:
        if hasattr(self.fast.speculation, "ngram"):
            self.fast.speculation.ngram.reset()
        self.fast.speculation.stats.reset()

    def answer(self, ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids], device=self.fast.device)
        return self.fast.generate(prompt, attention_mask=torch.ones_like(prompt), **self.fixed)[0, len(ids) :].tolist()

    def rounds(self, answer: list[int]) -> tuple[int, int]:
        stats = self.fast.speculation.stats
        return stats.steps, stats.tokens


load = Ours
