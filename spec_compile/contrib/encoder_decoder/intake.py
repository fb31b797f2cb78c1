"""`SourceIntake`: requests of an encoder-decoder, each with a source and a prompt of its decoder."""

import copy
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from ...batching.intake import CALLBACKS, Intake, PreparedCall, StopsBeforeTheLoop
from ...batching.sequence import BatchSequence
from ...capture.copies import shallow
from ...runtime.prompt import Past, Prompt
from ...runtime.state import State
from ..own_prefill.prefill import OwnPrefill

OF_SOURCES = {"input_features", "encoder_outputs", "attention_mask"}
"""Arguments of a request that bring its source, besides token ids."""
OF_SOUNDS = {"language", "task", "prompt_ids", "return_timestamps", "is_multilingual"}
"""Arguments of Whisper's ``generate()`` that a request may have."""
OF_SEGMENTS = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")
"""Settings of Whisper's that choose among several answers."""
STARTS = ("decoder_start_token_id", "bos_token_id")
"""Fields of a GenerationConfig that decide how a prompt of the decoder begins."""
OLD_NAME = "_prepare_encoder_decoder_kwargs_for_generation"
SOURCE, HEARD = "source of the request", "heard of the request"
"""Option with the arguments of ``generate()`` for the source and the prompt, and what of these is known by then."""


class StopsBeforeTheEncoder(StopsBeforeTheLoop):
    """Put in front of an encoder-decoder's class, makes ``generate()`` raise what it has prepared.

    encode: runs the encoder, and returns its output; None if the request brings that. heard: the language of a sound,
        once the model has heard it.
    """

    encode: Any = None
    heard: list[Tensor]

    def generate(
        self: Any, ids: Tensor, *, attention_mask: Tensor, generation_config: GenerationConfig, **kwargs: Any
    ) -> None:
        parent: Any = super()
        kwargs = kwargs.pop(SOURCE) | kwargs
        self.heard = kwargs.pop(HEARD)
        if "temperature" in inspect.signature(parent.generate).parameters:  # Whisper's, which reads no config for it
            configs, names = (generation_config, self.generation_config), ("do_sample", "temperature")
            samples, heat = (next((x for c in configs if (x := getattr(c, name)) is not None), None) for name in names)
            kwargs["temperature"] = (1.0 if heat is None else heat) if samples else None
        parent.generate(generation_config=generation_config, **kwargs)

    def detect_language(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Whisper's. It runs the encoder, so it is asked once for a request."""
        if not self.heard:
            self.heard.append(super().detect_language(*args, **kwargs))
        return self.heard[0]

    def _maybe_prepare_encoder_kwargs_for_generation(
        self: Any, inputs: Tensor, model_kwargs: dict[str, Any], *args: Any
    ) -> dict[str, Any]:
        """Put the encoder off until the request has a row. An empty output with as many places stands for its own."""
        if model_kwargs.get("encoder_outputs") is not None:
            return model_kwargs
        # Named anew in transformers 5.18 or later.
        parent: Any = super(StopsBeforeTheLoop, self)
        prepare = getattr(parent, OLD_NAME, None) or parent._maybe_prepare_encoder_kwargs_for_generation
        self.encode = lambda: prepare(inputs, {**model_kwargs}, *args)["encoder_outputs"]
        places = self.config.max_source_positions if inputs.is_floating_point() else inputs.shape[1]
        return model_kwargs | {"encoder_outputs": BaseModelOutput(inputs.new_empty(1, places, 0))}

    _prepare_encoder_decoder_kwargs_for_generation = _maybe_prepare_encoder_kwargs_for_generation


@dataclass
class SourcePrefill(OwnPrefill):
    """The states of a source. No token of the prompt is processed.

    source: the decoder over it, see `Decoder.over`. encode: runs the encoder; None: `source` has its output.
    """

    source: Any
    encode: Any
    end = 0
    until = math.inf

    def pieces(self, state: State, known: int, taps: tuple[int, ...]) -> Iterator[Past]:
        source = shallow(self.source)
        source.crossed = DynamicCache()
        if self.encode is not None:
            source.encoder_outputs = self.encode()
        yield source.past([0])


class SourceIntake(Intake):
    """Reads requests for an encoder-decoder. They have the arguments of ``generate()`` for one source."""

    arguments = CALLBACKS | {SOURCE}
    stops = StopsBeforeTheEncoder

    def sequences(
        self, input_ids: Any, config: GenerationConfig, request_id: str | None = None, /, **options: Any
    ) -> list[BatchSequence]:
        """See `Intake.sequences`. input_ids: token ids of the source, or features [1, F, S] of it; None if options
        bring it. The sequences' prompts are the decoder's."""
        engine = self._engine
        if engine.options.ranks.size > 1:
            raise ValueError("tensor_parallel: sources are read in one process; call generate(), or leave it out")
        if engine.loras is not None:
            raise ValueError("max_loras: no source is read with a row's adapter; call generate(), or leave it out")
        source = self._read_source(input_ids, options)
        texts = engine.decoder.sources((), source)
        if texts and engine.runtime.algorithm.store is not None and options.get("reference") is None:
            options["reference"] = texts[0][-self._room :]  # as much of it as a row holds

        # How transformers begins the decoder's prompt. Whisper may have to hear which language is spoken.
        first: Any = copy.copy(config)
        first.max_new_tokens, first.max_length = 1, None
        vars(first).update({name: options[name] for name in STARTS if name in options})
        copied: Any = shallow(self._model, self._class)
        copied.generation_config = self._model.generation_config
        with engine.turns:
            call = self._ask_transformers(copied, self._ids, first, None, {SOURCE: source})
        prompt = call.input_ids[0].tolist()
        return super().sequences(prompt, config, request_id, **options, **{SOURCE: source})

    def _read_source(self, given: Any, options: dict[str, Any]) -> dict[str, Any]:
        """Take the arguments for the source and the prompt out of `options`. ValueError or TypeError for wrong ones."""
        of_class = OF_SOUNDS & inspect.signature(type(self._engine.original).generate).parameters.keys()
        own = OF_SOURCES | (of_class or {"decoder_input_ids"})
        source = {name: options.pop(name) for name in own & options.keys()}
        source = {name: value for name, value in source.items() if value is not None} | {HEARD: []}
        if isinstance(given, Tensor) and given.is_floating_point():
            source["input_features"] = given
        elif given is not None:
            source["input_ids"] = torch.tensor([self._read_prompt(given)])
        if not {"input_ids", "input_features", "encoder_outputs"} & source.keys():
            raise ValueError("input_ids: expected a source, its input_features or its encoder_outputs, got none")
        if "decoder_input_ids" in source:
            ids = self._read_prompt(source["decoder_input_ids"], "decoder_input_ids")
            source["decoder_input_ids"] = torch.tensor([ids])

        # Features have the sizes that the encoder reads, and nothing is about more than one source.
        config, features, states = self._engine.original.config, source.get("input_features"), None
        if features is not None:
            most, bins = 2 * config.max_source_positions, config.num_mel_bins
            shape = tuple(getattr(features, "shape", ()))
            if len(shape) != 3 or shape[:2] != (1, bins) or not 0 < shape[2] <= most:
                raise ValueError(
                    f"input_features: expected [1, {bins}, at most {most}], one piece of a sound, got {[*shape]}; "
                    "generate() cuts longer ones"
                )
        if (told := source.get("encoder_outputs")) is not None:
            states = told if isinstance(told, Tensor) else told[0]
            if states.dim() != 3 or len(states) != 1 or states.shape[2] != config.d_model:
                raise ValueError(
                    f"encoder_outputs: expected states [1, places, {config.d_model}], got {[*states.shape]}"
                )
            source["encoder_outputs"] = BaseModelOutput(states.to(self._ids.device))
        if "attention_mask" in source:
            source["attention_mask"] = mask = torch.atleast_2d(torch.as_tensor(source["attention_mask"]))
            whole = [each.shape[:2] for each in (source.get("input_ids"), states) if each is not None]
            if any(mask.shape != shape for shape in whole) or not mask.any():
                raise ValueError(f"attention_mask: expected the source's size, and a token, got {[*mask.shape]}")
        elif "input_ids" in source:
            source["attention_mask"] = torch.ones_like(source["input_ids"])
        return source

    def _ask_transformers(self, copied: Any, *args: Any) -> PreparedCall:
        """See `Intake`. The arguments of the call are a causal language model's, without the source."""
        call = super()._ask_transformers(copied, *args)
        for name in OF_SEGMENTS:
            if getattr(call.config, name, None):
                raise ValueError(f"{name}: only generate() does this; leave it out")
        source = self._engine.decoder.over(self._engine, call.input_ids, call.model_kwargs)
        call.model_kwargs = source.arguments(call.model_kwargs)
        vars(call)["prefill"] = SourcePrefill(source, copied.encode)
        return call

    def own_prefill(self, prompt: Prompt, call: PreparedCall, arguments: dict[str, Any]) -> OwnPrefill:
        return vars(call)["prefill"]
