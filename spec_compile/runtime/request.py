"""`Request`: the wishes of a generate() or of a request of a batch, read from the arguments of transformers' decoding
loop. `Sequence`: a row and all that it has gained so far."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..capture.loras import NO_ADAPTER, Loaded
from ..errors import check_int
from ..parallel.ranks import ALONE, Alone
from ..tree import MAX_NODES
from .answer import Answer
from .prompt import Prompt
from .verify import Route, choose_route
from .verify.processors import MINIMA, is_known

CRITERIA_IN_ROUND = {"MaxLengthCriteria", "EosTokenCriteria"}  # stopping criteria that a round checks by itself


@dataclass(frozen=True)
class Request:
    """The wishes of one generate(), or of one request of a batch, which has one row. Nothing in it ever changes.

    Columns count the tokens of a row, prompt and padding included: 7 new tokens after a prompt of 5 columns end at
    column 12.

    longest, shortest: columns at which every row ends, and before which no row may end.
    eos, pad: see `Answer`.
    config: the generation config, completed by transformers.
    route: decides where tokens are accepted.
    criteria: stopping criteria to be called; None if `longest` and `eos` suffice.
    seed: starts all random numbers, in [0, 2**63).
    temperature: at which drafters draw; 0 takes the likeliest token.
    references: 1-D tensors of token ids from which drafts may be copied.
    share_text: True lets later calls draft from the texts of this one. A text names the owner of those that may.
    most_nodes: nodes that rounds verify of each tree, at most; 1: no drafts.

    Only requests of a batch have these, see `Manager.add_request`:

    adapter: the name of the LoRA adapter; None: rows of this model choose none.
    returns_logprobs: True if `Output.logprobs` tells the log-probabilities of the processed scores.
    process: the model's own prefill of a prompt with pictures, or of a source, a `contrib.own_prefill.OwnPrefill`;
        None: the prompt is text.
    """

    longest: int
    shortest: int = 0
    eos: list[int] = field(default_factory=list)
    config: GenerationConfig = field(default_factory=GenerationConfig)
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    route: Route = Route.GREEDY_IN_ROUND
    pad: int | None = None
    criteria: StoppingCriteriaList | None = None
    seed: int = 0
    temperature: float = 0.0
    references: list[Tensor] = field(default_factory=list)
    share_text: bool | str = True
    most_nodes: int = MAX_NODES
    adapter: str | None = None
    streaming: bool = False
    record_timestamps: bool = False
    returns_logprobs: bool = False
    cache_salt: str = ""
    client: str = ""
    process: Any = None

    @classmethod
    def of(
        cls, input_ids: Tensor, config: GenerationConfig, processors: LogitsProcessorList,
        criteria: StoppingCriteriaList, device: torch.device,
    ) -> "Request":  # fmt: skip
        """Read the arguments of transformers' loop; ValueError if rows may end before others and no padding is set."""
        ends = [each for each in criteria if hasattr(each, "eos_token_id")]
        eos: list[int] = next(
            (each.eos_token_id.tolist() for each in ends if type(each).__name__ == "EosTokenCriteria"), []
        )
        pad = config._pad_token_tensor if ends else None
        if pad is None and ends:
            raise ValueError("If `eos_token_id` is defined, make sure that `pad_token_id` is defined.")
        keeps_scores = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        is_plain = {type(criterion).__name__ for criterion in criteria} <= CRITERIA_IN_ROUND

        # The longest text, and the shortest.
        lengths = [each.max_length for each in criteria if type(each).__name__ == "MaxLengthCriteria"]
        longest = max(math.ceil(min(lengths, default=config.max_length)), input_ids.shape[1] + 1)
        minima = [
            each.min_length if hasattr(each, "min_length") else each.prompt_length_to_skip + each.min_new_tokens
            for each in processors if is_known(each, MINIMA)
        ]  # fmt: skip
        return cls(
            longest, max(minima, default=0), sorted(eos), config, processors,
            choose_route(config, processors, device, keeps_scores),
            None if pad is None else int(pad), None if is_plain else criteria,
            temperature=(config.temperature or 1.0) if config.do_sample else 0.0,
        )  # fmt: skip

    def after(self, width: int, **changes: Any) -> "Request":
        """This request, whose columns count from the prompt's end, for a prompt of `width` columns."""
        shortest = width + self.shortest if self.shortest else 0
        return replace(self, shortest=shortest, longest=width + self.longest, **changes)

    def answer(
        self, ids: Tensor, streamer: BaseStreamer | None = None, device: torch.device | None = None,
        ranks: Alone = ALONE, keep_logprobs: bool = False,
    ) -> Answer:  # fmt: skip
        """An empty answer to prompts `ids` [B, W] int64. device: gets the results. keep_logprobs: see `Answer`."""
        criteria: Callable[..., Tensor] | None = self.criteria
        if (called := self.criteria) is not None and ranks.size > 1:  # only the first rank calls them, for all
            criteria = lambda ids, scores: torch.tensor(ranks.lead(lambda: called(ids, scores).tolist()))  # noqa: E731
        returns = bool(self.config.return_dict_in_generate)
        return Answer(
            ids, self.longest, self.eos, self.pad, criteria, streamer, returns and bool(self.config.output_scores),
            returns and bool(self.config.output_logits), device, keep_logprobs,
        )  # fmt: skip

    def sequences(self, prompt: "Prompt", adapters: list[Loaded] | None = None) -> "list[Sequence]":
        """The rows of one generate(). Columns become lengths without the padding: `longest` 12 and a prompt of 5
        columns with padding [0, 2] give rows that end at 12 and at 10 tokens."""
        width, adapters = prompt.ids.shape[1], adapters or [NO_ADAPTER] * len(prompt.tokens)
        return [
            Sequence(
                self, tokens, row, max(0, self.shortest + len(tokens) - width), self.longest + len(tokens) - width,
                self.most_nodes, adapters[row],
            )
            for row, tokens in enumerate(prompt.tokens)
        ]  # fmt: skip


@dataclass(eq=False, repr=False)
class Sequence:
    """A row of a generate() or of a batch: its prompt, and what it has gained so far, as the host knows it.

    row: its number in the call, or in the batch once it has a place there.
    shortest, longest: tokens, the prompt's included, before which it may not end, and at which it ends.
    most_nodes: nodes that rounds verify of its trees, at most.
    loaded: its LoRA adapter.
    tokens: collected so far.
    count, confidence: real nodes of its pending tree, and how sure the drafter is; None if only the GPU knows them yet.
    is_over: True if nobody needs its outcomes any more.
    """

    request: Request
    prompt: list[int]
    row: int = -1
    shortest: int = 0
    longest: int = 0
    most_nodes: int = MAX_NODES
    loaded: Loaded = NO_ADAPTER
    tokens: list[int] = field(default_factory=list)
    count: int | None = None
    confidence: int | None = None
    is_over: bool = False

    @property
    def length(self) -> int:
        """Its tokens less one, as `State.lengths` counts."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def room(self) -> int:
        return self.longest - self.length - 1

    def numbers(self) -> dict[str, int | float]:
        """Values for buffers of a `State` when it enters its row."""
        return {
            "min_lengths": self.shortest, "max_lengths": self.longest, "seed": self.request.seed, "numbers": self.row,
            "temperature": self.request.temperature, "most_nodes": self.most_nodes,
        }  # fmt: skip


def seed_of(seed: int | None) -> int:
    """The seed that ``generate()`` has after ``torch.manual_seed(seed)``; None: as it would have now. TypeError or
    ValueError if torch takes no such seed."""
    if seed is not None:
        check_int("seed", seed, -(1 << 63), (1 << 64) - 1)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return int(torch.randint((1 << 63) - 1, (), generator=generator))


def from_now(criterion: Callable) -> Callable:
    """The criterion; a copy that begins now if it has a time limit that has not begun."""
    if getattr(criterion, "initial_timestamp", ...) is None:
        criterion = copy.copy(criterion)
        vars(criterion)["initial_timestamp"] = time.time()
    return criterion
