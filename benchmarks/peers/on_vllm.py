"""vLLM as an engine of compare.py. A setting: "speculative_config" (None: plain steps), and arguments of `LLM`."""

import vllm
from vllm import LLM, SamplingParams

COUNTER = "vllm:spec_decode_num_accepted_tokens"


class Vllm:
    """An `LLM` for one request at a time, without a tokenizer and without a cache of prefixes."""

    version = vllm.__version__

    def __init__(self, task: dict):
        arguments = dict(
            model=task["model"], dtype=task["dtype"], skip_tokenizer_init=True, enable_prefix_caching=False,
            disable_log_stats=False, max_model_len=task["max_len"] + 64, max_num_seqs=1, gpu_memory_utilization=0.5,
        )  # fmt: skip
        self.llm = LLM(**arguments | task["setting"])
        self.accepted = 0
        self.sampling = SamplingParams(
            temperature=0.0, max_tokens=task["new_tokens"], stop_token_ids=task["eos"], detokenize=False
        )

    def forget(self) -> None:
        pass

    def answer(self, ids: list[int]) -> list[int]:
        (output,) = self.llm.generate([{"prompt_token_ids": ids}], self.sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def rounds(self, answer: list[int]) -> tuple[int, int]:
        """The prompt's forward gives the first token; each later one gives a token and the drafts that it accepts.

        vLLM's own mean acceptance length leaves out steps in which nothing was drafted.
        """
        before, self.accepted = self.accepted, sum(m.value for m in self.llm.get_metrics() if m.name == COUNTER)
        given = len(answer) - 1
        return max(given - (self.accepted - before), 1), max(given, 1)


load = Vllm
