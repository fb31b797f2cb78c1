"""Time of one n-gram proposal on the GPU, inside a CUDA graph, one row.

    python -m benchmarks.kernels.ngram_match [--json figures.json]

Contexts and corpora are Python source (the standard library's, then installed packages') in the tokens of
examples/tiny_coder. Microseconds a proposal: mean and maximum over 16 places where the context may end, each replayed
from a graph; `cold` is the mean with the L2 cache swept before every proposal, as a model's weights sweep it. `nodes`
and `match` are the mean nodes and the mean length of the match.
"""

import argparse
import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import DEMO_MODEL, save_rows, show, stamp
from benchmarks.timers import captured, replay_us
from spec_compile.ngram.match import join_documents, propose
from spec_compile.ngram.match_options import MatchOptions

CONTEXTS, CORPORA, NODES, PLACES = (1_000, 8_000, 128_000), (0, 1_000_000, 10_000_000), (16, 64), 16
KEYS = ("context", "corpus", "match_type", "num_nodes")
"""The fields that tell the rows of the results apart."""


def source_texts(count: int) -> list[Tensor]:
    """Python files, tokenised, until they hold `count` tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    paths = sysconfig.get_paths()
    files = sorted(Path(paths["stdlib"]).rglob("*.py"), key=lambda path: "site-packages" in path.parts)
    files += sorted(Path(paths["purelib"]).rglob("*.py"))
    texts, held, seen = [], 0, set()
    for begin in range(0, len(files), 200):
        batch = [text for path in files[begin : begin + 200] if (text := path.read_text(errors="replace"))]
        batch = [text for text in batch if not (text in seen or seen.add(text))]
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"] if batch else []:
            texts.append(torch.tensor(ids, dtype=torch.int32))
            held += len(ids)
        if held >= count:
            return texts
    raise SystemExit(f"only {held} tokens of source are installed here")


def measure(text: Tensor, corpus: Tensor, context: int, num_nodes: int, options: MatchOptions) -> dict:
    """A row. text: [context or more] and corpus, on the GPU. The context ends at random places of its last quarter."""
    rng, launches = random.Random(0), 20
    places = [torch.tensor([context - rng.randrange(context // 4)], device="cuda") for _ in range(PLACES)]
    tokens, corpus_length = text[None, :context].contiguous(), torch.tensor([corpus.numel()], device="cuda")

    def one(place: Tensor):
        return propose(tokens, place, corpus, corpus_length, num_nodes, options)

    outs = [one(place) for place in places]
    warm = [
        replay_us(captured(lambda place=place: [one(place) for _ in range(launches)]), 9) / launches for place in places
    ]
    result = {
        "context": context,
        "corpus": corpus.numel(),
        "match_type": options.match_type,
        "num_nodes": num_nodes,
        "mean_us": sum(warm) / PLACES,
        "max_us": max(warm),
        "nodes": sum(int(out[2]) for out in outs) / PLACES,
        "match": sum(int(out[3]) for out in outs) / PLACES,
    }
    sweep = torch.empty(64 << 20, device="cuda")
    swept = replay_us(captured(lambda: [sweep.zero_() for _ in places]), 5)
    both = replay_us(captured(lambda: [(sweep.zero_(), one(place)) for place in places]), 5)
    result["cold_us"] = (both - swept) / PLACES
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in result.items()}


def load(largest: int) -> tuple[Tensor, list[Tensor]]:
    """A context of the largest size, and other documents of `largest` tokens together."""
    texts = source_texts(largest + 2 * max(CONTEXTS))
    random.Random(0).shuffle(texts)
    context: list[Tensor] = []
    while sum(map(len, context)) < max(CONTEXTS):
        context.append(texts.pop())
    return torch.cat(context)[: max(CONTEXTS)].long().cuda(), texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text, texts = load(max(CORPORA))
    whole = join_documents(texts, "cuda")
    rows = []
    for match_type in ("BFS", "PROB"):
        for size in CORPORA:
            for context in CONTEXTS:
                for num_nodes in NODES:
                    rows.append(measure(text, whole[:size], context, num_nodes, MatchOptions(match_type=match_type)))
                    print(rows[-1], flush=True)
    show(rows[0], [map(str, row.values()) for row in rows])
    if args.json:
        save_rows(args.json, rows, KEYS, stamp(torch.device("cuda")))


if __name__ == "__main__":
    main()
