"""Accepting tokens of a verified tree. `Route` says where and how."""

from enum import Enum

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ...parallel.ranks import ALONE, Alone
from ..answer import Answer
from .host import ConstrainedAcceptor, HostAcceptor
from .processors import MINIMA, is_known
from .sample import DrawInRound
from .thinking import follow_rows


class Route(Enum):
    """Where and how the tokens of a round are accepted. The first row that fits is taken.

    =============== ====================================== ==================== ===========================
    Route           Taken if                               Drafts are tested by Drafts that were drawn
    =============== ====================================== ==================== ===========================
    ON_HOST         scores or logits are returned, or the  `HostAcceptor`       as below
                    first logits are known already
    GREEDY_IN_ROUND do_sample=False, and the processors do `follow`             `follow`
                    no more than set a minimum length
    DRAW_IN_ROUND   do_sample=True on a GPU, and           `DrawInRound`        `accept_chain`
                    `DrawInRound.supports` the processors
    ON_HOST         anything else                          `HostAcceptor`       `accept_chain`, in lockstep
                                                                                `accept_drawn`
    =============== ====================================== ==================== ===========================

    On a CPU the host is faster than drawing in the round, because it processes only nodes that are reached. All routes
    that draw give the same tokens for a seed. Under a grammar or a thinking budget, ON_HOST is `ConstrainedAcceptor`
    if the other processors permit it.

    A new route is a file in this folder, a row above, a branch of `choose_route` and one of `make_acceptor`.
    """

    GREEDY_IN_ROUND = "greedy in the round"
    DRAW_IN_ROUND = "drawn in the round"
    ON_HOST = "on the host"


def choose_route(
    generation_config: GenerationConfig, processors: list, device: torch.device, keeps_scores: bool
) -> Route:
    """The route that serves one ``generate()`` whose first logits are not known yet.

    generation_config: only `do_sample` is read.
    device: the model's.
    keeps_scores: True if scores or logits of every token are returned.
    """
    if keeps_scores:
        return Route.ON_HOST
    if not generation_config.do_sample and all(is_known(processor, MINIMA) for processor in processors):
        return Route.GREEDY_IN_ROUND
    if generation_config.do_sample and device.type == "cuda" and DrawInRound.supports(processors):
        return Route.DRAW_IN_ROUND
    return Route.ON_HOST


def make_acceptor(
    route: Route, answer: Answer, processors: LogitsProcessorList, seed: int | None, ranks: Alone = ALONE
) -> HostAcceptor | DrawInRound | None:
    """The acceptor of a route; None for GREEDY_IN_ROUND, which is a part of every round.

    answer, processors, seed, ranks: see `HostAcceptor`.
    """
    match route:
        case Route.GREEDY_IN_ROUND:
            return None
        case Route.DRAW_IN_ROUND:
            return DrawInRound(processors)
        case Route.ON_HOST:
            processors = follow_rows(answer, processors)
            is_constrained = ConstrainedAcceptor.supports(processors, is_greedy=seed is None)
            if is_constrained and ranks.size == 1 and not answer.needs_scores:
                return ConstrainedAcceptor(answer, processors, seed)
            return HostAcceptor(answer, processors, seed, ranks)
