"""`ArtefactCache`: the folder in which artefacts are kept between processes. It has a folder for each key, and in it a
file for each item.

A file is a header and the item's bytes. Files are written under another name and then renamed, so a reader sees a whole
file or none, and no process waits for another. Whatever goes wrong is a line in the log and a start without the item.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import log
from ..folders import cache_folder, foreign, is_foreign, make_folder

if TYPE_CHECKING:
    from rich.table import Table

MAGIC = b"SPECART\n"
VERSION = 2
"""The version of what lies in all files: raise it when an item gets another form."""
OTHER_FORMAT = f"it is not of format {VERSION}"
HEADER = struct.Struct("<8sI32sQ32s")
"""Magic, version, the SHA-256 of key and name, the bytes of data, and the SHA-256 of the fields before and the data."""
VARIABLE = "SPEC_COMPILE_CACHE"
OFF = "off"
"""The value of the variable, or the name of a folder, for a cache that keeps nothing."""
LIMIT = 5e9
KEY, NAME = re.compile(r"[0-9a-f]{64}"), re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
GONE, DAMAGED, UNFINISHED = ".gone-", ".damaged-", ".new-"
"""The names of a folder or file that was taken out of use, and of a file that is being written, begin so."""
DAY = 86_400.0
"""Seconds after which such a file is deleted, because its writer is dead."""
COMPILED = ".part"
"""The names of items that hold compiled code end so."""
ABOUT = "about"
"""The item that describes an artefact to readers: a JSON object."""


class StoredArtefact(NamedTuple):
    """An artefact in a cache.

    bytes: size of its files.
    used: seconds since 1970 when an item was last read or written.
    items: their names, sorted.
    about: the JSON object that describes it; empty if it has none.
    """

    key: str
    bytes: int
    used: float
    items: list[str]
    about: dict[str, Any]


class ArtefactCache:
    """Keeps items, each under a key and a name. None of its methods raises an OSError.

    folder: None or True takes the environment variable SPEC_COMPILE_CACHE, and without it ``~/.cache/spec_compile``.
        False or "off" makes a cache that keeps nothing.
    is_carried: the user has named this folder, which others may have made: all but compiled code is read from it,
        whoever owns it, because it is data.
    limit_bytes: beyond it, the keys that were not used for longest are deleted.
    """

    said: set[str] = set()
    """The kinds of faults of the disk that this process has logged."""

    def __init__(self, folder: Path | str | bool | None = None, limit_bytes: float = LIMIT, is_carried: bool = False):
        named = os.environ.get(VARIABLE) if folder is None or folder is True else folder
        self.folder: Path | None = None
        if named is not False and named != OFF:
            with suppress(RuntimeError):  # this user has no home
                self.folder = Path(named).expanduser() if named else cache_folder()
        self.is_carried, self.limit_bytes = is_carried, limit_bytes
        self._unchecked = limit_bytes
        """Bytes that were written since the limit was last looked at."""

    def read(self, key: str, name: str) -> bytes | None:
        """The bytes of an item, None if there are none. A damaged file is renamed, so that it is written anew.

        ValueError if the key or the name is not one.
        """
        path = self._path(key, name)
        if path is None or (data := self._load(path)) is None:
            return None
        with suppress(OSError):  # the folder may be read-only
            os.utime(path.parent)
        return data

    def write(self, key: str, name: str, data: bytes) -> bool:
        """Keep an item in place of an earlier one of its name; False if it could not be kept.

        ValueError if the key or the name is not one: 64 hexadecimal digits; letters, digits, ".", "-" and "_".
        """
        path = self._path(key, name)
        if path is None:
            return False
        try:
            # Another process may delete the folder at any time; then it is made again.
            is_kept = any(self._replace(path, data) for _ in range(3))
            self._unchecked += len(data)
            if self._unchecked > self.limit_bytes / 20:
                self._unchecked = 0
                self._shrink()
            return is_kept and path.exists()
        except OSError as error:
            self.tell_once("write", f"{self.folder}: nothing is kept for later starts, because it cannot: {error}")
            return False

    def entries(self) -> list[StoredArtefact]:
        """All artefacts, the one that was used last first. They do not count as used by this."""
        found = []
        for folder in self._folders():
            with suppress(OSError):  # another process deletes it
                files, used = {file: file.stat().st_size for file in _files(folder)}, folder.stat().st_mtime
                about = None
                with suppress(ValueError):
                    about = json.loads(self._load(folder / ABOUT) or "{}")
                items = sorted(file.name for file in files if NAME.fullmatch(file.name))
                about = about if isinstance(about, dict) else {}
                found.append(StoredArtefact(folder.name, sum(files.values()), used, items, about))
        return sorted(found, key=lambda each: -each.used)

    def drop(self, key: str) -> bool:
        """Delete all items of a key; False if there are none. Processes that read them meanwhile are not disturbed."""
        path = self._path(key, ABOUT)
        return path is not None and self._remove(path.parent)

    def clear(self) -> int:
        """Delete all artefacts, and all that writers left; return the number of artefacts."""
        count = sum(self._remove(path) for path in self._folders())
        self._sweep(0)
        return count

    def export(self, key: str, folder: Path | str) -> bool:
        """Copy all items of a key to another folder, from which a cache can read. False if one could not be copied."""
        path, other = self._path(key, ABOUT), ArtefactCache(folder, float("inf"))
        names = [] if path is None else [file.name for file in _files(path.parent) if NAME.fullmatch(file.name)]
        data = {name: self.read(key, name) for name in names}
        return bool(data) and all(each is not None and other.write(key, name, each) for name, each in data.items())

    def _path(self, key: str, name: str) -> Path | None:
        """The file of an item; None if this cache keeps nothing."""
        if not KEY.fullmatch(key):
            raise ValueError(f"key: expected 64 hexadecimal digits, got {key!r}")
        if not NAME.fullmatch(name):
            raise ValueError(f"name: expected letters, digits, '.', '-' and '_', got {name!r}")
        return None if self.folder is None else self.folder / key / name

    def _load(self, path: Path) -> bytes | None:
        """The data of a file if all of it is as it was written, and the user's own."""
        try:
            is_checked = not self.is_carried or path.suffix == COMPILED
            if is_checked and (other := foreign(path.parent)) is not None:
                self.tell_once(str(other), f"{other}: not read, because another user owns it or may write to it")
                return None
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                is_others = is_checked and is_foreign(os.fstat(file.fileno()))
                reason = "another user owns it or may write to it" if is_others else ""
                content = b"" if reason else file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            reason, content = f"it cannot be read: {error}", b""
        reason = reason or _fault(content, path)
        if not reason:
            return content[HEADER.size :]
        if reason == OTHER_FORMAT:  # of an earlier version of the package: one line for all files
            self.tell_once(reason, f"{self.folder}: artefacts of another format are not used; they are made anew")
        else:
            self.tell_once(str(path), f"{path}: not used, because {reason}; it is made anew")
        with suppress(OSError):
            path.rename(_aside(path, DAMAGED))
            self.said.discard(str(path))
        return None

    def _replace(self, path: Path, data: bytes) -> bool:
        """Put a whole file in the place of another, in a folder for this user only. False if the folder, or the cache,
        is another user's, or was deleted meanwhile."""
        make_folder(path.parent)
        if (other := foreign(path.parent)) is not None:
            self.tell_once(str(other), f"{other}: not used, because another user owns it or may write to it")
            return False
        unfinished = _aside(path, UNFINISHED)
        try:
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_header(path, data))
                file.write(data)
            unfinished.replace(path)
            os.utime(path.parent)
        except FileNotFoundError:
            return False
        except BaseException:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise
        return True

    def _folders(self) -> list[Path]:
        """The folders of all keys."""
        return [path for path in _files(self.folder) if KEY.fullmatch(path.name)] if self.folder else []

    def _remove(self, folder: Path) -> bool:
        """Rename a folder, so that nobody reads a part of it, and delete it."""
        gone = _aside(folder, GONE)
        try:
            folder.rename(gone)
        except FileNotFoundError:
            return False
        except OSError as error:
            self.tell_once("remove", f"{folder}: cannot be deleted: {error}")
            return False
        _delete(gone)
        return True

    def _shrink(self) -> None:
        """Delete leftovers, and the artefacts that were not used for longest until the others are within the limit."""
        self._sweep(DAY)
        sizes = []
        for folder in self._folders():
            with suppress(OSError):
                sizes.append((folder.stat().st_mtime, folder, sum(file.stat().st_size for file in _files(folder))))
        total = sum(size for _, _, size in sizes)
        for _, folder, size in sorted(sizes):
            if total > self.limit_bytes and self._remove(folder):
                total -= size

    def _sweep(self, age: float) -> None:
        """Delete files of writers that are dead, damaged files, and folders out of use, from an age in seconds on."""
        oldest = time.time() - age
        for folder in [self.folder, *self._folders()] if self.folder else []:
            for path in _files(folder):
                with suppress(OSError):
                    if path.name.startswith((GONE, DAMAGED, UNFINISHED)) and path.lstat().st_mtime <= oldest:
                        _delete(path)

    def tell_once(self, kind: str, message: str) -> None:
        """Log one message of a kind in this process."""
        if kind not in self.said:
            self.said.add(kind)
            log.warning("%s", message)


def _aside(path: Path, prefix: str) -> Path:
    """Another name in the same folder, which no other process has."""
    return path.with_name(f"{prefix}{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def _files(folder: Path) -> Iterator[Path]:
    """The files in a folder; none if there is no such folder, or this user may not look."""
    with suppress(OSError):
        yield from folder.iterdir()


def _delete(path: Path) -> None:
    """Delete a file, a link or a folder, as far as this user may."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _header(path: Path, data: bytes) -> bytes:
    """The header of an item's file."""
    fields = HEADER.pack(MAGIC, VERSION, _place(path), len(data), bytes(32))[:-32]
    return fields + hashlib.sha256(fields + data).digest()


def _place(path: Path) -> bytes:
    """The digest of an item's key and name."""
    return hashlib.sha256(f"{path.parent.name}/{path.name}".encode()).digest()


def _fault(content: bytes, path: Path) -> str:
    """The reason why a file is not what was written there; "" if it is."""
    if len(content) < HEADER.size:
        return f"it is truncated ({len(content)} bytes)"
    magic, version, place, length, _ = HEADER.unpack_from(content)
    data = content[HEADER.size :]
    if magic != MAGIC:
        return "it is no artefact"
    if version != VERSION:
        return OTHER_FORMAT
    if place != _place(path):
        return "it was written for another model or item"
    if length != len(data):
        return f"it has {len(data)} bytes of data and announces {length}"
    return "" if content[: HEADER.size] == _header(path, data) else "its checksum does not match"  # guard: checksums


def table_of(entries: list[StoredArtefact], title: str) -> "Table":
    """A table of artefacts. Texts of the files are shown as they are, not as markup."""
    from rich.table import Table
    from rich.text import Text

    size = sum(entry.bytes for entry in entries) / 1e6
    table = Table(title=Text(f"{title}: {len(entries)} artefacts, {size:.1f} MB"), title_justify="left")
    for name in ("key", "model", "device", "MB", "last use", "versions"):
        table.add_column(name, justify="right" if name == "MB" else "left", overflow="fold")
    for entry in entries:
        model, device = (str(entry.about.get(name, "unknown")) for name in ("model", "device"))
        versions = entry.about.get("versions")
        pairs = versions.items() if isinstance(versions, dict) else ()
        # The first word is the version; torch's commit follows it.
        told = ", ".join(f"{name} {f'{version} '.split()[0]}" for name, version in pairs if version)
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        cells = entry.key[:12], model, device, f"{entry.bytes / 1e6:.1f}", used, told
        table.add_row(*map(Text, cells))
    return table
