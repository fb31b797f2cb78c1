"""`Updates` of a draft's weights and their optimizers, and `Loop`, a training by steps or by the clock."""

import math
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..cli import tell
from .corpus import UNNAMED
from .data import Batch, Batches, move
from .features import TargetFeatures
from .options import TrainingOptions
from .save import TrainingState, save_curve, save_state
from .trainer import Trainer, copy_weights, trained_parameters

BETAS = (0.9, 0.95)
"""The coefficients of AdamW."""


class Updates:
    """Updates the weights of a trainer's draft."""

    def __init__(
        self, trainer: Trainer, features: TargetFeatures, optimizer: str | None, learning_rate: float | None,
        clip: float,
    ):  # fmt: skip
        """optimizer, learning_rate, clip: see `TrainingOptions`."""
        self.trainer, self.features, self.clip = trainer, features, clip
        self.device, dtype = features.model.device, features.model.dtype
        self._mixed = self.device.type == "cuda" or dtype.itemsize == 2
        self.parameters = trained_parameters(trainer.module)
        size, highest = trainer.learning_rate
        self.learning_rate = learning_rate or min(size / trainer.module.hidden_size, highest)
        # AdamW, or Muon for the matrices of linear layers and AdamW for all else.
        matrices = matrices_of(trainer.module) if (optimizer or trainer.optimizer) == "muon" else []
        taken = {id(matrix) for matrix in matrices}
        others = [parameter for parameter in self.parameters.values() if id(parameter) not in taken]
        adamw = torch.optim.AdamW(others, betas=BETAS, weight_decay=0.0, fused=self.device.type == "cuda")
        self.optimizers = [Muon(matrices), adamw] if matrices else [adamw]

    def step(self, batch: Batch, seed: int, factor: float = 1.0) -> Tensor:
        """Update the weights once. Returns the loss, a scalar on the device.

        seed: seeds the random numbers of this step
        factor: multiplies the learning rate
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        features = self.features(move(batch.ids, self.device), self.trainer.learns_from_choices)
        with self._precision():
            loss = self.trainer.loss(batch, features, generator)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * factor
            optimizer.step()
        return loss.detach()

    def count(self, batches: list[Batch], steps: int, *others: Trainer) -> Tensor:
        """(drafts that reach a depth, drafts that equal the target's choices down to it) of the draft, [1, steps, 2].

        others: trainers of other drafts that read the same states, whose counts follow, [1 + others, steps, 2]
        """
        trainers = (self.trainer, *others)
        counts = torch.zeros(len(trainers), steps, 2, dtype=torch.int64)
        for batch in batches:
            features = self.features(move(batch.ids, self.device))
            with self._precision():
                counts += torch.tensor([list(each.accepted(batch, features, steps)) for each in trainers])
        return counts

    def _precision(self) -> torch.autocast:
        """The context of forwards: bfloat16 matrix products on a GPU or with a model in 16 bits."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._mixed)


MOMENTUM, ITERATIONS = 0.95, 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b, c of an iteration x -> a x + (b x x^T + c (x x^T)^2) x, which pushes singular values towards one."""


class Muon(torch.optim.Optimizer):
    """Momentum whose singular values are all made about one (https://kellerjordan.github.io/posts/muon).

    m <- 0.95 m + 0.05 g, and p <- p - lr * 0.2 sqrt(max(rows, columns)) * orthogonalised(0.95 m + 0.05 g). Updates have
    the size of AdamW's, so that both take the same learning rate (Liu et al., "Muon is scalable for LLM training",
    arXiv:2502.16982, section 2.2).

    Matrices of one shape are updated together, because launching their kernels takes longer than they run.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float = 1e-3):
        """matrices: [rows, columns] each. lr: as of AdamW."""
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                step = self._direction(matrices) * (-group["lr"] * 0.2 * max(shape) ** 0.5)
                torch._foreach_add_(matrices, list(step.to(matrices[0].dtype)))

    def _direction(self, matrices: list[Tensor]) -> Tensor:
        """The orthogonalised momentum of matrices of one shape, [n, rows, columns]."""
        for matrix in matrices:
            if "momentum" not in self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        momentum, grads = [self.state[matrix]["momentum"] for matrix in matrices], [matrix.grad for matrix in matrices]
        torch._foreach_lerp_(momentum, grads, 1 - MOMENTUM)
        return orthogonalised(torch.stack(torch._foreach_lerp(grads, momentum, MOMENTUM)))


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with singular values of about one, by Newton-Schulz iterations.

    They run in bfloat16 on a GPU, whose products are then several times as fast, and else in float32.
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices.float()
    x = x.mT if x.shape[1] > x.shape[2] else x  # the smaller products
    x = x / x.float().norm(dim=(1, 2), keepdim=True).clamp(min=1e-7).to(x.dtype)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


def matrices_of(module: nn.Module) -> list[Tensor]:
    """The weights of a module's linear layers that are trained. Embeddings, tables and output matrices are none."""
    linears = (part for part in module.modules() if isinstance(part, nn.Linear))
    return [part.weight for part in linears if part.weight.requires_grad and min(part.weight.shape) > 1]


# The training loop: one draft, by steps or by the clock, with progress, evaluations and checkpoints.


REPORT_SECONDS = 10.0
"""Seconds between two reports of progress; less at first."""
FIRST_SECONDS = 1.0
"""Seconds between the report of the first step and the next report."""
ENOUGH = 100
"""Steps below which a training by the clock is too short to be of use."""
CLEAR = 0.1
"""The share of a training after which its number of steps can be told."""
UNREAD = 32
"""Losses that may stay on a GPU before they are read, because reading waits for the GPU."""
EVALUATIONS = 10
"""Parts of the training; acceptance is measured after each but the last."""
LINES = 10
"""Lines that a training prints, about, if stderr is no terminal."""


class Interrupts:
    """A context in which the first SIGINT sets `asked`, and the second raises KeyboardInterrupt.

    A training ends after the step that is running, so that no work is lost. The context does nothing outside the main
    thread, or if the program handles the signal itself.
    """

    asked = False

    def __enter__(self) -> "Interrupts":
        is_main = threading.current_thread() is threading.main_thread()
        self._handles = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._handles:
            signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number, frame) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    share: done part of the training, from 0 to 1
    loss: the mean of the steps since the last `Progress`
    acceptance: the share of first drafts accepted on held-out text when last measured, or None before that
    seconds: time of training so far
    seconds_left: expected
    """

    step: int
    share: float
    loss: float
    acceptance: float | None
    tokens_per_second: float
    seconds: float
    seconds_left: float

    def __str__(self) -> str:
        accepted = "-" if self.acceptance is None else f"{self.acceptance:.1%}"
        return (
            f"{self.share:4.0%}  step {self.step}  loss {self.loss:.4f}  first drafts accepted {accepted}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {clock(self.seconds_left)} left"
        )


class Printer:
    """A context manager that shows each `Progress` it is called with on stderr.

    On a terminal it is a bar. Otherwise a line is printed for the first one, and for each tenth of the training.
    """

    def __enter__(self) -> "Printer":
        self._bar, self._printed = None, -1
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bars

            columns = (TextColumn("{task.description}"), BarColumn())
            self._bar = Bars(*columns, console=Console(stderr=True), auto_refresh=False)
            self._task = self._bar.add_task("  0%  the first step", total=1.0)
            self._bar.start()
        return self

    def __call__(self, progress: Progress) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.share, description=str(progress), refresh=True)
        elif int(progress.share * LINES) > self._printed:
            self._printed = int(progress.share * LINES)
            tell(str(progress))

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """A context in which transformers shows no progress bars if stderr is no terminal."""
    shown = logging.is_progress_bar_enabled()
    try:
        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def clock(seconds: float) -> str:
    """Seconds as 1:02:03, or as 2:03 below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


class Loop:
    """Trains a draft from `state` on, until the steps or minutes in `options` are over.

    Step s uses batch s, and random numbers that only depend on the seed and s. So a training that goes on from `state`
    gives the same draft as one without the interruption.
    """

    def __init__(
        self, trainer: Trainer, features: TargetFeatures, batches: Batches, glance: list[Batch],
        held_out: dict[str, list[Batch]], options: TrainingOptions, state: TrainingState, folder: Path,
        publish: Callable[[dict, list[float]], None], report: Callable[[Progress], None],
    ):  # fmt: skip
        """Prepare the optimizer, and load the weights of `state`.

        glance: held-out batches on which acceptance is measured during the training
        held_out: batches on which it is measured in the end, by the name of their set
        folder: for checkpoints
        publish: called with facts and acceptance, writes the draft
        report: called with each `Progress`
        """
        self.trainer, self.batches = trainer, batches
        self.glance, self.held_out = glance, held_out
        self.by_set: dict[str, list[float]] = {}
        """The acceptance by depth on each named set, once it is measured."""
        self.options, self.state, self.folder, self.publish, self.report = options, state, folder, publish, report
        self._updates = Updates(trainer, features, options.optimizer, options.learning_rate, options.clip)
        if state.weights is not None:
            copy_weights(state.weights, trainer.module)
            for optimizer, stored in zip(self._updates.optimizers, state.optimizer):
                optimizer.load_state_dict(stored)
        self._unread: list[Tensor] = []
        self._begin = time.perf_counter() - state.seconds

    @property
    def share(self) -> float:
        """The share of the training that is done, from 0 to 1."""
        if self.options.steps is not None:
            return self.state.step / self.options.steps
        return self.state.seconds / (self.options.minutes * 60)

    def run(self) -> list[float]:
        """Train to the end and save. Returns the acceptance by depth on the held-out text, empty without such text."""
        with Interrupts() as interrupts:
            self._train(interrupts)
            acceptance = self._measure() if self.held_out else []
        if acceptance and (not self.state.evaluations or self.state.evaluations[-1][0] < self.state.step):
            self.state.evaluations.append((self.state.step, acceptance[0]))
        self.save(acceptance)
        return acceptance

    def _train(self, interrupts: Interrupts) -> None:
        """Make all steps. KeyboardInterrupt, after a checkpoint, if the user asks to stop."""
        begin = saved = reported = time.perf_counter()
        known, waits, is_clear = (self.state.step, self.state.tokens, begin), 0.0, False
        while (share := self.share) < 1:
            self._step(share)
            # Acceptance after each part, progress every few seconds, a checkpoint every few minutes.
            if self.held_out and int(share * EVALUATIONS) < int(self.share * EVALUATIONS) < EVALUATIONS:
                self.state.evaluations.append((self.state.step, _shares(self._updates.count(self.glance, 1)[0])[0]))
            now = time.perf_counter()
            is_due = now - reported >= waits or self.share >= 1
            if is_due or len(self._unread) >= UNREAD:
                self._read_losses()
            if is_due:
                self._tell(*known)
                reported, known = now, (self.state.step, self.state.tokens, now)
                waits = min(REPORT_SECONDS, max(FIRST_SECONDS, now - begin))
            if self.share >= CLEAR and not is_clear:
                is_clear = True
                self._warn_of_few_steps()
            is_asked = interrupts.asked and self.share < 1
            if is_asked or (now - saved >= self.options.checkpoint_minutes * 60 and self.share < 1):  # guard: ctrl-c
                self.save([share for _, share in self.state.evaluations[-1:]])
                saved = now
            if is_asked:
                raise KeyboardInterrupt(f"stopped after step {self.state.step}, which {self.folder} keeps")

    def _warn_of_few_steps(self) -> None:
        """Warn if the minutes are enough for a few steps only."""
        steps = round(self.state.step / min(1.0, self.share))
        if self.options.minutes is not None and steps < ENOUGH:
            warnings.warn(
                f"minutes: {self.options.minutes:g} are too few: enough for about {steps} steps of "
                f"{self.options.batch_size} sequences here, and a head needs hundreds. Give more minutes, a GPU, or a "
                "smaller batch_size or sequence_length",
                stacklevel=5,
            )

    def _measure(self) -> list[float]:
        """The acceptance by depth on all held-out sets together. Sets `by_set`, unless the only set has no name."""
        counts = {name: self._updates.count(each, self.trainer.steps)[0] for name, each in self.held_out.items()}
        if counts.keys() != {UNNAMED}:
            self.by_set = {name: _shares(count) for name, count in counts.items()}
        return _shares(torch.stack([*counts.values()]).sum(0))

    def save(self, acceptance: list[float]) -> None:
        """Write a checkpoint: the state, and the draft with its card."""
        self._read_losses()
        state = self.state
        state.weights = {name: value.detach().cpu() for name, value in self._updates.parameters.items()}
        state.optimizer = [optimizer.state_dict() for optimizer in self._updates.optimizers]
        save_state(self.folder, state)
        save_curve(self.folder, state)
        facts = {
            "steps": state.step,
            "minutes": f"{state.seconds / 60:.1f}",
            "tokens seen": f"{state.tokens:,}",
            "training speed": f"{state.tokens / max(1e-9, state.seconds):,.0f} tokens/s",
            "learning rate": f"{self._updates.learning_rate:g}",
        }
        facts |= {f"accept length on {name}": f"{1 + sum(shares):.2f}" for name, shares in self.by_set.items()}
        self.publish(facts, acceptance)

    def _step(self, share: float) -> None:
        """Update the weights once. share: of the training that is done, which sets the learning rate."""
        state = self.state
        batch = self.batches[state.step]
        self.trainer.share = share
        loss = self._updates.step(batch, self.options.seed * 1_000_003 + state.step, self._schedule(share))
        self._unread.append(loss)  # not read here, which would wait for the GPU
        state.step += 1
        state.tokens += batch.tokens
        state.seconds = time.perf_counter() - self._begin

    def _schedule(self, share: float) -> float:
        """The factor of the learning rate: a linear warm-up, then half a cosine down to zero."""
        if self.options.steps is not None:
            share += 0.5 / self.options.steps
        warmup = self.options.warmup
        if share < warmup:
            return share / warmup
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (share - warmup) / (1 - warmup)))

    def _read_losses(self) -> None:
        """Move the unread losses into the state. FloatingPointError if one is infinite or NaN."""
        if self._unread:
            losses = torch.stack(self._unread).tolist()
            self._unread.clear()
            self.state.losses += losses
            if not all(map(math.isfinite, losses)):
                raise FloatingPointError(
                    f"the loss became {losses[-1]} by step {self.state.step}; {self.folder} keeps the checkpoint "
                    f"before it: train anew with a learning_rate below {self._updates.learning_rate:g}"
                )

    def _tell(self, step: int, tokens: int, since: float) -> None:
        """Report the progress since the last report, which came at time `since` with `step` and `tokens`."""
        state, share = self.state, min(1.0, self.share)
        recent = state.losses[step:]
        self.report(
            Progress(
                step=state.step,
                share=share,
                loss=sum(recent) / max(1, len(recent)),
                acceptance=state.evaluations[-1][1] if state.evaluations else None,
                tokens_per_second=(state.tokens - tokens) / max(1e-9, time.perf_counter() - since),
                seconds=state.seconds,
                seconds_left=state.seconds * (1 - share) / max(share, 1e-9),
            )
        )


def _shares(counts: Tensor) -> list[float]:
    """The share of accepted drafts at each depth, of the counts [steps, 2]."""
    return [accepted / max(1, reached) for reached, accepted in counts.tolist()]
