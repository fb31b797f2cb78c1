"""Pictures that requests name: which addresses are read, and how many bytes and pixels. transformers opens none.

`messages` refuses videos and sound. No other field of a request names a file or an address; see `ChatText.variables`.
"""

import asyncio
import base64
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import unquote, urljoin

from torch import Tensor

from ..errors import check_int
from .call import Waiting
from .errors import Refusal, refuse

MOST_PICTURES = 16
"""Pictures of a request, by default."""
MOST_BYTES, MOST_BYTES_OF_ALL = 20 << 20, 48 << 20
"""Bytes of a picture as it is sent, and of all pictures of a request."""
MOST_PIXELS, MOST_PIXELS_OF_ALL = 1 << 24, 1 << 25
"""Pixels of a picture, and of all pictures of a request."""
MOST_LENGTHS = 50
"""Times that a side may be as long as the other one: processors make the short side of some pictures longer."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are read. Pillow's decoders of some others start programs, or need more memory than the size tells."""
MOST_FETCHES, MOST_REDIRECTS = 8, 3
"""Requests whose pictures are fetched at once, and redirections of an address."""
MOST_HELD = 2 << 30
"""Bytes of the processed pictures of all requests that are not complete."""
CONNECT_SECONDS, FETCH_SECONDS = 3.0, 10.0
"""Seconds to connect, or between two parts of an answer, and of a whole picture with its redirections."""
LONGEST = 4096
"""Characters of an address that is not data."""
PARTS = ("image_url", "input_image")
"""Types of the parts of a message that are pictures."""
WEB = re.compile(r"(https?)://([a-z\d-]+(?:\.[a-z\d-]+)*)(?::(\d{1,5}))?((?:[/?][!-\[\]-~]*)?)", re.IGNORECASE)
"""An address of http: scheme, host, port and the rest. Other spellings, such as user@host, are not read."""
DOMAIN = re.compile(r"[a-z\d-]+(\.[a-z\d-]+)*(:\d{1,5})?")
DATA = re.compile(r"data:(?:[\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)
PORTS = {"http": 80, "https": 443}
WITHIN_IPV6 = ipaddress.ip_network("64:ff9b::/96")
"""IPv6 addresses that stand for IPv4 addresses."""


def find_pictures(value: Any, path: str) -> Iterator[tuple[str, dict]]:
    """Each part that is a picture in checked messages or items, after the path of its address. path: to `value`"""
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from find_pictures(each, f"{path}[{index}]")
    elif isinstance(value, dict) and value.get("type") in PARTS:
        yield f"{path}.image_url", value
    elif isinstance(value, dict):
        for name in ("content", "output"):
            yield from find_pictures(value.get(name), f"{path}.{name}")


def address_of(part: dict) -> str:
    """The address of a picture, in either form."""
    address = part["image_url"]
    return address["url"] if isinstance(address, dict) else address


def is_public(address: str) -> bool:
    """True for an IP address of the internet, to which a stranger may make this server connect."""
    ip: Any = ipaddress.ip_address(address)
    if ip.version == 6 and (ip.ipv4_mapped or ip.sixtofour or ip.teredo or ip.is_site_local or ip in WITHIN_IPV6):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)


def check_pixels(path: str, width: int, height: int, before: int) -> int:
    """The pixels of a request after a picture of this size. Refusal if they, or the picture's own, are too many.

    before: pixels of the pictures before it
    """
    pixels = width * height
    if pixels > MOST_PIXELS or before + pixels > MOST_PIXELS_OF_ALL:
        reason = f"expected at most {MOST_PIXELS} pixels, and {MOST_PIXELS_OF_ALL} of all pictures of a request"
        raise refuse(path, f"{reason}, got {width} x {height}", 413)
    if max(width, height) > MOST_LENGTHS * min(width, height):
        raise refuse(path, f"expected a side at most {MOST_LENGTHS} times the other, got {width} x {height}")
    return before + pixels


class Media:
    """Reads the pictures of requests: data: addresses, and others only as far as the server's owner says."""

    def __init__(
        self, domains: Iterable[str] = (), folder: str | Path | None = None, limits: dict[str, int] | None = None
    ):
        """domains: hosts whose pictures are fetched by http and https, each with or without a port

        folder: below it files may be read, by file: addresses; None for no files
        limits: {"image": n} for at most n pictures of a request

        Raises ValueError for a domain that is no host name, for a folder that is none, and for another limit.
        """
        self.domains = {domain.lower() for domain in domains}
        for domain in self.domains:
            if not DOMAIN.fullmatch(domain):
                raise ValueError(f"allowed_media_domains: expected HOST or HOST:PORT without a scheme, got {domain!r}")
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"allowed_local_media_path: expected a folder, got {str(folder)!r}")
        self.folders = [] if folder is None else [os.path.abspath(folder), os.path.realpath(folder)]
        limits = {} if limits is None else limits
        if limits.keys() - {"image"}:
            raise ValueError(f'limit_mm_per_prompt: expected {{"image": n}}, got {limits}')
        self.most_pictures = limits.get("image", MOST_PICTURES)
        check_int("limit_mm_per_prompt", self.most_pictures, 0, 1024)
        self._fetching, self._lock = 0, Lock()
        self._held: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="spec_compile media")

    async def load(self, parts: list[tuple[str, dict]]) -> dict[str, Any]:
        """The RGB pictures, of type `PIL.Image.Image`, by new names. Refusal that names the field's path.

        parts: from `find_pictures`; the names take the place of their addresses, which may be large

        `Workers` must drive it.
        """
        if len(parts) > self.most_pictures:
            reason = f"expected at most {self.most_pictures} pictures in a request, got {len(parts)}"
            raise refuse(parts[self.most_pictures][0], reason)
        for path, part in parts:
            self.check(path, address_of(part))
        read, pictures, pixels, room = [], {}, 0, MOST_BYTES_OF_ALL
        for path, part in parts:
            read.append(await self._read(path, address_of(part), min(room, MOST_BYTES)))
            room -= len(read[-1])
        for number, ((path, part), data) in enumerate(zip(parts, read)):
            name = part["image_url"] = f"picture {number}"
            pictures[name], pixels = _decode(path, data, pixels)
        return pictures

    def check(self, path: str, address: str) -> None:
        """Refuse an address of a kind or a host that is not read. It neither looks for a file nor resolves a name."""
        if DATA.match(address[:256]) or self._web(address):
            return
        if address.startswith("file:///") and self._is_below(unquote(address[7:LONGEST])):
            return
        also = " or an http address of an allowed host" if self.domains else ""
        also += " or a file: address below the allowed folder" if self.folders else ""
        raise refuse(path, f'expected "data:image/...;base64,..."{also}; this server reads no other address')

    def _web(self, address: str) -> re.Match | None:
        """The parts of an address of http at an allowed host, else None."""
        web = WEB.fullmatch(address) if len(address) <= LONGEST else None
        if web is None:
            return None
        host, usual = web[2].lower(), PORTS[web[1].lower()]
        port = int(web[3] or usual)
        return web if f"{host}:{port}" in self.domains or (port == usual and host in self.domains) else None

    def _is_below(self, name: str) -> bool:
        """True for the path of a file in the folder, as far as its text tells."""
        if "\0" in name or ".." in Path(name).parts:
            return False
        return any(Path(name) != Path(folder) and Path(name).is_relative_to(folder) for folder in self.folders)

    async def _read(self, path: str, address: str, most: int) -> bytes:
        """The bytes at a checked address. most: of them"""
        reason = f"expected at most {MOST_BYTES} bytes, and {MOST_BYTES_OF_ALL} of all pictures of a request"
        if match := DATA.match(address[:256]):
            if (len(address) - match.end()) * 3 // 4 > most + 2:
                raise refuse(path, reason, 413)
            try:
                return base64.b64decode("".join(address[match.end() :].split()), validate=True)
            except ValueError as error:
                raise refuse(path, "expected base64 after the comma") from error
        if address.startswith("file:"):
            data = self._read_file(path, unquote(address[7:]), most)
        else:
            data = await Waiting(self._fetch(path, address, most))
        if isinstance(data, Refusal):
            raise data
        if len(data) > most:
            raise refuse(path, reason, 413)
        return data

    def _read_file(self, path: str, name: str, most: int) -> bytes:
        """The first `most` + 1 bytes of a regular file in the folder. All other paths get the same refusal."""
        inside = f"{self.folders[1].rstrip('/')}/"
        try:
            real = os.path.realpath(name, strict=True)
            if not real.startswith(inside):
                raise OSError
            descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                opened = os.readlink(f"/proc/self/fd/{descriptor}")
                if not opened.startswith(inside) or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError
                return file.read(most + 1)
        except (OSError, ValueError):
            raise refuse(path, "there is no such picture in the folder that this server reads") from None

    def hold(self, name: str, values: Iterable[Any], names: Iterable[str]) -> None:
        """Count the bytes of a request's tensors. Refusal if all requests together have too many.

        name: the request's. names: of all requests that are not complete, this one included
        """
        size = sum(value.nbytes for value in values if isinstance(value, Tensor))
        if not size:
            return
        with self._lock:
            self._held = {each: self._held[each] for each in [*names] if each in self._held}
            if self._held and sum(self._held.values()) + size > MOST_HELD:
                raise Refusal(429, "too many pictures wait; try again later", code="media_queue_full", retries=True)
            self._held[name] = size

    async def _fetch(self, path: str, address: str, most: int) -> bytes | Refusal:
        """The first bytes at an address of http, more than `most` if there are more, or why there are none.

        The event loop runs it, and cancels it once the client has left.
        """
        if self._fetching >= MOST_FETCHES:
            reason = f"pictures of {MOST_FETCHES} requests are being fetched; send its data, or try again later"
            return refuse(path, reason, 429, "media_queue_full", retries=True)
        self._fetching += 1
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await self._follow(path, address, most)
        except TimeoutError:
            return refuse(path, f"the picture was not there within {FETCH_SECONDS:g} seconds")
        except Refusal as refusal:
            return refusal
        except Exception:  # of the network, of its protocols, or of the other server's answer
            return refuse(path, "the address could not be read")
        finally:
            self._fetching -= 1

    async def _follow(self, path: str, address: str, most: int) -> bytes:
        """See `_fetch`. Each redirection is checked as the address was."""
        import httpx

        limits = {"trust_env": False, "follow_redirects": False, "timeout": CONNECT_SECONDS, "verify": self._tls}
        async with httpx.AsyncClient(**limits) as client:
            for _ in range(MOST_REDIRECTS + 1):
                web = self._web(address)
                if web is None:
                    raise refuse(path, "the address leads to a host that is not allowed")
                request = await self._request(client, web, path)
                response = await client.send(request, stream=True)
                try:
                    if response.has_redirect_location:
                        address = urljoin(address, response.headers["location"])
                        continue
                    coding = response.headers.get("content-encoding", "identity")
                    if response.status_code != 200 or coding != "identity":
                        raise refuse(path, "the address could not be read")
                    data = bytearray()
                    async for part in response.aiter_raw():
                        data += part
                        if len(data) > most:
                            break
                    return bytes(data)
                finally:
                    await response.aclose()
        raise refuse(path, f"expected at most {MOST_REDIRECTS} redirections, got more")

    async def _request(self, client: Any, web: re.Match, path: str) -> Any:
        """The request of an address. It goes to an IP address that was checked, so that the name is resolved once."""
        scheme, host, rest = web[1].lower(), web[2].lower(), web[4]
        port = int(web[3] or PORTS[scheme])
        loop, kind = asyncio.get_running_loop(), socket.SOCK_STREAM
        found = await loop.run_in_executor(self._pool, lambda: socket.getaddrinfo(host, port, type=kind))
        addresses = [entry[4][0] for entry in found]
        if not addresses or not all(map(is_public, addresses)):  # guard: public-addresses
            raise refuse(path, "the address leads to a host that is not allowed")
        target = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        rest = rest if rest.startswith("/") else f"/{rest}"
        headers = {"Host": f"{host}:{port}" if web[3] else host, "Accept": "image/*", "Accept-Encoding": "identity"}
        url, extensions = f"{scheme}://{target}:{port}{rest}", {"sni_hostname": host}
        return client.build_request("GET", url, headers=headers, extensions=extensions)

    @cached_property
    def _tls(self) -> Any:
        """The certificates of httpx, which take a while to load."""
        import httpx

        return httpx.create_ssl_context(trust_env=False)


def _decode(path: str, data: bytes, pixels: int) -> tuple[Any, int]:
    """A picture, as transformers would load it, and the pixels so far. The size is checked before it is decoded."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise refuse(path, "this server has no Pillow, so it reads no pictures", 501) from error
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            pixels = check_pixels(path, *image.size, pixels)  # guard: pixels-before-decoding
            return ImageOps.exif_transpose(image).convert("RGB"), pixels
    except Refusal:
        raise
    except Image.DecompressionBombError as error:
        raise refuse(path, f"expected at most {MOST_PIXELS} pixels, got many more", 413) from error
    except Exception as error:  # decoders raise errors of many types
        raise refuse(path, f"expected a picture in the format {', '.join(FORMATS)}; this cannot be read") from error
