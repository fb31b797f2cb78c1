"""`train_while_serving`: a draft that learns from the answers of its target while it serves.

Online Speculative Decoding (Liu et al., arXiv:2310.07177) trains the draft on the texts that come, in the time that
serving leaves. Drafts never change an answer, so only their acceptance can. Here the trained weights go into service if
they are accepted at least as often as those in service on texts that are held out.
"""

import copy
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from ..capture.quantised import packed_layers
from ..compile.cold_start import background
from ..config import parse_options
from ..drafters.checkpoints.files import Target
from ..drafters.modules.dflash import DFlashDraft
from ..drafters.modules.eagle import Eagle3Head, EagleHead
from ..drafters.modules.mtp import MtpHead
from ..drafting import Algorithm
from ..errors import UnsupportedModelError, log
from ..runtime.generate import SpeculativeMixin
from .blocks import DFlashTrainer
from .data import Batch, Document, collate, cut, sample
from .features import TargetFeatures
from .heads import Eagle3Trainer, EagleTrainer, MtpTrainer
from .loop import Updates
from .options import OnlineOptions, TrainingOptions
from .trainer import Trainer, as_master, copy_weights

BATCH_SIZE = 8
"""Pieces of texts in a step."""
VISITS = 4
"""How often a piece is trained on, so that a server without new texts rests."""
HELD_OUT_TOKENS = 1 << 13
"""Held-out tokens on which weights are compared."""
LEAST_RATE = 1 / 64
"""The share of the first learning rate below which it does not fall."""
BYTES = 16
"""For each trained number: the trained copy's, its gradient and two of the optimizer, in float32."""


def train_while_serving(model: PreTrainedModel, **options) -> "OnlineTraining":
    """Let the draft of a model made by `speculate` learn from the answers that it gives from now on.

    The text of each finished answer, prompt included, is kept as token ids in the host's memory, never on disk, until
    newer texts take its place; texts of calls and requests with ``share_text=False`` are not. Answers keep their bits.

    options: the fields of `OnlineOptions`

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
    """Trains a copy of the draft in service, one step at a time between the calls of its engine.

    steps, swaps, dropped: steps made, and how often their weights went into service or were dropped
    acceptance: the share of first drafts on held-out texts that equal the target's choices, of the weights that were in
        service and of the trained ones, when they were last compared; None before
    seconds: time of training
    fault: the error that ended the training; "" if it goes on
    """

    def __init__(self, engine, draft: nn.Module, steps: int, options: OnlineOptions):
        """engine: an `Engine`. draft, steps: see `draft_of`."""
        target = Target.of(engine.original)
        check_memory(draft, engine.original)
        with torch.inference_mode(False), torch.enable_grad(), engine.turns:
            kind = TRAINED[type(draft)]
            self._trainer = kind.of_module(target, trained_copy(draft, target), steps)
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

    # --- work of the background's thread, see `Background`

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
        batches = sample(self.ring.part(held_out=True), BATCH_SIZE, HELD_OUT_TOKENS)
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
    """UnsupportedModelError if the trained copy of a draft and its optimizer do not fit into the free memory."""
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    numbers = sum(each.numel() for each in draft.parameters() if each.data_ptr() not in shared)
    is_on_gpu = model.device.type == "cuda"
    free = torch.cuda.mem_get_info(model.device)[0] if is_on_gpu else psutil.virtual_memory().available
    if numbers * BYTES > free:
        raise UnsupportedModelError(
            f"{NAME}: training {numbers:,} numbers takes {numbers * BYTES / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        )


# `Ring`: the last texts that were answered, in bounded memory of the host.

HELD_OUT_EVERY = 10
"""Texts 10, 20, ... are held out, and the others are trained on."""
LENGTH = 512
"""Tokens of a piece at most."""


class Ring:
    """Pieces of texts, the newest with up to `bound` tokens together, of which each takes 5 bytes.

    Nothing of them is written anywhere.
    """

    def __init__(self, bound: int, shortest: int):
        """shortest: tokens of a piece that can be trained on, at least."""
        self.bound, self.shortest = bound, shortest
        self.texts = self.tokens = 0
        """Texts so far, and tokens that are kept now."""
        self._pieces: deque[tuple[Document, bool]] = deque()
        self._lock = threading.Lock()

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Keep a text, of which the answer is to be learned. Returns the pieces that can be trained on.

        Texts 10, 20, ... are held out.
        """
        ids = torch.tensor([*prompt, *answer], dtype=torch.int32)
        pieces = cut([Document(ids, torch.arange(len(ids)) >= len(prompt))], min(LENGTH, self.bound), self.shortest)
        # A piece is a view of the whole text, whose memory would stay.
        pieces = [Document(piece.ids.clone(), piece.supervised.clone()) for piece in pieces]
        with self._lock:
            self.texts += 1
            is_held_out = self.texts % HELD_OUT_EVERY == 0
            for piece in pieces:
                self._pieces.append((piece, is_held_out))
                self.tokens += len(piece.ids)
            while self.tokens > self.bound:
                self.tokens -= len(self._pieces.popleft()[0].ids)
        return 0 if is_held_out else len(pieces)

    def part(self, held_out: bool) -> list[Document]:
        """The pieces that are held out, or all others, from old to new."""
        with self._lock:
            return [piece for piece, is_held_out in self._pieces if is_held_out == held_out]

    def batch(self, size: int, generator: torch.Generator) -> Batch | None:
        """A batch of `size` random pieces to train on, or of all if they are fewer; None if there are none."""
        pieces = self.part(held_out=False)
        picked = torch.randperm(len(pieces), generator=generator)[:size].tolist()
        return collate([pieces[n] for n in picked]) if picked else None


# The float32 copy of a draft in service, and the trainer of each kind of draft that can learn while it serves.

TRAINED: dict[type[nn.Module], type[Trainer]] = {
    EagleHead: EagleTrainer, Eagle3Head: Eagle3Trainer, MtpHead: MtpTrainer, DFlashDraft: DFlashTrainer,
}  # fmt: skip
"""The trainer of each class of drafts."""
NAME = "train_while_serving"


def draft_of(algorithm: Algorithm) -> tuple[nn.Module, int]:
    """The draft that `algorithm` runs, and the tokens that it drafts one after the other.

    UnsupportedModelError, naming the kind, unless the draft can learn while it serves.
    """
    draft = getattr(algorithm, "head", None) or getattr(algorithm, "draft", None)
    if isinstance(draft, Algorithm):  # joined with n-grams
        return draft_of(draft)
    if type(draft) not in TRAINED:
        kind = type(algorithm).__name__ if draft is None else getattr(draft, "flavour", "") or type(draft).__name__
        raise UnsupportedModelError(
            f"{NAME}: drafts of EAGLE, EAGLE-2, EAGLE-3, MTP and DFlash learn while they serve, not those of {kind}"
        )
    if algorithm.plan.draws:
        raise UnsupportedModelError(
            f"{NAME}: with draft_sample_method='probabilistic' sampled answers depend on the drafts, and would "
            "change with each swap; use 'greedy'"
        )
    if packed_layers(draft) or not all(each.is_floating_point() for each in draft.parameters()):
        raise UnsupportedModelError(f"{NAME}: this draft has quantised weights; use the draft in 16 or 32 bits")
    if getattr(draft, "further", ()):
        raise UnsupportedModelError(f"{NAME}: this MTP draft has several modules, of which only one could be trained")
    if isinstance(draft, DFlashDraft) and not _is_plain(draft):
        raise UnsupportedModelError(f"{NAME}: this draft of blocks has parts that DFlash does not have")
    return draft, draft.block_size - 1 if isinstance(draft, DFlashDraft) else algorithm.plan.levels


def _is_plain(draft: DFlashDraft) -> bool:
    """True if `DFlashTrainer` computes what the draft does."""
    parts = draft.softcap, draft.mask_embedding, draft.draft_to_target
    is_scaled = draft.embedding_scale != 1 or draft.output_scale != 1
    is_of_kin = type(draft) is not DFlashDraft or draft.sample_from_anchor
    return not (is_scaled or is_of_kin) and all(part is None for part in parts)


def trained_copy(draft: nn.Module, target: Target) -> nn.Module:
    """A copy of a draft whose parameters are in float32 and get gradients.

    It shares the target's tensors and the draft's embedding, which are not trained and no parameters of the copy; nor
    is an output matrix of rows of the target's.
    """
    shared = [*target.model.parameters(), *target.model.buffers(), draft.embedding]
    if getattr(draft, "all_rows", ()):
        shared.append(draft.head_weight)
    addresses = {tensor.data_ptr() for tensor in shared}
    copied = copy.deepcopy(draft, memo={id(tensor): tensor for tensor in shared})
    for module in copied.modules():
        for name, parameter in [*module._parameters.items()]:
            if parameter is not None and parameter.data_ptr() in addresses:
                del module._parameters[name]  # or moving the copy to float32 would cast the target
                setattr(module, name, parameter.detach())
    return as_master(copied, draft.embedding.detach()).requires_grad_(True).eval()
