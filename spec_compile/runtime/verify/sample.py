"""Choosing tokens: the likeliest in a round; random numbers by counter, tests of drafts that were drawn, and draws in a
round."""

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from ...compat import argmax
from ...errors import RequestError
from ...tree import Accepted, Tree
from ..state import State
from .processors import MINIMA, OF_SCORES, WAITING, is_known, row_invariant

NO_PROBABILITIES = (
    "cannot sample: the scores of the next token contain NaN or +inf, or every token is -inf; look at the logits "
    "processors, or pass remove_invalid_values=True"
)

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def follow(tree: Tree, ancestors: Tensor, depth: Tensor, choice: Tensor) -> Accepted:
    """The path from the root to the deepest node that was chosen with all its ancestors.

    ancestors, depth: [B, N] int64, see `tree.ancestry`. choice: [B, N] int64, the token chosen after each node.
    Siblings are distinct, so at most one path matches: tokens [7, 4, 9, 5], parents [-1, 0, 0, 2] and choice
    [9, 1, 5, 3] give path [0, 2, 3] (count 3) and tokens [9, 5, 3].
    """
    nodes = tree.tokens.shape[1]
    if nodes == 1:
        return Accepted(torch.zeros_like(choice), choice, torch.ones_like(choice[:, 0]))
    number = torch.arange(nodes, device=choice.device)
    is_chosen = tree.real & (choice.gather(1, tree.parents.clamp(min=0)) == tree.tokens)  # guard: accepted-slots
    is_chosen = is_chosen | (number == 0)  # the root is committed already
    chosen_bits = (is_chosen.to(torch.int64) << number).sum(dim=1, keepdim=True)
    on_path = (ancestors & chosen_bits) == ancestors  # guard: accepted-path
    count = torch.where(on_path, depth, -1).amax(dim=1) + 1  # guard: accepted-count
    at_depth = on_path[:, None, :] & (depth[:, None, :] == number[:, None])  # [B, depth, node], one node a depth
    path = torch.where(at_depth, number, 0).sum(dim=2)
    return Accepted(path, choice.gather(1, path), count)


def uniform(seed: int | Tensor, row: Tensor, position: Tensor, stream: int | Tensor = 0) -> Tensor:
    """Random numbers in [0, 1), float64, that depend only on (seed, row, position, stream).

    All arguments are int64 and broadcast to the shape of the result; `seed` and `stream` may be ints.
    row: its number in the batch.
    position: tokens that the row has generated.
    stream: the number's index at that position; 0 draws a token, others test drafts, and from
        `drafters.trees.grow.DRAFT_STREAM` on they draw drafts.

    The arguments go in turn through the finaliser of SplitMix64 (Steele, Lea and Flood 2014, section 3), modulo 2**64.
    """
    bits = mix(seed + _GOLDEN if isinstance(seed, Tensor) else torch.full_like(row, seed) + _GOLDEN)
    for counter in (row, position, stream):  # guard: random-counters
        counter = counter if isinstance(counter, Tensor) else torch.full_like(row, counter)
        bits = mix(bits + (counter + 1) * _GOLDEN)
    return _shift(bits, 12).to(torch.float64) * 2.0**-52  # 52 bits: below 1 even times any total


def counter(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1 as int64 [count] for `uniform` in a compiled graph. Inductor would turn a plain arange into an
    index, whose product with the constants of `uniform` overflows."""
    return torch.arange(count, device=device) | 0


def mix(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (see `uniform`) of int64."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def probabilities(scores: Tensor, raw: Tensor) -> Tensor:
    """The softmax of scores [R, V] in float64; `no_probabilities` if there is none (NaN, or every token excluded).

    raw: [R, V], the scores before the processors.
    """
    weights = scores.double().softmax(dim=-1)
    if not weights.isfinite().all():
        raise no_probabilities(raw)
    return weights


def no_probabilities(raw: Tensor) -> RuntimeError:
    """The error that no token can be drawn: a RequestError if logits processors have made it so.

    raw: [R, V], the scores before the processors.
    """
    is_of_model = not raw.amax(dim=-1).isfinite().all()
    return RuntimeError(NO_PROBABILITIES) if is_of_model else RequestError(NO_PROBABILITIES)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """The token [R] int64 at which the running sum of `weights` first exceeds `u` times their total.

    weights: [R, V] float64, not negative; weight 0 is never drawn. u: [R] float64 in [0, 1).
    Weights [0, 2, 0, 6] have the sums 0, 2, 2, 8: u < 0.25 draws token 1, any other token 3.
    """
    sums = weights.cumsum(dim=1)
    return torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)[:, 0]  # guard: excluded-tokens


def draw_each(scores: Tensor, u: Tensor) -> Tensor:
    """A token [R] int64 by scores [R, V] and numbers [R], -1 if there is nothing to draw from. No host waits."""
    weights = scores.double().softmax(dim=-1)
    token = draw(weights, u).clamp(max=scores.shape[1] - 1)
    return torch.where(weights.sum(dim=-1).isfinite(), token, -1)


def residual(target: Tensor, draft: Tensor, rejected: Tensor) -> Tensor:
    """The weights of the token after a rejection: [..., V] float64, max(target - draft, 0), normalised.

    target, draft: [..., V] float64, both normalised. rejected: [..., 1] int64, the draft's token, which cannot be
    drawn again. If nothing is left, which only rounding can cause, it is the target.
    """
    difference = (target - draft).clamp(min=0).scatter(-1, rejected, 0)  # it is 0 already, but for rounding
    total = difference.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, difference / total, target)  # guard: residual


def accept_drawn(target: Tensor, draft: Tensor, children: list[int], u: Tensor) -> Tensor:
    """The token after one node of a tree, 0-dim int64: an accepted child's, or one from the residual.

    target: [V] float64, normalised. draft: [V] float64, the first child's distribution, normalised here.
    children: the tokens of the node's children in the order of drawing, without replacement.
    u: float64 in [0, 1), a number for each child and one more.

    Rejection sampling tests drafts one by one so that tokens stay distributed as the target's. It serves rows in
    lockstep (see `HostAcceptor`) and trees with several children of a node, for which block verification is not defined
    and which no drafter of the package draws. A draft x drawn from q is accepted with probability min(1, p(x) / q(x)),
    where p is the target's distribution. After a rejection the token is drawn from max(p - q, 0), normalised (Leviathan
    et al. 2023, arXiv:2211.17192, section 2.3). A second draft, drawn without replacement, is tested in the same way
    with the normalised residual as p, and with q without the first draft (Jeon et al. 2024, arXiv:2402.14160, section
    3.2).
    """
    draft = draft / draft.sum()
    for token, number in zip(children, u):
        if number * draft[token] < target[token]:  # guard: drawn-drafts
            return torch.tensor(token, device=target.device)
        rejected = torch.tensor([token], device=target.device)
        target = residual(target, draft, rejected)
        draft = draft.scatter(0, rejected, 0)
        draft = draft / draft.sum().clamp(min=torch.finfo(draft.dtype).tiny)
    return draw(target[None], u[-1].reshape(1))[0]


def chain_numbers(seed: Tensor, row: Tensor, gained: Tensor, nodes: int) -> Tensor:
    """The random numbers [B, N] float64 for chains of N nodes: streams 0 .. N - 1 at the position of the root's child.

    seed, row: [B] int64, see `uniform`. gained: [B] int64, tokens that each row has gained before the root's child.

    The length that is accepted depends on the numbers of all drafts, also of rejected ones. The next round begins at a
    later position, so none of its numbers is one of these: after 5 tokens a chain of 3 nodes takes streams 0, 1, 2 of
    position 5. If it gains 2 tokens, the next chain takes the numbers of position 7.
    """
    return uniform(seed[:, None], row[:, None], gained[:, None], counter(nodes, gained.device))


def accept_chain(target: Tensor, draft: Tensor, tokens: Tensor, real: Tensor, u: Tensor) -> Accepted:
    """Accept drawn chains by block verification, for all rows at once and inside a captured round.

    target: [B, N, V] float64, normalised; the target's distribution after each node. It is NaN if there is none, and
        the chain ends there.
    draft: [B, N, V] float; the distribution that each node's child was drawn from, normalised here.
    tokens: [B, N] int64; node i is draft i, and node 0 the root.
    real: [B, N] bool, the nodes in use, which are the first ones of each row.
    u: [B, N] float64 in [0, 1). Number i > 0 tests draft i, and number 0 draws the token after the accepted drafts.

    Returns the accepted nodes, with a token of -1 if there was nothing to draw from.

    The drafts of a chain are tested together (Sun et al. 2024, arXiv:2403.10444, algorithm 2). Let T_i and Q_i be the
    distributions of the target and of the draft after i drafts, and x_i draft i of n:

        w_0 = 1,  w_i = min(1, w_(i-1) T_(i-1)(x_i) / Q_(i-1)(x_i))
        R_i = sum over all tokens of max(T_i - Q_i / w_i, 0)
        h_i = R_i / (R_i + 1 / w_i - 1) for i < n,  h_n = w_n

    Draft i passes with probability h_i. The chain is accepted up to the last draft that passes, even if drafts before
    it have not passed. The next token is drawn from T_n after the last draft, otherwise from max(T_i - Q_i / w_i, 0).
    In the paper w_i is p_i, and w_i R_i is a sum. A chain may end after draft i for any reason that depends on x_1 ..
    x_i only.

    Given x_1 .. x_i, at least i drafts are accepted with probability w_i. Tokens are therefore distributed as the
    target's, and on average as many drafts are accepted as by `accept_drawn`, or more. With target (1/3, 2/3) and draft
    (2/3, 1/3) at both places of a chain of two drafts, 11/9 drafts are accepted, and 10/9 by `accept_drawn`.
    """
    nodes, vocab = tokens.shape[1], target.shape[2]
    number = torch.arange(nodes, device=tokens.device)
    child = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)  # the last node's is never read
    has_child = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1) & target[:, :, 0].isfinite()
    has_child = has_child.to(torch.int64).cumprod(dim=1) > 0
    scale = draft.sum(dim=2, dtype=torch.float64)
    p, q = (weights.gather(2, child[:, :, None])[:, :, 0].double() for weights in (target, draft))
    w = _weights(p, q / scale)

    # Sums of one node at a time, because all [B, N, V] differences together would take as much memory as the target's.
    # The root always passes, and the last node has no child.
    sums = [torch.zeros_like(w[:, 0])] * nodes
    for i in range(1, nodes - 1):
        sums[i] = _rest(target[:, i], draft[:, i], scale[:, i], w[:, i]).sum(dim=1)
    r = torch.stack(sums, dim=1)
    passes = torch.where(has_child, u * (r + (1 - w) / w) < r, u < w)  # guard: drawn-chains
    is_draft = torch.cat([torch.zeros_like(has_child[:, :1]), has_child[:, :-1]], dim=1)
    last = torch.where(passes & is_draft, number, 0).amax(dim=1, keepdim=True)

    def at_last(values: Tensor) -> Tensor:
        """values [B, N, ...] of the last accepted nodes: [B, ...]."""
        return values.gather(1, last.view(-1, *[1] * (values.dim() - 1)).expand(-1, 1, *values.shape[2:]))[:, 0]

    # If nothing is left after a rejection, which only rounding can cause, the token is drawn from the target.
    after = at_last(target)
    rest = _rest(after, *map(at_last, (draft, scale, w)))
    is_rejected = at_last(has_child) & (rest.sum(dim=1) > 0)
    token = draw(torch.where(is_rejected[:, None], rest, after), u[:, 0]).clamp(max=vocab - 1)
    token = torch.where(after[:, 0].isfinite(), token, -1)
    follows = torch.where(number < last, child, token[:, None])
    return Accepted(number.expand_as(tokens).contiguous(), follows, last[:, 0] + 1)


def _weights(target: Tensor, draft: Tensor) -> Tensor:
    """w [B, N] float64 (see above) of the nodes of chains.

    target, draft: [B, N] float64, the probability of each node's child. With target [0.2, 0.9, ...] and draft
    [0.4, 0.3, ...], w is [1, 0.5, 1, ...], because 0.5 * 0.9 / 0.3 is above 1. A draft of probability 0, which is never
    drawn, gets 1 if the target can give it, and 0 if not.
    """
    w = [torch.ones_like(target[:, 0])]
    for p, q in zip(target.unbind(dim=1)[:-1], draft.unbind(dim=1)[:-1]):
        scaled = w[-1] * p
        w.append(torch.where(scaled < q, scaled / q, (scaled > 0).to(scaled.dtype)))
    return torch.stack(w, dim=1)


def _rest(target: Tensor, draft: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    """max(T - Q / w, 0) [B, V] float64 of one node of each chain, where Q is draft / scale.

    target: [B, V] float64. draft: [B, V] float. scale, w: [B] float64. No product is added to anything here, nor in the
    test of `accept_chain`, so that no compiler rounds them in another way than plain PyTorch does.
    """
    return (target - draft / scale[:, None] / w[:, None]).clamp(min=0)


# Processors that a row may have, in the order in which transformers applies them.
BY_ROW = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")


class DrawInRound:
    """Draws after every node of the trees and follows what was drawn. `HostAcceptor` gives the same tokens.

    processors: logits processors that `supports` accepts; they process all nodes at once, and no host waits.

    The seed lies in `State.seed`. A captured round depends on `key`, so that objects of one key are equal.
    """

    value = "drawn round"  # the name of such a step, as `StepKind` has names
    key: tuple

    def __init__(self, processors: list):
        self.processors = [processor for processor in processors if not is_known(processor, MINIMA)]
        self.key = tuple((type(processor).__name__, *_settings(processor)) for processor in self.processors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DrawInRound) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @staticmethod
    def supports(processors: list) -> bool:
        """True if these processors can be applied to all nodes at once, and captured."""
        return all(is_known(processor, (OF_SCORES | MINIMA) - WAITING) for processor in processors)

    def __call__(self, state: State, tree: Tree, ancestors: Tensor, depth: Tensor, logits: Tensor) -> Accepted:
        """The accepted nodes, with a token of -1 where there was nothing to draw from.

        ancestors, depth: [B, N] int64, see `tree.ancestry`. logits: [B, N, V] of the target after every node.
        """
        batch, nodes, vocab = logits.shape
        gained = state.lengths + 1 - state.prompt_lengths  # [B]
        with row_invariant(logits.device, self.processors):
            scores = self.process(state, state.forbid_early_eos(logits.float(), depth)).reshape(batch * nodes, vocab)
            if tree.probs is not None:  # a chain that was itself drawn
                numbers = chain_numbers(state.seed, state.numbers, gained, nodes)
                target = scores.double().softmax(dim=-1).view(batch, nodes, vocab)
                return accept_chain(target, tree.probs, tree.tokens, tree.real, numbers)
            numbers = uniform(state.seed[:, None], state.numbers[:, None], gained[:, None] + depth)
            return follow(tree, ancestors, depth, draw_each(scores, numbers.reshape(-1)).view(batch, nodes))

    def process(self, state: State, scores: Tensor) -> Tensor:
        """The processed scores of [B, N, V]."""
        scores = scores.reshape(-1, scores.shape[2])
        for processor in self.processors:
            scores = processor(None, scores)
        return scores


@dataclass(frozen=True)
class RowSettings:
    """How the tokens of one row are drawn. The defaults exclude none.

    top_k: tokens that are kept; 0 keeps all.
    excluded_p: 1 - top_p, the probability of the excluded tail; -1 excludes none.
    min_p: share of the largest probability below which tokens are excluded.
    """

    top_k: int = 0
    excluded_p: float = -1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: list) -> "RowSettings | None":
        """The settings of these processors, without the temperature; None if they do something else."""
        drawing = [each for each in processors if not is_known(each, MINIMA)]
        names = [type(each).__name__ for each in drawing]
        if not all(is_known(each, {*BY_ROW}) for each in drawing) or names != sorted(names, key=BY_ROW.index):
            return None
        if len({*names}) < len(names) or any(getattr(each, "min_tokens_to_keep", 1) > 1 for each in drawing):
            return None
        settings: dict[str, Any] = {}
        for each in drawing:
            if getattr(each, "filter_value", -torch.inf) != -torch.inf:
                return None
            settings |= {"top_k": each.top_k} if hasattr(each, "top_k") else {}
            settings |= {"excluded_p": 1 - each.top_p} if hasattr(each, "top_p") else {}
            settings |= {"min_p": each.min_p} if hasattr(each, "min_p") else {}
        return cls(**settings)

    def merge(self, other: "RowSettings | None") -> "RowSettings":
        """Settings with each kind of exclusion that either has."""
        return self if other is None else RowSettings(*map(max, astuple(self), astuple(other)))


class DrawRows(DrawInRound):
    """Draws the tokens of `DrawInRound` with each row's own settings, by the same operations on a row.

    Settings lie in the `State`; rows of temperature 0 take the likeliest token.
    settings: merged of all rows. A captured round depends on the kinds of exclusion, not on their values.
    """

    def __init__(self, settings: RowSettings):
        super().__init__([])
        self.has_top_k, self.has_top_p = settings.top_k > 0, settings.excluded_p >= 0
        self.has_min_p = settings.min_p > 0
        self.key = ("rows", self.has_top_k, self.has_top_p, self.has_min_p)

    def process(self, state: State, scores: Tensor) -> Tensor:
        """The scores [B, N, V], processed as by transformers."""
        vocab, drawn = scores.shape[2], state.temperature > 0

        def of_rows(values: Tensor) -> Tensor:
            return values[:, None, None]

        # On a GPU torch divides by a number as a product with its reciprocal, which rounds differently.
        tokens = torch.arange(vocab, device=scores.device)
        likeliest = torch.where(tokens == argmax(scores)[..., None], 0.0, -torch.inf)
        warm = scores * of_rows(1.0 / torch.where(drawn, state.temperature, 1.0))
        if self.has_top_k:
            rank = torch.where(state.top_k > 0, state.top_k, vocab).clamp(max=vocab) - 1
            ordered = warm.sort(dim=-1, descending=True).values
            least = ordered.gather(2, of_rows(rank).expand(-1, warm.shape[1], 1))
            warm = warm.masked_fill(warm < least, -torch.inf)
        if self.has_top_p:
            ordered, tokens = warm.sort(dim=-1, descending=False)
            excluded = ordered.softmax(dim=-1).cumsum(dim=-1) <= of_rows(state.excluded_p)
            excluded[..., -1:] = False
            warm = warm.masked_fill(excluded.scatter(2, tokens, excluded), -torch.inf)
        if self.has_min_p:
            weights = warm.softmax(dim=-1)
            warm = warm.masked_fill(weights < of_rows(state.min_p) * weights.amax(dim=-1, keepdim=True), -torch.inf)
        return torch.where(of_rows(drawn), warm, likeliest)


def _settings(processor: Any) -> list[tuple[str, str]]:
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(processor).items()}
    return sorted((name, repr(value)) for name, value in plain.items())
