"""Accepting tokens on the host, down each tree, as plain decoding chooses them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessorList

from ...compat import argmax
from ...errors import RequestError
from ...parallel.ranks import ALONE, Alone
from ...tree import Accepted, Tree, ancestry
from ..answer import Answer
from .constraint import Constraints, forbid
from .processors import OF_SCORES, ROWWISE, WAITING, is_known, row_invariant
from .sample import (
    NO_PROBABILITIES,
    accept_chain,
    accept_drawn,
    chain_numbers,
    draw,
    draw_each,
    no_probabilities,
    probabilities,
    uniform,
)

# Attributes of `ROWWISE` processors and of `Constraints` that may hold a value for each row of the batch.
OF_ROWS = ("prompt_ignore_length", "encoder_input_ids", "rows")


class HostAcceptor:
    """Goes down verified trees level by level: processes a node's logits, chooses a token, goes to its child.

    answer: takes the tokens as they are chosen.
    processors: any logits processors. Each node is processed with its true prefix.
    seed: selects the random numbers with which tokens are drawn; None takes the likeliest token.
    ranks: the processes that share the model; processors run on all of them, and the first one's choice counts.

    If all processors are known to treat rows by themselves, each row goes as far as its tree allows. Otherwise rows go
    in lockstep, and processors, stopping criteria and streamer are called in the order and with the arguments of plain
    decoding, which also serves processors with a memory.

    A token is drawn with the random number of its row and position, so it does not depend on what was drafted. Drafts
    that were themselves drawn (``tree.probs``) are tested instead:

    - A chain is tested as a block, by `accept_chain`. All of its nodes are processed first, down to a draft that
      the target cannot give.
    - If rows go in lockstep, a chain is tested draft by draft, by `accept_drawn`. To look ahead would call
      processors for tokens that are rejected later.
    - Other trees, too, are tested by `accept_drawn`, because block verification is for chains only.
    """

    def __init__(self, answer: Answer, processors: LogitsProcessorList, seed: int | None, ranks: Alone = ALONE):
        self.answer, self.seed, self.ranks = answer, seed, ranks
        self.first_row = 0  # the number of the answer's first row among those that share the seed
        self.processors = processors
        self.constraints = [processor for processor in processors if isinstance(processor, Constraints)]
        self.lockstep = not all(isinstance(each, Constraints) or is_known(each, ROWWISE) for each in processors)

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
        """The accepted nodes, on the CPU.

        logits: [B, N, V] of the target after every node. Scores stay on their device; all else is on the CPU.
        """
        tree = tree.cpu()
        if tree.probs is not None and self.seed is not None and not self.lockstep:
            if (tree.parents == torch.arange(-1, tree.parents.shape[1] - 1)).all():
                return self._accept_chains(tree, tree.probs, self.seed, logits)
        return self._walk(tree, logits)

    def _walk(self, tree: Tree, logits: Tensor) -> Accepted:
        """`__call__` token by token."""
        answer = self.answer
        batch, nodes = tree.tokens.shape
        path, tokens = torch.zeros(2, batch, nodes, dtype=torch.int64)
        count, node = torch.zeros(2, batch, dtype=torch.int64)
        going = [row for row in range(batch) if self._goes_on(row)]
        for level in range(nodes):
            rows = torch.arange(batch) if self.lockstep else torch.tensor(going)
            raw = logits[rows, node[rows]].float()
            gained = [len(answer.rows[row]) for row in going]
            lengths = [answer.prompt_width + length for length in gained]
            with row_invariant(raw.device, self.processors):
                scores = self._process(answer.ids, rows, lengths, raw.clone())
                scores = torch.broadcast_to(scores, (len(rows), -1))  # as plain decoding does with one row for all
                if self.lockstep:
                    raw, scores, rows = raw[going], scores[going], torch.tensor(going)
                chosen = self._choose(tree, rows, node[rows], torch.tensor(gained), scores, raw).cpu()
                if self.ranks.size > 1:
                    chosen = torch.tensor(self.ranks.lead(chosen.tolist))
            path[rows, level], tokens[rows, level] = node[rows], chosen
            count[rows] += 1
            follows = (tree.parents[rows] == node[rows, None]) & (tree.tokens[rows] == chosen[:, None])
            follows = follows & tree.real[rows]
            node[rows] = follows.to(torch.int64).argmax(dim=1)
            self._hand_over(dict(zip(going, chosen.tolist())), dict(zip(going, raw)), dict(zip(going, scores)))
            was_drafted = dict(zip(going, follows.any(dim=1).tolist()))
            needy = [row for row in going if self._goes_on(row)]
            if self.lockstep and not all(was_drafted[row] for row in needy):
                break
            going = [row for row in needy if was_drafted[row]]
            if not going:
                break
        return Accepted(path, tokens, count.clamp(min=1))

    def _accept_chains(self, tree: Tree, probs: Tensor, seed: int, logits: Tensor) -> Accepted:
        """`__call__` for chains that are tested as blocks."""
        answer, (batch, nodes), device = self.answer, tree.tokens.shape, logits.device
        path, tokens = torch.arange(nodes).repeat(batch, 1), torch.zeros(batch, nodes, dtype=torch.int64)
        count = torch.zeros(batch, dtype=torch.int64)
        going = [row for row in range(batch) if self._goes_on(row)]
        if going:
            rows = torch.tensor(going)
            gained = torch.tensor([len(answer.rows[row]) for row in going])
            numbers = chain_numbers(torch.full_like(rows, seed), rows + self.first_row, gained, nodes)
            with row_invariant(device, self.processors):
                target, scores = self._process_chains(tree, logits, going)
                draft, drafted, real = (part[rows].to(device) for part in (probs, tree.tokens, tree.real))
                accepted = accept_chain(target, draft, drafted, real, numbers.to(device))
            told = torch.cat([accepted.count[:, None], accepted.tokens], dim=1).cpu()
            if self.ranks.size > 1:
                told = torch.tensor(self.ranks.lead(told.flatten().tolist)).view(told.shape)
            tokens[rows] = told[:, 1:]
            left = dict(zip(going, told[:, 0].tolist()))  # tokens of each row that its answer has not got yet
        while going:
            level = int(count.max())
            chosen = dict(zip(going, tokens[going, level].tolist()))
            if -1 in chosen.values():
                failed = [row for row in going if chosen[row] < 0]
                for constraints in self.constraints:  # which may name the error
                    for row in failed:
                        constraints.follow(row)
                raise no_probabilities(logits[failed, level])
            raw = {row: logits[row, level].float() for row in going if answer.keeps_scores}
            self._hand_over(chosen, raw, scores[level])
            count[going] += 1
            going = [row for row in going if count[row] < left[row] and self._goes_on(row)]
        return Accepted(path, tokens, count.clamp(min=1))

    def _process_chains(self, tree: Tree, logits: Tensor, going: list[int]) -> tuple[Tensor, list[dict[int, Tensor]]]:
        """The target's distributions [R, N, V] float64 down the chains of the rows `going`, and for each level the
        processed scores [V] of rows.

        Nodes after a draft that the target cannot give keep zeros, because they cannot be accepted.
        """
        answer, nodes = self.answer, tree.tokens.shape[1]
        lengths = {row: answer.prompt_width + len(answer.rows[row]) for row in going}
        ids = F.pad(answer.ids[:, : max(lengths.values())], (0, nodes - 1))  # prefixes of roots, then drafts
        for row, length in lengths.items():
            ids[row, length : length + nodes - 1] = tree.tokens[row, 1:]
        target = logits.new_zeros(len(going), nodes, logits.shape[2], dtype=torch.float64)
        places, kept = [*range(len(going))], []
        for level in range(nodes):
            rows = [going[place] for place in places]
            raw = logits[rows, level].float()
            scores = self._process(ids, torch.tensor(rows), [lengths[row] + level for row in rows], raw)
            weights = scores.double().softmax(dim=-1)
            target[places, level] = weights
            kept.append(dict(zip(rows, scores)))
            if level + 1 == nodes:
                break
            child = tree.tokens[rows, level + 1]
            possible = weights.gather(1, child.to(weights.device)[:, None])[:, 0] > 0
            follows = (possible.cpu() & tree.real[rows, level + 1]).tolist()
            places = [place for place, goes_on in zip(places, follows) if goes_on]
            for place in [*places]:
                row, token = going[place], int(tree.tokens[going[place], level + 1])
                if not all([constraints.look_ahead(row, token) for constraints in self.constraints]):
                    target[place, level + 1] = torch.nan
                    places.remove(place)
            if not places:
                break
        for constraints in self.constraints:
            for row in going:
                constraints.come_back(row)
        return target, kept

    def _process(self, ids: Tensor, rows: Tensor, lengths: list[int], scores: Tensor) -> Tensor:
        """The scores [R, V] of the token after R prefixes, processed.

        ids: [B, L] int64 on the CPU; the prefix of a row is ``ids[row, :length]``.
        rows: [R] int64, rows of the batch. lengths: the lengths of their prefixes, [R].
        """
        if not self.processors:
            return scores
        if len(set(lengths)) != 1:  # processors take rows of one length
            out = torch.empty_like(scores)
            for length in set(lengths):
                alike = torch.tensor([index for index, other in enumerate(lengths) if other == length])
                out[alike] = self._process(ids, rows[alike], [length], scores[alike])
            return out
        process: Callable[..., Tensor] = self.processors
        if len(rows) < self.answer.batch:
            ids, process = ids[rows], type(self.processors)([_for_rows(each, rows) for each in self.processors])
        return process(ids[:, : lengths[0]].contiguous().to(scores.device), scores)

    def _goes_on(self, row: int) -> bool:
        return self.answer.needs(row) and not self.answer.full(row)

    def _choose(self, tree: Tree, rows: Tensor, node: Tensor, gained: Tensor, scores: Tensor, raw: Tensor) -> Tensor:
        """The next token [R] int64 after one node of each of R rows.

        rows, node: [R] int64.
        gained: [R] int64, tokens that each row has gained.
        scores, raw: [R, V] float, after and before the processors.
        """
        if self.seed is None:
            return scores.argmax(dim=-1)
        weights, numbers = probabilities(scores, raw), rows + self.first_row
        if tree.probs is None:
            return draw(weights, uniform(self.seed, numbers, gained).to(weights.device))  # guard: seed
        is_child = (tree.parents[rows] == node[:, None]) & tree.real[rows]  # [R, N]
        streams = torch.arange(int(is_child.sum(dim=1).max()) + 1)
        numbers = uniform(self.seed, numbers[:, None], gained[:, None], streams).to(weights.device)
        chosen = []
        for row, parent, mask, target, u in zip(rows.tolist(), node.tolist(), is_child, weights, numbers):
            children = tree.tokens[row, mask].tolist()
            chosen.append(accept_drawn(target, tree.probs[row, parent].double(), children, u[: len(children) + 1]))
        return torch.stack(chosen)

    def _hand_over(self, chosen: dict[int, int], raw: dict[int, Tensor], scores: dict[int, Tensor]) -> None:
        """Give the answer one token of each row in `chosen`, with its logits and processed scores [V]."""
        gained = [[chosen[row]] if row in chosen else [] for row in range(self.answer.batch)]
        self.answer.take(gained, raw, scores)


def _for_rows(processor: Any, rows: Tensor) -> Any:
    """The processor; if it has values for every row, a copy with the values of `rows`."""
    values = {name: getattr(processor, name, None) for name in OF_ROWS}
    values = {name: value[rows] for name, value in values.items() if isinstance(value, Tensor) and value.dim() > 0}
    if values:
        processor = copy.copy(processor)
        processor.__dict__.update(values)
    return processor


# Acceptance under a grammar with few copies from a GPU: rows follow tokens chosen after all nodes at once.


class Walk:
    """One row's way down its tree.

    tokens, parents, real, guesses: [N] lists; the tree's nodes, and the tokens that probably follow them.
    path: nodes that were entered.
    gained: the tokens chosen after them, perhaps not yet after the last: tokens = [7, 4, 9], parents = [-1, 0, 1] and
        guesses = [4, 5, 6] give path [0, 1], gained [4, 5] if both guesses are legal; no child of node 1 has token 5.
    """

    def __init__(self, tokens: list[int], parents: list[int], real: list[int], guesses: list[int]):
        self.guesses, self.is_over = guesses, False
        self.path: list[int] = []
        self.gained: list[int] = []
        self.children = {edge[:2]: node for node, edge in enumerate(zip(parents, tokens, real)) if node > 0 and edge[2]}

    def enter(self) -> bool:
        """Go to the child that has the last token, or first to the root. True if there is one."""
        node = self.children.get((self.path[-1], self.gained[-1])) if self.path else 0
        if node is not None:
            self.path.append(node)
        return node is not None


class ConstrainedAcceptor(HostAcceptor):
    """Takes the tokens that `HostAcceptor` takes under `Constraints`, with few copies from a GPU.

    A token is guessed after all nodes at once, without the mask: the likeliest one, or one drawn with the node's random
    number. Each row follows its guesses while they are legal, and notes the nodes after which the mask may change the
    choice: every node if tokens are drawn, otherwise only the node of an illegal guess. There tokens are then chosen
    under the masks, which one copy brings. A row gains them up to the first that is not the guess, and goes on from
    there in the same way.

    To draw on a CPU, or to test drafts that were drawn themselves, it is a `HostAcceptor`.
    """

    def __init__(self, answer: Answer, processors: LogitsProcessorList, seed: int | None):
        super().__init__(answer, processors, seed)
        self.only = self.constraints[0]

    @staticmethod
    def supports(processors: list, is_greedy: bool) -> bool:
        """True if one processor is `Constraints`, and the others only draw: they read scores, and no GPU waits."""
        others = [each for each in processors if not isinstance(each, Constraints)]
        fits = not others if is_greedy else all(is_known(each, OF_SCORES - WAITING) for each in others)
        return fits and len(others) + 1 == len(processors)

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
        if self.seed is not None and (logits.device.type == "cpu" or tree.probs is not None):
            return super().__call__(tree, logits)
        return self.accept(tree, logits)

    def accept(self, tree: Tree, logits: Tensor) -> Accepted:
        """`__call__` by guesses."""
        (batch, nodes), device, numbers = tree.tokens.shape, logits.device, None
        if self.seed is not None:
            gained = torch.tensor([len(tokens) for tokens in self.answer.rows]).to(device, non_blocking=True)
            rows = torch.arange(batch, device=device) + self.first_row
            numbers = uniform(self.seed, rows[:, None], gained[:, None] + ancestry(tree.parents)[1])
        guesses = self._choose_all(logits.flatten(0, 1), None if numbers is None else numbers.flatten())
        columns = torch.stack([tree.tokens, tree.parents, tree.real, guesses.view(batch, nodes)], dim=1).tolist()
        walks = {row: Walk(*columns[row]) for row in range(batch) if self._goes_on(row)}
        for row in walks:
            self.only.follow(row)
        bits = torch.empty(len(walks) * nodes, self.only.bitmask.shape[1], dtype=torch.int32)
        going = [*walks]
        while going:
            noted: list[tuple[int, int]] = []  # (row, index in its path) of each mask in `bits`
            for row in going:
                self._follow_guesses(row, walks[row], bits, noted)
            if not noted:
                break
            at = [row for row, _ in noted], [walks[row].path[index] for row, index in noted]
            chosen = self._choose_all(logits[at], None if numbers is None else numbers[at], bits[: len(noted)])
            going = []
            for (row, index), token in zip(noted, chosen.tolist()):
                if row not in going and walks[row].gained[index : index + 1] != [token]:
                    self._replace(row, walks[row], index, token)
                    going.append(row)
        path, tokens = torch.zeros(2, batch, nodes, dtype=torch.int64)
        count = torch.ones(batch, dtype=torch.int64)
        for row, walk in walks.items():
            count[row] = len(walk.path)
            path[row, : len(walk.path)] = torch.tensor(walk.path)
            tokens[row, : len(walk.path)] = torch.tensor(walk.gained)
        self.answer.take([walks[row].gained if row in walks else [] for row in range(batch)])
        return Accepted(path, tokens, count)

    def _choose_all(self, logits: Tensor, numbers: Tensor | None, bits: Tensor | None = None) -> Tensor:
        """A token [R] after each of R nodes, -1 if there is nothing to draw from.

        logits: [R, V].
        numbers: [R] float64, or None if not drawn.
        bits: [R, W] int32 on the CPU, the masks, or None.
        """
        if numbers is None:
            return argmax(logits if bits is None else forbid(logits.float(), bits))
        scores = logits.float()
        with row_invariant(scores.device, self.processors):
            for processor in self.processors:
                if processor is not self.only:
                    scores = processor(None, scores)
                elif bits is not None:
                    scores = forbid(scores, bits)
            return draw_each(scores, numbers)

    def _follow_guesses(self, row: int, walk: Walk, bits: Tensor, noted: list[tuple[int, int]]) -> None:
        """Go down as far as guesses are legal. Nodes whose choice the mask may change are noted, with the mask."""
        draws, matcher = self.seed is not None, self.only.matchers[row]

        def note() -> None:
            self.only.fill(row, bits, len(noted))
            noted.append((row, len(walk.path) - 1))

        while not self._is_over(row, walk) and walk.enter():
            if draws:
                note()
            guess = walk.guesses[walk.path[-1]]
            # A token after the constraint's end could not be taken back if another one is drawn.
            ends = draws and (matcher.is_terminated() or guess < 0)
            if ends or not self.only.accept(row, guess):
                if not draws:
                    note()  # guard: grammar-forbids
                break
            walk.gained.append(guess)
            if draws and matcher.is_terminated():
                break

    def _replace(self, row: int, walk: Walk, index: int, token: int) -> None:
        """Take a token that was chosen under the mask, in place of the guess with this index and all after it. If none
        was legal, `Constraints.follow` raises once the row needs another one, as plain decoding does."""
        if token < 0:
            raise RequestError(NO_PROBABILITIES)
        self.only.rewind(row, len(walk.gained) - index)
        del walk.gained[index:], walk.path[index + 1 :]
        walk.gained.append(token)
        walk.is_over = not self.only.accept(row, token)

    def _is_over(self, row: int, walk: Walk) -> bool:
        """True if the last token of the walk ends the row."""
        answer, gained = self.answer, walk.gained
        length = answer.prompt_width + len(answer.rows[row]) + len(gained)
        return walk.is_over or length >= answer.longest or (bool(gained) and gained[-1] in answer.eos)
