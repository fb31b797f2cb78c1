"""The drop-in: Hugging Face's ``generate()`` with our loop beneath its preparation."""

import math
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from ..capture import hooks
from . import past as pasts
from .accept.draw import Sampler
from .accept.processors import MINIMA, is_known
from .accept.walk import Walk
from .answer import Answer
from .engine import Request

HANDLED = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position",
    "inputs_embeds", "tokenizer", "assistant_tokenizer",
}  # fmt: skip
"""Arguments of the model's forward that the loop understands."""
LENGTHS = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Criteria that a round checks by itself."""


class SpeculativeMixin:
    """Put in front of a model's own class, replaces the decoding loops of ``generate()`` and nothing before them."""

    def generate(self, *args, reference=None, share_text=None, **kwargs):
        """transformers' ``generate()``: same arguments, same answer, fewer steps.

        Additional argument `reference`: token ids (a list or 1-D tensor, or a list of such) of texts that the output
        may copy from, such as the document to be edited ("predicted output").

        Additional argument `share_text`: with algo="ngram" the prompt, the answer and the reference of a call stay, and
        later calls of any user draft from them, so that the trees in their `report()` show pieces of them; no answer
        changes by it. False: this call's texts are forgotten when it ends; it drafts from its own and from what is
        held. None: what `speculate(..., share_text=...)` says (default: True). Other algorithms hold no texts.

        What only transformers' own loops can do (beam search, attentions and hidden states as outputs, an assistant
        model and the like) they do, unaccelerated, with one warning that names it.
        """
        kwargs.pop("prompt_lookup_num_tokens", None)  # asks for n-gram drafts, which are there anyway
        if kwargs.get("custom_generate") is not None:
            self.speculation.step_aside("custom_generate")
        replaced = vars(self.speculation.original).get("generate")  # by a repository's custom_generate, or by a user
        if replaced is not None:
            self.speculation.step_aside(f"generate (set on the {type(self).__name__} object)")
            return replaced(*args, **kwargs)
        with self.speculation.generating(reference, share_text):
            self.speculation.looped = False
            output = super().generate(*args, **kwargs)
            own = None if self.speculation.looped else hooks.overridden(self, ("generate",))
            if own is not None:
                self.speculation.step_aside(f"{own}, with a loop of its own")
            return output

    def init_continuous_batching(self, *args, **kwargs):
        """transformers' continuous batching, also that of ``generate_batch()``: unaccelerated, with one warning."""
        self.speculation.step_aside("generate_batch(), continuous batching")
        return super().init_continuous_batching(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        """Copies and pickles are of the original, which becomes speculative again."""
        return self.speculation.rebuilds(self.speculation.original)

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config,
        synced_gpus=False, streamer=None, **model_kwargs,
    ):  # fmt: skip
        speculation = self.speculation
        speculation.looped = True
        prompt = _Prompt.of(input_ids, generation_config, model_kwargs)
        foreign = _foreign(speculation, prompt, generation_config, model_kwargs) or hooks.overridden(self)
        if foreign or synced_gpus:
            speculation.step_aside(foreign or "synced_gpus")
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, generation_config,
                synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
            )  # fmt: skip
        chunk = generation_config.prefill_chunk_size
        if chunk is not None and chunk < 1:
            raise RuntimeError(f"prefill_chunk_size: expected at least 1, got {chunk}")
        past, first = model_kwargs.get("past_key_values"), None
        dictionary = generation_config.return_dict_in_generate
        longest = _longest(input_ids, stopping_criteria, generation_config)
        speculation.admit_request(prompt.tokens, longest - input_ids.shape[1])
        answer = _answer(input_ids, longest, stopping_criteria, generation_config, streamer)
        if prompt.embedded:
            output = self._prefill(input_ids, generation_config, model_kwargs)
            past, first = output.past_key_values, output.logits[:, -1].float()
        plain = not answer.keeps and first is None
        direct = plain and not generation_config.do_sample and all(is_known(p, MINIMA) for p in logits_processor)
        drawn = (  # on a CPU the walk is faster: it processes the nodes that are reached, and no others
            plain and generation_config.do_sample and self.device.type == "cuda" and Sampler.takes(logits_processor)
        )
        seed = int(torch.randint((1 << 63) - 1, ())) if generation_config.do_sample else None
        shortest = max((_minimum(p) for p in logits_processor if is_known(p, MINIMA)), default=0)
        own = [len(tokens) - input_ids.shape[1] for tokens in prompt.tokens]  # a row's tokens less the width
        request = Request(
            prompts=prompt.tokens,
            min_lengths=[max(0, shortest + more) for more in own],
            max_lengths=[answer.longest + more for more in own],
            eos=sorted(answer.eos),
            past=pasts.read(past, prompt.padding) if past is not None and past.get_seq_length() > 0 else None,
            unknown=prompt.unknown,
            first_logits=first,
            choose=None if direct or drawn else Walk(answer, logits_processor, seed),
            sampler=Sampler(logits_processor) if drawn else None,
            seed=seed or 0,
            temperature=(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0,
            prefill_chunk_size=generation_config.prefill_chunk_size,
        )
        with closing(speculation.run(request)) as rounds:
            for gained in rounds:
                if request.choose is None:
                    answer.take(gained)
                request.stopped.update(row for row in range(answer.batch) if not answer.needs(row))
        if streamer is not None:
            streamer.end()
        if past is not None and (dictionary or getattr(past, "_is_user_defined", False)):
            self._bring_up(past, request, prompt, answer)
        if not dictionary:
            return answer.sequences()
        return GenerateDecoderOnlyOutput(
            sequences=answer.sequences(), scores=answer.scores, logits=answer.logits, past_key_values=past
        )

    def _bring_up(self, past, request: Request, prompt: "_Prompt", answer: Answer) -> None:
        """Bring a cache to where plain decoding leaves it: all places but the last."""
        length = prompt.width + answer.columns - 1
        shortest = prompt.width + min(answer.gained(row) for row in range(answer.batch)) - 1
        if self.speculation.caches_alike:
            pasts.extend(past, request.state, prompt.padding, shortest)
        else:
            shortest = int(past.get_seq_length())  # the model itself fills a cache of another form
        if shortest < length:  # plain decoding goes on with padding behind rows that end early
            ids = answer.sequences()
            places = torch.arange(length, device=ids.device) - ids.new_tensor(prompt.padding)[:, None]
            before = prompt.width - answer.prompt_width
            self(
                ids[:, shortest - before : length - before], attention_mask=(places >= 0).long(),
                position_ids=places[:, shortest:].clamp(min=0), past_key_values=past, use_cache=True,
                **({"logits_to_keep": 1} if self._supports_logits_to_keep() else {}),
            )  # fmt: skip

    def _beam_search(self, *args, **kwargs):
        self.speculation.looped = True
        self.speculation.step_aside("num_beams")
        return super()._beam_search(*args, **kwargs)

    def _assisted_decoding(self, *args, assistant_model=None, **kwargs):
        config = kwargs["generation_config"]
        others = {"assistant_model": assistant_model} | {
            name: getattr(config, name, None) for name in ("assistant_early_exit", "use_mtp", "speculation_type")
        }
        asked = next((name for name, value in others.items() if value), None)
        if asked is None:  # prompt_lookup_num_tokens
            for name in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):
                kwargs.pop(name, None)
            return self._sample(*args, **kwargs)
        self.speculation.looped = True
        self.speculation.step_aside(asked)
        return super()._assisted_decoding(*args, assistant_model=assistant_model, **kwargs)


@dataclass
class _Prompt:
    """The rows to continue. tokens: of each row without padding (0 where they are not known: a cache or embeddings came
    in their place). padding: on the left of each row. width: places of the prompt, padding and cached ones included.
    regular: nothing but padding on the left is masked. embedded: its embeddings are given. unknown: some tokens are not
    known."""

    tokens: list[list[int]]
    padding: list[int]
    width: int
    regular: bool
    embedded: bool
    unknown: bool

    @classmethod
    def of(cls, input_ids: Tensor, generation_config, model_kwargs: dict) -> "_Prompt":
        embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        if input_ids.dim() == 2 and (input_ids.shape[0] == 0 or input_ids.is_floating_point()):
            raise RuntimeError(f"input_ids: expected rows of integers, got {input_ids.dtype} {tuple(input_ids.shape)}")
        if input_ids.dim() != 2 or (input_ids.shape[1] == 0 and embeds is None):
            raise ValueError(f"input_ids: expected [batch, at least one token], got shape {tuple(input_ids.shape)}")
        batch, given = input_ids.shape
        cache = model_kwargs.get("past_key_values")
        held = int(cache.get_seq_length()) if cache is not None else 0
        healed = bool(generation_config.token_healing) and not held  # ids may have come in place of the masked ones
        if healed and (mask is None or mask.shape[-1] != given):
            width = given
        elif mask is not None:
            width = mask.shape[-1]
        else:
            width = getattr(generation_config, "_mask_length", None) or max(given, held)
        if embeds is not None:
            width = embeds.shape[1]
        elif held >= width or (not healed and width not in (given, held + given)):
            raise ValueError(
                f"attention_mask, past_key_values: {held} cached and {given} given tokens do not make the mask's "
                f"{width}; pass all tokens, or those behind the cache and a mask over both"
            )
        pads, regular = [0] * batch, True
        if mask is not None:
            regular = mask.dim() == 2 and mask.shape == (batch, width)
            if regular:
                seen = mask.to(torch.int64)
                regular = not bool((seen.diff(dim=1) < 0).any()) and bool(seen.any(dim=1).all())
                pads = (seen == 0).sum(dim=1).tolist()
        positions = model_kwargs.get("position_ids")
        if positions is not None and regular:
            own = torch.arange(width, device=positions.device) - torch.tensor(pads, device=positions.device)[:, None]
            own = own[:, width - positions.shape[-1] :]
            regular = positions.shape[-1] <= width and not bool(((positions != own) & (own >= 0)).any())
        unknown = [0] * (width - given)
        tokens = [(unknown + row if given < width else row)[pad:] for row, pad in zip(input_ids.tolist(), pads)]
        return cls(tokens, pads, width, regular, embeds is not None, given < width)


def _foreign(speculation, prompt: _Prompt, generation_config, model_kwargs: dict) -> str | None:
    """The first thing asked for that only transformers' own loop does, if there is one."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "torch.autocast"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name, None):
                return name
    if not prompt.regular:
        return "attention_mask / position_ids (anything but padding on the left)"
    if any(prompt.padding) and not speculation.serves_padding:
        return "attention_mask (padding on the left, which the model's own positions do not follow)"
    cache = model_kwargs.get("past_key_values")
    if cache is not None and not pasts.is_plain(cache):
        return f"past_key_values / cache_implementation ({type(cache).__name__})"
    filled = cache is not None and cache.get_seq_length() > 0
    if (filled or prompt.embedded) and not speculation.caches_alike:
        name = "past_key_values" if filled else "inputs_embeds"
        return f"{name} (the model's own cache holds something else than the keys and values of each layer)"
    nothing = {"mm_encoder_outputs": {}}  # what a model that could read images is told if there are none
    others = ((name, value) for name, value in model_kwargs.items() if name not in HANDLED and value is not None)
    return next((name for name, value in others if name not in nothing or value != nothing[name]), None)


def _minimum(processor) -> int:
    """The width below which no row may end."""
    if hasattr(processor, "min_length"):
        return processor.min_length
    return processor.prompt_length_to_skip + processor.min_new_tokens


def _longest(input_ids: Tensor, stopping_criteria, generation_config) -> int:
    """The width at which every row ends."""
    lengths = [c.max_length for c in stopping_criteria if type(c).__name__ == "MaxLengthCriteria"]
    longest = math.ceil(min(lengths, default=generation_config.max_length))
    return max(longest, input_ids.shape[1] + 1)


def _answer(input_ids: Tensor, longest: int, stopping_criteria, generation_config, streamer) -> Answer:
    kinds = {type(criterion).__name__ for criterion in stopping_criteria}
    eos = next((c.eos_token_id.tolist() for c in stopping_criteria if type(c).__name__ == "EosTokenCriteria"), [])
    ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    pad = generation_config._pad_token_tensor if ends else None
    if pad is None and ends:
        raise ValueError("If `eos_token_id` is defined, make sure that `pad_token_id` is defined.")
    return Answer(
        input_ids,
        longest,
        eos,
        None if pad is None else int(pad),
        criteria=None if kinds <= LENGTHS else stopping_criteria,
        streamer=streamer,
        keep_scores=bool(generation_config.return_dict_in_generate and generation_config.output_scores),
        keep_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
    )
