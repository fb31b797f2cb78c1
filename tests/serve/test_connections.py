"""Connections that are silent, slow or many: they end by themselves or make room, and others are answered meanwhile."""

import json
import resource
import socket
import threading
import time

import httpx
import pytest
from server_fixtures import PROMPT, wait_until

from spec_compile.serve import body
from spec_compile.serve import runner as connections
from spec_compile.serve.runner import Connections, Limits

SECONDS = 1.0
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
SHORT = {"prompt": PROMPT, "max_tokens": 2}


LIMITS = Limits(connections=40, from_one_address=30, seconds=SECONDS)
SERVER = dict(slots=2, max_queue=4, runner={"limits": LIMITS})
ASKED = json.dumps(SHORT).encode()
ASKS = HEAD % len(ASKED) + ASKED


@pytest.fixture(scope="module", autouse=True)
def no_body_is_left(client):
    yield
    wait_until(lambda: not client.runner.requests.bodies._sizes)
    assert not client.runner.requests.bodies._timers


@pytest.fixture
def connect(client):
    """Opens connections to the server, which are closed afterwards."""
    opened = []

    def connect(data=b"", address="127.0.0.1"):
        raw = socket.create_connection((client.base_url.host, client.base_url.port), 10, (address, 0))
        opened.append(raw)
        raw.sendall(data)
        return raw

    yield connect
    for raw in opened:
        raw.close()
    wait_until(lambda: len(client.runner.connections.all) <= 1)


def answer(raw):
    """All that a server sends until it closes the connection."""
    parts = []
    try:
        while part := raw.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def is_answered(client):
    """Another client, with a connection of its own, is answered."""
    with httpx.Client(base_url=client.base_url, timeout=10) as other:
        assert other.get("/health").status_code == 200
        assert other.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("data", [b"", b"GET /heal", HEAD % 5000 + b'{"prompt": "'], ids=["silent", "headers", "body"])
@pytest.mark.parametrize("addresses", [1, 3])
def test_idle_connections_lock_nobody_out(client, connect, data, addresses):
    """Three times as many as may be open, also from several addresses."""
    for number in range(120):
        connect(data, f"127.0.0.{1 + number % addresses}")
    is_answered(client)
    assert len(client.runner.connections.all) <= 40 + connections.BESIDE


def test_connections_that_are_not_used_end(client, connect):
    """One that was never used, one whose headers stop, one that sends a byte at times, and one after its answer."""
    silent, begun, slow = connect(), connect(b"GET /health HTTP/1.1\r\nHost: a"), connect()
    for byte in b"GET /health HTTP":
        try:
            slow.sendall(bytes([byte]))
        except OSError:
            break
        time.sleep(SECONDS / 5)
    assert answer(silent) == b""
    for raw in (begun, slow):
        told = answer(raw)
        assert told.startswith(b"HTTP/1.1 408 ") or raw is slow  # whose last bytes may have reset the connection
    assert json.loads(told.partition(b"\r\n\r\n")[2] or b'{"error": 0}').keys() == {"error"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_body_must_come_in_time(client, connect, path):
    """Also if a byte comes at times; the error has the endpoint's form."""
    raw = connect((HEAD % 10_000).replace(b"/v1/completions", path.encode()))
    threading.Thread(target=drip, args=(raw,), daemon=True).start()
    told = answer(raw)
    assert told.startswith(b"HTTP/1.1 408 ") and b"connection: close" in told.lower()
    error = json.loads(told.partition(b"\r\n\r\n")[2])["error"]
    assert "too slowly" in error["message"] and error["type"] == "invalid_request_error"


def drip(raw):
    """Send a byte at times. True if the other end closes."""
    try:
        for _ in range(100):
            raw.sendall(b" ")
            time.sleep(0.1)
    except OSError:
        return True
    return False


def test_a_body_of_crumbs_is_refused(client, connect):
    """43,000 chunks of a byte would take the event loop 0.6 seconds. 500 small ones are read."""
    chunked = HEAD.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked")
    told = answer(connect(chunked + b"1\r\n \r\n" * 40_000))
    assert not told or told.startswith(b"HTTP/1.1 400 "), told
    is_answered(client)
    content = ASKED.ljust(50_000)
    parts = [content[place : place + 100] for place in range(0, 50_000, 100)]
    told = connect(chunked + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")
    assert told.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_large_body_has_more_time(client, connect, monkeypatch):
    """As long as it comes fast enough."""
    monkeypatch.setattr(body, "LEAST_RATE", 50_000)
    content = ASKED.ljust(200_000)
    raw = connect(HEAD % len(content))
    for place in range(0, len(content), 20_000):
        raw.sendall(content[place : place + 20_000])
        time.sleep(SECONDS / 5)
    assert raw.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [(HEAD % 10**9, 413), (HEAD.replace(b"json", b"xml") % 1000, 415), (HEAD.replace(b"/v1/c", b"/v2/c") % 1000, 404),
     (HEAD.replace(b"Host", b"X-Request-Id: \xff\r\nHost") % 1000, 400)],
    ids=["large", "type", "path", "id"],
)  # fmt: skip
def test_a_bad_head_is_answered_before_the_body_comes(connect, head, status):
    """Then the rest of the body has a time, too."""
    raw = connect(head)
    assert raw.recv(4096).startswith(b"HTTP/1.1 %d " % status)
    assert drip(raw)


def test_a_full_queue_is_told_before_the_body_comes(client, connect):
    """Other routes, which need no row, go on."""
    manager = client.runner.requests.manager
    with manager.pause():
        others = [connect(ASKS) for _ in range(6)]
        wait_until(lambda: manager.queue_room == 0)
        assert connect(HEAD % 1_000_000).recv(4096).startswith(b"HTTP/1.1 429 ")
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert {raw.recv(12) for raw in others} <= {b"HTTP/1.1 200", b"HTTP/1.1 429"}


def test_bodies_have_a_size_together(client, connect, monkeypatch):
    """The oldest one that has not come makes room, and a whole one is answered."""
    bodies = client.runner.requests.bodies
    monkeypatch.setattr(bodies, "most", 300_000)
    monkeypatch.setattr(bodies, "seconds", 10.0)
    held = [connect(HEAD % 100_001 + b" " * 100_000) for _ in range(3)]
    wait_until(lambda: sum(bodies._sizes.values()) == 300_000)
    assert client.post("/v1/completions", json=SHORT).status_code == 200
    assert held[0].recv(4096).startswith(b"HTTP/1.1 429 ") and sum(bodies._sizes.values()) == 200_000
    assert connect(HEAD % 300_002 + b" " * 300_001).recv(4096).startswith(b"HTTP/1.1 429 ")
    for raw in held:
        raw.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_never_reads_is_left(client, connect, monkeypatch, stream):
    """Its answer does not stay in memory."""
    monkeypatch.setattr(connections, "UNREAD_SECONDS", SECONDS)
    monkeypatch.setattr(client.runner.config.app.router, "default", large)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((client.base_url.host, client.base_url.port))
    raw.sendall(b"GET /large%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % stream)
    holds = lambda: any(each.transport.get_write_buffer_size() for each in [*client.runner.connections.all])  # noqa: E731
    wait_until(holds)
    wait_until(lambda: not holds(), 10)
    raw.close()


async def large(scope, receive, send):
    """An answer of 32 MiB, or one without end."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(32 << 20), "more_body": scope["path"] == "/large1"})
    while scope["path"] == "/large1":
        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})


class Transport:
    """What `Connections` needs of a connection."""

    def __init__(self, address):
        self.address, self.transport, self.is_closed = address, self, False

    def abort(self):
        self.is_closed = True


def test_who_makes_room():
    """First who has never sent a request, then who has sent one, then who sends a body; never who is answered."""
    guard = Connections(Limits(connections=4, from_one_address=3))
    groups = [guard.sending, guard.between, guard.silent, None]
    made = [Transport(address) for address in "aabb"]
    for each, group in zip(made, groups):
        assert guard.enter(each) == b""
        guard.place(each, group)
    for closed in (2, 1, 0):
        guard.place(new := Transport("c"), None)
        assert guard.enter(new) == b"" and [each.is_closed for each in made].count(True) == 3 - closed
        assert made[closed].is_closed and len(guard.all) == 4
    many = Transport("c")
    assert guard.enter(many) == connections.MANY and guard.is_full
    guard.leave(many)
    beside = [guard.enter(Transport(str(number))) for number in range(connections.BESIDE + 1)]
    assert beside == [b""] * connections.BESIDE + [connections.BUSY]


def test_only_health_is_answered_beside_the_bound(client, connect, monkeypatch):
    with client.runner.requests.manager.pause():
        busy = connect(ASKS)
        wait_until(lambda: client.runner.requests.active() == 1)
        monkeypatch.setattr(client.runner.connections.limits, "connections", 1)
        asks = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert connect(asks % b"/health").recv(100).startswith(b"HTTP/1.1 200 ")
        assert connect(asks % b"/v1/models").recv(100).startswith(b"HTTP/1.1 503 ")
    assert busy.recv(12) == b"HTTP/1.1 200"


def test_the_bounds_fit_the_descriptors(monkeypatch):
    """The soft limit is raised; the default is what is left, and more is refused."""
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    limits = Limits()
    backlog = limits.settle()
    assert given == [(1024, 1024)] and 16 <= backlog < 256
    assert limits.connections + backlog + connections.SPARE_FILES < 1024 and limits.connections > 500
    assert limits.from_one_address == limits.connections * 3 // 4
    with pytest.raises(ValueError, match="max_connections: this process may open 1024 files"):
        Limits(connections=1000).settle()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert (infinite := Limits()).settle() and infinite.connections == connections.MOST_CONNECTIONS
