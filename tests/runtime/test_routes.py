"""Which route accepts the tokens of a call: every row of the table of `Route`, and every reason to leave a row."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import (
    EtaLogitsWarper,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from spec_compile.runtime.answer import Answer
from spec_compile.runtime.verify import Route, choose_route, make_acceptor
from spec_compile.runtime.verify.host import HostAcceptor
from spec_compile.runtime.verify.sample import DrawInRound

GREEDY, DRAW, HOST = Route.GREEDY_IN_ROUND, Route.DRAW_IN_ROUND, Route.ON_HOST
MINIMUM = [MinLengthLogitsProcessor(4, [1]), MinNewTokensLengthLogitsProcessor(2, 3, [1])]
WARPERS = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)]
PENALTY = [RepetitionPenaltyLogitsProcessor(1.2)]


class OfTheUser(TopKLogitsWarper):
    """Not one of transformers' own."""


@pytest.mark.parametrize(
    "do_sample, processors, device, keeps_scores, route",
    [
        # scores are returned
        (False, [], "cpu", True, HOST),
        (False, [], "cuda", True, HOST),
        (True, WARPERS, "cuda", True, HOST),
        # greedy decoding
        (False, [], "cpu", False, GREEDY),
        (False, [], "cuda", False, GREEDY),
        (False, MINIMUM, "cpu", False, GREEDY),
        (False, PENALTY, "cuda", False, HOST),
        (False, [*MINIMUM, *PENALTY], "cpu", False, HOST),
        (False, [lambda ids, scores: scores], "cpu", False, HOST),
        # sampling
        (True, [], "cuda", False, DRAW),
        (True, [*MINIMUM, *WARPERS], "cuda", False, DRAW),
        (True, WARPERS, "cpu", False, HOST),
        (True, [*WARPERS, *PENALTY], "cuda", False, HOST),
        (True, [EtaLogitsWarper(0.1, device="cpu")], "cuda", False, HOST),  # makes the host wait
        (True, [OfTheUser(5)], "cuda", False, HOST),
    ],
)
def test_choose_route(do_sample, processors, device, keeps_scores, route):
    config, processors = GenerationConfig(do_sample=do_sample), LogitsProcessorList(processors)
    assert choose_route(config, processors, torch.device(device), keeps_scores) is route


@pytest.mark.parametrize("route, cls", [(GREEDY, type(None)), (DRAW, DrawInRound), (HOST, HostAcceptor)])
def test_make_acceptor(route, cls):
    answer = Answer(torch.zeros(1, 2, dtype=torch.int64), 4, [], 0)
    assert type(make_acceptor(route, answer, LogitsProcessorList(WARPERS), seed=3)) is cls
