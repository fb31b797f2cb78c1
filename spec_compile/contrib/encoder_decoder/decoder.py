"""`Decoder`: an encoder-decoder's decoder as a causal language model, over an example source or a call's sources."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.generation import GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.models.auto import modeling_auto
from transformers.utils import ModelOutput

from ...capture.copies import shallow
from ...capture.modules import heads_of, tell_positions
from ...compat import CACHE
from ...kernels.recurrence import recurrence
from ...runtime.prompt import Past
from . import inputs, kind


def classes_of(*families: str) -> dict[str, str]:
    """The class of each family, by the type of its configuration as modules are named: "blenderbot_small"."""
    known = {**modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    known |= modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    return {family: known[family.replace("_small", "-small")] for family in families}


FAMILIES = classes_of(
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot_small", "m2m_100", "marian", "mbart", "moonshine",
    "moonshine_streaming", "pegasus", "plbart", "whisper",
)  # fmt: skip
"""The class that is served, by family."""
BASES: dict[str, type["Decoder"]] = {}
"""The class that is put before a model's in place of `Decoder`, by the type of its configuration."""
ROOMS: dict[str, int] = {}
"""The most places of a source that are served, by the type of configurations that set no limit."""
EXAMPLE = 5
"""Places of the example source."""
ANY_LENGTH = 512
"""Places of a source where the configuration names no length; T5 was trained on such sources."""
WIDER = ", or set model.config.max_source_positions and call speculate() again"


def causal(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder of `model`, of a class in `FAMILIES`, as a causal language model over the example source."""
    cls = type(model)
    base = SkippingDecoder if skips_padding(model) else BASES.get(model.config.model_type, Decoder)
    made = shallow(model, type(cls.__name__, (base, cls), {"__module__": cls.__module__}))
    made.config = model.config.get_text_config(decoder=True)  # a copy, in which layers are the decoder's
    made.config.is_encoder_decoder = False
    if hasattr(made.config, "num_decoder_layers"):
        made.config.num_hidden_layers = made.config.num_decoder_layers
    made.example = example_states(made.config)
    return made


def example_states(config: Any) -> Tensor:
    """The encoder's output [1, EXAMPLE, C] for the example source: random numbers that all dtypes have."""
    size = getattr(config, "encoder_config", config).hidden_size
    drawn = torch.randn(1, EXAMPLE, size, generator=torch.Generator().manual_seed(0))
    return (16 * drawn).round() / 16


def skips_padding(model: Any) -> bool:
    """True if the positions of a decoder's tokens do not count its padding tokens (M2M-100)."""
    table = getattr(model.get_decoder(), "embed_positions", None)
    return hasattr(table, "create_position_ids_from_input_ids")


def room_of(config: Any) -> int:
    """The most places of a source: the encoder's positions, or if a source of any length has some, as T5's, the length
    that the configuration names."""
    if config.model_type in ROOMS:
        return ROOMS[config.model_type]
    names = "max_source_positions", "max_position_embeddings", "n_positions"
    return next((value for name in names if (value := getattr(config, name, None))), ANY_LENGTH)


_sources: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The input of an encoder and its mask by its output, as long as that lives."""


def source_of(encoder_outputs: Any) -> tuple[Tensor | None, Tensor | None]:
    """The input of the encoder that returned this, and the mask of its rows; None if they are not known."""
    return _sources.get(encoder_outputs, (None, None))


OF_DECODER = {"decoder_attention_mask": "attention_mask", "decoder_position_ids": "position_ids"}
"""Arguments of a call that a causal language model has under another name."""


@torch.no_grad()
def attend_to_states(module: Any, attend: Callable) -> int | None:
    """A change of a `Decoder`, see `capture.modules`: its layers attend to a source by states."""
    table = getattr(module.get_decoder(), "embed_positions", None)
    if table is None:  # positions turn queries and keys, and are an argument already
        limit = None
    elif skips_padding(module):
        limit = tell_positions(module, table, "weights", table.padding_idx + 1)
    else:
        limit = tell_positions(module, table, "weight", getattr(table, "offset", 0))
    for layer in module.get_decoder().layers:
        part = layer.encoder_attn
        hold_example(module, part, part.k_proj, part.v_proj, part.head_dim)
        part.forward = partial(by_states, part)
    return limit


def by_states(part: Any, hidden_states: Tensor, *_, **__) -> tuple[Tensor, None]:
    """Attention to a source."""
    out = attend_to_source(part, part.q_proj(hidden_states) * part.scaling)
    return part.out_proj(out) if hasattr(part, "out_proj") else part.o_proj(out), None


@torch.no_grad()
def hold_example(module: Any, part: Any, k_proj: Any, v_proj: Any, size: int) -> None:
    """Give the attention `part` of a `Decoder` what `attend_to_source` reads. size: of a head."""
    weight = module.get_output_embeddings().weight
    wide = torch.promote_types(weight.dtype, torch.float32)  # the checks also compare in float32
    states = module.attended(module.example.to(weight.device, wide))
    room = torch.zeros(room_of(module.config), device=weight.device)
    keys, values = (heads_of(copy.deepcopy(project).to(wide)(states), size) for project in (k_proj, v_proj))
    part.register_buffer("example", kind.pack(keys, values, None, EXAMPLE)[0], persistent=False)
    part.register_buffer("room", room.bool(), persistent=False)


def attend_to_source(part: Any, q: Tensor) -> Tensor:
    """Attention of scaled queries [B, T, H * D] to a source, [B, T, H * D] of their dtype."""
    out = recurrence("source", [q.unflatten(2, (len(part.example), -1)), part.example, part.room])
    return out.flatten(2).to(q.dtype)


def _is_fresh(cache: Any) -> bool:
    """True if transformers has made an empty cache of a growing size for the call."""
    return (
        type(cache) is EncoderDecoderCache
        and not getattr(cache, "_is_user_defined", False)
        and type(cache.self_attention_cache) is type(cache.cross_attention_cache) is DynamicCache
        and cache.get_seq_length() == 0
        and cache.cross_attention_cache.get_seq_length() == 0
    )


class Decoder:
    """Put before an encoder-decoder's class, makes it a causal language model, whose source is not among its arguments.

    example: the states of the example source [1, EXAMPLE, C].
    encoder_outputs: the source as transformers passes it; None: the example source in every row.
    source_mask: [B, S], 0 at padding; None: there is none.
    crossed: the keys and values of the source, once the first forward has computed them; None: each forward does.
    algorithm: makes the drafts of the call; None: this is a draft.
    refused: arguments of a call that are not served, by names that tell why.
    intake: the class that reads requests of a batch.
    """

    main_input_name = "input_ids"
    example: Tensor
    encoder_outputs: Any = None
    source_mask: Tensor | None = None
    crossed: DynamicCache | None = None
    algorithm: Any = None
    refused: dict[str, Any]
    intake: type

    def forward(
        self: Any, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        use_cache: bool | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """The logits of decoder tokens, with a causal language model's arguments."""
        cache, source = kwargs.pop(CACHE, None), self.encoder_outputs
        if cache is None and use_cache:
            cache = DynamicCache()
        if cache is not None:
            kwargs[CACHE] = EncoderDecoderCache(cache, DynamicCache() if self.crossed is None else self.crossed)
        if source is None:
            states = self.example.to(self.device, self.dtype)
            source = BaseModelOutput(states.expand(input_ids.shape[0], -1, -1))
        kwargs |= self.tokens(input_ids, position_ids, cache)
        output = self.run(source, attention_mask, use_cache=bool(use_cache), **kwargs)
        return CausalLMOutputWithPast(logits=output.logits, **{CACHE: cache})

    def run(self: Any, source: BaseModelOutput, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """The original's forward. attention_mask: of decoder tokens."""
        masks = {"decoder_attention_mask": attention_mask, "attention_mask": self.source_mask}
        return super().forward(encoder_outputs=source, **masks, **kwargs)

    def tokens(self: Any, input_ids: Tensor, position_ids: Tensor | None, cache: Any) -> dict[str, Any]:
        """The arguments of the original's forward for decoder tokens."""
        takes_positions = "decoder_position_ids" in inspect.signature(super().forward).parameters
        return {"decoder_input_ids": input_ids} | ({"decoder_position_ids": position_ids} if takes_positions else {})

    def attended(self, states: Tensor) -> Tensor:
        """The input of the layers' keys and values, for the encoder's output `states` [B, S, C]."""
        return states

    # A call of ``generate()``: its arguments, and what it returns.

    def begin(self: Any, engine: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check the sources of a call of ``generate()``. N-grams may copy from them, unless the call names others."""
        inputs.check(self.config, super().main_input_name, args, kwargs)
        sources, algorithm = self.sources(args, kwargs), engine.runtime.algorithm
        if sources and algorithm.store is not None and engine.call_options[0] is None:
            engine.wishes["references"] = algorithm.documents(sources)

    def remember_source(self, source: Tensor, model_kwargs: dict[str, Any]) -> None:
        """Keep the input of an encoder for `source_of`. If a call brings an output, transformers has ids of -100."""
        encoded = model_kwargs["encoder_outputs"]
        if isinstance(encoded, ModelOutput) and (source.is_floating_point() or (source >= 0).all()):
            _sources[encoded] = source, model_kwargs.get("attention_mask")

    def sources(self: Any, args: tuple, kwargs: dict[str, Any]) -> list[list[int]] | None:
        """The token ids of each source of a call of ``generate()``, without padding; None if they are not text.

        ValueError, before any work, if a source is longer than the encoder's positions, or has an unknown token.
        """
        named = {"inputs": args[0] if args else None} | kwargs
        name = next((each for each in ("input_ids", "inputs", "inputs_embeds") if named.get(each) is not None), "")
        given, most = named.get(name), room_of(self.config)
        if not isinstance(given, Tensor) or given.dim() < 2 or super().main_input_name != "input_ids":
            return None
        if given.shape[1] > most:
            has_positions = hasattr(self.get_decoder(), "embed_positions")
            room, way_out = ("the encoder has positions", "") if has_positions else ("a source has room", WIDER)
            raise ValueError(f"{name}: {room} for {most} tokens, got {given.shape[1]}; shorten it{way_out}")
        if given.is_floating_point():
            return None
        vocabulary = self.get_input_embeddings().weight.shape[0]
        if given.numel() and not 0 <= given.min() <= given.max() < vocabulary:
            raise ValueError(f"{name}: expected token ids below {vocabulary}, got {given.min()} to {given.max()}")
        mask = named.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != given.shape:
            return given.tolist()
        return [ids[seen != 0].tolist() for ids, seen in zip(given, mask)]

    def over(self: Any, engine: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> "Decoder":
        """This decoder over the sources of a call of ``_sample`` with these arguments, which `engine` serves."""
        made = shallow(self)
        made.algorithm, made.refused = engine.runtime.algorithm, {}
        cache = model_kwargs.get(CACHE)
        made.encoder_outputs, made.source_mask = model_kwargs["encoder_outputs"], model_kwargs.get("attention_mask")
        made.crossed = cache.cross_attention_cache if _is_fresh(cache) else DynamicCache()
        return made

    def arguments(self: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, as a causal language model has them, and those that are not served."""
        of_sources = ("encoder_outputs", "attention_mask", "inputs_embeds")
        given = {name: value for name, value in model_kwargs.items() if name not in of_sources}
        given |= {own: given.pop(name) for name, own in OF_DECODER.items() if name in given}
        cache = given.pop(CACHE, None)
        if _is_fresh(cache):
            given[CACHE] = cache.self_attention_cache
        elif cache is not None:
            given[f"{CACHE} / cache_implementation (of an encoder-decoder)"] = cache
        states, mask = self.encoder_outputs[0], self.source_mask
        if self.reads_mask and mask is not None and (mask.shape != states.shape[:2] or not mask.any(dim=1).all()):
            given["attention_mask (of a source, of another shape or without a token)"] = mask
        if states.shape[1] > room_of(self.config):
            given[f"encoder_outputs (of {states.shape[1]} places)"] = states
        return given | self.refused

    def past(self: Any, padding: list[int]) -> Past:
        """The states of the sources, made by the model's own forward over one token of each row."""
        states, mask = self.encoder_outputs[0], self.source_mask
        ids = torch.zeros(len(states), 1, dtype=torch.int64, device=states.device)
        self(ids, use_cache=True)
        seen = mask != 0 if self.reads_mask and mask is not None else None
        layers: list[Any] = self.crossed.layers
        packed = [kind.pack(layer.keys, layer.values, seen, room_of(self.config)) for layer in layers]
        read = getattr(getattr(self.algorithm, "head", self.algorithm), "read_source", None)
        if read is not None:  # a draft attends to the source, too
            read(self)
        return Past([], packed, 0, padding)

    def output(self: Any, cache: DynamicCache | None, **told: Any) -> GenerateEncoderDecoderOutput:
        """The result of transformers' loop. cache: has the keys and values of the decoder's tokens."""
        both = None if cache is None else EncoderDecoderCache(cache, self.crossed)
        return GenerateEncoderDecoderOutput(**{CACHE: both}, **told)

    @property
    def reads_mask(self: Any) -> bool:
        """True if tokens attend to a source under its mask; Whisper's attend to all of it."""
        return "encoder_attention_mask" in inspect.signature(type(self.get_decoder()).forward).parameters


class SkippingDecoder(Decoder):
    """A `Decoder` of M2M-100 and NLLB, whose positions do not count padding tokens. In single steps they do, and only
    the padding tokens themselves have none."""

    def tokens(self: Any, input_ids: Tensor, position_ids: Tensor | None, cache: Any) -> dict[str, Any]:
        """Embeddings, to which the original's forward adds positions that count. They lack what it adds to padding."""
        decoder, start = self.get_decoder(), 0 if cache is None else cache.get_seq_length()
        embeds, table = decoder.embed_tokens(input_ids), decoder.embed_positions
        is_padding = (input_ids == table.padding_idx)[:, :, None]
        return {"decoder_inputs_embeds": torch.where(is_padding, embeds - table(None, embeds, start), embeds)}

    def over(self: Any, engine: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> "Decoder":
        """A prompt of several tokens with padding is not served."""
        made = super().over(engine, input_ids, model_kwargs)
        if input_ids.shape[1] > 1 and (input_ids == self.get_decoder().padding_idx).any():
            made.refused["decoder_input_ids (with padding tokens, which positions do not count)"] = input_ids
        return made
