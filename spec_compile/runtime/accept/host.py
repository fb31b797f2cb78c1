"""Accepting tokens on the host, down each tree, as plain decoding chooses them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parallel.ranks import ALONE, Alone
from ...tree import Accepted, Tree
from ..answer import Answer
from .chain import accept_chain, chain_numbers
from .processors import Processors
from .random_numbers import draw, no_probabilities, probabilities, uniform
from .rejection import accept_drawn
from .row_invariant import row_invariant


class HostAcceptor:
    """Goes down verified trees level by level: processes a node's logits, chooses a token, goes to its child.

    answer: takes the tokens as they are chosen.
    processors: any logits processors. Each node is processed with its true prefix.
    seed: of the random numbers with which tokens are drawn; None takes the likeliest token.
    ranks: the processes that share the model; processors run on all of them, and the first one's choice counts.

    If all processors are known to treat rows by themselves, each row goes as far as its tree allows. Otherwise rows go
    in lockstep, and processors, stopping criteria and streamer are called in the order and with the arguments of plain
    decoding, which also serves processors with a memory.

    A token is drawn with the random number of its row and position, so it does not depend on what was drafted. Drafts
    that were themselves drawn (``tree.probs``) are tested instead:

    - A chain is tested as a block, by `chain.accept_chain`. All of its nodes are processed first, down to a draft that
      the target cannot give.
    - If rows go in lockstep, a chain is tested draft by draft, by `rejection.accept_drawn`. To look ahead would call
      processors for tokens that are rejected later.
    - Other trees, too, are tested by `rejection.accept_drawn`, because block verification is for chains only.
    """

    def __init__(self, answer: Answer, processors: list, seed: int | None, ranks: Alone = ALONE):
        self.answer, self.seed, self.ranks = answer, seed, ranks
        self.first_row = 0  # the number of the answer's first row among those that share the seed
        self.processors = Processors(processors, answer.batch)
        self.lockstep = not self.processors.rowwise

    def __call__(self, tree: Tree, logits: Tensor) -> Accepted:
        """The accepted nodes, on the CPU.

        logits: [B, N, V] of the target after every node. Scores stay on their device; all else is on the CPU.
        """
        tree = tree.cpu()
        if tree.probs is not None and self.seed is not None and not self.lockstep and _is_chain(tree):
            return self._accept_chains(tree, logits)
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
            with row_invariant(raw.device, self.processors.processors):
                scores = self.processors(answer.ids, rows, lengths, raw.clone())
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

    def _accept_chains(self, tree: Tree, logits: Tensor) -> Accepted:
        """`__call__` for chains that are tested as blocks."""
        answer, (batch, nodes), device = self.answer, tree.tokens.shape, logits.device
        path, tokens = torch.arange(nodes).repeat(batch, 1), torch.zeros(batch, nodes, dtype=torch.int64)
        count = torch.zeros(batch, dtype=torch.int64)
        going = [row for row in range(batch) if self._goes_on(row)]
        if going:
            rows = torch.tensor(going)
            gained = torch.tensor([len(answer.rows[row]) for row in going])
            numbers = chain_numbers(torch.full_like(rows, self.seed), rows + self.first_row, gained, nodes)
            with row_invariant(device, self.processors.processors):
                target, scores = self._process_chains(tree, logits, going)
                chains = (part[rows].to(device) for part in (tree.probs, tree.tokens, tree.real))
                accepted = accept_chain(target, *chains, numbers.to(device))
            chosen = torch.cat([accepted.count[:, None], accepted.tokens], dim=1).cpu()
            if self.ranks.size > 1:
                chosen = torch.tensor(self.ranks.lead(chosen.flatten().tolist)).view(chosen.shape)
            tokens[rows] = chosen[:, 1:]
            left = dict(zip(going, chosen[:, 0].tolist()))  # tokens of each row that its answer has not got yet
        while going:
            level = int(count.max())
            chosen = dict(zip(going, tokens[going, level].tolist()))
            if -1 in chosen.values():
                failed = [row for row in going if chosen[row] < 0]
                self.processors.follow(failed)
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
            scores = self.processors(ids, torch.tensor(rows), [lengths[row] + level for row in rows], raw)
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
                if not self.processors.look_ahead(going[place], int(tree.tokens[going[place], level + 1])):
                    target[place, level + 1] = torch.nan
                    places.remove(place)
            if not places:
                break
        self.processors.come_back(going)
        return target, kept

    def _goes_on(self, row: int) -> bool:
        return self.answer.needs(row) and not self.answer.full(row)

    def _choose(
        self, tree: Tree, rows: Tensor, node: Tensor, gained: Tensor, scores: Tensor, raw: Tensor
    ) -> Tensor:  # fmt: skip
        """The next token [R] int64 after one node of each of R rows.

        rows, node: [R] int64. gained: [R] int64, tokens that each row has gained. scores: [R, V] float.
        raw: [R, V] float, the scores before the processors.
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
        rows = range(self.answer.batch)
        gained = [[chosen[row]] if row in chosen else [] for row in rows]
        self.answer.take(gained, [raw.get(row) for row in rows], [scores.get(row) for row in rows])


def _is_chain(tree: Tree) -> bool:
    """True if each node is the parent of the next one."""
    return bool((tree.parents == torch.arange(-1, tree.parents.shape[1] - 1)).all())
