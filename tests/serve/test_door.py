"""Who may call a server: keys on every route, names in Host, origins of web pages, and the address of the metrics."""

import asyncio
import itertools
import json
import logging
import socket

import httpx
import pytest
from fastapi import FastAPI
from server_fixtures import COMPLETIONS, MESSAGES, body, refusal, running, save_tool_model

from spec_compile.serve import call
from spec_compile.serve.door import HostMiddleware, KeyMiddleware, Keys, is_loopback
from spec_compile.serve.runner import Runner

KEYS = ["sk-first", "sk-second+/="]
ROUTES = [
    ("GET", "/v1/models"), ("OPTIONS", "/v1/models"), ("GET", "/v1/models/tiny"), ("GET", "/metrics"),
    ("GET", "/docs"), ("GET", "/redoc"), ("GET", "/openapi.json"), ("GET", "/docs/oauth2-redirect"), ("GET", "/"),
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/load_model"),
    ("POST", "/v1/load_lora_adapter"), ("GET", "/nothing"), ("DELETE", "/v1/completions"), ("POST", "/health"),
    ("GET", "//health"), ("GET", "/health/"), ("GET", "/HEALTH"),
]  # fmt: skip
SAVE = save_tool_model
SERVER = dict(slots=2, served_model_name="tiny", keys=Keys(KEYS), enable_cors=True)


@pytest.fixture(scope="module")
def open_client(folder):
    """Of a server on loopback without keys."""
    runner = {"allowed_hosts": ["models.example:80"], "metrics": ("127.0.0.1", 0)}
    with running(folder, slots=2, served_model_name="tiny", runner=runner, enable_cors=True) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(client, method, path):
    for headers in (
        {}, {"Authorization": "Bearer sk-firs"}, {"Authorization": "Bearer"}, {"Authorization": "Basic sk-first"},
        {"Authorization": "sk-first"}, {"x-api-key": ""}, {"Authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "sk-first,sk-second+/="}, {"Cookie": "Authorization=Bearer sk-first"},
    ):  # fmt: skip
        response = client.request(method, path, headers=headers, params={"api_key": "sk-first"})
        error = response.json()["error"]
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        of_anthropic = path.startswith("/v1/messages")
        assert error["type"] == ("authentication_error" if of_anthropic else "invalid_request_error")
        assert "sk-first" not in response.text and ("code" in error) != of_anthropic


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "Bearer sk-first"}, {"Authorization": "bearer   sk-second+/="}, {"x-api-key": "sk-first"},
     {"Authorization": "Basic abc", "X-API-Key": "sk-second+/="}],
    ids=str,
)  # fmt: skip
def test_each_key_opens_all_routes(client, monkeypatch, headers):
    """The key's digest is the owner of the call, and /health needs none."""
    owners, made = [], call.HttpCall
    monkeypatch.setattr(call, "HttpCall", lambda loop, owner, **more: owners.append(owner) or made(loop, owner, **more))
    assert client.post(COMPLETIONS, json=body(COMPLETIONS), headers=headers).status_code == 200
    assert client.get("/metrics", headers=headers).status_code == 200
    assert client.get("/health").json() == {"status": "ok"} and client.head("/health").status_code == 405
    second = "second" in str(headers)
    assert owners[:2] == [Keys([KEYS[second]]).owner([(b"x-api-key", KEYS[second].encode())])] * 2
    assert len({*owners}) == 2 and owners[2] == ""


def test_a_body_without_a_key_is_not_asked_for(client):
    """A client that waits for leave to send its body gets 401 instead."""
    with socket.create_connection((client.base_url.host, client.base_url.port), 10) as raw:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
        raw.sendall(head)
        assert raw.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_web_pages_may_ask_whether_they_may_ask(client):
    """A preflight has no key; any other OPTIONS needs one. Cookies are of no use, so pages may not send them."""
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    response = client.options("/v1/completions", headers=asks)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers
    refused = client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "*"


def test_answers_do_not_name_the_server(client):
    assert "server" not in client.get("/health").headers


HOSTS = {
    200: ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "models.example"],
    400: ["evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "localhost:x", "", "[::1", "0.0.0.0",
          "evil.example/localhost"],
}  # fmt: skip
ORIGINS = {
    200: ["http://localhost:3000", "http://[::1]", "https://models.example"],
    403: ["https://evil.example", "null", "file://", "http://localhost.evil.example"],
}


@pytest.mark.parametrize(("header", "values"), [("Host", HOSTS), ("Origin", ORIGINS)])
def test_a_server_on_loopback_is_called_by_its_names_and_its_pages(open_client, header, values):
    """A page of an attacker whose name has this machine's address (DNS rebinding) sends its name."""
    for status, names in values.items():
        for name, path in itertools.product(names, ("/health", "/v1/models")):
            assert open_client.get(path, headers={header: name}).status_code == status, name
    for host in HOSTS[400]:
        assert "Host:" in refusal(open_client.post(MESSAGES, json={}, headers={"Host": host}))


def test_metrics_have_an_address(open_client):
    address = open_client.runner.servers[-1].sockets[0].getsockname()
    url = f"http://127.0.0.1:{address[1]}/metrics"
    assert address[0] == "127.0.0.1" and open_client.get("/metrics").status_code == 404
    assert "spec_compile:num_requests_running" in httpx.get(url).text
    assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 400
    assert httpx.get(url.replace("/metrics", "/v1/models")).status_code == 404


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\tb", "clé", "a\x00", "\u200b", None])
def test_bad_keys_are_refused_at_the_start(tmp_path, monkeypatch, key):
    """The message does not have the key."""
    with pytest.raises(ValueError, match="api_key: key 2 ") as error:
        Keys(["sk-secret", key])
    assert "secret" not in str(error.value) and (not key or len(key.strip()) < 2 or key not in str(error.value))
    if key is not None and "\n" not in key:
        (tmp_path / "keys").write_text(f"sk-secret\n{key}\n")
        with pytest.raises(ValueError, match=r"api_key_file .*: key 2 "):
            Keys.read((), tmp_path / "keys")
    if key is not None and "\x00" not in key:
        monkeypatch.setenv("SPEC_COMPILE_API_KEY", f"sk-secret,{key}")
        with pytest.raises(ValueError, match="SPEC_COMPILE_API_KEY: key 2 "):
            Keys.read(())


def test_keys_come_from_options_a_file_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_COMPILE_API_KEY", "c,d")
    (tmp_path / "keys").write_text("a\nb\n")
    keys = Keys.read(["e"], tmp_path / "keys")
    owners = [keys.owner([(b"authorization", b"Bearer " + key)]) for key in (b"a", b"b", b"c", b"d", b"e")]
    assert None not in owners and len({*owners}) == 5 and keys.owner([(b"x-api-key", b"c,d")]) is None
    assert not Keys.read(()), "children of the process would get the variable"
    for file in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            Keys.read((), file)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="key 1 is empty"):
        Keys.read((), tmp_path / "empty")


def test_keys_are_shown_nowhere(client, caplog):
    keys = client.runner.config.app.user_middleware
    key = {"Authorization": "Bearer sk-first"}
    with caplog.at_level(logging.DEBUG):
        texts = [client.post("/v1/completions", json={"prompt": 5}, headers=key).text]
        texts.append(client.get("/metrics", headers=key).text)
    for text in (*texts, caplog.text, repr(keys), repr(Keys(KEYS)), repr(vars(Keys(KEYS)))):
        assert "sk-first" not in text and "sk-second" not in text


@pytest.mark.parametrize(
    ("host", "is_safe"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False),
     ("", False), (None, False), ("10.0.0.1", False), ("my.host", False)],
)  # fmt: skip
def test_a_server_that_anybody_may_use_says_so(client, monkeypatch, caplog, host, is_safe):
    assert is_loopback(host) == is_safe
    server = client.runner.config  # a runner needs a server that was built, and changes only its config and its app
    made = type("Server", (), {"config": server, "requests": client.runner.requests, "app": FastAPI()})()
    monkeypatch.setattr(server, "host", host)
    for keys in (Keys(()), Keys(KEYS)):
        made.keys = keys
        caplog.clear()
        Runner(made)
        assert ("without an API key" in caplog.text) == (not is_safe and not keys)
        hosts = [each for each in made.app.user_middleware if each.cls is HostMiddleware]
        assert len(hosts) == is_safe
    monkeypatch.undo()


def test_ray_has_the_same_door():
    """The ingress asks for keys itself, and passes a browser's preflight on to replicas, which answer it."""
    passed = []

    async def app(scope, receive, send):
        passed.append(scope.get(call.OWNER))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(method, headers):
        door = KeyMiddleware(app, Keys(KEYS), lets_preflights=True)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://a") as client:
            return (await client.request(method, "/v1/models", headers=headers)).status_code

    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert asyncio.run(ask("OPTIONS", preflight)) == 200 and asyncio.run(ask("POST", preflight)) == 401
    assert asyncio.run(ask("OPTIONS", {})) == 401 and asyncio.run(ask("GET", {"x-api-key": "sk-first"})) == 200
    assert passed[0] == "" and len(passed[1]) == 16


def test_a_path_is_quoted_within_bounds(open_client):
    message = open_client.get("/" + "a%0Ab%1B%E2%80%AE" * 200).json()["error"]["message"]
    assert len(message) < 300 and message.isprintable() and json.dumps("/a\nb\x1b\u202ea")[1:-1] in message
