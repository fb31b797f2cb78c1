"""Do trees of more than 64 nodes pay? Accept lengths of the best trees of 16 to 256 nodes, by the time of a round.

    python benchmarks/wide_trees.py [--model FOLDER] [--heads FOLDER] [--prompts 2] [--new-tokens 48] [--device cpu]
                                    [--times 64:5.13,128:6.0 | --gpu-json results/gpu.json --shape llama-8b]
                                    [--draft-ms 1.3] [--json FILE]

No round of more than 64 nodes runs here: accept lengths come from candidates and what the target went on with.
"replayed" are those of heads on real prompts: at every token of the target's own greedy answer the head gives its
candidates with their probabilities, the best tree of N nodes is taken, and as much of the answer is accepted as the
tree holds. "simulated" are lattices of independent places whose probabilities are stated (`PROFILES`) and taken to be
right: the accept length is 1 plus the sum of the probabilities of the tree's nodes.

--times gives milliseconds of a round by its rows; --gpu-json takes them from the rounds that gpu.py timed, a row for
each sequence and node: `python benchmarks/gpu.py --shapes llama-8b --contexts 1024 --batches 1 2 4 --sizes 16 32 64`
has 16 to 256 rows. A tree of N nodes is taken to cost what N rows cost, and --draft-ms more. Where both are known,
tokens a second follow, and whether twice the nodes pay; without times, how much longer a round may take for that.
"""

import argparse
import heapq
import json
import math
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from common import DEMO_MODEL, HERE, RESULTS, pin, prompts_of, stamp, write_json
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from spec_compile.drafters.trees import grow
from spec_compile.drafters.trees.block import BlockTree

SIZES = (16, 32, 64, 128, 256)
"""Nodes of a tree, the root included."""
PLACES, CANDIDATES = 15, 16
"""Of a simulated lattice."""
PROFILES = {"easy": (0.96, 0.982), "medium": (0.89, 0.975), "hard": (0.82, 0.965)}
"""Name -> (p, q): the likeliest candidate of place d has probability p * q ** d; the one of rank r > 0 has a share of
what is left that falls with r ** -2, so that all candidates have 99 % of it together."""
HEADS = {
    "DFlash": ("dflash", "dflash", dict(topk=16, num_draft_tokens=2)),
    "EAGLE-3, 5 steps of 10": ("eagle3", "eagle3", dict(num_steps=5, topk=10, num_draft_tokens=2)),
}
"""Name -> algorithm, folder of --heads, options: as many candidates as the library looks at, hardly any verified."""

BLOCK, BEST_NODES = BlockTree.forward, grow.best_nodes
"""What `record` looks at."""


@dataclass
class Candidates:
    """Nodes below a root, from the best down, parents first: their tokens, parents (-1: the root) and probabilities.

    The first N - 1 of them are the best tree of N nodes.
    """

    tokens: list[int]
    parents: list[int]
    probabilities: list[float]

    def expected(self, nodes: int) -> float:
        """The accept length of the best tree of so many nodes, if the probabilities are right."""
        return 1 + sum(self.probabilities[: nodes - 1])

    def accepted(self, nodes: int, answer: list[int]) -> int:
        """How many tokens of `answer`, which is what follows, a round with the best tree of so many nodes gives."""
        children = {(parent, token): number for number, (parent, token) in enumerate(zip(self.parents, self.tokens))}
        node, count = -1, 0
        while count < len(answer):
            count += 1  # the target's own choice at this node
            node = children.get((node, answer[count - 1]), nodes)
            if node >= nodes - 1:
                break
        return count


def best_of_block(scores: list[list[float]], tokens: list[list[int]], count: int) -> Candidates:
    """The `count` best nodes over a block: scores (log-probabilities) and tokens [place][rank], likeliest first."""
    heap, nodes = [(-scores[0][0], 0, 0, -1)], []  # minus the path's score, place, rank, parent
    while heap and len(nodes) < count:
        cost, place, rank, parent = heapq.heappop(heap)
        nodes.append((tokens[place][rank], parent, math.exp(-cost)))
        if rank + 1 < len(scores[place]):
            step = scores[place][rank] - scores[place][rank + 1]
            heapq.heappush(heap, (cost + step, place, rank + 1, parent))
        if place + 1 < len(scores):
            heapq.heappush(heap, (cost - scores[place + 1][0], place + 1, 0, len(nodes) - 1))
    return Candidates(*map(list, zip(*nodes)))


def best_of_grown(tokens: Tensor, above: Tensor, scores: Tensor, count: int) -> Candidates:
    """The `count` best of grown nodes [1, M]: what `grow.best_nodes` takes, the root first."""
    tokens, parents, scores = BEST_NODES(tokens, above, scores, min(count + 1, tokens.shape[1]))
    probabilities = scores[0, 1:].double().exp().tolist()
    return Candidates(tokens[0, 1:].tolist(), (parents[0, 1:] - 1).tolist(), probabilities)


def simulated(name: str, count: int = max(SIZES)) -> Candidates:
    """The best nodes of a lattice of `PROFILES`."""
    first, decay = PROFILES[name]
    shares = [rank**-2 for rank in range(1, CANDIDATES)]
    scores = []
    for place in range(PLACES):
        top = first * decay**place
        rest = [0.99 * (1 - top) * share / sum(shares) for share in shares]
        scores.append([math.log(p) for p in sorted([top, *rest], reverse=True)])
    return best_of_block(scores, [list(range(CANDIDATES))] * PLACES, count)


def record(fast, ids: Tensor, answer: list[int], count: int = max(SIZES)) -> list[Candidates]:
    """The candidates that the head of `fast` gives before each token of the answer to the prompt `ids` [1, T].

    What is verified in their place is a token that the answer does not have, so that every round adds one token.
    """
    seen: list[Candidates] = []
    wrong = min(set(range(len(answer) + 1)) - set(answer))

    def rejected(tree: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, parents, scores = tree
        return torch.cat([tokens[:, :1], torch.full_like(tokens[:, 1:], wrong)], dim=1), parents, scores

    def of_block(self, root, scores, tokens):
        seen.append(best_of_block(scores[0].double().tolist(), tokens[0].tolist(), count))
        return rejected(BLOCK(self, root, scores, tokens))

    def of_grown(tokens, above, scores, nodes):
        seen.append(best_of_grown(tokens, above, scores, count))
        return rejected(BEST_NODES(tokens, above, scores, nodes))

    with mock.patch.object(BlockTree, "forward", of_block), mock.patch.object(grow, "best_nodes", of_grown):
        text = fast.generate(ids, do_sample=False, max_new_tokens=len(answer), pad_token_id=0)
    if text[0, ids.shape[1] :].tolist() != answer or len(seen) < len(answer):
        raise RuntimeError("the candidates that were recorded are not those of the answer, token by token")
    return seen[: len(answer)]


def replay(candidates: list[Candidates], answer: list[int], nodes: int) -> tuple[int, int]:
    """Tokens and rounds of an answer with trees of so many nodes. candidates: for each of its tokens."""
    place = rounds = 0
    while place < len(answer):
        place += candidates[place].accepted(nodes, answer[place:])
        rounds += 1
    return len(answer), rounds


def replayed(fast, model, prompts: list[Tensor], new_tokens: int) -> dict[int, float]:
    """The accept length by nodes over the answers to `prompts`."""
    totals = {nodes: [0, 0] for nodes in SIZES}
    for ids in prompts:
        text = model.generate(ids, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
        answer = text[0, ids.shape[1] :].tolist()
        candidates = record(fast, ids, answer)
        for nodes, total in totals.items():
            for index, value in enumerate(replay(candidates, answer, nodes)):
                total[index] += value
    return {nodes: tokens / rounds for nodes, (tokens, rounds) in totals.items()}


def parse_times(text: str) -> dict[int, float]:
    """ "64:5.1,128:6" -> milliseconds by rows."""
    pairs = [part.split(":") for part in text.split(",")]
    return {int(rows): float(ms) for rows, ms in pairs}


def times_of(path: Path, shape: str, context: int) -> dict[int, float]:
    """Milliseconds by rows (sequences times nodes) of gpu.py's results; of one number, with the fewest sequences."""
    rounds = json.loads(path.read_text())["shapes"][shape]["rounds"]
    times = {}
    for row in sorted(rounds, key=lambda row: -row["batch"]):
        if row["context"] == context:
            times[row["batch"] * row["nodes"]] = row["ms"]
    return times


def verdict(lengths: dict[int, float], times: dict[int, float], few: int, many: int, draft_ms: float) -> str:
    """Whether trees of `many` nodes pay beside those of `few`."""
    gain = lengths[many] / lengths[few]
    if few not in times or many not in times:
        return f"{many} nodes accept {gain - 1:+.1%} more than {few}: they pay if the round takes less than that longer"
    ratio = gain * (times[few] + draft_ms) / (times[many] + draft_ms)
    says = "pay" if ratio > 1 else "do not pay"
    limit = gain * (times[few] + draft_ms) - draft_ms
    return (
        f"{many} nodes {says}: {gain:.3f}x the accept length of {few}, {ratio:.3f}x the tokens a second "
        f"({times[many]:.2f} ms; even at {limit:.2f} ms)"
    )


def table(rows: list[dict], times: dict[int, float], draft_ms: float) -> Table:
    """A line for each draft, a column for each size."""
    shown = Table(title="accept length (tokens/s)", title_justify="left")
    for column in ("", "draft", *(f"{nodes} nodes" for nodes in SIZES)):
        shown.add_column(column, no_wrap=True)
    for row in rows:
        cells = []
        for nodes, length in row["accept_length"].items():
            rate = f" ({length / (times[nodes] + draft_ms) * 1e3:.0f})" if nodes in times else ""
            cells.append(f"{length:.2f}{rate}")
        shown.add_row(row["how"], row["draft"], *cells)
    return shown


def measure(options: argparse.Namespace) -> list[dict]:
    """A row for each profile, and for each head and workload."""
    rows = []
    for name in PROFILES:
        candidates = simulated(name)
        lengths = {nodes: candidates.expected(nodes) for nodes in SIZES}
        rows.append({"how": "simulated", "draft": name, "accept_length": lengths})
    if not options.workloads:
        return rows
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device).eval()
    model.generation_config.eos_token_id = None
    room = model.config.max_position_embeddings - options.new_tokens - 64
    for name, (algo, folder, settings) in HEADS.items():
        if not (options.heads / folder / "config.json").is_file():
            print(f"{name}: left out, because {options.heads / folder} is no head")
            continue
        fast = spec_compile.speculate(model, algo, draft=str(options.heads / folder), compile=False, cuda_graphs=False,
                                      check=False, **settings)  # fmt: skip
        fast.generation_config.eos_token_id = None
        for workload in options.workloads:
            chat = bool(getattr(tokenizer, "chat_template", None))
            prompts = prompts_of(workload, options.folder, options.prompts, tokenizer, min(room, 512), chat)
            prompts = [ids.to(options.device) for ids in prompts]
            lengths = replayed(fast, model, prompts, options.new_tokens)
            rows.append({"how": "replayed", "draft": f"{name}, {workload}", "accept_length": lengths})
            print(
                f"  {rows[-1]['draft']}: " + ", ".join(f"{n} {length:.2f}" for n, length in lengths.items()), flush=True
            )
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--heads", type=Path, help="folder with dflash and eagle3 (default: heads of the model)")
    parser.add_argument("--workloads", nargs="*", default=["chat", "code_completion", "code_editing", "maths"])
    parser.add_argument("--folder", type=Path, default=HERE / "prompts")
    parser.add_argument("--prompts", type=int, default=2, help="of each workload")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--times", type=parse_times, default={}, help="rows:milliseconds,rows:milliseconds")
    parser.add_argument("--gpu-json", type=Path, help="results of gpu.py")
    parser.add_argument("--shape", default="llama-8b", help="of --gpu-json")
    parser.add_argument("--context", type=int, default=1024, help="of --gpu-json")
    parser.add_argument("--draft-ms", type=float, default=0.0, help="of the draft, whatever the nodes")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--json", type=Path, default=RESULTS / "wide_trees.json")
    options = parser.parse_args(arguments)
    options.heads = options.heads or Path(options.model) / "heads"
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if options.device.type == "cpu":
        pin(options.threads)
    times = times_of(options.gpu_json, options.shape, options.context) if options.gpu_json else {}
    times |= options.times
    rows = measure(options)
    Console(width=160).print(table(rows, times, options.draft_ms))
    for row in rows:
        for few, many in ((64, 128), (128, 256)):
            print(f"{row['draft']}: {verdict(row['accept_length'], times, few, many, options.draft_ms)}")
    facts = stamp(options.device) | {"model": Path(options.model).name, "new_tokens": options.new_tokens}
    write_json(options.json, {"rows": [{**row, "stamp": facts} for row in rows]})


if __name__ == "__main__":
    main()
