"""Logits that `audit` compares: their distance from float32 next to the noise that it allows, and the bits of rounds.

The noise is how far a model's logits move when the same sums are done in another order. In 16 bits every order of
computation (the text at once, in pieces through a cache, in a padded batch, token by token) rounds differently, and
each is legitimate. All of them approximate the model in float32, so the distance of an order from a float32 copy of the
same weights is the model's noise. A speculative model that computes the same function is as far from the copy as the
orders are. One that computes another function is farther at every position.
"""

import copy
import dataclasses
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from .. import passes
from ..cache import ROUNDED, Cache
from ..capture.yardstick import DEVIATIONS, FLOOR, LEAST_SPREAD, MORE_NOISE, rms
from ..compat import CACHE
from ..graph import ModelGraph
from ..inventory import held, held_parameters, held_tensors
from ..kernels import HALF
from ..passes.outputs import FINAL
from ..runtime.engine import Engine
from ..stats import Stats
from ..tree import MAX_NODES, ancestry

PADDING = 7
"""Padding tokens on the left of the padded batch."""


@dataclass
class Scatter:
    """The exact logits at the last positions of a text, and how far the target's orders of computation are from them.

    exact: [positions, V] float32; logits of the float32 copy.
    steps: [positions, V] float32; logits of the model itself, token by token.
    distance: [positions] float32; root mean square of (order - `exact`) over the vocabulary, for the median order.
    gaps: [orders, positions] float32; the error of each order in the difference of two logits.
    floor: the least distance that counts.
    """

    exact: Tensor
    steps: Tensor
    distance: Tensor
    gaps: Tensor
    floor: float

    def excess(self, logits: Tensor) -> Tensor:
        """log(distance of `logits` [positions, V] / distance of the orders) at each position, float32 [positions]."""
        return (rms(logits.float() - self.exact).clamp(min=self.floor) / self.distance).log()

    def errors(self, logits: Tensor) -> Tensor:
        """The mean and the largest distance of `logits` [positions, V] from `exact`, float32 [positions, 2]."""
        error = (logits.float() - self.exact).abs()
        return torch.stack([error.mean(dim=-1), error.amax(dim=-1)], dim=1)


@dataclass
class Logits:
    """How far the speculative logits of all prompts are from a float32 copy of the target, next to the target's logits.

    positions: number of positions that were compared.
    excess: mean of log(distance of the speculative logits from the copy / distance of the target's own from it).
    error: standard error of that mean.
    """

    positions: int
    excess: float
    error: float

    @classmethod
    def of(cls, excess: Tensor) -> "Logits":
        """From the excess at each position, [positions]: see `Scatter.excess`."""
        count = len(excess)
        spread = max(float(excess.std()), LEAST_SPREAD) if count > 1 else math.inf
        return cls(count, float(excess.mean()), spread / math.sqrt(count))

    @property
    def verdict(self) -> str:
        """ "same" if they are no farther from the float32 copy than the target's own, or else "DIFFERENT"."""
        return "same" if self.excess - DEVIATIONS * self.error <= math.log1p(MORE_NOISE) else "DIFFERENT"

    def __str__(self) -> str:
        ratio = math.exp(self.excess)
        distance = f"{ratio:.3f} (±{ratio * self.error:.3f}) times as far from float32 as the target's own"
        return f"{self.positions} positions: {distance}, {self.verdict}"


@dataclass
class Distance:
    """The mean and the largest distance of logits from a float32 copy of the model, for ours and transformers' own."""

    ours: tuple[float, float]
    theirs: tuple[float, float]

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor) -> "Distance":
        """From the mean and the largest distance at each position, [positions, 2]: see `Scatter.errors`."""
        return cls(*((float(each[:, 0].mean()), float(each[:, 1].max())) for each in (ours, theirs)))

    def __str__(self) -> str:
        ours, theirs = (f"{mean:.3g} and {largest:.3g}" for mean, largest in (self.ours, self.theirs))
        return f"ours {ours}, transformers' {theirs}"


class Reference:
    """A model and its float32 reference: a copy if the model has 16 bits, otherwise the model itself.

    The copy takes 4 bytes a parameter, on the model's device if that has room, otherwise on the CPU.
    """

    def __init__(self, model: PreTrainedModel):
        self.model, self.exact = model, model
        if model.dtype.itemsize == 2:
            self.exact = _float32_copy(model, _roomy_device(model))

    @torch.no_grad()
    def scatter(self, text: Tensor, count: int, pair: tuple[int, int] | None = None) -> Scatter:
        """Measure the last `count` positions of `text` [1, T].

        ``gaps`` are taken between the two largest logits. pair: the tokens to compare at the last position instead.
        """
        exact = _last(_forward(self.exact, text.to(self.exact.device), count), count).to(text.device)
        two = exact.topk(2, dim=-1).indices
        if pair is not None:
            two[-1] = two.new_tensor(pair)
        distances, gaps = [], []
        for logits in _orders(self.model, text, count):
            error = logits - exact
            distances.append(rms(error))
            gaps.append(error.gather(-1, two).diff(dim=-1)[:, 0])
        floor = max(FLOOR.get(self.model.dtype, 0.0) * float(exact.abs().max()), 1e-30)
        distance = torch.stack(distances).quantile(0.5, dim=0).clamp(min=floor)
        return Scatter(exact, logits, distance, torch.stack(gaps), floor)


def gap_noise(gaps: Tensor, floor: float = 0.0) -> float:
    """Root mean square of `gaps` [orders, positions] over the positions, for the median order."""
    return max(float(rms(gaps).quantile(0.5)), floor)


def _forward(model: PreTrainedModel, ids: Tensor, count: int, **arguments):
    """The model's output. If the model can leave out other logits, it has only the last `count` positions."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = count
    return model(ids, **arguments)


def _last(output, count: int) -> Tensor:
    """The logits of the first row's last `count` positions, float32 [count, V]."""
    return output.logits[0, -count:].float()


def _orders(model: PreTrainedModel, text: Tensor, count: int) -> Iterator[Tensor]:
    """Logits [count, V] of the last positions of `text` [1, T], by each legitimate order of computation.

    The last order is the one of `generate`: the text up to the first of these positions, then one step a token.
    """
    length = text.shape[1]
    yield _last(_forward(model, text, count), count)
    third = -(-length // 3)
    yield _in_pieces(model, text, count, [*range(third, length, third), length])
    yield _padded(model, text, count)
    yield _in_pieces(model, text, count, range(length - count + 1, length + 1))


def _in_pieces(model: PreTrainedModel, text: Tensor, count: int, ends) -> Tensor:
    """Logits [count, V] of the last positions, from pieces of the text that end at `ends` and share a cache."""
    cache, begin, logits = None, 0, []
    for end in ends:
        output = _forward(model, text[:, begin:end], min(end - begin, count), use_cache=True, **{CACHE: cache})
        cache, begin = getattr(output, CACHE), end
        logits.append(_last(output, count))
    return torch.cat(logits)[-count:]


def _padded(model: PreTrainedModel, text: Tensor, count: int) -> Tensor:
    """Logits [count, V] of the last positions, with the text in a batch of two rows and padding on its left."""
    longer = F.pad(text, (PADDING, 0))
    mask = F.pad(torch.ones_like(text), (PADDING, 0))
    mask = torch.cat([mask, torch.ones_like(mask)])
    arguments = {"attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return _last(_forward(model, torch.cat([longer, longer.roll(1, dims=1)]), count, **arguments), count)


def _float32_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A copy of the model with every tensor of 16 bits in float32."""

    def widened(tensor: Tensor) -> Tensor:
        wide = tensor.detach().to(device, torch.float32 if tensor.dtype in HALF else tensor.dtype)
        return nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide

    exact = copy.deepcopy(model, {id(tensor): widened(tensor) for tensor in held_tensors(model)})
    for each in held(exact):  # what the copying has made
        if each.tensor.dtype in HALF or each.tensor.device != device:
            each.holder[each.name] = widened(each.tensor)
    if exact.config._attn_implementation not in ("sdpa", "eager"):
        exact.set_attn_implementation("eager")  # not every other one takes float32
    return exact


def _roomy_device(model: PreTrainedModel) -> torch.device:
    """The model's device, or the CPU if that has no room for the float32 copy."""
    if model.device.type == "cuda":
        # 4 bytes a parameter, and one in reserve for what the forwards need.
        needed = 5 * sum(parameter.numel() for parameter in held_parameters(model))
        unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
        if torch.cuda.mem_get_info(model.device)[0] + unused < needed:
            return torch.device("cpu")
    return model.device


def speculative_logits(fast: Any, ids: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """A prompt with its speculative answer, [1, T], and the answer's logits [positions, V]."""
    options = {**options, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = fast.generate(ids, **options)
    return output.sequences, torch.cat(output.logits)


def graph_logits(verify: ModelGraph, text: Tensor, count: int) -> Tensor:
    """Logits [count, V] of the rewritten graph, not compiled, at the last `count` positions of `text` [1, T]."""
    length = text.shape[1]
    cache = Cache(verify, 1, -(-length // ROUNDED) * ROUNDED).argument  # as a session's
    positions = torch.arange(length, device=text.device)[None]
    return verify.gm(text, positions, text.new_zeros(1), None, cache, length)[0][0, -count:]


# The bits of speculative rounds and of plain steps of the same engine, which draft nothing.

PATHS = (MAX_NODES // 2, 8, 2)
"""Nodes of the paths that `first_difference` runs. Every node but the root has a rival."""


@contextmanager
def plain_steps(engine: Engine) -> Iterator[None]:
    """A context in which the engine verifies only roots, and counts in separate statistics."""
    stats = engine.runtime.stats
    engine.most_nodes, engine.runtime.stats = 1, Stats()
    try:
        yield
    finally:
        engine.most_nodes, engine.runtime.stats = MAX_NODES, stats


@torch.no_grad()
def first_difference(engine: Engine, text: Tensor) -> str:
    """The first part of the rewritten graph, not compiled, whose bits in a tree differ from plain steps.

    The trees have the last tokens of `text` [1, T] on a path, and a rival of each. Returns "" if every bit is the same,
    or if the layers of the model cannot be told apart.
    """
    taps = (*range(engine.captured.decoder_layers + 1), FINAL)
    try:
        graph = passes.run(engine.captured, dataclasses.replace(engine.settings["verify"], taps=taps))
    except KeyError:  # a tap that `tap_hidden_states` does not find
        return ""
    layers = [f"layer {n}" for n in range(engine.captured.decoder_layers)]
    names = ["the embeddings", *layers, "the final norm", "the head"]
    longest = text.shape[1] - 1
    for path in (n for n in PATHS if n <= longest):
        for name, in_tree, alone in zip(names, *_both(graph, text, text.shape[1] - path), strict=True):
            if not torch.equal(in_tree, alone):
                return name
    return ""


def _both(graph: ModelGraph, text: Tensor, begin: int) -> tuple[list[Tensor], list[Tensor]]:
    """Taps and logits [1, T - begin, *] of `text` [1, T] from `begin` on, as a path of a tree and by plain steps."""
    length = text.shape[1]
    slots = -(-(length + MAX_NODES) // ROUNDED) * ROUNDED
    # The text up to `begin` is in the cache for both.
    buffers = Cache(graph, 1, slots)
    states, cache = buffers.states, buffers.argument
    steps = torch.arange(length, device=text.device)[None]
    states.reset(steps.new_tensor([begin]))
    for counted in states.tensors[:1]:
        counted.fill_(begin)
    graph.gm(text[:, :begin], steps[:, :begin], steps.new_zeros(1), None, cache, slots)
    # The rest in one tree, and again as plain steps, each of which is committed.
    in_tree = _tree(graph, text[:, begin:], steps[:, begin : begin + 1], cache, slots)
    root = torch.ones_like(text[:, :1])  # sees itself
    alone = []
    for n in range(begin, length):
        alone.append(graph.gm(text[:, n : n + 1], steps[:, n : n + 1], steps[0, n : n + 1], root, cache, slots))
        states.commit(torch.zeros_like(root), root[0])
    rows = [torch.cat(parts, dim=1) for parts in zip(*alone)]
    return [*in_tree[1:], in_tree[0]], [*rows[1:], rows[0]]


def _tree(graph: ModelGraph, path: Tensor, begin: Tensor, cache: list[Tensor], slots: int) -> list[Tensor]:
    """Logits and taps [1, count, *] of `path` [1, count], whose root is at `begin` [1, 1], in a tree with rivals.

    Nodes come level by level: the root, then each token of the path (odd numbers) followed by its rival (even numbers).
    The path r, a, b gives nodes r, a, a', b, b' with parents -1, 0, 0, 1, 1.
    """
    count = path.shape[1]
    tokens = torch.stack([path, (path + 1) % graph.vocab_size], dim=2).flatten(1)[:, [0, *range(2, 2 * count)]]
    on_path = [0, *range(1, 2 * count - 1, 2)]
    parents = [-1, *(parent for parent in on_path[:-1] for _ in range(2))]
    ancestors, depth = ancestry(torch.tensor([parents], device=path.device))
    out = graph.gm(tokens, begin + depth, begin[0], ancestors, cache, slots)
    return [states[:, on_path] for states in out]
