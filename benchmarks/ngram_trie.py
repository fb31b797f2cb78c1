"""Speed and memory of the n-gram trie, one thread.

    python benchmarks/ngram_trie.py [--tokens 1000000] [--json figures.json]

"source" is the Python standard library's source split into words, "random" is uniform over a vocabulary of
32,000. `RSS` is what the process grew by. Every measurement runs in a process of its own.
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

from spec_compile.runtime.ngram import NgramTrie

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


def quantiles(seconds: list[float]) -> dict:
    ordered = sorted(seconds)
    return {name: round(ordered[int(q * (len(ordered) - 1))] * 1e6, 2) for name, q in (("median_us", 0.5), ("p99_us", 0.99), ("max_us", 1))}  # fmt: skip


def measure(kind: str, match_type: str, count: int, capacity: int) -> dict:
    torch.set_num_threads(1)
    text = (source_tokens if kind == "source" else random_tokens)(count + 20_000)
    ids, probe = text[:count].contiguous(), text[count:].contiguous()
    start = rss()
    trie = NgramTrie(capacity=capacity, match_type=match_type)
    empty = rss() - start
    began = time.perf_counter()
    stream, pauses = trie.open(), []
    for piece in ids.split(16):  # as a row being generated; also shows the longest pause
        at = time.perf_counter()
        trie._core.extend(stream, piece.data_ptr(), piece.numel())
        pauses.append(time.perf_counter() - at)
    seconds = time.perf_counter() - began
    held = trie.stats()
    grown = rss() - start
    # Rounds on text that follows: append three tokens, then draft. The stream's own last tokens are the match.
    n, times, nodes, matches = 16, [], 0, 0
    out = [torch.zeros(1, n, dtype=torch.int64), torch.zeros(1, n, dtype=torch.int64), *torch.zeros(2, 1, dtype=torch.int64)]
    streams, committed, rounds, advances = torch.tensor([trie.open()]), torch.zeros(1, dtype=torch.int64), probe[None], []
    tokens, parents = out[0][0], out[1][0]
    for end in range(3, 18_000, 3):
        committed[0] = end
        at = time.perf_counter()
        trie.advance(streams, rounds, committed, *out)
        advances.append(time.perf_counter() - at)
        stream = int(streams[0])
        at = time.perf_counter()
        trie._core.propose(stream, n, tokens.data_ptr(), parents.data_ptr())
        times.append(time.perf_counter() - at)
        nodes += int(out[2]) - 1
        matches += int(out[3])
    return {
        "text": kind, "match_type": match_type, "tokens": count, "capacity": capacity,
        "tokens_per_s": round(count / seconds), "pause_16_tokens": quantiles(pauses),
        "held_tokens": held["tokens"], "nodes": held["nodes"], "evicted": held["evicted"],
        "bytes_per_node": round(held["bytes"] / held["nodes"], 2), "rss_per_node": round(grown / held["nodes"], 2),
        "bytes_per_token": round(held["bytes"] / held["tokens"], 1), "empty_rss_mib": round(empty / 2**20, 2),
        "propose_again_16": quantiles(times), "advance_16": quantiles(advances),
        "nodes_per_draft": round(nodes / len(times), 2), "mean_match": round(matches / len(times), 2),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*json.loads(args.one))))
        return
    results = []
    roomy = 20 * args.tokens  # more than branch_length nodes a token: nothing is evicted
    print(f"{'text':7} {'type':5} {'capacity':>11} {'tokens/s':>10} {'nodes':>11} {'B/node':>7} {'RSS/node':>8} {'B/token':>8}"
          f" {'propose 16: us':>15} {'advance 3+16: us':>17} {'drafted':>8}")  # fmt: skip
    for case in (("source", "BFS", roomy), ("source", "PROB", roomy), ("random", "BFS", roomy), ("source", "BFS", 2 * args.tokens)):
        case = (case[0], case[1], args.tokens, case[2])
        done = subprocess.run([sys.executable, __file__, "--one", json.dumps(case)], check=True, capture_output=True, text=True)
        r = json.loads(done.stdout)
        results.append(r)
        print(f"{r['text']:7} {r['match_type']:5} {r['capacity']:11,} {r['tokens_per_s']:10,} {r['nodes']:11,} {r['bytes_per_node']:7} {r['rss_per_node']:8}"
              f" {r['bytes_per_token']:8} {r['propose_again_16']['median_us']:15} {r['advance_16']['median_us']:17} {r['nodes_per_draft']:8}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
