"""Replicas on Ray: `app`, an application for Ray Serve, and `Answers`, for ``map_batches`` of Ray Data."""

from typing import Any

import torch
from ray import serve
from ray.serve.config import BackpressureConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ..api import speculate
from .cli import require_packages

SLOTS = 32
"""Requests that a replica answers at once, by default."""
MAX_QUEUE = 64
"""Requests that wait in a replica, and again as many before all replicas, by default."""
DEPLOYMENT = {
    "num_replicas": 1,
    "health_check_period_s": 5,
    "health_check_timeout_s": 60,
    "graceful_shutdown_timeout_s": 30,
}
"""Options of Ray's deployment that differ from its own defaults."""


class Replica:
    """One model with its manager, in a process of its own, behind transformers' server."""

    def __init__(self, model: str, algo: str, options: dict, settings: dict):
        """See `app`. settings: arguments of `server.build`."""
        from .server import build

        self.server = build(model, algo, options, **settings)

    def __serve_build_asgi_app__(self) -> Any:
        return self.server.app

    def check_health(self) -> None:
        """Raise RuntimeError if the replica cannot answer; Ray then starts another."""
        ailment = self.server.requests.ailment()
        if ailment is not None:
            raise RuntimeError(ailment)


def app(
    model: str,
    algo: str = "ngram",
    *,
    options: dict | None = None,
    device: str = "cuda",
    slots: int = SLOTS,
    max_queue: int = MAX_QUEUE,
    flags: dict | None = None,
    **deployment: Any,
) -> serve.Application:
    """An application for ``ray.serve.run``: replicas of transformers' server, each with a speculative model.

    model: a directory that every machine has, or a name on the model hub. options: those of `speculate`. device: "cuda"
    gives each replica a GPU, "cpu" gives it none. slots: requests that a replica answers at once. max_queue: requests
    that wait for that in a replica, and again before the replicas; others get 429 with Retry-After. flags: arguments of
    transformers' `Serve`, such as dtype="bfloat16". deployment: options of Ray's deployment, such as num_replicas,
    autoscaling_config and ray_actor_options.

    Raises ImportError if a package of the extra ``serve`` is missing.
    """
    require_packages()
    settings = {"slots": slots, "max_queue": max_queue, "device": device} | (flags or {})
    actor = {"num_gpus": 0 if device == "cpu" else 1} | deployment.pop("ray_actor_options", {})
    overload = BackpressureConfig(status_code=429, retry_after_s=1)
    merged = DEPLOYMENT | {
        # One more than the replica holds, so that it can say itself that it is full.
        "max_ongoing_requests": slots + max_queue + 1, "max_queued_requests": max_queue, "backpressure_config": overload,
    } | deployment  # fmt: skip
    if "autoscaling_config" in merged:
        merged.pop("num_replicas")
    replica = serve.deployment(serve.ingress()(Replica), name="Replica", ray_actor_options=actor, **merged)
    return replica.bind(str(model), algo, options or {}, settings)


class Answers:
    """For ``map_batches``: takes batches with prompts, and adds answers. The model is loaded once in each actor."""

    def __init__(self, model: str, algo: str = "ngram", options: dict | None = None, device: str = "cuda", **settings):
        """model, algo, options: as for `app`. settings: fields of GenerationConfig, such as max_new_tokens."""
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32" if device == "cpu" else "auto")
        self.model = speculate(loaded.to(torch.device(device)).eval(), algo, **(options or {}))
        self.config = GenerationConfig.from_model_config(loaded.config)
        self.config.update(**settings)

    def __call__(self, batch: dict) -> dict:
        """batch: columns, of which "prompt" has texts. Adds "answer", texts, and "accept_length", tokens a step."""
        inputs = [self.tokenizer(prompt)["input_ids"] for prompt in batch["prompt"]]
        outputs = self.model.generate_batch(inputs, generation_config=self.config, persistent_manager=True).values()
        failed = next((output.error for output in outputs if output.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"a prompt was not answered: {failed}")
        answers = [self.tokenizer.decode(output.generated_tokens, skip_special_tokens=True) for output in outputs]
        lengths = [len(output.generated_tokens) / max(1, output.speculation.steps) for output in outputs]
        return batch | {"answer": answers, "accept_length": lengths}
