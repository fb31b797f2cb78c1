"""An engine for specdec_bench, NVIDIA's benchmark of speculative decoding (Model-Optimizer, examples/specdec_bench).

Its run.py takes engines from tables: with this folder on PYTHONPATH add ``"SPEC_COMPILE": SpecCompileModel`` to
`engines_available`, and ``"SPEC_COMPILE": "max_cache_len"`` to `_MAX_SEQ_LEN_KEY`.
"""

import asyncio
import time
from dataclasses import asdict
from importlib.metadata import version
from itertools import count
from typing import Any

from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from spec_compile import speculate

ALGORITHMS = {
    "EAGLE3": "eagle3",
    "EAGLE": "eagle",
    "DRAFT_TARGET": "draft_model",
    "PARD": "pard",
    "NGRAM": "ngram",
    "MTP": "mtp",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
    "NONE": "ngram",
}
"""Our algorithm for each of specdec_bench's. NONE is n-grams with one node a round, which is plain decoding."""
PARALLEL = {"EAGLE3": "p_eagle", "DRAFT_TARGET": "pard", "PARD": "pard"}
"""Our algorithm for each of specdec_bench's with --parallel_drafting: one forward of the draft gives all its tokens."""
STEPPED = ("EAGLE3", "EAGLE", "DRAFT_TARGET", "PARD", "MTP")
"""The algorithms that take the length of a chain (--draft_length)."""
BLOCKS = ("DFLASH", "DSPARK")
"""The algorithms that take the slots of a block (--block_size) instead."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "beam_width")
"""The sampling_kwargs that are served."""
EVERYTHING = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
"""Settings besides the temperature: a benchmark that gives only a temperature wants no others, though the model may."""
UNUSED = {"tokenizer_path"}
"""Arguments that mean nothing here, because prompts come as token ids."""


class SpecCompileModel:
    """An engine: prompts as token ids in, the tokens of each round out.

    sampling_kwargs: may be changed between runs, as a sweep over temperatures does.
    """

    def __init__(
        self,
        model_dir: str,
        max_concurrent_requests: int,
        sampling_kwargs: dict,
        *,
        speculative_algorithm: str | None = "NONE",
        draft_model_dir: str | None = None,
        speculative_num_steps: int | None = None,
        speculative_num_draft_tokens: int | None = None,
        tensor_parallel_size: int = 1,
        moe_expert_parallel_size: int = 1,
        block_size: int | None = None,
        parallel_drafting: bool = False,
        trust_remote_code: bool = False,
        device: str = "cuda",
        dtype: str = "auto",
        **options: Any,
    ):
        """Load and wrap the model.

        sampling_kwargs: settings in `SAMPLING`; a temperature above 0 asks for sampling.
        speculative_num_steps: drafts in a chain, or levels of a tree; the algorithms in `BLOCKS` ignore it.
        speculative_num_draft_tokens: nodes of a tree, the root included.
        block_size: slots of a block, only for `BLOCKS` (default: as many as the draft was trained with).
        options: of `speculate`; run.py passes its "engine_args" here.

        Raises ValueError, naming the argument, for what this engine does not do, and what `speculate` raises.
        """
        algo = algorithm(speculative_algorithm or "NONE", parallel_drafting)
        for name, flag, size in (
            ("tensor_parallel_size", "--tp_size", tensor_parallel_size),
            ("moe_expert_parallel_size", "--ep_size", moe_expert_parallel_size),
        ):
            if size not in (None, 1):
                raise ValueError(f"{name}: this engine runs on one GPU, got {size}; give run.py {flag} 1")
        sampling(sampling_kwargs)  # raises
        options |= sizes(
            speculative_algorithm or "NONE", speculative_num_steps, speculative_num_draft_tokens, block_size
        )
        if draft_model_dir and speculative_algorithm not in (None, "NONE"):
            options["draft"] = draft_model_dir
        options = {name: value for name, value in options.items() if name not in UNUSED}
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, trust_remote_code=trust_remote_code)
        self.model = speculate(model.to(device).eval(), algo, **options)
        self.sampling_kwargs, self._numbers = dict(sampling_kwargs), count()
        config = ContinuousBatchingConfig(max_requests_per_batch=max_concurrent_requests)
        self.manager = self.model.init_continuous_batching(continuous_batching_config=config)
        self.manager.warmup()
        self.manager.start()

    async def run(
        self, prompt_ids: list[int], max_length: int, end_id: int, request_id: Any = None, turn_id: Any = None
    ) -> dict:
        """Answer a prompt.

        max_length: new tokens at most. end_id: the token that ends the answer, or -1 for none.

        Returns output_ids, [beam][chunk][token] with a chunk for each round, and token_times: perf_counter seconds at
        the start and after each chunk. Raises RuntimeError if the request fails.
        """
        name = f"{request_id}-{turn_id}-{next(self._numbers)}"  # a sweep has the same ids again
        finished = asyncio.get_running_loop().create_future()
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
        fields, seed = sampling(self.sampling_kwargs), self.sampling_kwargs.get("seed")
        config = GenerationConfig(max_new_tokens=max_length, eos_token_id=end_id, **fields)
        self.manager.add_request(list(prompt_ids), name, streaming=True, generation_config=config, seed=seed)
        output = await finished
        if output.error is not None:
            raise RuntimeError(f"request {name} failed: {output.error}")
        return {"output_ids": [chunks], "output_logits": None, "token_times": times}

    def get_serving_config(self) -> dict:
        """The facts that the benchmark writes into configuration.json, all of them JSON."""
        speculation = self.model.speculation
        options = {
            name: value if isinstance(value, str | int | float | list | dict | None) else repr(value)
            for name, value in asdict(speculation.options).items()
        }
        slots = self.manager.continuous_batching_config.max_requests_per_batch
        return {
            "engine": "spec_compile", "version": version("spec_compile"), "algo": speculation.engine.name,
            "max_concurrent_requests": slots, "options": options,
        }  # fmt: skip

    def stop(self) -> None:
        """End the worker."""
        self.manager.stop(block=True)


def algorithm(name: str, parallel: bool) -> str:
    """Our algorithm for one of specdec_bench's, with its option parallel_drafting. ValueError if there is none."""
    if name not in ALGORITHMS:
        raise ValueError(f"speculative_algorithm: expected one of {', '.join(ALGORITHMS)}, got {name!r}")
    if parallel and name not in PARALLEL:
        raise ValueError(f"parallel_drafting: only {', '.join(PARALLEL)} draft in parallel, not {name}; leave it out")
    return (PARALLEL if parallel else ALGORITHMS)[name]


def sizes(name: str, steps: int | None, nodes: int | None, block_size: int | None) -> dict[str, int | None]:
    """Options of `speculate` for specdec_bench's numbers. ValueError for a block of an algorithm that has none."""
    options: dict[str, int | None] = {}
    if name in BLOCKS:
        options["block_size"] = block_size
    elif block_size is not None:
        raise ValueError(f"block_size: only {', '.join(BLOCKS)} have blocks, not {name}; leave it out")
    if name in STEPPED and steps:
        options["num_steps"] = steps
    elif name == "NGRAM" and steps and not nodes:
        nodes = steps + 1
    if name == "NONE":
        nodes = 1
    return options | ({"num_draft_tokens": nodes} if nodes else {})


def sampling(kwargs: dict) -> dict:
    """The fields of a GenerationConfig that sampling_kwargs stand for. ValueError for what is not served."""
    for name in kwargs:
        if name not in SAMPLING:
            raise ValueError(f"sampling_kwargs: expected some of {', '.join(SAMPLING)}, got {name!r}")
    if kwargs.get("beam_width", 1) != 1:
        raise ValueError(f"beam_width: beams are not searched, expected 1, got {kwargs['beam_width']}")
    if not kwargs.get("temperature"):
        return {"do_sample": False, "repetition_penalty": kwargs.get("repetition_penalty", 1.0)}
    fields = {name: value for name, value in kwargs.items() if name not in ("seed", "beam_width")}
    return {"do_sample": True} | EVERYTHING | fields
