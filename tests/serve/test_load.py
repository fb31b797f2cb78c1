"""Requests beside each other over HTTP: expensive bodies, clients that leave while they are prepared, hard stops."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest
from server_fixtures import CHATS, COMPLETIONS, PROMPT, ask, body, expected, refusal, running, user, wait_until

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
        "many messages": {"messages": user("a") * 2000, "max_tokens": 2},
        "garbage": {"prompt": [[]] * 40_000},
    }  # fmt: skip


def gaps(client, seed):
    """The seconds between the tokens of a stream, sorted. They are measured where the manager makes them."""
    requests, times = client.runner.requests, []
    observe, requests.metrics.observe = requests.metrics.observe, lambda output: times.append(output.timestamps)
    try:
        response = client.post(COMPLETIONS, json=LONG | {"seed": seed, "max_tokens": 100})
        assert response.status_code == 200
    finally:
        requests.metrics.observe = observe
    stamps = max(times, key=len)
    return sorted(after - before for before, after in pairwise(stamps))


@pytest.mark.slow
def test_an_expensive_body_delays_no_others_tokens(client, tmp_path):
    """The longest wait for a token is a few times that without such a client; it was seconds for stop strings."""
    quiet = max(gaps(client, seed)[-2] for seed in range(2))
    for number, (name, fields) in enumerate(expensive().items()):
        file = tmp_path / "body"
        file.write_text(json.dumps(fields))
        path = CHATS if "messages" in fields else COMPLETIONS
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
    assert client.post(COMPLETIONS, json=SHORT).status_code == 200
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
        client.post(COMPLETIONS, json=LONG, timeout=0.5)
    assert reached.wait(10)
    time.sleep(0.2)  # until the server has noticed
    left.set()
    wait_until(lambda: manager.active_requests == 0 and manager.output_router.result_handlers == {})
    monkeypatch.undo()
    assert manager.metrics()["requests_finished_total"]["cancelled"] == before + 1
    assert manager.output_router.output_queue.empty()
    assert ask(client, COMPLETIONS, PROMPT, 24).text == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)


def test_as_many_bodies_are_prepared_as_may_wait(client, monkeypatch):
    """Others get 429 at once, and /health is answered."""
    go, check, responses = threading.Event(), Completion._check, []
    monkeypatch.setattr(Completion, "_check", lambda *given: go.wait(30) and check(*given))

    def ask():
        responses.append(client.post(COMPLETIONS, json=SHORT))

    with ThreadPoolExecutor(20) as pool:
        for _ in range(20):
            pool.submit(ask)
        wait_until(lambda: len(responses) == 12)
        assert client.get("/health").status_code == 200
        go.set()
    assert [response.status_code for response in responses] == [429] * 12 + [200] * 8
    assert all(int(response.headers["Retry-After"]) >= 1 for response in responses[:12])
    assert 'request_rejected_total{reason="queue_full"} 12' in client.get("/metrics").text


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
                waiting = [asyncio.ensure_future(many.post(COMPLETIONS, json=each)) for each in bodies]
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
        refusal(client.post(COMPLETIONS, json=body(COMPLETIONS, limit=limit)), "max_tokens")
    assert not called
