"""Many HTTP clients of servers on a CPU for some minutes: is a request lost, does the memory of a process grow?

    python -m benchmarks.host.load [--minutes 10] [--clients 200] [--attackers 0] [--servers 1] [--url URL]

Starts the servers over the demo model, and clients that send one request after the other: streams and whole answers,
short and long, greedy and sampled, chats with tools, bad input, and requests whose client leaves before the end. Prints
each minute, and at the end, how many were sent, answered, refused (429, the queue is full), rejected (bad input), left
by their client and lost; the median and the 99th percentile of latencies; and the resident memory of each process.

A request is lost if it gets no answer, an error of the server, a stream without an end, or bad input is answered. The
script ends with an error if a request is lost, if a server still works on one after the end, or if the memory of a
server at the end is more than `--growth` above that after `--warmup`, by when its caches of n-grams and prefixes
are full. `--url` takes a server that runs already, such as an ingress on Ray, whose memory is not looked at.

`--attackers` of the clients attack instead, see `benchmarks.host.attacks`. Each client has an API key of its own.
Compare the percentiles of the others with a run of as many other clients without attackers.
"""

import argparse
import asyncio
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from transformers import AutoTokenizer

from benchmarks.common import DEMO_MODEL, RESULTS, save_rows, stamp
from benchmarks.host.attacks import Attacker

OPTIONS = {"capacity": 200_000, "prefix_cache_host_bytes": 64 << 20}
"""Options of `speculate`: caches that are full within the warm-up."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
)
"""A chat template for a model that has none."""
BAD: tuple[dict, ...] = (
    {"max_tokens": 0}, {"temperature": "hot"}, {"stop": ["x"] * 64}, {"logit_bias": {"a": 1}}, {"seed": 1 << 70},
    {"speed": 9}, {"model": "other"}, {"stream": "yes"}, {"prompt": ""}, {"prompt": "a " * 20_000},
)  # fmt: skip
KINDS = {"stream": 4, "whole": 4, "tools": 1, "bad": 1, "left": 1, "left stream": 1}
"""Kinds of requests, and how often each is drawn."""
LENGTHS = (4, 16, 64, 200)
"""New tokens of an answer at most. A client that leaves has asked for the most."""
SECONDS = 1200
"""Time after which a request without an answer is lost."""


class Load:
    """The clients' counts and latencies. latencies: seconds by name. faults: answers that no attacker may get."""

    def __init__(self, urls: list[str], end: float):
        self.urls, self.end = urls, end
        self.counts: Counter[str] = Counter()
        self.latencies: dict[str, list[float]] = defaultdict(list)
        self.losses: list[str] = []
        self.faults: list[str] = []

    async def attack(self, number: int) -> None:
        """One client that attacks until the end."""
        attacker = Attacker(self.urls[number % len(self.urls)], key_of(number), number, self.faults)
        while time.monotonic() < self.end:
            await attacker.attack()
            self.counts["attacks"] += 1

    async def live(self, number: int) -> None:
        """One client, which sends its first request in any case, and others until the end."""
        draws = random.Random(number)
        url = self.urls[number % len(self.urls)]
        async with httpx.AsyncClient(base_url=url, timeout=SECONDS, headers=key_of(number), verify=False) as client:
            while True:
                await self._ask(client, draws)
                if time.monotonic() >= self.end:
                    return

    async def _ask(self, client: httpx.AsyncClient, draws: random.Random) -> None:
        """Send a request, and count what became of it."""
        kind = draws.choices([*KINDS], [*KINDS.values()])[0]
        self.counts["sent"] += 1
        try:
            outcome = await self._send(client, kind, draws)
        except Exception as error:
            outcome = f"{kind}: {type(error).__name__}: {error}"
        if outcome not in ("answered", "refused", "rejected", "left"):
            self.losses.append(outcome)
            outcome = "lost"
        self.counts[outcome] += 1
        if outcome in ("refused", "lost"):
            await asyncio.sleep(draws.uniform(0.5, 1.5))

    async def _send(self, client: httpx.AsyncClient, kind: str, draws: random.Random) -> str:
        """Send a request of a kind. Returns what became of it."""
        path, body = make(kind, draws)
        if "stream" in kind:
            return await self._stream(client, path, body | {"stream": True}, kind == "left stream")
        if kind == "left":
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(client.post(path, json=body), draws.random())
            return "left"
        begin = time.monotonic()
        response = await client.post(path, json=body)
        if response.status_code == 429:
            return "refused"
        if kind == "bad":
            is_right = 400 <= response.status_code < 500 and response.json()["error"]["message"]
            return "rejected" if is_right else f"bad: {response.status_code} {response.text[:200]} for {body}"
        if response.status_code != 200 or not response.json()["choices"]:
            return f"{kind}: {response.status_code} {response.text[:200]}"
        self.latencies["whole answer"].append(time.monotonic() - begin)
        return "answered"

    async def _stream(self, client: httpx.AsyncClient, path: str, body: dict, leaves: bool) -> str:
        begin, last = time.monotonic(), ""
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode()
                return "refused" if response.status_code == 429 else f"stream: {response.status_code} {text[:200]}"
            async for line in response.aiter_lines():
                if line and not last:
                    self.latencies["first token"].append(time.monotonic() - begin)
                    if leaves:
                        return "left"
                last = line or last
        if last != "data: [DONE]":
            return f"stream: it ends in {last[:200]}"
        self.latencies["stream"].append(time.monotonic() - begin)
        return "answered"


def key_of(number: int) -> dict[str, str]:
    """The headers with a client's API key."""
    return {"Authorization": f"Bearer client-{number}"}


def make(kind: str, draws: random.Random) -> tuple[str, dict]:
    """A request of a kind: its path and its body."""
    names = [draws.choice(("value", "total", "index", "item", "left", "right")) + str(draws.randrange(50))
             for _ in range(draws.choice((2, 8, 60)))]  # fmt: skip
    prompt = "".join(f"{name} = {draws.randrange(1000)}\n" for name in names) + "def mean(values):\n"
    body: dict[str, Any] = {"max_tokens": LENGTHS[-1] if "left" in kind else draws.choice(LENGTHS)}
    if draws.random() < 0.5:
        body |= {"temperature": draws.choice((0.7, 1.2)), "seed": draws.randrange(1 << 40), "top_p": 0.95}
    if draws.random() < 0.2:
        body["stop"] = ["\n\n", "return"]
    if kind == "tools" or (kind != "bad" and draws.random() < 0.3):
        body |= {"tools": TOOLS} if kind == "tools" else {}
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
    return "/v1/completions", body | {"prompt": prompt} | (draws.choice(BAD) if kind == "bad" else {})


def with_template(model: str, folder: str) -> str:
    """The folder of a model with a chat template: its own, or `folder`, into which it is copied with `TEMPLATE`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template:
        return model
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def start_server(folder: str, threads: int, eager: bool, clients: int) -> tuple[subprocess.Popen, str]:
    """A server, which loads and knows the keys of all clients, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "spec_compile", "serve", folder, "--device", "cpu", "--dtype", "float32",
        "--port", str(port), "--slots", "16", "--max-queue", "256", "--log-level", "warning",
        "--options", json.dumps(OPTIONS | {"compile": not eager}),
    ]  # fmt: skip
    keys = ",".join(f"client-{number}" for number in range(clients))
    environment = {**psutil.Process().environ(), "OMP_NUM_THREADS": str(threads), "SPEC_COMPILE_API_KEY": keys}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL), f"http://127.0.0.1:{port}"


def wait_for(url: str, seconds: float = 300) -> None:
    """Return once a server answers. RuntimeError after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"no server answers at {url}; its output says why")


def working(url: str) -> float:
    """Requests that a server waits for, reads and decodes."""
    names = ("num_requests_running", "num_requests_prefilling", "num_requests_waiting")
    lines = httpx.get(f"{url}/metrics", timeout=SECONDS, headers=key_of(0)).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(tuple(f"spec_compile:{n}" for n in names)))


def resident(processes: dict[str, psutil.Process]) -> dict[str, float]:
    """Megabytes in memory of each process with its children; servers are children of the clients' process."""
    return {
        name: sum(each.memory_info().rss for each in [process, *process.children(recursive=True)]) / 1e6
        for name, process in processes.items()
    }


def percentiles(latencies: dict[str, list[float]]) -> dict[str, float]:
    """The median and the 99th percentile of each list, in milliseconds, rounded."""
    told = {}
    for name, seconds in latencies.items():
        cuts = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else seconds * 99
        told |= {f"{name} p50 ms": round(cuts[49] * 1e3), f"{name} p99 ms": round(cuts[98] * 1e3)}
    return told


def find_faults(rows: list[dict], losses: list[str], growth: float) -> list[str]:
    """Sentences about losses, and about servers whose memory has grown by more than the share `growth`.

    rows: of `measure`. Those after the warm-up have "is warm".
    """
    faults = [f"lost {len(losses)} requests: {'; '.join([*dict.fromkeys(losses)][:5])}"] if losses else []
    warm = [row["memory mb"] for row in rows if row["is warm"]]
    for name in warm[0]:
        if name != "clients" and warm[-1][name] > (1 + growth) * warm[0][name]:
            faults.append(f"the memory of {name} has grown from {warm[0][name]:.0f} to {warm[-1][name]:.0f} MB")
    return faults


async def measure(
    load: Load, clients: int, attackers: int, minutes: float, warmup: float, processes: dict
) -> list[dict]:
    """Run the clients, the last ones of which attack. Returns a row for the start, each minute and the end."""
    rows: list[dict] = []
    begin = time.monotonic()

    def tell() -> None:
        passed = (time.monotonic() - begin) / 60
        row = {"minute": round(passed, 1), "is warm": passed >= warmup - 0.01, **load.counts}
        rows.append(row | percentiles(load.latencies) | {"memory mb": resident(processes)})
        print(json.dumps(rows[-1]), flush=True)

    async def each_minute() -> None:
        for minute in range(1, int(minutes) + 1):
            await asyncio.sleep(begin + 60 * minute - time.monotonic())
            tell()

    tell()
    others = clients - attackers
    lives = [load.live(number) if number < others else load.attack(number) for number in range(clients)]
    await asyncio.gather(each_minute(), *lives)
    tell()
    return rows


def run(options: argparse.Namespace, urls: list[str], started: list) -> tuple[list[dict], list[str]]:
    """The rows of `measure`, and the faults."""
    processes = {f"server {number}": psutil.Process(each.pid) for number, (each, _) in enumerate(started, 1)}
    processes["clients"] = psutil.Process()
    for url in urls:
        wait_for(url)
    load = Load(urls, time.monotonic() + 60 * options.minutes)
    rows = asyncio.run(measure(load, options.clients, options.attackers, options.minutes, options.warmup, processes))
    time.sleep(2)  # the servers notice the last clients that left
    faults = [*find_faults(rows, load.losses, options.growth), *dict.fromkeys(load.faults)]
    return rows, faults + [f"{url} still works on {count:.0f} requests" for url in urls if (count := working(url))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--warmup", type=float, default=2, help="minutes")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--attackers", type=int, default=0, help="clients, of all, that attack")
    parser.add_argument("--servers", type=int, default=1, help="processes, each with a model")
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--growth", type=float, default=0.1, help="the share by which a server's memory may grow")
    parser.add_argument("--json", type=Path, default=RESULTS / "load.json")
    options = parser.parse_args()
    if not 0 < options.warmup < options.minutes:
        parser.error("--warmup: expected less than --minutes, and more than 0")
    if not 0 <= options.attackers < options.clients:
        parser.error("--attackers: expected less than --clients, and at least 0")
    with tempfile.TemporaryDirectory() as folder:
        model = with_template(options.model, folder)
        count = 0 if options.url else options.servers
        started = [start_server(model, options.threads, options.eager, options.clients) for _ in range(count)]
        try:
            rows, faults = run(options, [options.url] if options.url else [url for _, url in started], started)
        finally:
            for process, _ in started:
                process.terminate()
                process.wait(60)
    facts = {
        "clients": options.clients, "attackers": options.attackers, "servers": options.servers,
        "minutes": options.minutes,
    }  # fmt: skip
    save_rows(options.json, [facts | row for row in rows], (*facts, "minute"), stamp())
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
