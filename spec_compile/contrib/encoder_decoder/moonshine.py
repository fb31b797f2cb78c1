"""Moonshine and Moonshine Streaming: decoders with rotary positions over sounds of any length."""

import copy
import importlib
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from .decoder import BASES, ROOMS, Decoder

SECONDS = 64
"""The longest sound that is served; the model itself has no limit, and was trained on shorter ones."""


class SoundDecoder(Decoder):
    """A `Decoder` whose encoder also returns the mask of its output, which is shorter than the sound."""

    def over(self: Any, engine: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> Decoder:
        made = super().over(engine, input_ids, model_kwargs)
        made.source_mask = getattr(made.encoder_outputs, "attention_mask", None)
        return made

    def run(self: Any, source: BaseModelOutput, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        module = importlib.import_module(type(self).__module__)
        # A streaming decoder adds positions to the states in place.
        masked = getattr(module, f"{type(self).__name__.removesuffix('ForConditionalGeneration')}EncoderModelOutput")(
            last_hidden_state=source[0].clone(), attention_mask=self.source_mask
        )
        return super().run(masked, attention_mask, **kwargs)


class StreamingDecoder(SoundDecoder):
    """A `SoundDecoder` that gives the encoder's output positions and its own width."""

    def attended(self: Any, states: Tensor) -> Tensor:
        decoder = self.get_decoder()
        return copy.deepcopy(decoder.proj).to(states.dtype)(states + decoder.pos_emb.weight[: states.shape[1]])


BASES["moonshine"], BASES["moonshine_streaming"] = SoundDecoder, StreamingDecoder
ROOMS["moonshine"] = SECONDS * 16_000 // 384  # of the samples of a second 384 make a place
