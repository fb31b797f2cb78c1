"""Simulated acceptance: tokens a second of plain, adaptive and fixed drafting, if a stated share of drafts is right.

    python -m benchmarks.simulated_acceptance [--shape qwen3-30b-a3b [--layers N] | --model PATH] [--batch 1 4 16]
        [--acceptance 0 0.3 0.5 0.7 0.85] [--forms chain tree] [--head eagle3] [--new-tokens 256] [--repeats 2]
        [--in-flight 1 16 64 256 [--requests 500]] [--prompt-tokens 128] [--json FILE]

A shape has random weights, so that no draft of its own would be accepted. So the model's greedy answer is recorded with
plain steps, and the drafter proposes trees of a fixed form in which a node is right with probability
``acceptance / 2 ** rank``, where rank is its number among its siblings, if none of these before it is; a chain has rank
0 only. Each token of each row has a draw of its own, the same for all systems. A --head of random weights also runs in
each round, so that drafts cost what they do with a real one; with "none" they cost nothing, like n-grams.

--in-flight measures continuous batching in place of static batches, with --requests, or three for each that is under
way at any time. All have one prompt, and none starts with keys and values of another.

"over best" divides the rate of adaptive drafting by the best of plain steps and the fixed settings of the same form, in
hindsight. "same answers" says that all systems gave the recorded answer, in the first row. All figures are simulated.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from torch import Tensor
from transformers import PreTrainedModel

import spec_compile
from benchmarks import common
from benchmarks.rounds.drafts import make
from benchmarks.rounds.shapes import SHAPES, build, text_tokens
from benchmarks.serving import ROWS, in_flight, managed
from spec_compile.drafters import ALGORITHMS, Entry
from spec_compile.drafters.heads import HeadAlgorithm, HeadDrafter, HeadOptions
from spec_compile.drafters.trees.propose import propose_full
from spec_compile.drafters.union import CollectingState
from spec_compile.drafting import Algorithm, Drafter, DraftPlan
from spec_compile.runtime.draft_record import DraftRecord
from spec_compile.runtime.session import StepKind

LIKELY = 0.7
"""The acceptance for which the form of a tree is the best."""
RANKS = 4
"""Children of a node at most."""
TREE = dict(num_steps=5, topk=RANKS, num_draft_tokens=16)
HEADS = {"eagle3": "EAGLE-3 head", "eagle": "EAGLE head", "none": "free"}
FORMS = {
    "chain": (dict(num_steps=3), {f"chain of {steps}": dict(num_steps=steps) for steps in (1, 2, 3)}),
    "tree": (
        TREE,
        {
            f"tree of {nodes} nodes": TREE | dict(num_steps=steps, num_draft_tokens=nodes)
            for nodes, steps in ((4, 2), (8, 3), (16, 5))
        },
    ),
}
FORMS |= {f"chain of {steps}": (chain := dict(num_steps=steps), {f"chain of {steps}": chain}) for steps in (1, 3)}
"""Name -> options of the adaptive system, and of the fixed ones by their names."""


class Form:
    """A tree of `nodes` nodes, the root included: the likeliest paths of up to `steps` ranks below `topk`, likeliest
    first, so that parents come first and the first nodes are the best smaller tree.

    parents, rank, depth: [N] int64; number of the parent (-1: the root's), number among the siblings, and depth.

    With 2 steps and topk 4, 4 nodes are the root, (0), (0, 0) and (1): parents [-1, 0, 1, 0], rank [0, 0, 0, 1].
    """

    def __init__(self, steps: int, topk: int, nodes: int, device: torch.device):
        paths = [path for depth in range(1, steps + 1) for path in product(range(topk), repeat=depth)]
        paths.sort(key=lambda path: -prod(LIKELY / 2**rank for rank in path))
        paths = [(), *paths[: nodes - 1]]
        number = {path: node for node, path in enumerate(paths)}
        table = torch.tensor([(number[path[:-1]], path[-1], len(path)) for path in paths[1:]], device=device)
        root = torch.tensor([[-1, 0, 0]], device=device)
        self.parents, self.rank, self.depth = torch.cat([root, table]).unbind(dim=1)

    def trees(
        self, root: Tensor, lengths: Tensor, text: Tensor, right: Tensor, vocab_size: int
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Tokens and parents [B, N] of the trees below the roots [B], in slots `lengths` [B].

        text [R, L], right [D, L]: the text of row b of the batch is row ``b % R``, and its draws are row ``b % D`` of
        `draw_right`.

        A node that is not right gets another token than its siblings: if the text goes on with 7, the children of ranks
        0, 1 and 2, of which 1 is right, get 8, 7 and 10.
        """
        slots = (lengths[:, None] + self.depth).clamp(max=text.shape[1] - 1)
        rows = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
        truth = text[rows % text.shape[0], slots]
        wrong = (truth + 1 + self.rank) % vocab_size
        tokens = torch.where(right[rows % right.shape[0], slots] == self.rank, truth, wrong)
        tokens = torch.where(self.depth == 0, root[:, None], tokens)
        return tokens, self.parents.expand_as(tokens)


def draw_right(acceptance: float, rows: int, length: int) -> Tensor:
    """For each token [rows, length] int64 the rank of the node that is right, -1 if none is.

    The random numbers do not depend on `acceptance`.
    """
    drawn = torch.rand(rows, length, RANKS, generator=torch.Generator().manual_seed(0))
    hits = drawn < acceptance * 0.5 ** torch.arange(RANKS)
    return torch.where(hits.any(dim=2), hits.to(torch.int64).argmax(dim=2), -1)


@dataclass(frozen=True)
class SimulatedOptions(HeadOptions):
    """Options of simulated drafts.

    text, right: int64 on the model's device, see `Form.trees`; their values may change between calls.
    """

    text: Any = None
    right: Any = None

    def form(self) -> Form:
        schedule = self.schedule
        return Form(schedule.num_steps, schedule.topk, schedule.nodes, self.text.device)


class SimulatedHead(HeadAlgorithm):
    """A head whose drafts are computed, and then replaced."""

    def __init__(self, head: torch.nn.Module, options: SimulatedOptions):
        super().__init__(head, options)
        self.form, self.text, self.right = options.form(), options.text, options.right

    def drafter(self, batch: int, slots: int) -> Drafter:
        return SimulatedHeadDrafter(self, batch, slots)


class SimulatedHeadDrafter(HeadDrafter):
    """Replaces the head's trees."""

    def __init__(self, algorithm: SimulatedHead, batch: int, slots: int):
        super().__init__(algorithm, batch, slots)
        self.form, self.text, self.right = algorithm.form, algorithm.text, algorithm.right

    def propose(self, state, max_kv_len: int, nodes: int | None = None) -> None:
        drafted = CollectingState(state)
        super().propose(drafted, max_kv_len, nodes)
        tokens, parents = drafted.trees[:2]
        truth = state.lengths.clone(), self.text, self.right, state.is_eos.shape[1]
        simulated = (nodes_of[:, :nodes] for nodes_of in self.form.trees(tokens[:, 0], *truth))
        has_run = (tokens >= 0) & (parents >= -1)  # always; without it a compiler would leave out the head
        propose_full(state, *(torch.where(has_run, new, old) for new, old in zip(simulated, (tokens, parents))))


class SimulatedFree(Algorithm):
    """Drafts that cost nothing."""

    def __init__(self, options: SimulatedOptions):
        self.form, self.text, self.right = options.form(), options.text, options.right
        self.plan = DraftPlan(options.schedule.nodes)

    def drafter(self, batch: int, slots: int) -> Drafter:
        return SimulatedFreeDrafter(self)


class SimulatedFreeDrafter(Drafter):
    """Proposes trees without a head."""

    def __init__(self, algorithm: SimulatedFree):
        super().__init__()
        self.form, self.text, self.right = algorithm.form, algorithm.text, algorithm.right

    def propose(self, state, max_kv_len: int) -> None:
        truth = state.lengths.clone(), self.text, self.right, state.is_eos.shape[1]
        propose_full(state, *self.form.trees(state.tree_tokens[:, 0].clone(), *truth))


def simulate(model: PreTrainedModel, options: SimulatedOptions) -> Algorithm:
    """The algorithm with the head that `options` names, or with none."""
    return SimulatedFree(options) if options.draft is None else SimulatedHead(options.draft, options)


ALGORITHMS["simulated"] = Entry(SimulatedOptions, simulate)


def systems_of(model: PreTrainedModel, form: str, text: Tensor, right: Tensor, options) -> dict[str, PreTrainedModel]:
    """The wrapped models of a form: plain, adaptive, and the fixed settings."""
    adaptive, fixed = FORMS[form]
    shared = dict(compile=not options.no_compile, check=False, cache=False, max_cache_len=text.shape[1])
    shared |= dict(prefix_cache_bytes=0, prefix_cache_host_bytes=0)
    draft = None if options.head == "none" else make(options.head, model)
    wrap = partial(spec_compile.speculate, model, "simulated", draft=draft, text=text, right=right, **shared)
    systems = {"plain": spec_compile.speculate(model, num_draft_tokens=1, **shared), "adaptive": wrap(**adaptive)}
    return systems | {name: wrap(adaptive=False, **settings) for name, settings in fixed.items()}


def forget(fast: PreTrainedModel) -> None:
    """Drop what adaptive drafting has learned of the gains of drafts."""
    for kind in StepKind:
        vars(fast.speculation.engine.runtime.records[kind.value]).update(vars(DraftRecord()))


def facts_of(model: PreTrainedModel, form: str, rates: dict[str, float], options) -> dict:
    """The part of a row that all have. rates: tokens a second by system."""
    device, drafting = model.device.type, HEADS[options.head]
    row = {"device": device, "model": options.name, "drafting": drafting, "form": form, **rates}
    return row | common.hindsight(rates)


def measure(model: PreTrainedModel, form: str, options) -> Iterator[dict]:
    """A row for each batch size and acceptance of one form."""
    most, size = max(options.batch), options.prompt_tokens
    length = size + options.new_tokens
    text, right = (torch.zeros(most, length, dtype=torch.int64, device=model.device) for _ in range(2))
    prompts = text_tokens(most * size, model.config.vocab_size, options.model or common.DEMO_MODEL)
    text[:, :size] = prompts.view(most, size)
    systems = systems_of(model, form, text, right, options)
    fixed = dict(max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    for batch in options.batch:
        prompt = text[:batch, :size].clone()
        whole = torch.ones_like(prompt)  # transformers would take the id of padding in a text for padding
        calls = {name: partial(fast.generate, attention_mask=whole, **fixed) for name, fast in systems.items()}
        for name, fast in systems.items():
            _, seconds = common.elapsed(partial(fast.speculation.warmup, batch), model.device)
            calls[name](prompt, max_new_tokens=8)
            print(f"simulated, {form}, batch {batch}: {name} is ready after {seconds:.0f} s", flush=True)
        text[:batch] = calls["plain"](prompt)
        for acceptance in options.acceptance:
            right.copy_(draw_right(acceptance, most, length))
            forget(systems["adaptive"])
            answers, rates = common.answer_in_turn(calls, systems, [prompt], options.repeats)
            rates = {name: rate * batch for name, rate in rates.items()}
            row = {
                "batch": batch,
                "simulated acceptance": acceptance,
                "same answers": all(answer[0].equal(text[0, size:]) for answer in answers.values()),
            }
            row["accept lengths"] = {name: fast.speculation.stats.accept_length for name, fast in systems.items()}
            yield facts_of(model, form, rates, options) | row


def measure_load(model: PreTrainedModel, form: str, options) -> Iterator[dict]:
    """The same for each number of requests in flight. All have one prompt, and so one text."""
    rows, size = min(max(options.in_flight), ROWS), options.prompt_tokens
    length = size + options.new_tokens
    text, right = (torch.zeros(each, length, dtype=torch.int64, device=model.device) for each in (1, rows))
    text[0, :size] = text_tokens(size, model.config.vocab_size, options.model or common.DEMO_MODEL)
    prompt, systems, told = text[0, :size].tolist(), systems_of(model, form, text, right, options), {}
    fixed = dict(max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    whole = torch.ones_like(text[:, :size])
    text[:] = systems["plain"].generate(text[:, :size].clone(), attention_mask=whole, **fixed)
    for name, fast in systems.items():
        with managed(fast, len(right)) as manager:
            for count in options.in_flight:
                in_flight(manager, [prompt] * count, count, 8, salted=True)
                for acceptance in options.acceptance:
                    if name != "plain" or acceptance == options.acceptance[0]:  # plain steps draft nothing
                        right.copy_(draw_right(acceptance, *right.shape))
                        forget(fast)
                        asked = [prompt] * (options.requests or 3 * count)
                        row = in_flight(manager, asked, count, options.new_tokens, salted=True)
                    told.setdefault((count, acceptance), {})[name] = row
        fast.destroy_cached_continuous_batching_manager()
    for (count, acceptance), by_name in told.items():
        rates = {name: row["tokens_per_s"] for name, row in by_name.items()}
        row = {"in flight": count, "simulated acceptance": acceptance, "tokens": f"{size} + {options.new_tokens}"}
        row["accept lengths"] = {name: row["tokens_per_step"] for name, row in by_name.items()}
        row["first token s"] = {name: row["first_token_s"] for name, row in by_name.items()}
        yield facts_of(model, form, rates, options) | row


def tell(row: dict) -> None:
    """Print a line of a row."""
    rates = ", ".join(f"{name} {row[name]:.1f} ({length:.2f})" for name, length in row["accept lengths"].items())
    rows = f"batch {row['batch']}" if "batch" in row else f"{row['in flight']} in flight"
    print(
        f"simulated, {row['drafting']}, {row['form']}, {rows}, acceptance {row['simulated acceptance']}: tokens/s "
        f"(accept length) {rates}; adaptive over best, {row['best']}: {row['over best']:.3f}", flush=True,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = common.command_line(__doc__, results="simulated_acceptance.json", threads=2)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=list(SHAPES), metavar="NAME", help="random weights")
    parser.add_argument("--layers", type=int, help="layers of the shape, in place of its own")
    parser.add_argument("--model", help="a folder of a model, in place of a shape")
    parser.add_argument("--forms", nargs="+", default=["chain", "tree"], choices=list(FORMS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.0, 0.3, 0.5, 0.7, 0.85])
    parser.add_argument("--head", default="eagle3", choices=list(HEADS), help="none: drafts cost nothing")
    parser.add_argument("--in-flight", type=int, nargs="+", help="continuous batching in place of static batches")
    parser.add_argument("--requests", type=int, help="three for each in flight by default")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="rounds without Inductor")
    options = parser.parse_args(arguments)
    device = common.device_for(options.threads)
    layers = f", {options.layers} layers" if options.layers else ""
    options.name = Path(options.model).name if options.model else options.shape + layers
    model = common.load_model(options.model, device) if options.model else build(options.shape, device, options.layers)
    way, part, size = (measure_load, "load", "in flight") if options.in_flight else (measure, "rows", "batch")
    keys = ("device", "model", "drafting", "form", size, "tokens", "simulated acceptance")
    facts = common.stamp(model.device)
    for form in options.forms:
        rows = []
        for row in way(model, form, options):
            tell(row)
            common.save_rows(options.json, [row], keys, facts, part)
            rows.append(row)
        columns = [name for name in rows[0] if not isinstance(rows[0][name], dict)]
        common.show_rows(rows, columns, "tokens a second at simulated acceptance")


if __name__ == "__main__":
    main()
