"""Speed and memory of the n-gram trie, one thread.

    python -m benchmarks.host.ngram_trie [--tokens 1000000] [--json figures.json]

"source" is the Python standard library's source split into words, "random" is uniform over a vocabulary of 32,000.
Tokens per second are given by the thread's own time and by the clock on the wall; `rss` is the growth of the process
for each node held; times in microseconds are medians (the rows have p99 and maximum too): one draft of 16 nodes, and
one round of `advance` that appends 3 tokens and drafts 16. Each line comes from a separate process.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from benchmarks.common import save_rows, show, stamp
from spec_compile.ngram.trie import NgramTrie

COLUMNS = (
    "capacity", "tokens_per_cpu_s", "tokens_per_s", "nodes", "bytes_per_node", "rss_per_node", "bytes_per_token",
    "propose_16_us", "round_3_16_us", "nodes_per_draft",
)  # fmt: skip
"""Figures of the printed table; the rows have more."""
SPLIT = re.compile(r"\w+|[^\w\s]|\n *| +")


def source_tokens(count: int) -> torch.Tensor:
    words, ids = {}, []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        ids += [words.setdefault(word, len(words)) for word in SPLIT.findall(path.read_text(errors="replace"))]
        if len(ids) >= count:
            break
    if len(ids) < count:
        raise SystemExit(f"the standard library has only {len(ids)} tokens: ask for fewer with --tokens")
    return torch.tensor(ids[:count])


def random_tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 32_000, (count,), generator=torch.Generator().manual_seed(0))


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def microseconds(seconds: list[float]) -> dict:
    ordered = sorted(seconds)
    at = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[int(q * (len(ordered) - 1))] * 1e6, 2) for name, q in at.items()}


def figure(value) -> str:
    """A cell of the table; of a time, the median."""
    return f"{value['median'] if isinstance(value, dict) else value:,}"


def measure(kind: str, match_type: str, count: int, capacity: int) -> dict:
    torch.set_num_threads(1)
    text = (source_tokens if kind == "source" else random_tokens)(count + 20_000)
    ids, probe = text[:count].contiguous(), text[count:].contiguous()
    start = rss()
    trie = NgramTrie(capacity=capacity, match_type=match_type)
    empty = rss() - start
    stream, pieces = trie.open(), []
    began, cpu = time.perf_counter(), time.thread_time()
    for piece in ids.split(256):
        at = time.thread_time()
        trie._core.extend(stream, piece.numpy())
        pieces.append(time.thread_time() - at)
    wall, cpu = time.perf_counter() - began, time.thread_time() - cpu
    held = trie.stats()
    grown = rss() - start
    # Rounds on the text that follows: append three tokens, then draft a tree of 16. The first half of the text times
    # only the draft; the second half times whole rounds, with the checks of `advance`.
    n, streams, committed = 16, torch.tensor([trie.open()]), torch.zeros(1, dtype=torch.int64)
    out = [torch.zeros(shape, dtype=torch.int64) for shape in ((1, n), (1, n), (1,), (1,))]
    drafts, rounds, nodes, matches = [], [], 0, 0
    for end in range(3, len(probe), 3):
        committed[0] = end
        if end <= len(probe) // 2:
            trie._core.extend(int(streams), probe[end - 3 : end].numpy())
            at = time.perf_counter()
            trie._core.propose(int(streams), out[0][0].numpy(), out[1][0].numpy())
            drafts.append(time.perf_counter() - at)
        else:
            at = time.perf_counter()
            trie.advance(streams, probe[None], committed, *out)
            rounds.append(time.perf_counter() - at)
            nodes += int(out[2]) - 1
            matches += int(out[3])
    return {
        "text": kind,
        "match_type": match_type,
        "tokens": count,
        "capacity": capacity,
        "tokens_per_s": round(count / wall),
        "tokens_per_cpu_s": round(count / cpu),
        "add_256_tokens_us": microseconds(pieces),
        "held_tokens": held["tokens"],
        "nodes": held["nodes"],
        "evicted": held["evicted"],
        "bytes_per_node": round(held["bytes"] / held["nodes"], 2),
        "rss_per_node": round(grown / held["nodes"], 2),
        "bytes_per_token": round(held["bytes"] / held["tokens"], 1),
        "empty_rss_mib": round(empty / 2**20, 2),
        "propose_16_us": microseconds(drafts),
        "round_3_16_us": microseconds(rounds),
        "nodes_per_draft": round(nodes / len(rounds), 2),
        "mean_match": round(matches / len(rounds), 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return
    rows = []
    roomy = 20 * args.tokens  # more than branch_length nodes a token: nothing is evicted
    for text, match_type, capacity in (
        ("source", "BFS", roomy),
        ("source", "PROB", roomy),
        ("random", "BFS", roomy),
        ("source", "BFS", 2 * args.tokens),  # mostly evicted again
    ):
        case = json.dumps((text, match_type, args.tokens, capacity))
        command = [sys.executable, "-m", "benchmarks.host.ngram_trie", "--one", case]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout))
        print(rows[-1], flush=True)
    cells = [(row["text"], row["match_type"], *(figure(row[name]) for name in COLUMNS)) for row in rows]
    show(("text", "match_type", *COLUMNS), cells)
    if args.json:
        save_rows(args.json, rows, ("text", "match_type", "tokens", "capacity"), stamp())


if __name__ == "__main__":
    main()
