"""Clients that attack a server with small requests, for `benchmarks.host.load --attackers`.

Each attack is one that a careless server answers with memory, with everybody's time, or with somebody's text. The
answers do not matter, except that a server's own failure (500) and an address of its memory are faults.
"""

import asyncio
import json
import random
import re
from contextlib import suppress
from urllib.parse import urlsplit

import httpx

HEAP_ADDRESS = re.compile(r"\b0x[0-9a-f]{8,}\b")
SILENT_CONNECTIONS, SILENT_SECONDS = 40, 15.0
"""Connections that one attack opens and says nothing on, and how long it waits."""
LONG_PROMPT = "value = 17\n" * 60


def completion(**fields: object) -> tuple[str, dict]:
    """A request for a short completion with further fields."""
    return "/v1/completions", {"prompt": "def mean(values):\n", "max_tokens": 8} | fields


def chat(content: object, **fields: object) -> tuple[str, dict]:
    """A request for a short chat with further fields."""
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 8} | fields


def picture(url: str) -> tuple[str, dict]:
    """A chat about a picture at an address that a client may not choose."""
    return chat([{"type": "text", "text": "See?"}, {"type": "image_url", "image_url": {"url": url}}])


BODIES: dict[str, list[tuple[str, dict]]] = {
    "numbers": [
        completion(generation_config=json.dumps({name: (1 << 31) - 1}))
        for name in ("encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "top_k", "min_length")
    ],
    "grammars": [
        completion(guided_regex="(.*)*" * 100),
        completion(guided_regex="(a|a)*" * 200),
        completion(guided_grammar='root ::= root root | "a"'),
        completion(guided_json={"type": "string", "minLength": 1, "maxLength": 1 << 30}),
    ],
    "pictures": [
        picture("/etc/passwd"),
        picture("file:///etc/passwd"),
        picture("http://169.254.169.254/latest/meta-data"),
        picture("http://10.255.255.1/never.png"),
        chat("See?", chat_template_kwargs={"images": ["/etc/passwd"]}),
    ],
    "prompt log-probabilities": [completion(prompt=LONG_PROMPT, echo=True, logprobs=20, max_tokens=1)],
    "choices": [completion(n=64, max_tokens=200), completion(prompt=["a"] * 200, max_tokens=200)],
    "guesses": [completion(logit_bias={"17": 100}, prompt=LONG_PROMPT), ("/metrics", {})],
    "files": [("/v1/load_lora_adapter", {"lora_name": "a\0\u202e" * 2000, "lora_path": "/etc"})],
}
"""Kinds of attacks that are one request with a body, each with its variants."""
KINDS = (*BODIES, "silent connections", "slow body", "large body", "stream that nobody reads", "wrong key")


class Attacker:
    """One client that attacks until the end. faults: answers that no attack may get."""

    def __init__(self, url: str, headers: dict[str, str], number: int, faults: list[str]):
        self._url, self._headers, self._faults = url, headers, faults
        self._draws = random.Random(number)

    async def attack(self) -> str:
        """Attack once in a random way. Returns the kind."""
        kind = self._draws.choice(KINDS)
        with suppress(OSError, httpx.HTTPError, asyncio.TimeoutError):
            if kind in BODIES:
                await self._send(*self._draws.choice(BODIES[kind]))
            elif kind == "silent connections":
                await self._open([b""] * SILENT_CONNECTIONS)
            elif kind == "slow body":
                await self._open([self._head("/v1/completions", 1000) + b"{"] * 8)
            elif kind == "large body":
                await self._open([self._head("/v1/completions", 1 << 34) + b" " * (1 << 20)])
            elif kind == "stream that nobody reads":
                path, body = completion(max_tokens=200, stream=True)
                data = json.dumps(body).encode()
                await self._open([self._head(path, len(data)) + data])
            else:
                await self._send(*completion(), {"Authorization": "Bearer guess"})
        return kind

    async def _send(self, path: str, body: dict, headers: dict[str, str] | None = None) -> None:
        """Send a request, and look at its answer."""
        async with httpx.AsyncClient(base_url=self._url, timeout=60, headers=headers or self._headers) as client:
            answer = await (client.post(path, json=body) if body else client.get(path))
        if answer.status_code == 500 or HEAP_ADDRESS.search(answer.text):
            self._faults.append(f"{path} {str(body)[:200]}: {answer.status_code} {answer.text[:300]}")

    def _head(self, path: str, length: int) -> bytes:
        """The head of a request whose body has `length` bytes."""
        fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(length)}
        lines = [f"{name}: {value}" for name, value in (fields | self._headers).items()]
        return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()

    async def _open(self, beginnings: list[bytes]) -> None:
        """Open a connection for each beginning, send it, and say nothing more for `SILENT_SECONDS`."""
        address = urlsplit(self._url)
        writers = []
        try:
            for beginning in beginnings:
                _, writer = await asyncio.open_connection(address.hostname, address.port)
                writers.append(writer)
                writer.write(beginning)
            await asyncio.sleep(SILENT_SECONDS)
        finally:
            for writer in writers:
                writer.close()
