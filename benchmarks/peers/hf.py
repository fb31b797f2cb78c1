"""transformers as an engine of compare.py. A setting: options of `generate`, such as those of prompt lookup."""

import torch
import transformers


class Transformers:
    """A model without this library."""

    version = transformers.__version__

    def __init__(self, task: dict):
        model = transformers.AutoModelForCausalLM.from_pretrained(task["model"], dtype=getattr(torch, task["dtype"]))
        self.model, self.forwards = model.to(task["device"]).eval(), 0
        self.model.register_forward_hook(self._count)
        self.fixed = dict(
            do_sample=False, max_new_tokens=task["new_tokens"], eos_token_id=task["eos"], pad_token_id=0,
            repetition_penalty=1.0, **task["setting"],
        )  # fmt: skip

    def _count(self, *_) -> None:
        self.forwards += 1

    def forget(self) -> None:
        pass

    def answer(self, ids: list[int]) -> list[int]:
        self.forwards, prompt = 0, torch.tensor([ids], device=self.model.device)
        output = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **self.fixed)
        return output[0, len(ids) :].tolist()

    def rounds(self, answer: list[int]) -> tuple[int, int]:
        # The prompt's forward gives the first token, or with drafts the first few; it counts as one token.
        return max(self.forwards - 1, 1), max(len(answer) - 1, 1)


load = Transformers
