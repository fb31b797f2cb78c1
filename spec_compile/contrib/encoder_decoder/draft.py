"""A draft model over the source of its target: transformers' assistant of an encoder-decoder, such as Distil-Whisper.

The draft is an encoder-decoder itself, or a lone decoder (`WhisperForCausalLM`). Its layers attend to the
source as the target's do, by states that are computed once a call. A lone decoder, and a draft whose encoder has the
weights of the target's, attends to what the target's encoder returned; any other draft runs its own encoder.
"""

import inspect
from typing import Any

import transformers
from torch import Tensor, equal, nn
from transformers import AutoConfig, DynamicCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...capture.admit import DECODERS, Inventory
from ...capture.copies import shallow
from ...drafters import ALGORITHMS, draft_model
from ...drafting import Drafter
from ...graph import ModelGraph
from ...quantised.codes import class_path
from ...runtime.state import State
from .. import two_tokenizers
from .decoder import FAMILIES, Decoder, causal, example_states, room_of, source_of

ENCODER_SHAPES = "d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"
"""Values of a configuration in which a lone decoder must agree with its target, as transformers demands."""
PASS_OTHER = "pass a draft of the model's family, or the whole encoder-decoder"


class LoneDecoder(Decoder):
    """A `Decoder` of a class that has no encoder, such as BartForCausalLM, and takes what one returned."""

    def run(self: Any, source: BaseModelOutput, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """The original's forward."""
        takes = inspect.signature(super(Decoder, self).forward).parameters
        kwargs |= {"encoder_outputs": source} if "encoder_outputs" in takes else {"encoder_hidden_states": source[0]}
        if "encoder_attention_mask" in takes:
            kwargs["encoder_attention_mask"] = self.source_mask
        return super(Decoder, self).forward(attention_mask=attention_mask, **kwargs)

    def tokens(self: Any, input_ids: Tensor, position_ids: Tensor | None, cache: Any) -> dict[str, Any]:
        takes_positions = "position_ids" in inspect.signature(type(self.get_decoder()).forward).parameters
        return {"input_ids": input_ids} | ({"position_ids": position_ids} if takes_positions else {})


def is_lone(model: Any) -> bool:
    """True if `model` is the decoder of an encoder-decoder in `FAMILIES` with an output matrix."""
    family = getattr(getattr(model, "config", None), "model_type", "").replace("-", "_")
    path = f"transformers.models.{family}.modeling_{family}."
    return family in FAMILIES and class_path(model).startswith(path) and class_path(model).endswith("ForCausalLM")


def lone(model: PreTrainedModel) -> LoneDecoder:
    """A model of which `is_lone` is true, as a causal language model over the example source."""
    cls = type(model)
    made = shallow(model, type(cls.__name__, (LoneDecoder, cls), {"__module__": __name__}))
    whole = type(model.config).from_dict(model.config.to_dict() | {"is_encoder_decoder": True})
    made.config = whole.get_text_config(decoder=True)
    made.config.is_encoder_decoder = False
    made.config._attn_implementation = model.config._attn_implementation
    made.example = example_states(made.config)
    return made


class SourceDraft(draft_model.DraftModel):
    """Drafts of a decoder that attends to the source of the target."""

    def __init__(self, draft: PreTrainedModel, decoder: Decoder, graph: ModelGraph, target: Inventory, options: Any):
        """decoder: made of `draft`, captured in `graph`."""
        super().__init__(draft, graph, options, draft_model.map_one(target, graph))
        self.decoder = decoder
        self.encoder = encoder_of(draft, target.model)
        """The draft's own encoder; None if it takes what the target's returned."""
        self.states: list[Tensor] = []
        """The states of the sources of the call that begins."""

    def drafter(self, batch: int, slots: int) -> Drafter:
        return SourceDrafter(self, batch, slots)

    def explain(self) -> list[str]:
        shared = "attends to the output of the model's encoder" if self.encoder is None else "runs its own encoder"
        return [*super().explain(), f"the draft {shared}"]

    def read_source(self, target: Decoder) -> None:
        """Compute the states of a call's sources. target: over them.

        ValueError if the draft has its own encoder, and the call brought another encoder's output as its source.
        """
        states, made = target.encoder_outputs[0], shallow(self.decoder)
        if self.encoder is not None:
            states = self.encode(target, len(states))
        made.encoder_outputs, made.crossed = BaseModelOutput(states.to(made.dtype)), DynamicCache()
        made.source_mask = target.source_mask
        self.states = made.past([]).states

    def encode(self, target: Decoder, rows: int) -> Tensor:
        """The output [rows, S, C] of the draft's own encoder. Rows of one source are neighbours, as transformers
        repeats them: sources 0, 1 and four rows give the rows 0, 0, 1, 1."""
        assert self.encoder is not None
        inputs, mask = source_of(target.encoder_outputs)
        if inputs is None:
            raise ValueError(
                "encoder_outputs: the draft has another encoder than the model, which reads the source itself; pass "
                "the source, or speculation=False"
            )
        repeats, name = rows // len(inputs), self.draft_module.main_input_name
        if inputs.is_floating_point():
            inputs = inputs.to(self.decoder.dtype)
        given = {name: inputs}
        if mask is not None and "attention_mask" in inspect.signature(self.encoder.forward).parameters:
            given["attention_mask"] = mask[::repeats]
        return self.encoder(**given)[0].repeat_interleave(repeats, dim=0)


class SourceDrafter(draft_model.ModelDrafter):
    """A `ModelDrafter` whose layers attend to the sources of a call."""

    def __init__(self, algorithm: SourceDraft, batch: int, slots: int):
        super().__init__(algorithm, batch, slots)
        self.algorithm = algorithm

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.cache.states.fill(self.algorithm.states)
        self.algorithm.states = []


def encoder_of(draft: PreTrainedModel, target: PreTrainedModel) -> nn.Module | None:
    """The encoder that `draft` has to run; None if it has none, or one that computes what the target's does."""
    if not draft.config.is_encoder_decoder:
        return None
    ours, theirs = target.get_encoder(), draft.get_encoder()
    is_flat = type(theirs.config) is type(draft.config)  # else the encoder has a configuration for itself
    configs = [
        {name: x for name, x in each.config.to_dict().items() if not is_flat or name.startswith("encoder_")}
        for each in (ours, theirs)
    ]
    tensors = [each.state_dict() for each in (ours, theirs)]
    is_same = type(ours) is type(theirs) and configs[0] == configs[1] and tensors[0].keys() == tensors[1].keys()
    return None if is_same and all(equal(x, y) for x, y in zip(*map(dict.values, tensors))) else theirs


def check(draft: PreTrainedModel, target: Decoder) -> None:
    """ValueError, beginning with "draft:", unless `draft` can read every source of `target`."""
    ours, theirs, name = target.config, draft.config, type(draft).__name__
    if not theirs.is_encoder_decoder:
        whole = target.get_encoder().config
        for each in ENCODER_SHAPES:
            wanted, given = getattr(whole, each, None), getattr(theirs, each, None)
            if wanted != given:
                raise ValueError(
                    f"draft: {name} attends to an encoder of {each} {given}, the model's has {wanted}; pass the whole "
                    "encoder-decoder, which runs its own encoder"
                )
    elif draft.main_input_name != super(Decoder, target).main_input_name:
        wanted = super(Decoder, target).main_input_name
        raise ValueError(f"draft: {name} reads {draft.main_input_name}, the model {wanted}; {PASS_OTHER}")
    elif getattr(theirs, "num_mel_bins", None) != getattr(ours, "num_mel_bins", None):
        raise ValueError(
            f"draft: the encoder of {name} reads {theirs.num_mel_bins} mel bins, the model's {ours.num_mel_bins}; pass "
            "a draft for the same features"
        )
    if room_of(theirs) < room_of(ours):
        raise ValueError(
            f"draft: {name} takes sources of {room_of(theirs)} places, the model {room_of(ours)}; pass a draft that "
            "takes as many"
        )


def open_draft(target: Inventory, options: Any) -> Any:
    """The draft that the options name; encoder-decoders are loaded with their encoder."""
    if not isinstance(options.draft, str):
        return options.draft
    config = AutoConfig.from_pretrained(options.draft)
    family = config.model_type.replace("-", "_")
    if not config.is_encoder_decoder or family not in FAMILIES:
        return draft_model.open_draft(target, options)
    cls = getattr(transformers, FAMILIES[family])
    return cls.from_pretrained(options.draft, dtype=target.model.dtype).to(target.device).eval()


def build(target: Inventory, options: Any) -> draft_model.DraftModel:
    """`two_tokenizers.build`, also of a draft that attends to the source of an encoder-decoder."""
    if not isinstance(target.model, Decoder):
        return two_tokenizers.build(target, options)
    draft = open_draft(target, options)
    make = causal if class_path(draft) in DECODERS else lone if is_lone(draft) else None
    if make is None:
        return two_tokenizers.build(target, options)
    if options.use_heterogeneous_vocab or options.tokenizer or options.assistant_tokenizer:
        raise ValueError(
            "draft: a draft that attends to the model's source must have its tokenizer; leave tokenizers out"
        )
    check(draft, target.model)
    decoder = make(draft)
    return SourceDraft(draft, decoder, draft_model.capture_draft(target, decoder, options), target, options)


ALGORITHMS["draft_model"] = ALGORITHMS["draft_model"]._replace(build=build)
