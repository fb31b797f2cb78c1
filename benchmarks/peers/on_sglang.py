"""SGLang as an engine of compare.py. A setting: arguments of `Engine`, such as "speculative_algorithm"."""

import sglang


class Sglang:
    """An `Engine` for one request at a time, without a tokenizer and without a cache of prefixes.

    Its n-grams remember earlier answers and cannot forget them.
    """

    version = sglang.__version__

    def __init__(self, task: dict):
        arguments = dict(
            model_path=task["model"], dtype=task["dtype"], skip_tokenizer_init=True, disable_radix_cache=True,
            context_length=task["max_len"] + 64, max_running_requests=1, cuda_graph_max_bs=1, mem_fraction_static=0.5,
            log_level="error",
        )  # fmt: skip
        self.engine = sglang.Engine(**arguments | task["setting"])
        self.sampling = dict(temperature=0.0, max_new_tokens=task["new_tokens"], stop_token_ids=task["eos"])
        self.verifications = 0

    def forget(self) -> None:
        pass

    def answer(self, ids: list[int]) -> list[int]:
        output = self.engine.generate(input_ids=ids, sampling_params=self.sampling)
        self.verifications = output["meta_info"].get("spec_verify_ct", 0)
        return list(output["output_ids"])

    def rounds(self, answer: list[int]) -> tuple[int, int]:
        given = max(len(answer) - 1, 1)  # the prompt's forward gives the first token
        return self.verifications or given, given


load = Sglang
