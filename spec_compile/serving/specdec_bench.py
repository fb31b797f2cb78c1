"""An engine for specdec_bench, NVIDIA's benchmark of speculative decoding (Model-Optimizer, examples/specdec_bench).

Its run.py takes engines from a table: add ``"SPEC_COMPILE": SpecCompileModel`` to `engines_available`.
"""

import asyncio
import time
from dataclasses import asdict
from typing import Any

from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from ..api import speculate

ALGORITHMS = {
    "EAGLE3": "eagle3",
    "EAGLE": "eagle",
    "DRAFT_TARGET": "draft_model",
    "NGRAM": "ngram",
    "MTP": "mtp",
    "DFLASH": "dflash",
    "NONE": "ngram",
}
"""Our algorithm for each of specdec_bench's. NONE is n-grams with one node a round, which is plain decoding."""
UNUSED = {"tokenizer_path"}
"""Arguments that mean nothing here, because prompts come as token ids."""


class SpecCompileModel:
    """An engine: prompts as token ids in, the tokens of each round out."""

    def __init__(
        self,
        model_dir: str,
        max_concurrent_requests: int,
        sampling_kwargs: dict,
        *,
        speculative_algorithm: str = "NONE",
        draft_model_dir: str | None = None,
        speculative_num_steps: int | None = None,
        speculative_num_draft_tokens: int | None = None,
        tensor_parallel_size: int = 1,
        moe_expert_parallel_size: int = 1,
        trust_remote_code: bool = False,
        device: str = "cuda",
        dtype: str = "auto",
        **options: Any,
    ):
        """Load and wrap the model.

        sampling_kwargs: fields of GenerationConfig; a temperature above 0 asks for sampling.
        speculative_num_draft_tokens: nodes of a tree, the root included. speculative_num_steps: the length of a chain,
        used where no number of nodes is given. options: of `speculate`; those of "engine_args" come here.

        Raises ValueError for an unknown algorithm and for more than one GPU, and what `speculate` raises.
        """
        if speculative_algorithm not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise ValueError(f"speculative_algorithm: expected one of {known}, got {speculative_algorithm!r}")
        for name, size in (
            ("tensor_parallel_size", tensor_parallel_size), ("moe_expert_parallel_size", moe_expert_parallel_size),
        ):  # fmt: skip
            if size not in (None, 1):
                raise ValueError(f"{name}: this engine runs on one GPU, got {size}")
        nodes = speculative_num_draft_tokens or (speculative_num_steps and speculative_num_steps + 1)
        if speculative_algorithm == "NONE":
            nodes = 1
        if nodes:
            options["num_draft_tokens"] = nodes
        if draft_model_dir:
            options["draft"] = draft_model_dir
        options = {name: value for name, value in options.items() if name not in UNUSED}
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, trust_remote_code=trust_remote_code)
        self.model = speculate(model.to(device).eval(), ALGORITHMS[speculative_algorithm], **options)
        self.sampling = {"do_sample": bool(sampling_kwargs.get("temperature"))} | sampling_kwargs
        if not self.sampling["do_sample"]:
            self.sampling.pop("temperature", None)
        config = ContinuousBatchingConfig(max_requests_per_batch=max_concurrent_requests)
        self.manager = self.model.init_continuous_batching(continuous_batching_config=config)
        self.manager.warmup()
        self.manager.start()

    async def run(self, prompt_ids: list[int], max_length: int, end_id: int, request_id: Any, turn_id: Any) -> dict:
        """Answer a prompt.

        max_length: new tokens at most. end_id: the token that ends the answer, or -1 for none.

        Returns output_ids, [beam][chunk][token] with a chunk for each round, and token_times: perf_counter seconds at
        the start and after each chunk. Raises RuntimeError if the request fails.
        """
        name, finished = f"{request_id}-{turn_id}", asyncio.get_running_loop().create_future()
        chunks: list[list[int]] = []
        times = [time.perf_counter()]
        taken = 0

        def take(output: Any) -> None:
            nonlocal taken
            chunk = [token for token in output.generated_tokens[taken:] if token != end_id]
            taken = len(output.generated_tokens)
            if chunk:
                chunks.append(chunk)
                times.append(time.perf_counter())
            if output.is_finished() and not finished.done():
                finished.set_result(output)

        self.manager.register_result_handler(name, take)
        config = GenerationConfig(max_new_tokens=max_length, eos_token_id=end_id, **self.sampling)
        self.manager.add_request(list(prompt_ids), name, streaming=True, generation_config=config)
        output = await finished
        if output.error is not None:
            raise RuntimeError(f"request {name} failed: {output.error}")
        return {"output_ids": [chunks], "output_logits": None, "token_times": times}

    def get_serving_config(self) -> dict:
        """What the benchmark writes into configuration.json."""
        speculation = self.model.speculation
        return {"engine": "spec_compile", "algo": speculation.algorithm, "options": asdict(speculation.options)}

    def stop(self) -> None:
        """End the worker."""
        self.manager.stop(block=True)
