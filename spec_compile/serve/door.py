"""Who may call the server: `Keys`, the middleware that asks for one, and the middleware that checks Host and Origin."""

import hmac
import ipaddress
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from .call import OWNER
from .errors import Refusal, error_at
from .fields import SHARE
from .media import Media

VARIABLE = "SPEC_COMPILE_API_KEY"
"""The variable of the environment that may hold keys, with commas between them."""
KEY = re.compile(r"[!-~]+")
MOST_GIVEN = 8
"""Keys of one request that are looked at."""
DIGITS = 16
"""Digits of the digest that names the owner of a key."""
OPEN = "/health"
"""The one path that needs no key."""


class Keys:
    """The API keys of a server. It holds their digests only, so that no text of it shows a key."""

    def __init__(self, keys: Iterable[str], name: str = "api_key"):
        """ValueError, which tells the place and not the key, for one that is empty or not of visible ASCII.

        name: the option's, for errors
        """
        self._digests: list[bytes] = []
        for number, key in enumerate(keys, 1):
            if not isinstance(key, str) or not KEY.fullmatch(key):
                raise ValueError(
                    f"{name}: key {number} is empty or has other characters than visible ASCII; give each key "
                    "without blanks and line breaks"
                )
            self._digests.append(sha256(key.encode()).digest())

    @classmethod
    def read(cls, given: Iterable[str] = (), file: str | Path | None = None) -> "Keys":
        """The keys of the options `api_key` and `api_key_file` (a key a line), and of `VARIABLE`, which is removed from
        the environment, so that no process that is started gets it. ValueError for a bad key or file."""
        keys = cls(given)
        if file is not None:
            try:
                lines = Path(file).expanduser().read_text("ascii", errors="replace").removesuffix("\n").split("\n")
            except OSError as error:
                raise ValueError(f"api_key_file: {file} cannot be read: {error.strerror}") from error
            keys._digests += cls(lines, f"api_key_file {file}")._digests
        variable = os.environ.pop(VARIABLE, None)
        if variable is not None:
            keys._digests += cls(variable.split(","), VARIABLE)._digests
        return keys

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """A short digest of the key that a request has, or None if it has none of these.

        headers: with names in lower case. All keys are compared, each in constant time.
        """
        found = None
        for given in [*_given(headers)][:MOST_GIVEN]:
            digest = sha256(given).digest()
            is_known = [hmac.compare_digest(digest, each) for each in self._digests]
            if any(is_known):
                found = found or digest.hex()[:DIGITS]
        return found


def _given(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    """The keys in OpenAI's and in Anthropic's header."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()
        elif name == b"x-api-key":
            yield value.strip()


class KeyMiddleware:
    """ASGI middleware: only requests with a key go on, before anything of their bodies is read. `OPEN` needs none."""

    def __init__(self, app: Callable, keys: Keys, lets_preflights: bool = False):
        """lets_preflights: True if a browser's question about another origin goes on to an app that answers it."""
        self.app, self._keys, self._lets_preflights = app, keys, lets_preflights

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] == "http" and self._keys:
            owner = self._keys.owner(scope["headers"])
            if owner is None and not self._is_open(scope):
                reason = "a key is needed: send Authorization: Bearer KEY, or x-api-key: KEY, with a key of this server"
                refusal = Refusal(401, reason, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await error_at(scope["path"], refusal)(scope, receive, send)
                return
            scope[OWNER] = owner or ""
        await self.app(scope, receive, send)

    def _is_open(self, scope: dict) -> bool:
        if scope["path"].removeprefix(scope.get("root_path", "")) == OPEN and scope["method"] in ("GET", "HEAD"):
            return True
        names = {name for name, _ in scope["headers"]}
        asks = scope["method"] == "OPTIONS" and {b"origin", b"access-control-request-method"} <= names
        return asks and self._lets_preflights


class HostMiddleware:
    """ASGI middleware: refuses requests to another host, and requests of web pages of other hosts.

    A page of an attacker can give its own name this machine's address (DNS rebinding), and then its scripts reach a
    server on loopback. Their requests have that name in Host.
    """

    def __init__(self, app: Callable, hosts: Iterable[str], origins: Iterable[str] = ()):
        """hosts: names without ports; loopback's names are always allowed. origins: pages of these may call, too"""
        self.app = app
        self._hosts = {"localhost", "127.0.0.1", "::1"} | {_name_of(f"//{host}") or host.lower() for host in hosts}
        self._origins = self._hosts | {_name_of(origin) for origin in origins}

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        refusal = self._refusal(scope["headers"]) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self.app(scope, receive, send)
        else:
            await error_at(scope["path"], refusal)(scope, receive, send)

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> Refusal | None:
        hosts = [_name_of(f"//{value.decode('latin-1')}") for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return Refusal(400, "Host: this server is not called so; start it with --allowed-hosts to allow more names")
        origins = [_name_of(value.decode("latin-1")) for name, value in headers if name == b"origin"]
        if not self._origins.issuperset(origins):
            return Refusal(403, "Origin: pages of other hosts may not call this server; see --allowed-origins")
        return None


def _name_of(address: str) -> str | None:
    """The host of an address, in lower case, or None."""
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018  raises ValueError for a bad one
        return None if parts.username is not None or parts.path else parts.hostname
    except ValueError:
        return None


def is_loopback(host: str | None) -> bool:
    """True if only this machine reaches a server at this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "0.0.0.0").is_loopback
    except ValueError:
        return False


@dataclass
class Policy:
    """The permissions of a server's clients. The fields are arguments of `server.build` and options of the command.

    keys: one of which every request but to /health needs; no keys: none
    allowed_media_domains, allowed_local_media_path, limit_mm_per_prompt: the arguments of `Media`, in this order
    share_texts: True if n-grams are drafted from the texts of all clients, whatever their keys
    isolate_prefixes: True if prompts of different keys share no keys and values
    allow_runtime_lora_updating: True if clients may load and unload adapters
    shadow: share of requests, 0 to 1, that plain steps answer again in idle time, see `Shadow`
    lora_root: the folder that has the adapters that clients may load, which they need
    enable_cors: True if web pages of other origins may read answers
    allowed_origins, allowed_methods, allowed_headers: bounds of that by origin (which turn it on), by method and by
        header; None: all

    Raises ValueError as `Media` does, and if one of the two options of adapters is there without the other.
    """

    keys: Keys = field(default_factory=lambda: Keys(()))
    allowed_media_domains: list[str] | None = None
    allowed_local_media_path: str | Path | None = None
    limit_mm_per_prompt: dict[str, int] | None = None
    share_texts: bool = False
    isolate_prefixes: bool = False
    allow_runtime_lora_updating: bool = False
    lora_root: str | Path | None = None
    shadow: float = 0.0
    enable_cors: bool = False
    allowed_origins: list[str] | None = None
    allowed_methods: list[str] | None = None
    allowed_headers: list[str] | None = None

    def __post_init__(self):
        if not SHARE.accepts(self.shadow):
            raise ValueError(f"shadow: expected {SHARE.expected}, got {self.shadow!r}")
        self.media = Media(self.allowed_media_domains or [], self.allowed_local_media_path, self.limit_mm_per_prompt)
        root = self.lora_root
        if (root is None) == self.allow_runtime_lora_updating or not Path(root or ".").is_dir():
            raise ValueError(
                "lora_root: with allow_runtime_lora_updating, and only with it, expected the folder with the adapters "
                f"that clients may load, got {root}"
            )
        self.lora_root = None if root is None else Path(root).resolve()
