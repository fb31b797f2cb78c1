"""The drop-in: Hugging Face's ``generate()`` with our loop beneath its preparation."""

import copy
import math
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput

from ..capture import adapters, hooks
from ..capture.watch import describe
from ..parallel.ranks import ALONE, Alone
from . import past as pasts
from .accept import Route, choose_route, make_acceptor
from .accept.processors import MINIMA, is_known
from .agreement import asked, led
from .answer import Answer
from .prepared import Inputs, Plan, make_key
from .prompt import Prompt
from .request import Request

SERVED_ARGUMENTS = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position",
    "inputs_embeds", "tokenizer", "assistant_tokenizer",
}  # fmt: skip
"""Arguments of the model's forward that the loop understands."""
CRITERIA_IN_ROUND = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Stopping criteria that a round checks by itself."""


class SpeculativeMixin:
    """Put in front of a model's own class, replaces the decoding loops of ``generate()`` and nothing before them."""

    def generate(self, *args, reference=None, share_text=None, **kwargs):
        """transformers' ``generate()`` with the same arguments and the same answer, in fewer steps.

        reference: token ids (a list or 1-D tensor, or a list of such) of texts from which the output may copy, such as
            the document to be edited ("predicted output").
        share_text: with algo="ngram", whether the prompt, the answer and the reference of this call stay, so that later
            calls of any user draft from them, and the trees in their `report()` show pieces of them. No answer changes
            by it. False forgets the texts of this call when it ends. None does what `speculate(..., share_text=...)`
            says, which is True by default. Other algorithms keep no texts.

        What only transformers' own loops can do (beam search, attentions and hidden states as outputs, an assistant
        model and the like) they do, unaccelerated, with one warning that names it.
        """
        kwargs.pop("prompt_lookup_num_tokens", None)  # asks for n-gram drafts, which it gets anyway
        if not self.speculation.options.ranks.leads:  # the first rank alone streams
            kwargs.pop("streamer", None)
        if kwargs.get("custom_generate") is not None:
            self.speculation.step_aside("custom_generate")
        replaced = vars(self.speculation.original).get("generate")  # by a repository's custom_generate, or by a user
        if replaced is not None:
            self.speculation.step_aside(f"generate (set on the {type(self).__name__} object)")
            return replaced(*args, **kwargs)
        with self.speculation.generating(reference, share_text):
            common, key = Inputs.of(args, kwargs), None
            if common is not None:
                inputs, options = common
                key = make_key(self, self.speculation.engine.runtime.device, inputs, options)
                plan = self.speculation.plans.find(key)
                prompt = None if plan is None else inputs.prompt(plan.padding)
                if prompt is not None:
                    return self._generate_by_plan(plan, prompt, inputs)
            _refuse_changes(self.speculation)
            self.speculation.looped = False
            with self.speculation.plans.awaiting(key):
                output = super().generate(*args, **kwargs)
            override = None if self.speculation.looped else hooks.overridden(self, ("generate",))
            if override is not None:
                self.speculation.step_aside(f"{override}, with a loop of its own")
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
        """transformers' loop for greedy decoding and sampling: its arguments, and what it returns."""
        speculation, config = self.speculation, generation_config
        speculation.looped = True
        prompt = Prompt.of(input_ids, config, model_kwargs)
        unserved = _unserved(speculation, prompt, config, model_kwargs) or hooks.overridden(self)
        if unserved or synced_gpus:
            speculation.step_aside(unserved or "synced_gpus")
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, config,
                synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
            )  # fmt: skip

        # Read what is asked for.
        if config.prefill_chunk_size is not None and config.prefill_chunk_size < 1:
            raise RuntimeError(f"prefill_chunk_size: expected at least 1, got {config.prefill_chunk_size}")
        longest = _longest(input_ids, stopping_criteria, config)
        speculation.admit_request(prompt, longest - input_ids.shape[1])
        ranks = speculation.options.ranks
        answer = _answer(input_ids, prompt, longest, stopping_criteria, config, streamer, ranks)
        cache, first_logits = model_kwargs.get("past_key_values"), None
        if prompt.is_embedded:
            output = self._prefill(input_ids, config, model_kwargs)
            cache, first_logits = output.past_key_values, output.logits[:, -1].float()

        # Choose how tokens are accepted, and run rounds until every row has ended.
        route = choose_route(
            config, logits_processor, self.device, answer.keeps_scores, has_first_logits=first_logits is not None
        )
        shortest = _shortest(logits_processor)
        speculation.agreement.reach(asked(prompt, config, logits_processor, stopping_criteria))
        request = _request(prompt, answer, route, logits_processor, config, shortest, cache, first_logits, ranks)
        speculation.plans.keep(self, prompt, config, logits_processor, stopping_criteria, answer, route)
        self._run(request, answer, route)

        # Return what transformers returns.
        if cache is not None and (config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)):
            self._extend_cache(cache, request, prompt, answer)
        if not config.return_dict_in_generate:
            return answer.sequences()
        return GenerateDecoderOnlyOutput(
            sequences=answer.sequences(), scores=answer.scores, logits=answer.logits, past_key_values=cache
        )

    def _generate_by_plan(self, plan: Plan, prompt: Prompt, inputs: Inputs) -> Tensor:
        """What `generate` returns, without transformers' preparation."""
        speculation, (least, most) = self.speculation, plan.new_tokens
        on_gpu = speculation.engine.runtime.on_gpu
        if not on_gpu:
            _refuse_changes(speculation)
        if inputs.streamer is not None:
            inputs.streamer.put(inputs.ids.cpu())
        speculation.admit_request(prompt, most)
        answer = Answer(
            prompt.ids, prompt.width + most, plan.eos, plan.pad, streamer=inputs.streamer, device=inputs.ids.device
        )
        shortest = prompt.width + least if least else 0
        request = _request(prompt, answer, plan.route, plan.processors, plan.config, shortest)
        request.check = partial(_refuse_changes, speculation) if on_gpu else None
        self._run(request, answer, plan.route)
        return answer.sequences()

    def _run(self, request: Request, answer: Answer, route: Route) -> None:
        """Run rounds until every row of the answer has ended."""
        ranks = self.speculation.options.ranks
        with ranks.call(), closing(self.speculation.run(request)) as rounds:
            for gained in rounds:
                if route is not Route.ON_HOST:  # there the acceptor has given them to the answer
                    answer.take(gained)
                request.stopped.update(row for row in range(answer.batch) if not answer.needs(row))
        if answer.streamer is not None:
            answer.streamer.end()

    def _extend_cache(self, cache: Cache, request: Request, prompt: Prompt, answer: Answer) -> None:
        """Bring a cache to where plain decoding leaves it, which is all positions but the last."""
        length = prompt.width + answer.columns - 1
        filled = prompt.width + min(answer.gained(row) for row in range(answer.batch)) - 1  # that every row has
        if self.speculation.caches_alike:
            pasts.extend(cache, request.state, prompt.padding, filled)
        else:
            filled = int(cache.get_seq_length())  # the model itself fills a cache of another form
        if filled < length:  # plain decoding goes on with padding behind rows that end early
            ids = answer.sequences()
            positions = torch.arange(length, device=ids.device) - ids.new_tensor(prompt.padding)[:, None]
            before = prompt.width - answer.prompt_width
            self(
                ids[:, filled - before : length - before], attention_mask=(positions >= 0).long(),
                position_ids=positions[:, filled:].clamp(min=0), past_key_values=cache, use_cache=True,
                **({"logits_to_keep": 1} if self._supports_logits_to_keep() else {}),
            )  # fmt: skip

    def _beam_search(self, *args, **kwargs):
        """transformers' own."""
        self.speculation.looped = True
        self.speculation.step_aside("num_beams")
        return super()._beam_search(*args, **kwargs)

    def _assisted_decoding(self, *args, assistant_model=None, **kwargs):
        """`_sample` for prompt lookup, because n-gram drafts are drafts like others; else transformers' own."""
        config = kwargs["generation_config"]
        assistants = {"assistant_model": assistant_model} | {
            name: getattr(config, name, None) for name in ("assistant_early_exit", "use_mtp", "speculation_type")
        }
        requested = next((name for name, value in assistants.items() if value), None)
        if requested is None:  # prompt_lookup_num_tokens
            for name in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):
                kwargs.pop(name, None)
            return self._sample(*args, **kwargs)
        self.speculation.looped = True
        self.speculation.step_aside(requested)
        return super()._assisted_decoding(*args, assistant_model=assistant_model, **kwargs)


def shadow(model: PreTrainedModel) -> PreTrainedModel:
    """An object of a subclass with our generate(), which shares all modules and parameters of the model."""
    cls = type(model)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    shadow: Any = adapters.shallow(model, type(cls.__name__, (SpeculativeMixin, cls), names))
    shadow.generation_config = copy.deepcopy(model.generation_config)
    shadow.__dict__.pop("generate", None)  # one set on the object is run by `SpeculativeMixin.generate`
    return shadow


def _refuse_changes(speculation) -> None:
    """Raise RuntimeError if the model has changed since it was captured."""
    if changes := speculation.watch.changes():
        raise RuntimeError(describe(changes))


def _unserved(speculation, prompt: Prompt, generation_config, model_kwargs: dict) -> str | None:
    """The first thing asked for that only transformers' own loop does, if there is one."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "torch.autocast"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name, None):
                return name
    if not prompt.is_left_padded:
        return "attention_mask / position_ids (anything but padding on the left)"
    if any(prompt.padding) and not speculation.serves_padding:
        return "attention_mask (padding on the left, which the model's own positions do not follow)"
    cache = model_kwargs.get("past_key_values")
    if cache is not None and not pasts.is_plain(cache):
        return f"past_key_values / cache_implementation ({type(cache).__name__})"
    is_filled = cache is not None and cache.get_seq_length() > 0
    if (is_filled or prompt.is_embedded) and not speculation.caches_alike:
        name = "past_key_values" if is_filled else "inputs_embeds"
        return f"{name} (the model's own cache holds something else than the keys and values of each layer)"
    no_images = {"mm_encoder_outputs": {}}  # what a model that could read images is told if there are none
    others = ((name, value) for name, value in model_kwargs.items() if name not in SERVED_ARGUMENTS)
    others = ((name, value) for name, value in others if value is not None)
    return next((name for name, value in others if name not in no_images or value != no_images[name]), None)


def _request(
    prompt: Prompt, answer: Answer, route: Route, processors: list, generation_config, shortest: int,
    cache: Cache | None = None, first_logits: Tensor | None = None, ranks: Alone = ALONE,
) -> Request:  # fmt: skip
    """The request for the rounds of one call. Widths of the answer become lengths of each row without its padding.

    shortest: the width below which no row may end.
    """
    seed, temperature = None, 0.0
    if generation_config.do_sample:
        drawn, temperature = int(torch.randint((1 << 63) - 1, ())), generation_config.temperature or 1.0
        (seed,) = ranks.lead(lambda: [drawn])
    differences = [len(tokens) - answer.prompt_width for tokens in prompt.tokens]  # a row's length less its width
    return Request(
        prompts=prompt.tokens,
        min_lengths=[max(0, shortest + difference) for difference in differences],
        max_lengths=[answer.longest + difference for difference in differences],
        eos=sorted(answer.eos),
        ids=None if any(prompt.padding) or prompt.has_unknown_tokens else prompt.ids,
        past=pasts.read(cache, prompt.padding) if cache is not None and cache.get_seq_length() > 0 else None,
        has_unknown_tokens=prompt.has_unknown_tokens,
        first_logits=first_logits,
        acceptor=make_acceptor(route, answer, processors, seed, ranks),
        seed=seed or 0,
        temperature=temperature,
        prefill_chunk_size=generation_config.prefill_chunk_size,
    )


def _shortest(processors: list) -> int:
    """The width below which no row may end."""
    minima = [processor for processor in processors if is_known(processor, MINIMA)]
    return max(
        (
            each.min_length if hasattr(each, "min_length") else each.prompt_length_to_skip + each.min_new_tokens
            for each in minima
        ),
        default=0,
    )


def _longest(input_ids: Tensor, stopping_criteria, generation_config) -> int:
    """The width at which every row ends."""
    lengths = [c.max_length for c in stopping_criteria if type(c).__name__ == "MaxLengthCriteria"]
    longest = math.ceil(min(lengths, default=generation_config.max_length))
    return max(longest, input_ids.shape[1] + 1)


def _answer(
    input_ids: Tensor, prompt: Prompt, longest: int, stopping_criteria, generation_config, streamer,
    ranks: Alone = ALONE,
) -> Answer:  # fmt: skip
    """The answer of one call, still without tokens; ValueError if rows may end before others and no padding is set."""
    names = {type(criterion).__name__ for criterion in stopping_criteria}
    eos = next((c.eos_token_id.tolist() for c in stopping_criteria if type(c).__name__ == "EosTokenCriteria"), [])
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    pad = generation_config._pad_token_tensor if has_eos else None
    if pad is None and has_eos:
        raise ValueError("If `eos_token_id` is defined, make sure that `pad_token_id` is defined.")
    return Answer(
        prompt.ids,
        longest,
        eos,
        None if pad is None else int(pad),
        criteria=None if names <= CRITERIA_IN_ROUND else led(stopping_criteria, ranks),
        streamer=streamer,
        keep_scores=bool(generation_config.return_dict_in_generate and generation_config.output_scores),
        keep_logits=bool(generation_config.return_dict_in_generate and generation_config.output_logits),
        device=input_ids.device,
    )
