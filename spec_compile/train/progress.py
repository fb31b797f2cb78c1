"""The progress of a training, shown as a bar on a terminal and as a few lines elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers.utils import logging

from ..cli import tell

LINES = 10
"""Lines that a training prints, about, if stderr is no terminal."""


@dataclass(frozen=True)
class Progress:
    """The progress of a training.

    share: of the training that is done, from 0 to 1
    loss: the mean of the steps since the last `Progress`
    acceptance: the share of first drafts accepted on held-out text when last measured, or None before that
    seconds: of training so far
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
            self._bar.refresh()
        return self

    def __call__(self, progress: Progress) -> None:
        if self._bar is None:
            if int(progress.share * LINES) > self._printed:
                self._printed = int(progress.share * LINES)
                tell(str(progress))
            return
        self._bar.update(self._task, completed=progress.share, description=str(progress))
        self._bar.refresh()

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.stop()


def say_nothing(message: str) -> None:
    """Print nothing, in the place of `tell`."""


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
