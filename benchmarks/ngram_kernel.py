"""Time of one n-gram proposal on the GPU, inside a CUDA graph, one row.

    python benchmarks/ngram_kernel.py [--json figures.json]

Contexts and corpora are Python source (the standard library's, then installed packages') in the tokens of
examples/tiny_coder, or without transformers Zipf-distributed tokens and repeats. Microseconds a proposal: mean and
maximum over 16 places where the context may end, each replayed from a graph; `cold` is the mean with the L2 cache
swept before every proposal, as by a model's weights. `nodes` and `match` are means of what was proposed.
"""

import argparse
import itertools
import random
import sysconfig
import time
from pathlib import Path

import torch
from common import stamp, write_json
from torch import Tensor

from spec_compile.ngram.match import join_documents, propose
from spec_compile.ngram.match_options import MatchOptions

CONTEXTS, CORPORA, NODES, PLACES = (1_000, 8_000, 128_000), (0, 1_000_000, 10_000_000), (16, 64), 16


def source_texts(count: int) -> list[Tensor]:
    """Python files, tokenised, until they hold `count` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "examples" / "tiny_coder")
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


def random_texts(count: int) -> list[Tensor]:
    """Documents of 2,000 Zipf-distributed tokens, a third of each copied from earlier ones in pieces of 30."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, 32_001, dtype=torch.float64)
    flat = torch.multinomial(weights, count, replacement=True, generator=generator).int()
    for at in range(90, count - 30, 90):
        begin = int(torch.randint(0, at - 60, (1,), generator=generator))
        flat[at : at + 30] = flat[begin : begin + 30].clone()
    return list(flat.split(2_000))


def seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Median time of a replay."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))[repeats // 2] / 1e3


def capture(work) -> torch.cuda.CUDAGraph:
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def measure(
    text: Tensor, corpus: Tensor, context: int, num_nodes: int, options: MatchOptions, cold: bool = True
) -> dict:
    """text [context or more] and corpus on the GPU. The context ends at random places, in its last quarter."""
    rng, launches = random.Random(0), 20
    places = [torch.tensor([context - rng.randrange(context // 4)], device="cuda") for _ in range(PLACES)]
    tokens, corpus_length = text[None, :context].contiguous(), torch.tensor([corpus.numel()], device="cuda")

    def one(place: Tensor):
        return propose(tokens, place, corpus, corpus_length, num_nodes, options)

    outs = [one(place) for place in places]
    warm = [
        seconds(capture(lambda place=place: [one(place) for _ in range(launches)]), 9) / launches for place in places
    ]
    result = {
        "context": context,
        "corpus": corpus.numel(),
        "match_type": options.match_type,
        "num_nodes": num_nodes,
        "mean_us": sum(warm) / PLACES * 1e6,
        "max_us": max(warm) * 1e6,
        "nodes": sum(int(out[2]) for out in outs) / PLACES,
        "match": sum(int(out[3]) for out in outs) / PLACES,
    }
    if cold:
        sweep = torch.empty(64 << 20, device="cuda")
        swept = seconds(capture(lambda: [sweep.zero_() for _ in places]), 5)
        both = seconds(capture(lambda: [(sweep.zero_(), one(place)) for place in places]), 5)
        result["cold_us"] = (both - swept) / PLACES * 1e6
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in result.items()}


def load(largest: int) -> tuple[Tensor, list[Tensor], str]:
    """A context of the largest size, other documents of `largest` tokens together, and what they are."""
    count = largest + 2 * max(CONTEXTS)
    try:
        texts, kind = source_texts(count), "source"
    except ImportError:
        texts, kind = random_texts(count), "random"
    random.Random(0).shuffle(texts)
    context: list[Tensor] = []
    while sum(map(len, context)) < max(CONTEXTS):
        context.append(texts.pop())
    return torch.cat(context)[: max(CONTEXTS)].long().cuda(), texts, kind


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    text, texts, kind = load(max(CORPORA))
    whole = join_documents(texts, "cuda")
    results = []
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {kind}; {time.perf_counter() - began:.0f} s to load")
    columns = ("context", "corpus", "match_type", "num_nodes", "mean_us", "max_us", "cold_us", "nodes", "match")
    print(*(f"{name:>10}" for name in columns))
    for match_type in ("BFS", "PROB"):
        for size in CORPORA:
            for context in CONTEXTS:
                for num_nodes in NODES:
                    result = measure(text, whole[:size], context, num_nodes, MatchOptions(match_type=match_type))
                    results.append(result)
                    print(*(f"{result[name]:>10}" for name in columns), flush=True)
    if args.json:
        facts = {**stamp(torch.device("cuda")), "text": kind}
        write_json(args.json, [{**row, "stamp": facts} for row in results])


if __name__ == "__main__":
    main()
