"""`StopCut`: a text that comes in pieces ends at its first stop string."""

from collections.abc import Sequence


class StopCut:
    """Ends a text that comes in pieces at the first stop string, as if it came character by character.

    stops: the stop strings
    keeps_stop: True if the text ends after the stop string, False if before
    found: the one that was found, or None

    With the stop "END", the pieces "aE", "N", "Db" give "a", "", "": the "E" waits until it is known to be no stop.
    If two stops end at one place, the one that begins first counts.
    """

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False):
        self.stops, self.keeps_stop = stops, keeps_stop
        self.found: str | None = None
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that is known to belong to the answer."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if places:
            end, length, self.found = min(places)
            self._held = ""
            return text[: end if self.keeps_stop else end + length]
        sizes = (size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        held = max(sizes, default=0)  # guard: held-text
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """The text that waited, once nothing follows it."""
        held, self._held = self._held, ""
        return held

    def whole(self, text: str) -> str:
        """A whole text up to its end."""
        self.found = None
        return self.feed(text) + self.rest()
