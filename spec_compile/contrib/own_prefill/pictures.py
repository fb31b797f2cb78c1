"""`PicturePrefill`: prompts with pictures or sounds."""

import copy
from collections.abc import Iterator
from typing import Any

from ...batching.intake import PreparedCall
from ...capture.admit import placeholders
from ...compat import CACHE
from ...runtime.prompt import Past, Prompt, own_prefill
from ...runtime.state import State
from .prefill import OwnPrefill


class PicturePrefill(OwnPrefill):
    """Has the model's own forward process a prompt with pictures or sounds, as transformers calls it."""

    def __init__(self, model: Any, prompt: Prompt, call: PreparedCall, arguments: dict[str, Any]):
        """arguments: of the request, pictures among them. ValueError if only ``generate()`` serves the prompt."""
        engine = model.speculation.engine
        ids, places = prompt.tokens[0], placeholders(engine.original.config)
        if ids[-1] in places:
            raise ValueError("input_ids: a prompt that ends in a picture is served by generate(); add text after it")
        if engine.options.ranks.size > 1:
            raise ValueError("pixel_values: pictures are read in one process; leave out tensor_parallel")
        self._model, self._prompt, self._call = model, prompt, call
        self.end, self.offset = len(ids) - 1, (prompt.position_offsets or [0])[0]
        self.until = max((number for number, token in enumerate(ids, 1) if token in places), default=self.end)

    def pieces(self, state: State, known: int, taps: tuple[int, ...]) -> Iterator[Past]:
        call = self._call
        cache = copy.deepcopy(call.model_kwargs[CACHE])  # empty; another sequence may need it, too
        kwargs = call.model_kwargs | {CACHE: cache}
        yield own_prefill(self._model, self._prompt, call.input_ids, call.config, kwargs, taps)[1]
