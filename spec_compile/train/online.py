"""`train_while_serving`: a draft that learns from the answers of its target while it serves.

Online Speculative Decoding (Liu et al., arXiv:2310.07177) trains the draft on the texts that come, in the time that
serving leaves. Drafts never change an answer, so only their acceptance can. Here the trained weights go into service if
they are accepted at least as often as those in service on texts that are held out.
"""

import logging
import math
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import parse_options
from ..drafters.checkpoints.target import Target
from ..errors import UnsupportedModelError, check_int
from ..runtime.background import background
from ..runtime.generate import SpeculativeMixin
from .features import TargetFeatures
from .options import TrainingOptions, check_number
from .ring import Ring
from .twin import NAME, TRAINED, copy_weights, draft_of, make_twin
from .updates import Updates

log = logging.getLogger("spec_compile")

BATCH_SIZE = 8
"""Pieces of texts in a step."""
VISITS = 4
"""How often a piece is trained on, so that a server without new texts rests."""
HELD_OUT_TOKENS = 1 << 13
"""Held-out tokens on which weights are compared."""
LEAST_RATE = 1 / 64
"""The share of the first learning rate below which it does not fall."""
MOST_SHARE = 0.2
"""Calls keep four fifths of the time anyway; see `Turns`."""
BYTES = 16
"""For each trained number: the twin's, its gradient and two of the optimizer, in float32."""


@dataclass(frozen=True)
class OnlineOptions:
    """Options of `train_while_serving`.

    buffer_tokens: tokens of texts, prompts included, that are kept in the host's memory
    share: most of the wall time that training takes
    learning_rate: the highest (default: by the size of the head)
    steps_between_swaps: steps after which the trained weights go into service, or are dropped
    """

    buffer_tokens: int = 1 << 16
    share: float = 0.1
    learning_rate: float | None = None
    steps_between_swaps: int = 50

    def __post_init__(self):
        check_int("buffer_tokens", self.buffer_tokens, 1 << 8, 1 << 31)
        check_int("steps_between_swaps", self.steps_between_swaps, 1, 1 << 31)
        check_number("share", self.share, 0.0, MOST_SHARE + 1e-9, f"above 0 and at most {MOST_SHARE}")
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, 0.0, math.inf, "positive and finite")


def train_while_serving(model: PreTrainedModel, **options) -> "OnlineTraining":
    """Let the draft of a model made by `speculate` learn from the answers that it gives from now on.

    The text of each finished answer, prompt included, is kept as token ids in the host's memory, never on disk, until
    newer texts take its place; texts of calls and requests with ``share_text=False`` are not. Answers keep their bits.

    options: of `OnlineOptions`

    Returns what is at ``model.speculation.online`` from then on. Raises TypeError or ValueError, naming the option, for
    wrong options; UnsupportedModelError for a draft, or with options of `speculate`, that cannot learn or if there is
    too little memory.
    """
    parsed = parse_options(OnlineOptions, options)
    if not isinstance(model, SpeculativeMixin):
        raise TypeError(f"model: expected a result of speculate(), got {type(model).__name__}")
    engine = model.speculation.engine
    if engine.options.ranks.size > 1:
        raise UnsupportedModelError(f"{NAME}: a draft learns in one process; leave out tensor_parallel")
    if engine.options.max_loras:
        raise UnsupportedModelError(
            f"{NAME}: rows choose adapters (max_loras), and a draft would learn from another model's answers"
        )
    if engine.online is not None:
        raise ValueError(f"{NAME}: this model's draft learns already; see model.speculation.online")
    engine.online = OnlineTraining(engine, *draft_of(engine.runtime.algorithm), parsed)
    return engine.online


class OnlineTraining:
    """Trains the twin of a draft in service, one step at a time between the calls of its engine.

    steps, swaps, dropped: steps made, and how often their weights went into service or were dropped
    acceptance: the share of first drafts on held-out texts that equal the target's choices, of the weights that were in
        service and of the trained ones, when they were last compared; None before
    seconds: of training
    fault: the error that ended the training; "" if it goes on
    """

    def __init__(self, engine, draft: nn.Module, steps: int, options: OnlineOptions):
        """engine: a `ServedEngine`. draft, steps: see `draft_of`."""
        target = Target.of(engine.original)
        check_memory(draft, engine.original)
        with torch.inference_mode(False), torch.enable_grad(), engine.turns:
            kind = TRAINED[type(draft)]
            self._trainer = kind.of_module(target, make_twin(draft, target), steps)
            self._served = kind.of_module(target, draft, steps)
            # Graphs of all shapes would take memory without bound, and other threads may use the GPU meanwhile.
            self._trainer.captures = self._served.captures = False
            features = TargetFeatures(engine.original, self._trainer.taps, self._trainer.kept, captures=False)
            self._updates = Updates(self._trainer, features, None, options.learning_rate, TrainingOptions.clip)
        self.options, self.turns, self.device_type = options, engine.turns, engine.runtime.device.type
        self.ring = Ring(options.buffer_tokens, self._trainer.shortest)
        self.steps = self.swaps = self.dropped = 0
        self.acceptance: tuple[float, float] | None = None
        self.seconds, self.fault = 0.0, ""
        self._algorithm, self._process = engine.runtime.algorithm, os.getpid()
        self._first_rate, self._visits, self._next = self._updates.learning_rate, 0, -math.inf

    def keep(self, prompt: list[int], answer: list[int]) -> None:
        """Keep the text of a finished answer, and learn from it later. Nothing is learned in a forked process."""
        if answer and not self.fault and os.getpid() == self._process:
            self._visits += VISITS * self.ring.add(prompt, answer)
            background.care_for(self)

    # --- a `Chore` of the background's thread

    @property
    def waits(self) -> bool:
        return self._visits >= BATCH_SIZE and not self.fault

    def load(self) -> None:
        """Nothing comes from elsewhere."""

    def has_work(self) -> bool:
        return self.waits and time.perf_counter() >= self._next

    def work(self) -> bool:
        """Make a step, and a swap if it is due. Then wait so long that training keeps to its share of the time."""
        begin = time.perf_counter()
        try:
            device = self._updates.device
            with torch.inference_mode(False), torch.enable_grad():
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    self._step()
        except Exception as error:  # the answers must go on
            self.fault = f"{type(error).__name__}: {error}"
            log.exception("%s: the training has ended", NAME)
        seconds = time.perf_counter() - begin
        self.seconds += seconds
        self._next = begin + seconds / self.options.share
        return False

    def _step(self) -> None:
        batch = self.ring.batch(BATCH_SIZE, torch.Generator().manual_seed(self.steps))
        if batch is None:  # newer texts, which are held out, have taken all places
            self._visits = 0
            return
        loss = float(self._updates.step(batch, self.steps))
        self.steps, self._visits = self.steps + 1, self._visits - BATCH_SIZE
        if not math.isfinite(loss):
            self._drop()
        elif self.steps % self.options.steps_between_swaps == 0:
            self._compare()

    def _compare(self) -> None:
        """Put the trained weights into service if they are accepted at least as often on the held-out texts."""
        batches = self.ring.held_out(BATCH_SIZE, HELD_OUT_TOKENS)
        if not batches:
            return  # train on until there are some
        trained, served = self._updates.count(batches, self._trainer.steps, self._served)
        self.acceptance = tuple(float(count[0, 1] / count[0, 0].clamp(min=1)) for count in (served, trained))
        if trained[:, 1].sum() < served[:, 1].sum():  # guard: worse-weights
            self._drop()
            return
        copy_weights(self._updates.parameters, self._served.module)
        with torch.no_grad():
            self._algorithm.refresh()
        self.swaps += 1

    def _drop(self) -> None:
        """Go on from the weights in service, in smaller steps."""
        self.dropped += 1
        served = dict(self._served.module.named_parameters())
        copy_weights({name: served[name] for name in self._updates.parameters}, self._trainer.module)
        rate = max(self._updates.learning_rate / 2, self._first_rate * LEAST_RATE)
        self._updates = Updates(self._trainer, self._updates.features, None, rate, self._updates.clip)

    def figures(self) -> dict[str, float]:
        """Numbers for metrics."""
        before, after = self.acceptance or (math.nan, math.nan)
        return {
            "steps_total": self.steps, "swaps_total": self.swaps, "dropped_total": self.dropped,
            "seconds_total": self.seconds, "buffer_tokens": self.ring.tokens,
            "acceptance_in_service": before, "acceptance_trained": after,
        }  # fmt: skip

    def __str__(self) -> str:
        told = "not compared yet"
        if self.acceptance is not None:
            told = "{:.2f} in service, {:.2f} trained".format(*self.acceptance)
        end = f"; ended: {self.fault}" if self.fault else ""
        return (
            f"learns while it serves: {self.steps} steps in {self.seconds:.0f} s, {self.swaps} swaps, {self.dropped} "
            f"dropped; first drafts accepted on held-out texts: {told}{end}"
        )


def check_memory(draft: nn.Module, model: PreTrainedModel) -> None:
    """UnsupportedModelError if the twin of a draft and its optimizer do not fit into the free memory."""
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    numbers = sum(each.numel() for each in draft.parameters() if each.data_ptr() not in shared)
    is_on_gpu = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if is_on_gpu else psutil.virtual_memory().available
    if numbers * BYTES > free:
        raise UnsupportedModelError(
            f"{NAME}: training {numbers:,} numbers takes {numbers * BYTES / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        )
