"""Requests beside each other over HTTP: expensive bodies, clients that leave while they are prepared, hard stops."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from itertools import pairwise

import httpx
import pytest
from server_fixtures import PROMPT, expected, running, wait_until

from spec_compile.serve import generation
from spec_compile.serve.handlers import Completion

SHORT = {"prompt": PROMPT, "max_tokens": 24}
LONG = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 2.0, "seed": 1}
SENDER = """
import sys, httpx
content = open(sys.argv[2], "rb").read()
with httpx.Client(timeout=60) as client:
    while True:
        client.post(sys.argv[1], content=content, headers={"Content-Type": "application/json"})
        print("sent", flush=True)
"""
"""A client in a process of its own, which sends one body again and again."""
SERVER = dict(slots=4, max_queue=8)


def expensive():
    """Bodies that take long to read, or would."""
    several = {str(token): 1 for token in range(100_000)}
    return {
        "a million characters": {"prompt": "a" * 1_000_000},
        "a prompt that is tokenized": {"prompt": "a " * 15_000},
        "a hundred thousand biases": {"prompt": "a", "logit_bias": several},
        "64 stop strings": {"prompt": "a", "stop": [f"{number:040}" for number in range(64)]},
        "long stop strings": {"prompt": "a", "max_tokens": 2, "stop": [f"{number:0256}" for number in range(16)]},
        "one stop string of 50,000": {"prompt": "a", "stop": "x" * 50_000},
        "many words": {"prompt": "a", "max_tokens": 2, "generation_config": json.dumps({
            "bad_words_ids": [[token] for token in range(900)] + [[token, token] for token in range(64)],
        })},
        "many messages": {"messages": [{"role": "user", "content": "a"}] * 2000, "max_tokens": 2},
        "garbage": {"prompt": [[]] * 40_000},
    }  # fmt: skip


def gaps(client, seed):
    """The seconds between the tokens of a stream, sorted. They are measured where the manager makes them."""
    requests, times = client.runner.requests, []
    observe, requests.metrics.observe = requests.metrics.observe, lambda output: times.append(output.timestamps)
    try:
        response = client.post("/v1/completions", json=LONG | {"seed": seed, "max_tokens": 100})
        assert response.status_code == 200
    finally:
        requests.metrics.observe = observe
    stamps = max(times, key=len)
    return sorted(after - before for before, after in pairwise(stamps))


@pytest.mark.slow
def test_an_expensive_body_delays_no_others_tokens(client, tmp_path):
    """The longest wait for a token is a few times that without such a client; it was seconds for stop strings."""
    quiet = max(gaps(client, seed)[-2] for seed in range(2))
    for number, (name, body) in enumerate(expensive().items()):
        file = tmp_path / "body"
        file.write_text(json.dumps(body))
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        url = str(client.base_url).rstrip("/") + path
        sender = subprocess.Popen([sys.executable, "-c", SENDER, url, file], stdout=subprocess.PIPE, text=True)
        try:
            assert sender.stdout.readline()
            busy = gaps(client, 10 + number)[-2]
        finally:
            sender.kill()
            sender.communicate()
        assert busy < max(0.25, 10 * quiet), f"{name}: {busy:.3f} s in place of {quiet:.3f} s"


def test_no_body_is_prepared_on_the_event_loop(client, monkeypatch):
    threads = []
    check = Completion._check
    monkeypatch.setattr(
        Completion, "_check", lambda *given: threads.append(threading.current_thread()) or check(*given)
    )
    assert client.post("/v1/completions", json=SHORT).status_code == 200
    assert threads[0].name.startswith("spec_compile requests")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_client_that_leaves_while_its_request_is_prepared_leaves_nothing(client, alone, monkeypatch, moment):
    """It leaves while a thread is about to add its request, or has added it and does not know yet."""
    manager, add = client.runner.requests.manager, client.runner.requests.manager.add_request
    reached, left = threading.Event(), threading.Event()
    before = manager.metrics()["requests_finished_total"].get("cancelled", 0)

    def slow(ids, name, **options):
        if moment == "after":
            add(ids, name, **options)
        reached.set()
        left.wait(10)
        if moment == "before":
            add(ids, name, **options)

    monkeypatch.setattr(manager, "add_request", slow)
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=0.5)
    assert reached.wait(10)
    time.sleep(0.2)  # until the server has noticed
    left.set()
    wait_until(lambda: manager.active_requests == 0 and manager.output_router.result_handlers == {})
    monkeypatch.undo()
    assert manager.metrics()["requests_finished_total"]["cancelled"] == before + 1
    assert manager.output_router.output_queue.empty()
    text = client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"]
    assert text == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)


def test_as_many_bodies_are_prepared_as_may_wait(client, monkeypatch):
    """Others get 429 at once."""
    go = threading.Event()
    check = Completion._check
    monkeypatch.setattr(Completion, "_check", lambda *given: go.wait(30) and check(*given))

    async def ask():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
            waiting = [asyncio.ensure_future(many.post("/v1/completions", json=SHORT)) for _ in range(20)]
            while sum(task.done() for task in waiting) < 12:
                await asyncio.sleep(0.01)
            go.set()
            return await asyncio.gather(*waiting)

    statuses = [response.status_code for response in asyncio.run(ask())]
    assert statuses.count(429) == 12 and statuses.count(200) == 8


def test_every_request_ends_when_the_server_is_stopped_hard(folder, monkeypatch):
    """Streams and whole answers, those that wait, and one that the manager has lost."""
    before = {*threading.enumerate()}
    with running(folder, slots=2, max_queue=64) as client:
        manager = client.runner.requests.manager
        add = manager.add_request
        lost = []

        def lose(ids, name, **options):
            if len(ids) == 1:
                return lost.append(name)
            return add(ids, name, **options)

        monkeypatch.setattr(manager, "add_request", lose)

        async def ask():
            async with httpx.AsyncClient(base_url=client.base_url, timeout=30) as many:
                bodies = [LONG | {"stream": number % 2 == 1, "seed": number} for number in range(24)]
                bodies += [LONG | {"prompt": "a"}, LONG | {"prompt": "a", "stream": True}]
                waiting = [asyncio.ensure_future(many.post("/v1/completions", json=body)) for body in bodies]
                await asyncio.to_thread(wait_until, lambda: manager.active_requests == 24 and len(lost) == 2)
                client.runner.should_exit = True
                return await asyncio.gather(*waiting)

        for response in asyncio.run(ask()):
            if response.headers["content-type"].startswith("application/json"):
                assert response.status_code == 500 and "stopped" in response.json()["error"]["message"]
            else:
                last = [line for line in response.text.splitlines() if line][-1]
                assert "stopped" in json.loads(last.removeprefix("data: "))["error"]["message"]
    wait_until(lambda: {*threading.enumerate()} <= before)


def test_a_limit_is_checked_before_anything_of_its_size_is_made(client, monkeypatch):
    """The manager never hears of it."""
    called = []
    monkeypatch.setattr(client.runner.requests.manager, "add_request", lambda *given, **options: called.append(given))
    for limit in (3000, 10**8, 10**13):
        response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": limit})
        assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"
    assert not called


def test_a_large_body_is_not_kept(client, monkeypatch):
    """It is read to its end, so that its client sees the reason, unless it is far too large."""
    too_large = b'{"prompt": "' + b"a" * (client.runner.requests.most_bytes + 1)
    response = client.post("/v1/completions", content=too_large, headers={"Content-Type": "application/json"})
    assert response.status_code == 413 and "bytes" in response.json()["error"]["message"]
    assert generation.MOST_BYTES < client.runner.requests.most_bytes < 2 * generation.MOST_BYTES
