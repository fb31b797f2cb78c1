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

from server_fixtures import (  # isort: skip
    CHATS, COMPLETIONS, DIALECTS, MESSAGES, PROMPT, RESPONSES, ask, body, events, expected, read, running, together,
    wait_until,
)  # fmt: skip
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


def complete(client):
    """The text of a short answer."""
    return ask(client, COMPLETIONS, PROMPT, 24).text


def counts(client):
    """The page /metrics, as a dict from name to value."""
    lines = client.get("/metrics").text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name.removeprefix("spec_compile:"): float(value) for name, value in pairs}


def manager_of(client):
    return client.runner.requests.manager


# Answers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
def test_an_answer_is_that_of_generate(client, alone, path, stream):
    prompt, rendered = (PROMPT, PROMPT) if path == COMPLETIONS else ("a mean", "# a mean\n")
    answer = ask(client, path, prompt, 24, stream=stream)
    assert answer.text == expected(alone, rendered, max_new_tokens=24, do_sample=False)
    assert answer.reason == {RESPONSES: "incomplete", MESSAGES: "max_tokens"}.get(path, "length")
    sizes = [value for name, value in answer.usage.items() if name in ("prompt_tokens", "input_tokens")]
    assert sizes == [len(alone[1](rendered)["input_ids"])] and answer.count == 24
    assert answer.figures or (path, stream) == (RESPONSES, True)


def test_each_request_has_its_own_settings(client, alone):
    """Sampled and greedy answers, limits and stops, all at once."""
    wanted = [
        ({"temperature": 0.8, "seed": 5}, {"do_sample": True, "temperature": 0.8, "seed": 5}),
        ({}, {"do_sample": False}),
        ({"max_tokens": 3}, {"do_sample": False, "max_new_tokens": 3}),
        ({"generation_config": '{"repetition_penalty": 1.5}'}, {"do_sample": False, "repetition_penalty": 1.5}),
        ({"stop": ["1"]}, {"do_sample": False, "stop_strings": ["1"], "tokenizer": alone[1]}),
    ]
    responses = together(client, COMPLETIONS, [SHORT | fields for fields, _ in wanted])
    texts = [expected(alone, PROMPT, **{"max_new_tokens": 24} | options) for _, options in wanted]
    answers = [read(each) for each in responses]
    assert [each.text for each in answers] == [*texts[:4], texts[4].partition("1")[0]]
    assert answers[4].reason == "stop"


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}], ids=str)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_stream_has_the_same_text_and_the_usage_if_it_is_asked_for(client, path, options):
    """The usage is a chunk of its own before the mark of the end, as OpenAI's reference says."""
    fields = body(path, "a mean", 24, n=2)
    whole = client.post(path, json=fields).json()
    response = client.post(path, json=fields | {"stream": True, "stream_options": options})
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


def test_an_answer_tells_what_was_drafted_and_accepted(client):
    metrics = ask(client, COMPLETIONS, "x = [1, 1, 1, 1, 1, 1, 1,", 48).figures
    steps, accepted = metrics["num_spec_steps"], metrics["num_accepted_draft_tokens"]
    assert steps == len(metrics["per_step_accepted"]) == len(metrics["per_step_drafted"])
    assert accepted == sum(metrics["per_step_accepted"])
    assert metrics["num_draft_tokens"] == sum(metrics["per_step_drafted"])
    assert metrics["mean_acceptance_length"] == 1 + accepted / steps
    assert len(metrics["acceptance_histogram"]) == metrics["num_spec_tokens"] + 1
    assert sum(metrics["acceptance_histogram"]) == steps
    plain = ask(client, COMPLETIONS, "x = [1, 1, 1, 1, 1, 1, 1,", 48, speculation=False).figures
    assert plain["num_draft_tokens"] == 0 < metrics["num_draft_tokens"]


def test_a_request_without_a_limit_gets_what_is_left_of_a_row(client):
    assert client.post(COMPLETIONS, json={"prompt": "a " * 1500, "stop": ["a"]}).status_code == 200


def test_the_models_are_the_one_that_is_served(client, folder):
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [str(folder)]
    assert client.post("/reset").status_code == 404


# Clients, and load


def test_a_slow_client_loses_its_own_request_alone(client, alone, monkeypatch):
    """Nobody takes what is streamed, until the bound; another request is answered meanwhile."""
    requests = client.runner.requests
    monkeypatch.setattr(requests, "most_unread", 20)

    async def ask():
        slow = HttpCall(asyncio.get_running_loop(), limit_field="max_tokens", inputs=alone[1](PROMPT))
        config = GenerationConfig(do_sample=True, temperature=2.0, max_new_tokens=1500, eos_token_id=-1)
        requests.stream(slow, config, pieces := asyncio.Queue())
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as other:
            answer = await other.post(COMPLETIONS, json=SHORT)
        while slow.is_open:
            await asyncio.sleep(0.01)
        waiting = [pieces.get_nowait()[1] for _ in range(pieces.qsize())]
        return slow.output, waiting, answer.json()["choices"][0]["text"]

    output, waiting, text = asyncio.run(ask())
    assert output.finish_reason == "cancelled" and len(output.generated_tokens) < 1500
    assert "slowly" in waiting[-1].detail and None not in waiting
    assert text == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)


def test_metrics_count_requests_tokens_and_drafts(client):
    before = counts(client)
    metrics = ask(client, COMPLETIONS, "x = [1, 1, 1, 1, 1,", 40).figures
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
            waiting = asyncio.ensure_future(many.post(COMPLETIONS, json=LONG))
            async with many.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                received = [await anext(lines)]
                manager_of(client).scheduler.step = fail
                received += [line async for line in lines if line]
            return await waiting, received

    with running(folder, slots=2) as client:
        answer, received = asyncio.run(ask(client))
        assert answer.status_code == 503 and DEAD in answer.text
        assert DEAD == json.loads(received[-1].removeprefix("data: "))["error"]["message"]
        for path, body in (("/health", None), (COMPLETIONS, {"prompt": "a"})):
            response = client.request("POST" if body else "GET", path, json=body)
            assert response.status_code == 503 and DEAD in response.text
        wait_until(lambda: client.runner.should_exit)
        assert client.runner.has_failed and "the device is gone" in caplog.text


def test_rounds_that_do_not_end_are_unhealthy(client, monkeypatch):
    monkeypatch.setattr(manager_of(client), "stalled_seconds", lambda: 31.0)
    response = client.get("/health")
    assert response.status_code == 503 and "31 seconds" in response.text


def test_a_request_that_changes_rows_is_active(client, monkeypatch):
    active, move = [], Rows.move_row
    monkeypatch.setattr(Rows, "move_row", lambda *row: active.append(client.runner.requests.active()) or move(*row))
    complete(client)
    assert active and set(active) == {1}


@pytest.mark.sweep("30.0")
@pytest.mark.parametrize("grace", [30.0, 0.0])
def test_a_signal_stops_admission_and_lets_requests_end(folder, grace):
    """With no grace, what runs fails."""
    tokens = 150 if grace else 1900

    async def ask(client):
        async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as many:
            running = asyncio.ensure_future(many.post(COMPLETIONS, json=LONG | {"max_tokens": tokens}))
            await asyncio.to_thread(wait_until, lambda: client.runner.requests.active() == 1)
            client.runner.handle_exit(15, None)
            refused = [await many.post(COMPLETIONS, json=LONG)] if grace else []
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
        assert complete(client) == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)
        process.terminate()
        assert process.wait(30) in (0, -15)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_serve_one_model_and_end_together(folder, alone, size):
    """The server ends with a status when a rank dies, and the other ranks end with the server. No file of theirs stays
    in shared memory."""
    before = glob.glob("/dev/shm/spec_compile_*")
    with command(folder, 8125, "--tensor-parallel", size) as (process, client):
        assert complete(client) == expected(alone, PROMPT, max_new_tokens=24, do_sample=False)
        drawn = ask(client, COMPLETIONS, PROMPT, 24, temperature=0.8, seed=5).text
        assert drawn == expected(alone, PROMPT, 5, do_sample=True, temperature=0.8, max_new_tokens=24)
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
