"""The file that n-gram stores are saved in: one format for `NgramTrie` and `NgramCorpus`, written all or nothing.

Little-endian: magic, version and the crc32 of all that follows; a header (see `HEADER`); then the held tokens as int32,
for each the distance to the next token of its text as uint32 (0: the text ends), and the order of siblings as int32,
which only a trie has. Tokens [7, 3, 8, 4] with links [2, 2, 0, 0] are the texts [7, 8] and [3, 4].
"""

import os
import struct
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"SPECTRIE"
VERSION = 1
PREFIX = struct.Struct("<8sII")
HEADER = struct.Struct("<6I5Q")
"""branch_length (0: only texts, no trie), windows, breadths, match_type is PROB; capacity, vocab_size, nodes, tokens,
length of sibling order."""


@dataclass(frozen=True)
class Contents:
    """The contents of a file.

    settings: the first eight fields of `HEADER`.
    tokens, links, order: their bytes.
    """

    settings: tuple[int, ...]
    nodes: int
    tokens: bytes
    links: bytes
    order: bytes = b""

    @property
    def branch_length(self) -> int:
        """The trie's; 0 if only texts are held."""
        return self.settings[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return len(self.tokens) // 4

    def texts(self) -> list[np.ndarray]:
        """The texts, each [n] int32, in the order of their first tokens; ValueError if links contradict themselves."""
        tokens = np.frombuffer(self.tokens, "<i4")
        links = np.frombuffer(self.links, "<u4").astype(np.int64)
        places = np.arange(len(tokens))
        sources = np.flatnonzero(links)
        targets = sources + links[sources]
        if len(targets) and (int(targets.max()) >= len(tokens) or len(np.unique(targets)) < len(targets)):
            raise ValueError("its links are broken")
        first = places.copy()
        first[targets] = sources
        while not np.array_equal(first, further := first[first]):
            first = further
        grouped = np.argsort(first, kind="stable")
        starts = np.flatnonzero(np.diff(first[grouped], prepend=-1))
        return np.split(tokens[grouped], starts[1:]) if len(tokens) else []


def from_text(text: np.ndarray, end: int, capacity: int, vocab_size: int) -> Contents:
    """The contents of a corpus: `text` [n] int32, whose documents each end with `end`."""
    kept = text != end
    links = np.append(kept[1:], False)[kept]
    settings = (0, 0, 0, 0, 0, 0, capacity, vocab_size)
    return Contents(settings, 0, text[kept].astype("<i4").tobytes(), links.astype("<u4").tobytes())


def write(path: str | os.PathLike, contents: Contents) -> None:
    """Replace the file at `path` by a new one once that is on the disk."""
    counts = (contents.nodes, contents.num_tokens, len(contents.order) // 4)
    parts = (HEADER.pack(*contents.settings, *counts), contents.tokens, contents.links, contents.order)
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(PREFIX.pack(MAGIC, VERSION, _checksum(parts)))
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike) -> Contents:
    """The contents of a file; ValueError, with only the reason, if it is truncated, damaged or not of this version."""
    data = memoryview(Path(path).read_bytes())
    if bytes(data[:8]) != MAGIC:
        raise ValueError("the file was not written by NgramTrie.save or NgramCorpus.save")
    start = PREFIX.size + HEADER.size
    if len(data) < start:
        raise ValueError(f"it is truncated ({len(data)} bytes)")
    _, version, checksum = PREFIX.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"its format version is {version}, this release reads version {VERSION}")
    *settings, nodes, num_tokens, num_order = HEADER.unpack_from(data, PREFIX.size)
    expected = start + 8 * num_tokens + 4 * num_order
    if len(data) != expected:
        raise ValueError(f"it has {len(data)} bytes where its header announces {expected}: truncated or damaged")
    if _checksum([data[PREFIX.size :]]) != checksum:
        raise ValueError("its checksum does not match: it is damaged")
    links, order = start + 4 * num_tokens, start + 8 * num_tokens
    return Contents(tuple(settings), nodes, bytes(data[start:links]), bytes(data[links:order]), bytes(data[order:]))


def _checksum(parts: Iterable) -> int:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return checksum
