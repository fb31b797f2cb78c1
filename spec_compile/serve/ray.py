"""Replicas on Ray: `app`, an application for Ray Serve, and `Answers`, for ``map_batches`` of Ray Data."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..api import speculate
from . import require_packages
from .forwarding import AnswerHead, HttpRequest, answer

SLOTS = 32
"""Requests that a replica answers at once, by default."""
MAX_QUEUE = 64
"""Requests that wait in a replica, and again as many before all replicas, by default."""
INGRESS = {"num_replicas": 1, "max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0}}
"""Options of the ingress's deployment."""
DEPLOYMENT = {
    "num_replicas": 1,
    "health_check_period_s": 5,
    "health_check_timeout_s": 60,
    "graceful_shutdown_timeout_s": 30,
}
"""Options of Ray's deployment that differ from its own defaults."""


class Replica:
    """One model with its manager and transformers' server, in its own process."""

    def __init__(self, model: str, algo: str, options: dict, settings: dict):
        """See `app`. settings: arguments of `server.build`."""
        from .server import build

        self.server = build(model, algo, options, **settings)

    async def answer(self, sent: HttpRequest) -> AsyncIterator[AnswerHead | bytes]:
        """The server's answer to a request in parts."""
        async with aclosing(answer(self.server.app, sent)) as parts:
            async for part in parts:
                yield part

    async def metrics(self) -> tuple[str, bytes]:
        """The name of the replica, and its page for Prometheus."""
        return serve.get_replica_context().replica_id.unique_id, self.server.requests.metrics.page()

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
    tensor_parallel: int = 1,
    flags: dict | None = None,
    api_key: list[str] | None = None,
    api_key_file: str | None = None,
    ingress: dict | None = None,
    **deployment: Any,
) -> serve.Application:
    """An application for ``ray.serve.run``: replicas of transformers' server, and an ingress that sends them requests.

    model: a directory that every machine has, or a name on the model hub
    options: of `speculate`
    device: "cuda" gives each replica a GPU, "cpu" gives it none
    slots: requests that a replica answers at once
    max_queue: requests that wait in a replica, and as many again before all replicas; others get 429 with Retry-After
    tensor_parallel: GPUs of one machine that share the model in each replica, which has a process for each
    flags: further arguments of `server.build`, such as share_texts=True, and of transformers' `Serve`, such as
        dtype="bfloat16"
    api_key, api_key_file: keys, and a file with one a line, of which every request but to /health needs one; the
        variable SPEC_COMPILE_API_KEY may have keys, too
    ingress: options of Ray's deployment of the ingress, such as num_replicas
    deployment: options of Ray's deployment of the replicas, such as num_replicas and autoscaling_config

    Raises ImportError if a package of the extra ``serve`` is missing.
    """
    require_packages()
    from .door import Keys
    from .ray_ingress import Ingress, PrefixRouter

    keys = Keys.read(api_key or (), api_key_file)
    settings = {
        "slots": slots, "max_queue": max_queue, "device": device, "tensor_parallel": tensor_parallel, "keys": keys
    } | (flags or {})  # fmt: skip
    actor = {"num_gpus": 0 if device == "cpu" else tensor_parallel} | deployment.pop("ray_actor_options", {})
    merged = DEPLOYMENT | {
        # One more than the replica takes, so that the replica itself refuses it with the reason.
        "max_ongoing_requests": slots + max_queue + 1,
        "max_queued_requests": max_queue,
        "request_router_config": RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"most_ahead": max(1, slots // 2)}
        ),
    } | deployment  # fmt: skip
    if "autoscaling_config" in merged:
        merged.pop("num_replicas")
    replica = serve.deployment(Replica, name="Replica", ray_actor_options=actor, **merged)
    door = serve.deployment(serve.ingress()(Ingress), name="Ingress", **INGRESS | (ingress or {}))
    isolates = settings.get("isolate_prefixes", False)
    return door.bind(replica.bind(str(model), algo, options or {}, settings), keys, isolates)


class Answers:
    """For ``map_batches``: takes batches with prompts, and adds answers. The model is loaded once in each actor."""

    def __init__(
        self, model: str, algo: str = "ngram", options: dict | None = None, device: str = "cuda", dtype: str = "auto",
        **settings: Any,
    ):  # fmt: skip
        """model, algo, options, device: as for `app`. settings: fields of GenerationConfig, such as max_new_tokens."""
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        self.settings = settings
        self.manager = speculate(loaded, algo, **(options or {})).init_continuous_batching()
        self.manager.warmup()
        self.manager.start()

    def __call__(self, batch: dict) -> dict:
        """Answer a batch, each prompt independently of the others. RuntimeError if the worker dies.

        batch: columns, of which "prompt" has texts

        Returns the batch with three more columns: "answer", texts; "accept_length", tokens a step; and "error", the
        reason why there is no answer, or "".
        """
        names = [self._add(prompt) for prompt in batch["prompt"]]
        outputs = {name: None for name in names if isinstance(name, str)}
        while None in outputs.values():
            output = self.manager.get_result(timeout=1)
            if output is not None:
                outputs[output.request_id] = output
            elif not self.manager.is_running():
                raise RuntimeError(f"the worker died: {self.manager.background_thread_status.fatal_error}")
        rows = [self._row(outputs[name]) if isinstance(name, str) else ("", 0.0, str(name)) for name in names]
        columns = map(list, zip(*rows))
        return dict(batch) | dict(zip(("answer", "accept_length", "error"), columns))

    def _add(self, prompt: str) -> str | Exception:
        """The name of the request for a prompt, or the error with which it was refused."""
        try:
            return self.manager.add_request(
                self.tokenizer(prompt)["input_ids"], tokenizer=self.tokenizer, **self.settings
            )
        except ValueError as error:
            return error

    def _row(self, output: Any) -> tuple[str, float, str]:
        answer = self.tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        return answer, len(output.generated_tokens) / max(1, output.speculation.steps), output.error or ""
