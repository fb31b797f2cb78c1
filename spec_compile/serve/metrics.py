"""Figures under vLLM's names: the page /metrics for Prometheus, and the field `metrics` of an answer."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX = "spec_compile:"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
FIGURES = {
    "num_requests_running": ("requests_running", "Requests that are being decoded."),
    "num_requests_prefilling": ("requests_prefilling", "Requests whose prompts are being read."),
    "num_requests_waiting": ("requests_waiting", "Requests that wait for a row."),
    "kv_cache_usage_perc": ("cache_usage", "The share of the cache that is used, 0 to 1."),
    "spec_decode_num_drafts": ("drafts_total", "Rounds of a request in which something was drafted."),
    "spec_decode_num_draft_tokens": ("draft_tokens_total", "Draft tokens that were verified."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens_total", "Draft tokens that were accepted."),
    "prompt_tokens": ("prompt_tokens_total", "Tokens of prompts."),
    "prompt_tokens_cached": ("reused_prompt_tokens_total", "Tokens of prompts that were in the cache already."),
    "prefix_cache_queries": ("prefix_cache_queries_total", "Tokens of prompts that were looked for in the cache."),
    "prefix_cache_hits": ("prefix_cache_hits_total", "Tokens of prompts that were found in the cache."),
    "prefix_cache_evicted_blocks": ("prefix_cache_evicted_blocks_total", "Blocks of earlier texts that were dropped."),
    "num_preemptions": ("preemptions_total", "Requests whose rows were taken for others, and that came back."),
    "generation_tokens": ("generation_tokens_total", "Tokens of answers."),
}
"""For each figure: the entry of `Manager.metrics()`, which is a counter if its name ends in `_total`; the help text."""
LABELLED = {
    "request_success": ("requests_finished_total", "finished_reason", "Requests that ended, by the reason."),
    "spec_decode_rounds": ("rounds_by_nodes_total", "nodes", "Rounds, by the nodes that they verified of each row."),
    "prefix_cache_hits_by_place": (
        "prefix_cache_hits_by_place_total",
        "place",
        "Tokens of prompts that were found, by the place.",
    ),
    "request_rejected": ("requests_rejected_total", "reason", "Requests that were refused, by the reason."),
    "prefix_cache_bytes": ("prefix_cache_bytes", "place", "Bytes of earlier texts' keys and values."),
    "spec_decode_num_accepted_tokens_per_pos": (
        "accepted_tokens_per_position_total",
        "position",
        "Draft tokens that were accepted, by their depth in the tree.",
    ),
}
"""The same of figures with a label, whose name is between them."""
SHADOWED = {
    "spec_decode_checked": "Tokens of answers that were made again by plain steps.",
    "spec_decode_mismatches": "Places where such an answer differs from the one that was served.",
}
"""The counters of `Shadow`."""

ONLINE = {
    "steps_total": "Steps of training.",
    "swaps_total": "Trained weights that went into service.",
    "dropped_total": "Trained weights that were dropped.",
    "seconds_total": "Seconds of training.",
    "buffer_tokens": "Tokens of texts that are kept to learn from.",
    "acceptance_in_service": "Share of accepted first drafts of the weights in service, on held-out texts.",
    "acceptance_trained": "The same of the trained weights.",
}
"""The figures of a draft that learns while it serves, by name, and the help texts."""


class PrometheusMetrics:
    """Counters of the manager, and times of requests."""

    def __init__(self, read: Callable[[], dict], shadow: Any):
        """read: the manager's `metrics`. shadow: the server's `Shadow`"""
        self._read, self._shadow = read, shadow
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._first = self._histogram("time_to_first_token_seconds", "From a request to its first token.", LONG)
        self._between = self._histogram("inter_token_latency_seconds", "Between two tokens of an answer.", SHORT)
        self._latency = self._histogram("e2e_request_latency_seconds", "From a request to its end.", LONG)
        self._queued = self._histogram("request_queue_time_seconds", "From a request to its admission.", LONG)

    def _histogram(self, name: str, text: str, buckets: tuple) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

    def collect(self) -> Iterator[Any]:
        """The families of metrics; prometheus_client calls this."""
        values = self._read()
        for name, (entry, text) in FIGURES.items():
            yield _family(entry)(PREFIX + name, text, value=values[entry])
        for name, text in SHADOWED.items():
            value = getattr(self._shadow, name.removeprefix("spec_decode_"))
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        for name, (entry, label, text) in LABELLED.items():
            family, parts = _family(entry)(PREFIX + name, text, labels=[label]), values[entry]
            for place, value in parts.items() if isinstance(parts, dict) else enumerate(parts):
                family.add_metric([str(place)], value)
            yield family
        for name, value in values["online_training"].items():
            yield _family(name)(f"{PREFIX}online_training_{name.removesuffix('_total')}", ONLINE[name], value=value)

    def observe(self, output: Any) -> None:
        """Count the times of a finished output of the manager, all in seconds of perf_counter."""
        admitted, finished = output.lifespan
        if finished > 0:
            self._latency.observe(finished - output.created_time)
        if admitted > 0:
            self._queued.observe(admitted - output.created_time)
        if output.first_token_time is not None:
            self._first.observe(output.first_token_time - output.created_time)
        for before, after in pairwise(output.timestamps or []):
            self._between.observe(after - before)

    def page(self) -> bytes:
        """The page, in the text format of Prometheus."""
        return generate_latest(self.registry)

    def answer(self, request: Request) -> Response:
        """The endpoint that tells the page."""
        return Response(self.page(), media_type=CONTENT_TYPE_LATEST)


def _family(entry: str) -> Any:
    """The class of a figure by its name in `Manager.metrics()`."""
    return CounterMetricFamily if entry.endswith("_total") else GaugeMetricFamily


def speculation_fields(outputs: Iterable[Any], num_spec_tokens: int) -> dict:
    """The field `metrics` of an answer, as vLLM has it.

    outputs: finished outputs of the manager, one for each choice
    num_spec_tokens: draft tokens that a step verifies at most

    All nodes of a tree but the root count as drafted. The histogram counts steps by their number of accepted draft
    tokens, which is the depth of the accepted path.
    """
    counters = [output.speculation for output in outputs]
    steps = [accepted for each in counters for accepted in each.per_step_accepted]
    drafted = [nodes for each in counters for nodes in each.per_step_drafted]
    accepted, offered = sum(steps), sum(drafted)
    summary = {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else None,
        "draft_acceptance_rate": accepted / offered if offered else None,
        "acceptance_histogram": [steps.count(length) for length in range(num_spec_tokens + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": offered,
        "num_spec_tokens": num_spec_tokens,
    }
    return {"speculative_decoding": summary | {"per_step_accepted": steps, "per_step_drafted": drafted}}
