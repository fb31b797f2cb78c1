"""The HTTP server: answers, streams, what is refused and how, clients that leave, overload, and the end."""

import asyncio
import glob
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import psutil
import pytest
from server_fixtures import PROMPT, events, expected, running, wait_until
from transformers import GenerationConfig

from spec_compile.batching.rows import Rows
from spec_compile.serve import followers
from spec_compile.serve import runner as drain
from spec_compile.serve.call import HttpCall
from spec_compile.serve.errors import DEAD
from spec_compile.serve.server import build

SHORT = {"prompt": PROMPT, "max_tokens": 24}
LONG = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 2.0, "seed": 1}
"""An answer that takes a while, because nothing drafted is accepted."""
SERVER = dict(slots=2, max_queue=5)


def complete(client, **body):
    """The body of an answer."""
    response = client.post("/v1/completions", json=SHORT | body)
    assert response.status_code == 200, response.text
    return response.json()


def counts(client):
    """The page /metrics, as a dict from name to value."""
    lines = client.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("spec_compile:"): float(value) for name, value in pairs}


def manager_of(client):
    return client.runner.requests.manager


# Answers


def test_an_answer_is_that_of_generate(client, alone):
    body = complete(client)
    assert body["choices"][0]["text"] == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 24, "total_tokens": 30}


def test_each_request_has_its_own_settings(client, alone):
    """Sampled and greedy answers, limits and stops, all at once."""
    wanted = [
        ({"temperature": 0.8, "seed": 5}, {"do_sample": True, "temperature": 0.8, "seed": 5}),
        ({}, {"do_sample": False}),
        ({"max_tokens": 3}, {"do_sample": False, "max_new_tokens": 3}),
        ({"generation_config": '{"repetition_penalty": 1.5}'}, {"do_sample": False, "repetition_penalty": 1.5}),
        ({"stop": ["1"]}, {"do_sample": False, "stop_strings": ["1"], "tokenizer": alone[1]}),
    ]  # the text of the last one ends before the stop string

    async def ask():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
            bodies = [SHORT | body for body, _ in wanted]
            return await asyncio.gather(*(many.post("/v1/completions", json=body) for body in bodies))

    answers = [response.json()["choices"][0] for response in asyncio.run(ask())]
    texts = [expected(alone, PROMPT, **{"max_new_tokens": 24} | options) for _, options in wanted]
    assert [each["text"] for each in answers] == [*texts[:4], texts[4].partition("1")[0]]
    assert answers[4]["finish_reason"] == "stop"


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}], ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_same_text_and_the_usage_if_it_is_asked_for(client, path, options):
    """The usage is a chunk of its own before the mark of the end, as OpenAI's reference says."""
    prompt = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a mean"}]}
    body = prompt | {"max_tokens": 24, "n": 2}
    whole = client.post(path, json=body).json()
    response = client.post(path, json=body | {"stream": True, "stream_options": options})
    assert response.text.endswith("\n\ndata: [DONE]\n\n") and response.text.count("[DONE]") == 1
    chunks = events(response)
    asks = options == {"include_usage": True}
    *others, last = chunks
    assert last["choices"] == [] if asks else last["choices"][0]["finish_reason"] == "length"
    assert last.get("usage") == (whole["usage"] if asks else None)
    assert not any(chunk.get("usage") or "metrics" in chunk or not chunk["choices"] for chunk in others)
    for index, choice in enumerate(whole["choices"]):
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        texts = [each["text"] if "text" in each else each["delta"].get("content", "") for each in own]
        assert "".join(texts) == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert [each["finish_reason"] for each in own if each.get("finish_reason")] == ["length"]
    assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] == 7


def test_chat_goes_through_the_template(client, alone):
    message = {"messages": [{"role": "user", "content": "a mean"}], "max_tokens": 16}
    text = client.post("/v1/chat/completions", json=message).json()["choices"][0]["message"]["content"]
    assert text == expected(alone, "# a mean\n", max_new_tokens=16, do_sample=False)
    with client.stream("POST", "/v1/chat/completions", json=message | {"stream": True}) as response:
        chunks = events(response)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    answer = client.post("/v1/responses", json={"input": "a mean", "max_output_tokens": 16, "stream": False}).json()
    assert answer["output"][0]["content"][0]["text"] == text and "speculative_decoding" in answer["metrics"]


def test_an_answer_tells_what_was_drafted_and_accepted(client):
    metrics = complete(client, prompt="x = [1, 1, 1, 1, 1, 1, 1,", max_tokens=48)["metrics"]["speculative_decoding"]
    steps, accepted = metrics["num_spec_steps"], metrics["num_accepted_draft_tokens"]
    assert steps == len(metrics["per_step_accepted"]) == len(metrics["per_step_drafted"])
    assert accepted == sum(metrics["per_step_accepted"]) and metrics["num_draft_tokens"] == sum(
        metrics["per_step_drafted"]
    )
    assert metrics["mean_acceptance_length"] == 1 + accepted / steps
    assert len(metrics["acceptance_histogram"]) == metrics["num_spec_tokens"] + 1
    assert sum(metrics["acceptance_histogram"]) == steps
    plain = complete(client, prompt="x = [1, 1, 1, 1, 1, 1, 1,", max_tokens=48, speculation=False)
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0 < metrics["num_draft_tokens"]


def test_a_request_without_a_limit_gets_what_is_left_of_a_row(client):
    response = client.post("/v1/completions", json={"prompt": "a " * 1500, "stop": ["a"]})
    assert response.status_code == 200, response.text


def test_the_models_are_the_one_that_is_served(client, folder):
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [str(folder)]
    assert client.post("/reset").status_code == 404


# What is refused


@pytest.mark.parametrize(
    ("status", "names", "body"),
    [
        (422, "body", b"{bad"),
        (422, "body", b"[1]"),
        (400, "prompt", {}),
        (400, "prompt", {"prompt": 5}),
        (400, "prompt", {"prompt": ["a", 5]}),
        (400, "temperature", {"prompt": "a", "temperature": "hot"}),
        (400, "temperature", {"prompt": "a", "temperature": -1}),
        (400, "top_p", {"prompt": "a", "top_p": 0}),
        (400, "max_tokens", {"prompt": "a", "max_tokens": 0}),
        (400, "max_tokens", {"prompt": "a", "max_tokens": 2.5}),
        (400, "seed", {"prompt": "a", "seed": True}),
        (400, "stop", {"prompt": "a", "stop": [""]}),
        (400, "n:", {"prompt": "a", "n": 0}),
        (400, "echo", {"prompt": "a", "echo": 1}),
        (400, "stream", {"prompt": "a", "stream": "yes"}),
        (400, "generation_config", {"prompt": "a", "generation_config": "{"}),
        (400, "speed", {"prompt": "a", "generation_config": '{"speed": 9}'}),
        (400, "beam", {"prompt": "a", "generation_config": '{"num_beams": 2}'}),
        (404, "another", {"prompt": "a", "model": "another"}),
        (400, "at least one token", {"prompt": ""}),
        (400, "vocabulary", {"prompt": "<unknown>"}),
        (400, "max_new_tokens", {"prompt": "a", "max_tokens": 3000}),
        (400, "max_new_tokens", {"prompt": "a " * 3000}),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_by_name(client, status, names, body):
    before = counts(client)
    content = body if isinstance(body, bytes) else json.dumps(body)
    for streamed in (False, True):
        if streamed and isinstance(body, dict) and "stream" not in body:
            content = json.dumps(body | {"stream": True})
        response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == status and names in response.text, response.text
    after = counts(client)
    assert after["prompt_tokens_total"] == before["prompt_tokens_total"]
    assert manager_of(client).output_router.result_handlers == {}


@pytest.mark.parametrize("messages", [None, [], "a", [5], [{"content": "a"}], [{"role": "user", "content": [1]}]])
def test_bad_messages_are_refused_by_name(client, messages):
    response = client.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400 and "messages" in response.text, response.text


# Clients, and load


def finished(client, reason):
    return manager_of(client).metrics()["requests_finished_total"].get(reason, 0)


def test_a_client_that_leaves_a_stream_frees_its_row(client):
    before = finished(client, "cancelled")
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: finished(client, "cancelled") == before + 1)
    assert client.runner.requests.active() == 0


def test_a_client_that_leaves_before_its_answer_frees_its_row(client):
    before = finished(client, "cancelled")
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=0.2)
    wait_until(lambda: finished(client, "cancelled") == before + 1)
    wait_until(lambda: manager_of(client).output_router.result_handlers == {})
    assert client.runner.requests.active() == 0


def test_a_full_queue_answers_429_at_once(client, alone):
    async def ask():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
            waiting = [asyncio.ensure_future(many.post("/v1/completions", json=LONG)) for _ in range(12)]
            while not any(task.done() for task in waiting):
                await asyncio.sleep(0.01)
            refused = [task.result() for task in waiting if task.done()]
            health = await many.get("/health")
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return refused, health

    refused, health = asyncio.run(ask())
    assert {response.status_code for response in refused} == {429} and health.status_code == 200
    assert all(int(response.headers["Retry-After"]) >= 1 for response in refused)
    assert counts(client)['request_rejected_total{reason="queue_full"}'] > 0
    wait_until(lambda: client.runner.requests.active() == 0)
    text = complete(client)["choices"][0]["text"]
    assert text == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)


def test_a_slow_client_loses_its_own_request_alone(client, alone, monkeypatch):
    """Nobody takes what is streamed, until the bound; another request is answered meanwhile."""
    requests = client.runner.requests
    monkeypatch.setattr(requests, "most_unread", 20)

    async def ask():
        slow = HttpCall(asyncio.get_running_loop(), limit_field="max_tokens", inputs=alone[1](PROMPT))
        config = GenerationConfig(do_sample=True, temperature=2.0, max_new_tokens=1500, eos_token_id=-1)
        requests.stream(slow, config, pieces := asyncio.Queue())
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as other:
            answer = await other.post("/v1/completions", json=SHORT)
        while slow.is_open:
            await asyncio.sleep(0.01)
        waiting = [pieces.get_nowait()[1] for _ in range(pieces.qsize())]
        return slow.output, waiting, answer.json()["choices"][0]["text"]

    output, waiting, text = asyncio.run(ask())
    assert output.finish_reason == "cancelled" and len(output.generated_tokens) < 1500
    assert "slowly" in waiting[-1].detail and None not in waiting
    assert text == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)


def test_an_error_of_a_request_is_its_own(client, alone, caplog):
    """A criterion of one's own that raises ends that request; others go on."""
    requests = client.runner.requests

    def fail(input_ids, scores, **kwargs):
        raise ArithmeticError('no "more"')

    manager, add = manager_of(client), manager_of(client).add_request

    def add_with_criterion(*args, **kwargs):
        return add(*args, **kwargs, stopping_criteria=[fail])

    manager.add_request = add_with_criterion
    try:
        response = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8})
        with client.stream("POST", "/v1/completions", json={"prompt": PROMPT, "stream": True}) as stream:
            chunks = events(stream)
    finally:
        manager.add_request = add
    assert "usage" not in chunks[-1] and response.status_code == 500
    for error in (response.json()["error"], chunks[-1]["error"]):
        told, name = error["message"].rsplit(" ", 1)
        assert told == "the server failed; its log has the reason under error"
        assert next(each.message for each in caplog.records if f"error {name}" in each.message).endswith('| no "more"')
    assert requests.ailment() is None
    assert complete(client)["choices"][0]["text"] == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)


def test_metrics_count_requests_tokens_and_drafts(client):
    before = counts(client)
    metrics = complete(client, prompt="x = [1, 1, 1, 1, 1,", max_tokens=40)["metrics"]["speculative_decoding"]
    after = counts(client)
    grown = {name: value - before.get(name, 0) for name, value in after.items() if value != before.get(name, 0)}
    assert grown["generation_tokens_total"] == 40
    assert grown["spec_decode_num_draft_tokens_total"] == metrics["num_draft_tokens"]
    assert grown.get("spec_decode_num_accepted_tokens_total", 0) == metrics["num_accepted_draft_tokens"]
    assert grown['request_success_total{finished_reason="length"}'] == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown[f"{name}_count"] == 1
    assert grown["inter_token_latency_seconds_count"] == 39
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0


# The end


def test_a_dead_worker_is_told_to_all_and_ends_the_server(folder, monkeypatch, caplog):
    monkeypatch.setattr(drain, "FAREWELL", 1.0)

    def fail():
        raise RuntimeError("the device is gone")

    async def ask(client):
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
            waiting = asyncio.ensure_future(many.post("/v1/completions", json=LONG))
            async with many.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                received = [await anext(lines)]
                manager_of(client).scheduler.step = fail
                received += [line async for line in lines if line]
            return await waiting, received

    with running(folder, slots=2) as client:
        answer, received = asyncio.run(ask(client))
        assert answer.status_code == 503 and DEAD in answer.text
        assert DEAD == json.loads(received[-1].removeprefix("data: "))["error"]["message"]
        for path, body in (("/health", None), ("/v1/completions", {"prompt": "a"})):
            response = client.request("POST" if body else "GET", path, json=body)
            assert response.status_code == 503 and DEAD in response.text
        wait_until(lambda: client.runner.should_exit)
        assert client.runner.has_failed and "the device is gone" in caplog.text


def test_rounds_that_do_not_end_are_unhealthy(client, monkeypatch):
    monkeypatch.setattr(manager_of(client), "stalled_seconds", lambda: 31.0)
    response = client.get("/health")
    assert response.status_code == 503 and "31 seconds" in response.text


def test_a_request_that_changes_rows_is_active(client, monkeypatch):
    active, copy = [], Rows.copy_row
    monkeypatch.setattr(Rows, "copy_row", lambda *row: active.append(client.runner.requests.active()) or copy(*row))
    complete(client)
    assert active and set(active) == {1}


@pytest.mark.sweep("30.0")
@pytest.mark.parametrize("grace", [30.0, 0.0])
def test_a_signal_stops_admission_and_lets_requests_end(folder, grace):
    """With no grace, what runs fails."""
    tokens = 150 if grace else 1900

    async def ask(client):
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
            running = asyncio.ensure_future(many.post("/v1/completions", json=LONG | {"max_tokens": tokens}))
            await asyncio.to_thread(wait_until, lambda: client.runner.requests.active() == 1)
            client.runner.handle_exit(15, None)
            refused = [await many.post("/v1/completions", json=LONG)] if grace else []
            return refused, await running

    with running(folder, grace, slots=1) as client:
        refused, answer = asyncio.run(ask(client))
        wait_until(lambda: client.runner.should_exit)
    assert all(each.status_code == 503 and "Retry-After" in each.headers for each in refused)
    assert answer.status_code == (200 if grace else 500)


@contextmanager
def command(folder, port, *more):
    """The process of the command, and a client of it, once it listens."""
    flags = ["--device", "cpu", "--dtype", "float32", "--port", port]
    words = ["-m", "spec_compile", "serve", folder, "--algo", "ngram", "--options", '{"compile": false}', *flags, *more]
    process = subprocess.Popen([sys.executable, *map(str, words)], stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://localhost:{port}", timeout=60) as client:
            for _ in range(1200):
                try:
                    client.get("/health")
                    break
                except httpx.ConnectError:
                    assert process.poll() is None, process.stderr.read()
                    time.sleep(0.1)
            yield process, client
    finally:
        process.kill()


@pytest.mark.slow
def test_the_command_serves_until_sigterm(folder, alone):
    with command(folder, 8123) as (process, client):
        assert complete(client)["choices"][0]["text"] == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)
        process.terminate()
        assert process.wait(30) in (0, -15)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_serve_one_model_and_end_together(folder, alone, size):
    """The server ends with a status when a rank dies, and the other ranks end with the server. No file of theirs stays
    in shared memory."""
    before = glob.glob("/dev/shm/spec_compile_*")
    with command(folder, 8125, "--tensor-parallel", size) as (process, client):
        assert complete(client)["choices"][0]["text"] == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)
        text = complete(client, temperature=0.8, seed=5)["choices"][0]["text"]
        options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 24}
        assert text == expected(alone, PROMPT, seed=5, **options)
        followers = psutil.Process(process.pid).children()
        assert len(followers) == size - 1
        sockets = [each for one in (psutil.Process(process.pid), *followers) for each in one.net_connections()]
        listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1", "::1"}
        followers[-1].kill()
        wait_until(lambda: client.get("/health").status_code == 503)
        assert f"rank {size - 1}" in client.get("/health").text and process.wait(30) == 1
        wait_until(lambda: not any(map(lives, followers)))
    with command(folder, 8125, "--tensor-parallel", size) as (process, _):
        followers = psutil.Process(process.pid).children()
        process.kill()
        wait_until(lambda: not any(map(lives, followers)))
    assert glob.glob("/dev/shm/spec_compile_*") == before


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_rank_that_does_not_start_ends_the_server():
    """Which would wait for it."""
    script = (
        "import sys, time; from spec_compile.serve import followers\n"
        "followers.COMMAND = [sys.executable, '-c', 'input(); raise SystemExit(3)']\n"
        "with followers.Followers(2, {}): time.sleep(100)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "rank 1" in ended.stderr and "status 3" in ended.stderr


def test_a_model_that_cannot_be_loaded_ends_the_other_ranks(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(followers, "COMMAND", [sys.executable, "-c", "input(); input()"])

    def stop(ranks):
        started.extend(ranks.processes)
        folder = os.path.dirname(os.environ[followers.STORE])
        assert os.stat(folder).st_mode & 0o777 == 0o700  # no other user joins them

    monkeypatch.setattr(followers.Followers, "stop", stop)
    monkeypatch.setattr(followers.os, "environ", dict(os.environ))
    with pytest.raises(OSError, match="none"):
        build(tmp_path / "none", tensor_parallel=2, device="cpu")
    (process,) = started
    process.stdin.close()
    assert process.wait(10) == 1  # input() has met the end of its pipe


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument"),
        (["m", "--spead", "1"], "No such option"),
        (["m", "--port", "many"], "Invalid value"),
        (["m", "--options", "5"], "expected a JSON object"),
        (["m", "--slots", "0"], "Invalid value"),
    ],
)
def test_bad_arguments_are_refused_before_work(arguments, says, capsys):
    from spec_compile.__main__ import main

    with pytest.raises(SystemExit) as end:
        main(["serve", *arguments])
    assert end.value.code == 2 and says in capsys.readouterr().err


def test_a_missing_folder_is_one_line(tmp_path, capsys):
    from spec_compile.__main__ import main

    assert main(["serve", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
