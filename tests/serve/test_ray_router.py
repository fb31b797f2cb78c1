"""The router of Ray Serve, without Ray's processes."""

import asyncio
from types import SimpleNamespace

import pytest

for package in ("ray.serve", "fastapi", "prometheus_client"):
    pytest.importorskip(package, reason=f"needs the extras ray and serve: {package}")

from ray.serve.request_router import PendingRequest

from spec_compile.serve.forwarding import HttpRequest
from spec_compile.serve.ray import PrefixRouter

REPLICAS = [SimpleNamespace(replica_id=name) for name in "abc"]


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
    groups = asyncio.run(router.choose_replicas(REPLICAS, request))
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
