"""The drop-in: transformers' ``generate()`` with our decoding loop."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..capture import copies, replaced
from ..capture.admit import placeholders
from ..capture.copies import FollowsGenerationConfig, followed
from ..capture.loras import Loaded
from ..compat import CACHE
from .answer import Answer
from .engine import Engine
from .pipeline import Call
from .preparation import TOKENIZERS, CalledDraft, asked, check_options, make_key, model_for, read_inputs, read_prompt
from .prompt import Prompt, are_states_behind, cache_among, extend_cache, own_prefill, read_cache, unserved
from .request import Request, seed_of
from .verify import Route, make_acceptor
from .verify.thinking import check_processors

if TYPE_CHECKING:
    from ..api import Speculation

    class Base(Any):  # the model's own class, which comes after the mixin
        speculation: Speculation
else:
    Base = object

INEXACT = "; in some releases its assisted decoding gives other tokens once a window is crossed"
"""transformers#46629 and #48280; the end of the warning before that loop runs."""


def _in_turn(loop: Callable) -> Callable:
    """A decoding loop that has the model's turn, also if a loop of the user calls it, which has none."""

    @wraps(loop)
    def run(self: "SpeculativeMixin", *args: Any, **kwargs: Any) -> Any:
        with self._engine.turns:
            return loop(self, *args, **kwargs)

    return run


class SpeculativeMixin(FollowsGenerationConfig, Base):
    """Mixed into a model's class, replaces only the decoding loops of ``generate()``."""

    @property
    def _engine(self) -> Engine:
        return vars(self)["speculation"].engine

    def generate(
        self, *args: Any, reference: Any = None, share_text: bool | None = None, speculation: Any = None,
        adapter_names: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """transformers' ``generate()`` with the same arguments and the same answer, in fewer steps.

        reference: token ids (a list or 1-D tensor, or a list of such) of texts from which the output may copy, such as
            the document to be edited ("predicted output").
        share_text: with n-grams, True keeps the prompt, the answer and the reference of this call, so that later calls
            of any user draft from them, and the trees in their `report()` show pieces of them. False forgets them when
            the call ends. None does as `speculate(..., share_text=...)` says, True by default. No answer depends on it.
        speculation: False makes no drafts in this call, {"num_draft_tokens": n} verifies at most n nodes of each tree,
            the root included; None as many as pay. No answer depends on it, unless drafts are drawn.
        adapter_names: with `max_loras`, a LoRA adapter for each prompt, "__base__" for none. None: the active one.

        `assistant_model`, `use_mtp`, `prompt_lookup_num_tokens` and `speculation_type` name another draft for this
        call; the first call with it builds what `speculate` builds. Drafts that are not served, beam search, attentions
        and hidden states as outputs and the like run in transformers' own loops, unaccelerated, with one warning that
        names the option.
        """
        if self._engine.runtime.algorithm.store is not None:
            kwargs.pop("prompt_lookup_num_tokens", None)  # asks for n-gram drafts, which it gets anyway
        if not self._engine.options.ranks.leads:  # only the first rank streams
            kwargs.pop("streamer", None)
        has_own_loop = kwargs.get("custom_generate") is not None
        if has_own_loop:
            self._engine.step_aside("custom_generate")
        own_generate = replaced.replaced_generate(self._engine.original)
        if own_generate is not None:  # by a repository's custom_generate, or by a user
            self._engine.step_aside(f"generate (set on the {type(self).__name__} object)")
            return own_generate(*args, **kwargs)
        with self._engine.generating(reference, share_text, speculation, adapter_names):
            if self._engine.decoder is not None:
                self._engine.decoder.begin(self._engine, args, kwargs)
            common, key = read_inputs(args, kwargs), None
            if common is not None:
                ids, mask, streamer, options = common
                key = make_key(self, self._engine.runtime.device, ids, mask, options)
                found = self._engine.remembered.find(key)
                if found is not None and (prompt := read_prompt(ids, mask, found[1])) is not None:
                    return self._generate_as_before(found[0], prompt, ids.device, streamer)
            check_options(self.generation_config, kwargs)
            self._engine.refuse_changes()
            if kwargs.get("cache_implementation") == "paged":  # calls generate_batch(), and drops some options
                self._engine.step_aside("cache_implementation='paged'")
                own: Any = type(self._engine.original)
                return own.generate(self._engine.original, *args, **kwargs)
            self._engine.looped = False
            # A loop of the user's own may call what waits for rounds.
            key, lent = (None, self._engine.turns.lent()) if has_own_loop else (key, nullcontext())
            with self._engine.remembered.awaiting(key), lent:
                output = super().generate(*args, **kwargs)
            override = None if self._engine.looped else replaced.overridden(self, ("generate",))
            if override is not None:
                self._engine.step_aside(f"{override}, with a loop of its own")
            return output

    def extra_repr(self) -> str:
        """The model's own, and the speculation."""
        return "\n".join(filter(None, [super().extra_repr(), f"speculation={vars(self).get('speculation')!r}"]))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        """Copies and pickles are of the original, which becomes speculative again."""
        return copies.rebuild, (self._engine.rebuild, self._engine.original, followed(self).own())

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """transformers' own, after which a draft with its own encoder can read the model's source."""
        if self._engine.decoder is not None:
            self._engine.decoder.remember_source(kwargs["encoder_input_ids"], kwargs["model_kwargs"])
        return super()._get_logits_processor(*args, **kwargs)

    @_in_turn
    def _sample(
        self, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig, synced_gpus: bool = False, streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """transformers' loop for greedy decoding and sampling: its arguments, and what it returns."""
        engine, config = self._engine, generation_config
        engine.looped = True
        source = None if engine.decoder is None else engine.decoder.over(engine, input_ids, model_kwargs)
        given = model_kwargs if source is None else source.arguments(model_kwargs)
        prompt = Prompt.of(input_ids, config, given, placeholders(engine.original.config))
        reason = unserved(engine, prompt, config, given) or replaced.overridden(self)
        if reason or synced_gpus:
            engine.step_aside(reason or "synced_gpus")
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, config,
                synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
            )  # fmt: skip

        # Read what is asked for.
        if config.prefill_chunk_size is not None and config.prefill_chunk_size < 1:
            raise RuntimeError(f"prefill_chunk_size: expected at least 1, got {config.prefill_chunk_size}")
        check_processors(logits_processor, len(input_ids), engine.runtime.verify.vocab_size)
        request = Request.of(input_ids, config, logits_processor, stopping_criteria, self.device)
        engine.admit_request(prompt, request.longest - input_ids.shape[1])
        cache, past = cache_among(given), None if source is None else source.past(prompt.padding)
        if prompt.is_embedded or prompt.has_pictures:
            taps = engine.runtime.algorithm.plan.taps
            cache, past = own_prefill(self, prompt, input_ids, config, model_kwargs, taps)

        # Run rounds until every row has ended.
        engine.agreement.reach(asked(prompt, config, logits_processor, stopping_criteria))
        if past is None and cache is not None and cache.get_seq_length() > 0 and engine.cache_layout is not None:
            past = read_cache(cache, prompt.padding, engine.cache_layout)
        adapters = engine.row_adapters(len(prompt.tokens), config.num_return_sequences or 1)
        engine.remembered.keep(self, prompt, request)
        route = request.route if past is None or past.first_logits is None else Route.ON_HOST
        request = replace(request, route=route, **engine.wishes)
        call, answer = self._run(request, prompt, adapters, streamer, input_ids.device, past=past)

        # Return what transformers returns.
        if cache is not None and (config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)):
            self._extend_cache(source or self, cache, call, prompt, answer)
        if not config.return_dict_in_generate:
            return answer.sequences()
        told: dict[str, Any] = {"scores": answer.scores, "logits": answer.logits, CACHE: cache}
        output = GenerateDecoderOnlyOutput if source is None else source.output
        return output(**told | {"sequences": answer.sequences()})

    def _generate_as_before(
        self, request: Request, prompt: Prompt, device: torch.device, streamer: BaseStreamer | None
    ) -> Tensor:
        """`generate` without transformers' preparation. request: remembered from an earlier call; see `Remembered`."""
        engine = self._engine
        check = engine.refuse_changes if engine.runtime.on_gpu else None
        if check is None:
            engine.refuse_changes()
        if streamer is not None:
            streamer.put(prompt.ids)
        engine.admit_request(prompt, request.longest)
        request, adapters = request.after(prompt.width, **engine.wishes), engine.row_adapters(len(prompt.tokens))
        _, answer = self._run(request, prompt, adapters, streamer, device, check=check)
        return answer.sequences()

    def _run(
        self, request: Request, prompt: Prompt, adapters: list[Loaded] | None, streamer: BaseStreamer | None,
        device: torch.device, **more: Any,
    ) -> tuple[Call, Answer]:  # fmt: skip
        """Run rounds until every row has ended. device: gets the answer. more: arguments of `Call`."""
        engine, ranks = self._engine, self._engine.options.ranks
        answer, seed = request.answer(prompt.ids, streamer, device, ranks), None
        if request.config.do_sample:
            drawn = seed_of(None)
            (seed,) = ranks.lead(lambda: [drawn])
            request = replace(request, seed=seed)
        acceptor = make_acceptor(request.route, answer, request.processors, seed, ranks)
        call = Call(request, request.sequences(prompt, adapters), acceptor, prompt, **more)
        with ranks.call(), closing(engine.run(call)) as rounds:
            for gained in rounds:
                if request.route is not Route.ON_HOST:  # on the host, the acceptor gives them to the answer
                    answer.take(gained)
                call.stop(row for row in range(answer.batch) if not answer.needs(row))
        if streamer is not None:
            streamer.end()
        return call, answer

    def _extend_cache(self, runner: Any, cache: Cache, call: Call, prompt: Prompt, answer: Answer) -> None:
        """Fill a cache as plain decoding does, with all positions but the last. runner: this, or an encoder-decoder's
        decoder."""
        length = prompt.width + answer.columns - 1
        filled = prompt.width + min(answer.gained(row) for row in range(answer.batch)) - 1  # that every row has
        layout, state = self._engine.cache_layout, call.session.state
        if layout is not None and are_states_behind(state, prompt.padding, filled):
            extend_cache(cache, state, prompt.padding, filled, layout)
        else:
            filled = int(cache.get_seq_length())  # the model fills it if our states differ or are further on
        if filled < length:  # plain decoding goes on with padding after rows that end early
            ids = answer.sequences()
            positions = torch.arange(length, device=ids.device) - ids.new_tensor(prompt.padding)[:, None]
            shifted = positions.clamp(min=0) + ids.new_tensor(prompt.position_offsets)[:, None]
            before = prompt.width - answer.prompt_width
            runner(
                ids[:, filled - before : length - before], attention_mask=(positions >= 0).long(),
                position_ids=shifted[:, filled:], use_cache=True, **{CACHE: cache},
                **({"logits_to_keep": 1} if self._supports_logits_to_keep() else {}),
            )  # fmt: skip

    def _beam_search(self, *args: Any, **kwargs: Any) -> Any:
        self._engine.looped = True
        self._engine.step_aside("num_beams")
        return super()._beam_search(*args, **kwargs)

    @_in_turn
    def _assisted_decoding(
        self, *args: Any, assistant_model: Any = None, inputs_tensor: Any = None, **kwargs: Any
    ) -> Any:  # fmt: skip
        """`_sample` with the draft that the call names; transformers' own loop for a draft that is not served."""
        engine = self._engine
        called = CalledDraft.of(kwargs["generation_config"], assistant_model, kwargs)
        model: Any = self if called.is_that_of(engine) else model_for(called, engine)
        engine.looped = True
        if model is None:
            engine.step_aside(called.argument, INEXACT)
            # Early exit changes the config for a while, and the original may be changed.
            original: Any = engine.original
            named = {"assistant_model": assistant_model, "inputs_tensor": inputs_tensor}
            return original._assisted_decoding(*args, **named, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in TOKENIZERS}
        if model is self:
            return self._sample(*args, **kwargs)
        with model._engine.generating(*engine.call_options):
            model._engine.refuse_changes()
            return model._sample(*args, **kwargs)
