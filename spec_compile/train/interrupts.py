"""Ctrl-C in a training: it ends after the step that is running, so that no work is lost."""

import signal
import threading


class Interrupts:
    """A context in which the first SIGINT sets `asked`, and the second raises KeyboardInterrupt.

    It does nothing outside the main thread, or if the program handles the signal itself.
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
