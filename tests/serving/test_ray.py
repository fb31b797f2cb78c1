"""Replicas on a local Ray: answers, streams, a replica that is killed, overload, and a batch of Ray Data."""

import asyncio
import json
import os
import runpy
import socket
import subprocess
import sys
import time

import psutil
import pytest

for package in ("ray.serve", "ray.data", "fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package, reason=f"needs the extras ray and serve: {package}")
httpx = pytest.importorskip("httpx", reason="needs httpx, which fastapi's tests need, too")

import ray
from ray import serve
from server_fixtures import DEMO, EAGER, PROMPT, save_model, wait_until

from spec_compile.serving.ray import Answers, app

EXAMPLES = DEMO.parent
pytestmark = pytest.mark.slow
SHORT = {"prompt": PROMPT, "max_tokens": 24}
LONG = {"prompt": PROMPT, "max_tokens": 1900, "temperature": 2.0, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(folder):
    """A client of two replicas, which answer two requests each at once and let two more wait."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        scale = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}, "health_check_period_s": 1}
        flags = {"dtype": "float32"}
        serve.run(app(folder, options=EAGER, device="cpu", slots=2, max_queue=2, flags=flags, **scale))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def complete(client, **body):
    return client.post("/v1/completions", json=SHORT | body)


def replicas():
    """The processes of replicas, as psutil has them."""
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if "ray::ServeReplica" in "".join(process.info["cmdline"] or [])]


def test_replicas_answer(client):
    answers = [complete(client).json() for _ in range(6)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert all("speculative_decoding" in answer["metrics"] for answer in answers)
    assert client.get("/health").json() == {"status": "ok"}


def test_a_stream_comes_in_pieces(client):
    whole = complete(client).json()["choices"][0]["text"]
    with client.stream(
        "POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 24, "stream": True}
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    chunks = [json.loads(line) for line in lines]
    assert len(chunks) > 2 and "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_overload_is_429(client):
    async def ask():
        async with httpx.AsyncClient(base_url=client.base_url, timeout=120) as many:
            body = LONG | {"max_tokens": 100}
            return await asyncio.gather(*(many.post("/v1/completions", json=body) for _ in range(30)))

    responses = asyncio.run(ask())
    assert {response.status_code for response in responses} == {200, 429}
    assert all("Retry-After" in response.headers for response in responses if response.status_code == 429)


def test_a_replica_that_is_killed_breaks_its_streams_alone(client):
    """The client sees a broken transfer, not a short answer; the next requests are served, and the replica returns."""
    before = {process.pid for process in replicas()}
    with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        received = [next(lines)]
        busy = {process: sum(process.cpu_times()[:2]) for process in replicas()}
        time.sleep(0.3)
        max(busy, key=lambda process: sum(process.cpu_times()[:2]) - busy[process]).kill()
        with pytest.raises(httpx.TransportError):
            received += lines
    assert not any("usage" in line or "[DONE]" in line for line in received)
    assert [complete(client).status_code for _ in range(4)] == [200] * 4
    wait_until(lambda: len({process.pid for process in replicas()}) == 2 and {p.pid for p in replicas()} != before, 60)


def test_a_replica_may_be_of_several_ranks(client, folder):
    one = complete(client).json()["choices"][0]["text"]
    settings = {"options": EAGER, "device": "cpu", "slots": 2, "flags": {"dtype": "float32"}, "tensor_parallel": 2}
    actor = {"ray_actor_options": {"num_cpus": 0.5}}
    serve.run(app(folder, **settings, **actor), name="ranks", route_prefix="/ranks")
    response = client.post("/ranks/v1/completions", json=SHORT)
    serve.delete("ranks")
    assert response.json()["choices"][0]["text"] == one


def test_a_job_that_was_stopped_goes_on_where_it_was(client, folder, tmp_path, monkeypatch):
    """examples/ray_data.py, with a file of answers whose last line is torn."""
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [json.dumps({"id": number, "prompt": f"x = {number}\n"}) for number in range(5)]
    prompts.write_text("\n".join(lines) + "\n")
    answers.write_text('{"id": 0, "answer": "kept"}\n{"id": 1, "ans')
    arguments = [str(prompts), str(answers), "--model", str(folder), "--eager", "--new-tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["ray_data.py", *arguments])
    runpy.run_path(str(EXAMPLES / "ray_data.py"), run_name="__main__")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(row["id"] for row in rows) == [0, 1, 2, 3, 4] and rows[0]["answer"] == "kept"
    written = answers.read_bytes()
    runpy.run_path(str(EXAMPLES / "ray_data.py"), run_name="__main__")
    assert answers.read_bytes() == written


def test_the_example_of_ray_serve_prints_an_answer(folder):
    command = [sys.executable, str(EXAMPLES / "ray_serve.py"), "--model", str(folder), "--eager", "--port", "8124"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0 and "accept length" in printed.stdout, printed.stderr[-2000:]


def test_a_batch_of_ray_data_is_answered(client, folder):
    """A prompt that is refused has an error, and disturbs no other."""
    texts = [f"x = {number}\n" for number in range(8)] + ["<unknown>"]
    prompts = ray.data.from_items([{"prompt": text} for text in texts])
    settings = {"model": str(folder), "options": EAGER, "device": "cpu", "dtype": "float32", "max_new_tokens": 8}
    answered = prompts.map_batches(
        Answers, fn_constructor_kwargs=settings, batch_size=4, compute=ray.data.ActorPoolStrategy(size=1)
    ).take_all()
    errors = [row["prompt"] for row in answered if row["error"]]
    assert len(answered) == 9 and errors == ["<unknown>"]
    assert all(row["answer"] and row["accept_length"] >= 1 for row in answered if not row["error"])
    wanted = complete(client, prompt="x = 5\n", max_tokens=8).json()["choices"][0]["text"]
    assert next(row["answer"] for row in answered if row["prompt"] == "x = 5\n") == wanted
