"""The drop-in: Hugging Face's ``generate()`` with our loop beneath its preparation."""

from contextlib import closing

import torch
from torch import Tensor

PROCESSOR_ARGUMENTS = {
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "LogitNormalization": "renormalize_logits",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
CRITERIA_ARGUMENTS = {"MaxTimeCriteria": "max_time", "StopStringCriteria": "stop_strings"}
OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
UNDERSTOOD = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}


def _unsupported(argument: str) -> NotImplementedError:
    return NotImplementedError(
        f"{argument}: not supported by speculative generate() yet; call the original model's generate() for it"
    )


class SpeculativeMixin:
    """Put in front of a model's own class, replaces the decoding loops of ``generate()`` and nothing before them."""

    def generate(self, *args, reference=None, **kwargs):
        """transformers' ``generate()``: same arguments, same answer, fewer steps.

        Additional argument `reference`: token ids (a list or 1-D tensor, or a list of such) of texts that the output
        may copy from, such as the document to be edited ("predicted output").
        """
        if kwargs.get("custom_generate") is not None:
            raise _unsupported("custom_generate")
        with self.speculation.generating(reference):
            return super().generate(*args, **kwargs)

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config,
        synced_gpus=False, streamer=None, **model_kwargs,
    ):  # fmt: skip
        if generation_config.do_sample:
            raise _unsupported("do_sample")
        for name in OUTPUTS:
            if getattr(generation_config, name, None):
                raise _unsupported(name)
        prompts = _prompts(input_ids, model_kwargs)
        padding = [input_ids.shape[1] - len(prompt) for prompt in prompts]
        shortest = _shortest(logits_processor)
        longest, eos = _limits(stopping_criteria, generation_config)
        pad = generation_config._pad_token_tensor
        rows: list[list[int]] = [[] for _ in prompts]
        put = 0
        rounds = self.speculation.run(
            prompts,
            [max(0, shortest - pads) for pads in padding],
            [longest - pads for pads in padding],
            eos,
        )
        with closing(rounds):
            for gained in rounds:
                for row, tokens in zip(rows, gained):
                    row.extend(tokens)
                if streamer is not None:
                    put = _stream(streamer, rows, gained, put, pad)
        if streamer is not None:
            _stream(streamer, rows, [[] for _ in rows], put, pad)
            streamer.end()
        width = max(map(len, rows))
        fill = 0 if pad is None else int(pad)
        new = torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=input_ids.dtype)
        return torch.cat([input_ids, new.view(len(rows), width).to(input_ids.device)], dim=1)

    def _beam_search(self, *args, **kwargs):
        raise _unsupported("num_beams > 1")

    def _assisted_decoding(self, *args, **kwargs):
        raise _unsupported("assistant_model / prompt_lookup_num_tokens")


def _prompts(input_ids: Tensor, model_kwargs: dict) -> list[list[int]]:
    """Each row's prompt without its padding; raises before any work if something else was passed to the model."""
    for name, value in model_kwargs.items():
        if name not in UNDERSTOOD and value is not None:
            raise _unsupported(name)
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise _unsupported("past_key_values")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: expected [batch, at least one token], got shape {tuple(input_ids.shape)}")
    mask = model_kwargs.get("attention_mask")
    rows = input_ids.tolist()
    pads = [0] * len(rows)
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise ValueError(f"attention_mask: expected shape {tuple(input_ids.shape)}, got {tuple(mask.shape)}")
        mask = mask.to(torch.int64)
        if (mask.diff(dim=1) < 0).any() or not mask.any(dim=1).all():
            raise ValueError(
                "attention_mask: expected padding on the left only and at least one token in every row; "
                "set tokenizer.padding_side = 'left'"
            )
        pads = (mask == 0).sum(dim=1).tolist()
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        own = (
            torch.arange(input_ids.shape[1], device=positions.device)
            - torch.tensor(pads, device=positions.device)[:, None]
        )
        if ((positions != own) & (own >= 0)).any():
            raise _unsupported("position_ids")
    return [row[pad:] for row, pad in zip(rows, pads)]


def _shortest(logits_processor) -> int:
    """The length below which no row may end, of the processors that say so; others are refused."""
    shortest = 0
    for processor in logits_processor:
        kind = type(processor).__name__
        if kind == "MinLengthLogitsProcessor":
            length = processor.min_length
        elif kind == "MinNewTokensLengthLogitsProcessor":
            length = processor.prompt_length_to_skip + processor.min_new_tokens
        else:
            raise _unsupported(PROCESSOR_ARGUMENTS.get(kind, f"logits_processor ({kind})"))
        shortest = max(shortest, length)
    return shortest


def _limits(stopping_criteria, generation_config) -> tuple[int, list[int]]:
    """(length at which every row ends, end-of-sequence tokens) of the criteria; others are refused."""
    longest, eos = generation_config.max_length, []
    for criterion in stopping_criteria:
        kind = type(criterion).__name__
        if kind == "MaxLengthCriteria":
            longest = min(longest, criterion.max_length)
        elif kind == "EosTokenCriteria":
            eos = criterion.eos_token_id.tolist()
        else:
            raise _unsupported(CRITERIA_ARGUMENTS.get(kind, f"stopping_criteria ({kind})"))
    return longest, eos


def _stream(streamer, rows: list[list[int]], gained: list[list[int]], put: int, pad) -> int:
    """Put every column that no unfinished row can change any more, a token a row each; returns how many are put."""
    growing = [len(row) for row, tokens in zip(rows, gained) if tokens]
    ready = min(growing) if growing else max(map(len, rows))
    for column in range(put, ready):
        streamer.put(torch.tensor([row[column] if column < len(row) else int(pad) for row in rows]))
    return max(put, ready)
