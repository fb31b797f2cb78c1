"""The ingress and the router of replicas that are played: one dies before, or after, the first part of its answer."""

import asyncio
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="needs the extra ray")
import httpx
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest

from spec_compile.serve import ray as serve_ray
from spec_compile.serve.forwarding import AnswerHead, HttpRequest
from spec_compile.serve.ray import ATTEMPTS, Ingress, PrefixRouter, merge

JSON = AnswerHead(200, [(b"content-type", b"application/json"), (b"x-request-id", b"inner")])
EVENTS = AnswerHead(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
BUSY, ILL = AnswerHead(429, JSON.headers), AnswerHead(503, JSON.headers)
DEATH, FULL = RayActorError(), BackPressureError(num_queued_requests=2, max_queued_requests=2)


class Parts:
    """An answer of a replica, in Ray's form. An exception among the parts is raised."""

    def __init__(self, parts):
        self.parts, self.is_cancelled = iter(parts), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        part = next(self.parts, StopAsyncIteration())
        if part is Ellipsis:
            await asyncio.sleep(60)
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self):
        self.is_cancelled = True


class Replicas:
    """A handle, in Ray's form, whose calls have these answers one after the other."""

    def __init__(self, *answers):
        self.answers, self.sent, self.given = [*answers], [], []
        self.answer = self

    def options(self, stream):
        assert stream
        return self

    def remote(self, sent):
        self.sent.append(sent)
        self.given.append(Parts(self.answers.pop(0)))
        return self.given[-1]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(serve_ray, "RETRY_SECONDS", 0)


def ask(replicas, path="/v1/completions", method="POST", seconds=60, **options):
    app = Ingress(replicas).__serve_build_asgi_app__()

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as client:
            return await asyncio.wait_for(client.request(method, path, **options), seconds)

    return asyncio.run(send())


def test_everything_is_passed_on():
    replicas = Replicas([AnswerHead(418, [(b"x-a", b"b"), (b"x-request-id", b"inner")]), b"one", b"two"])
    response = ask(replicas, "/any/path?a=1&b=%20", "PATCH", content=b"the body", headers={"X-Mine": "yes"})
    assert response.status_code == 418 and response.content == b"onetwo" and dict(response.headers) == {"x-a": "b"}
    (sent,) = replicas.sent
    assert (sent.method, sent.path, sent.query, sent.body) == ("PATCH", "/any/path", b"a=1&b=%20", b"the body")
    assert (b"x-mine", b"yes") in sent.headers and not replicas.given[0].is_cancelled


@pytest.mark.parametrize("begun", [[DEATH], [JSON, DEATH], [EVENTS, DEATH], [ILL, b"the worker died"]])
def test_a_request_is_sent_again_if_no_part_of_its_answer_has_come(begun):
    replicas = Replicas(begun, begun, [JSON, b'"answer"'])
    response = ask(replicas, json={"prompt": "a" * 1000})
    assert response.status_code == 200 and response.json() == "answer" and not replicas.answers
    assert len(replicas.sent[0].keys) == 3 and replicas.sent[0] is replicas.sent[1]  # the router notes where it was


@pytest.mark.parametrize("refusal", [[FULL], [BUSY, b"full"]])
def test_a_request_that_was_admitted_waits_for_a_place(refusal):
    assert ask(Replicas([DEATH], refusal, refusal, [JSON, b"1"]), json={}).json() == 1
    response = ask(Replicas(refusal), json={})
    assert response.status_code == 429 and response.content


def test_it_is_sent_a_few_times_only():
    replicas = Replicas(*[[DEATH]] * ATTEMPTS)
    response = ask(replicas, json={})
    assert response.status_code == 503 and "died" in response.json()["error"]["message"]
    assert response.headers["retry-after"] and not replicas.answers
    assert ask(Replicas(*[[ILL, b"ill"]] * ATTEMPTS), json={}).content == b"ill"
    assert ask(Replicas([ILL, b"ill"]), "/health", "GET").status_code == 503  # a question about one replica


def test_a_stream_that_has_begun_ends_in_an_error_event():
    response = ask(Replicas([EVENTS, b"data: 1\n\n", b"data: 2\n\n", DEATH]), json={})
    *pieces, last = response.text.strip().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert pieces == ["data: 1", "data: 2"] and error["type"] == "server_error" and "died" in error["message"]
    response = ask(Replicas([EVENTS, b"event: ping\ndata: {}\n\n", DEATH]), "/v1/messages", json={})
    name, data = response.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error" and json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_errors_of_the_ingress_have_the_form_of_the_endpoint():
    assert set(ask(Replicas([FULL]), json={}).json()["error"]) == {"message", "type", "param", "code"}
    body = ask(Replicas([FULL]), "/v1/messages", json={}).json()
    assert body["type"] == "error" and body["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("parts", [[...], [EVENTS, ...], [EVENTS, b"data: 1\n\n", ...]])
def test_a_client_that_leaves_cancels_its_call(parts):
    replicas = Replicas(parts)
    with pytest.raises(TimeoutError):
        ask(replicas, seconds=0.1)
    assert replicas.given[0].is_cancelled


def test_metrics_that_a_replica_does_not_tell_are_missing_as_a_whole():
    class Broken(Replicas):
        def broadcast(self, name):
            assert name == "metrics"
            return self

        async def results_async(self, timeout_s):
            raise TimeoutError

    response = ask(Broken(), "/metrics", "GET")
    assert response.status_code == 503 and "TimeoutError" in response.json()["error"]["message"]


def test_metrics_of_replicas_are_told_apart():
    page = b"# HELP a_total b\n# TYPE a_total counter\na_total{x=\"y\"} %d\n# HELP c d\n# TYPE c histogram\n" \
           b"c_bucket{le=\"1.0\"} 2.0\nc_bucket{le=\"+Inf\"} 3.0\nc_count 3.0\nc_sum 4.0\n"  # fmt: skip
    merged = merge({"one": page % 5, "two": page % 6}).decode()
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    counts = {sample.labels["replica"]: sample.value for sample in families["a"].samples}
    assert counts == {"one": 5, "two": 6} and families["a"].samples[0].labels["x"] == "y"
    assert families["c"].type == "histogram" and merged.count("c_bucket{") == 4 and merged.count("# TYPE c ") == 1


# The router

NAMED = [SimpleNamespace(replica_id=name) for name in "abc"]


@pytest.fixture
def router():
    """A router without the parts that talk to replicas."""
    made = PrefixRouter.__new__(PrefixRouter)
    made.initialize_state(most_ahead=2)
    return made


def pending(name, keys, tried=()):
    async def make():
        metadata = SimpleNamespace(internal_request_id=name)
        return PendingRequest([HttpRequest("POST", "/", keys=keys, tried=[*tried])], {}, metadata)

    return asyncio.run(make())


def choose(router, request):
    groups = asyncio.run(router.choose_replicas(NAMED, request))
    return [sorted(each.replica_id for each in group) for group in groups]


def test_a_request_goes_to_the_replica_that_holds_its_prefix(router):
    assert choose(router, pending("1", [1, 2])) == [["a", "b", "c"]]
    router.on_request_routed(pending("1", [1, 2]), "b", None)
    assert choose(router, pending("2", [1, 2, 3])) == [["b"], ["a", "c"]]
    router.on_request_routed(pending("2", [1, 2, 3]), "b", None)
    assert choose(router, pending("3", [1, 2, 3])) == [["a", "b", "c"]]  # b has two requests more than the others
    router.on_request_completed("b", "1")
    router.on_request_completed("b", "1")
    assert choose(router, pending("3", [1, 2, 3])) == [["b"], ["a", "c"]]


def test_a_request_that_is_sent_again_goes_elsewhere_if_it_can(router):
    request = pending("1", [1])
    router.on_request_routed(request, "b", None)
    assert choose(router, request) == [["a", "c"], ["b"]]
    assert choose(router, pending("2", [1], tried="abc")) == [["a", "b", "c"]]
    assert request.routing_context.should_backoff  # Ray would try again without a pause


def test_a_call_without_a_request_goes_to_any_replica(router):
    assert choose(router, None) == [["a", "b", "c"]]
