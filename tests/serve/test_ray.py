"""Replicas on a local Ray: all routes, prefixes, a replica that is killed, and a batch of Ray Data."""

import json
import os
import runpy
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

for package in ("ray.serve", "ray.data", "fastapi", "openai", "prometheus_client"):
    pytest.importorskip(package, reason=f"needs the extras ray and serve: {package}")
import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from server_fixtures import COMPLETIONS, DEMO, DIALECTS, EAGER, PROMPT, ask, body, refusal, wait_until

from spec_compile.serve.ray import Answers, app

EXAMPLES = DEMO.parent
pytestmark = pytest.mark.slow
SHORT = {"prompt": PROMPT, "max_tokens": 24}
LONG = {"prompt": PROMPT, "max_tokens": 1900, "temperature": 2.0, "seed": 1}


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


def replicas():
    """The processes of replicas, as psutil has them."""
    processes = psutil.process_iter(["cmdline"])
    name = "ray::ServeReplica:default:Replica"  # the ingress has another one
    return [process for process in processes if name in "".join(process.info["cmdline"] or [])]


def test_replicas_answer(client):
    """A stream comes in pieces."""
    answers = [ask(client, COMPLETIONS, PROMPT, 24, stream=number == 5) for number in range(6)]
    assert len({answer.text for answer in answers}) == 1 and all(answer.figures for answer in answers)
    assert len(answers[5].parts) > 2 and client.get("/health").json() == {"status": "ok"}


def by_replica(client, name):
    """A metric of each replica."""
    page = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    return {sample.labels["replica"]: sample.value for sample in families[f"spec_compile:{name}"].samples}


def test_every_route_is_passed_on(client):
    name = client.get("/v1/models").json()["data"][0]["id"]
    assert client.get(f"/v1/models/{name}").json()["id"] == name
    assert all(ask(client, path).text for path in DIALECTS)
    tokens = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": PROMPT}
    assert len(by_replica(client, "num_requests_running")) == 2
    refusal(client.post(COMPLETIONS, json=body(COMPLETIONS, limit=0)), "max_tokens")
    assert client.get("/nothing").json()["error"]["code"] == "unknown_url"
    response = client.post(COMPLETIONS, json=SHORT, headers={"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine" == response.json()["id"]


def test_requests_go_to_the_replica_that_holds_their_prefix(client):
    """Of two conversations each stays where it was."""
    before = by_replica(client, "prompt_tokens")
    for prefix in ("one = 1\n" * 60, "two = 2\n" * 60):
        begun = by_replica(client, "prompt_tokens")
        for turn in range(4):
            ask(client, COMPLETIONS, prefix + f"x = {turn}\n", 4)
        grown = [after - begun[name] for name, after in by_replica(client, "prompt_tokens").items()]
        assert sorted(grown)[0] == 0 and sorted(grown)[1] > 1000
    assert by_replica(client, "prompt_tokens") != before


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_leaves_nothing(client, streamed):
    asked = LONG | {"stream": streamed, "seed": 2}
    before = sum(by_replica(client, "generation_tokens").values())
    if streamed:
        with client.stream("POST", COMPLETIONS, json=asked) as response:
            assert next(lines := response.iter_lines()) and lines
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post(COMPLETIONS, json=asked, timeout=0.5)
    wait_until(lambda: not sum(by_replica(client, "num_requests_running").values()))
    assert sum(by_replica(client, "generation_tokens").values()) < before + 1900


def kill_the_busiest():
    """Kill the process of the replica that computes."""
    busy = {process: sum(process.cpu_times()[:2]) for process in replicas()}
    time.sleep(0.3)
    max(busy, key=lambda process: sum(process.cpu_times()[:2]) - busy[process]).kill()


def wait_for_replicas(client):
    """Until two replicas answer."""

    def are_two():
        response = client.get("/metrics")
        return response.status_code == 200 and response.text.count("spec_compile:num_requests_running{") == 2

    wait_until(are_two, 300)


def test_a_replica_that_is_killed_loses_no_request_that_has_sent_no_token(client):
    """Whole answers, running and waiting: each client gets the answer of the other replica."""
    bodies = [LONG | {"max_tokens": 600, "seed": seed} for seed in range(4)]
    wanted = [client.post(COMPLETIONS, json=bodies[seed]).json()["choices"] for seed in range(2)]

    with ThreadPoolExecutor() as pool:
        asking = []
        for asked in bodies:  # two may wait at once for a replica to take them
            asking.append(pool.submit(client.post, COMPLETIONS, json=asked))
            time.sleep(0.1)
        kill_the_busiest()
        responses = [each.result() for each in asking]
    assert [response.status_code for response in responses] == [200] * 4
    assert [response.json()["choices"] for response in responses[:2]] == wanted
    wait_for_replicas(client)


def test_a_replica_may_be_of_several_ranks(client, folder):
    one = ask(client, COMPLETIONS, PROMPT, 24).text
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
    wanted = ask(client, COMPLETIONS, "x = 5\n", 8).text
    assert next(row["answer"] for row in answered if row["prompt"] == "x = 5\n") == wanted
