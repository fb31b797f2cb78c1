"""`Accounts`: the methods by which a `Speculation` describes itself and recorded answers."""

import dataclasses
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..config import Options
from ..runtime.served import ServedEngine
from ..stats import Stats
from . import html
from .explain import explain


class Accounts:
    """The methods of `Speculation` that change nothing."""

    engine: ServedEngine
    options: Options
    original: PreTrainedModel

    def __repr__(self) -> str:
        """The algorithm, options that are not at their default (such as the draft), the device and the dtype."""
        parts = [f"algo={self.engine.name!r}"]
        for field in dataclasses.fields(self.options):
            value = getattr(self.options, field.name)
            if value is not field.default and (type(value) is not type(field.default) or value != field.default):
                parts.append(f"{field.name}={_short(value)}")
        parts += [f"device={str(self.engine.runtime.device)!r}", f"dtype={self.engine.described.dtype}"]
        return f"Speculation({', '.join(parts)})"

    @property
    def stats(self) -> Stats:
        """Counters since the start or ``stats.reset()``."""
        return self.engine.runtime.stats

    @property
    def online(self) -> Any:
        """The training of the draft while it serves, which `train_while_serving` began; None if there is none."""
        return self.engine.online

    def explain(self) -> str:
        """A readable account of the changes by each pass, and of a round."""
        return explain(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which generate() records every tree that it verifies, for `report`. The last call is kept."""
        before, self.engine.records = self.engine.records, True
        try:
            yield
        finally:
            self.engine.records = before

    def report(self, path: str | Path, tokenizer: Any = None) -> Path:
        """Write an HTML page about the last generate() that was recorded, and return its path.

        It shows text by rounds, accept lengths, times, and every tree with its accepted nodes. It needs no network.
        With n-grams the trees show parts of other calls' texts, unless these ran with ``share_text=False``.

        path: of the file.
        tokenizer: the model's, to show text in place of token ids.

        Raises RuntimeError if nothing was recorded, and TypeError if `tokenizer` cannot decode.
        """
        if self.engine.recording is None:
            raise RuntimeError(
                "no generate() was recorded; run it inside `with model.speculation.recording():`, then call report()"
            )
        return html.write(self.engine.recording, path, tokenizer, type(self.original).__name__, self.engine.name)


def _short(value: Any) -> str:
    """A value in one line: texts and numbers in full, lists shortened, and the class of any other object."""
    if isinstance(value, str | Path | bool | int | float):
        return repr(str(value) if isinstance(value, Path) else value)
    return reprlib.repr(value) if isinstance(value, list | tuple | dict) else f"<{type(value).__name__}>"
