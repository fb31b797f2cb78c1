"""Tiny random encoder-decoders: `BUILDERS` maps a type of configuration to a builder of a float32 eval() model."""

import functools

import distributions
import models
import torch
import transformers

VOCAB, PAD, EOS = 96, 1, 2
SIZES = dict(
    vocab_size=VOCAB, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=128, pad_token_id=PAD,
    bos_token_id=0, eos_token_id=EOS, decoder_start_token_id=EOS, forced_eos_token_id=None,
)  # fmt: skip
AUDIO = dict(
    max_source_positions=50, max_target_positions=128, num_mel_bins=16, begin_suppress_tokens=None,
    suppress_tokens=None,
)  # fmt: skip
BY_DISTANCE = dict(
    d_ff=96, d_kv=16, num_heads=4, num_layers=3, num_decoder_layers=2, relative_attention_num_buckets=8,
    relative_attention_max_distance=20, decoder_start_token_id=PAD, max_position_embeddings=None, n_positions=64,
)  # fmt: skip
GATED = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
FRAMES = 2 * AUDIO["max_source_positions"]
"""Frames of features that Whisper reads at once."""
CLASSES = {
    "bart": ("Bart", "BartForConditionalGeneration", {}),
    "bigbird_pegasus": (
        "BigBirdPegasus",
        "BigBirdPegasusForConditionalGeneration",
        dict(attention_type="original_full"),
    ),
    "blenderbot": ("Blenderbot", "BlenderbotForConditionalGeneration", {}),
    "blenderbot_small": ("BlenderbotSmall", "BlenderbotSmallForConditionalGeneration", {}),
    "m2m_100": ("M2M100", "M2M100ForConditionalGeneration", {}),
    "marian": ("Marian", "MarianMTModel", dict(decoder_start_token_id=PAD)),
    "mbart": ("MBart", "MBartForConditionalGeneration", {}),
    "pegasus": ("Pegasus", "PegasusForConditionalGeneration", {}),
    "plbart": ("PLBart", "PLBartForConditionalGeneration", {}),
    "t5": ("T5", "T5ForConditionalGeneration", BY_DISTANCE),
    "flan_t5": ("T5", "T5ForConditionalGeneration", BY_DISTANCE | GATED),
    "mt5": ("MT5", "MT5ForConditionalGeneration", BY_DISTANCE | GATED),
    "umt5": ("UMT5", "UMT5ForConditionalGeneration", BY_DISTANCE | GATED),
    "longt5": ("LongT5", "LongT5ForConditionalGeneration", BY_DISTANCE | dict(local_radius=4)),
    "whisper": ("Whisper", "WhisperForConditionalGeneration", AUDIO),
}  # fmt: skip
"""For each type the beginning of its configuration's name, its class, and what differs from `SIZES`."""


def build(family, seed=0, std=0.3, embed=0.25, **changes):
    """A model of the class of `CLASSES`. Two calls give equal weights."""
    name, cls, own = CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | own | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, cls)(config)
    models._randomise(model, torch.Generator().manual_seed(seed), std=std, embed=embed)
    model.generation_config.update(forced_eos_token_id=None, max_length=None, num_beams=1, eos_token_id=None)
    return model.eval()


BUILDERS = {family: functools.partial(build, family) for family in CLASSES}


def sources(family, batch=1, length=20, seed=0):
    """The arguments of generate() for random sources; row b of several has 3 b tokens of padding, by turns at its end
    and at its beginning."""
    g = torch.Generator().manual_seed(seed)
    if family == "whisper":
        return dict(input_features=torch.randn(batch, AUDIO["num_mel_bins"], FRAMES, generator=g))
    ids = torch.randint(3, VOCAB, (batch, length), generator=g)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        padded = slice(length - 3 * row, None) if row % 2 else slice(3 * row)
        ids[row, padded], mask[row, padded] = PAD, 0
    return dict(input_ids=ids, attention_mask=mask)


TEXT, LANGUAGES = 96, {"<|en|>": 100, "<|de|>": 101}
"""Tokens of text, and those of languages, of `transcriber`."""


def transcriber(**changes):
    """A Whisper with languages, tasks and timestamps. Its sources have a second, of 100 frames."""
    model = build("whisper", vocab_size=200, decoder_start_token_id=97, **changes)
    vars(model.generation_config).update(
        decoder_start_token_id=97, eos_token_id=EOS, pad_token_id=EOS, lang_to_id=LANGUAGES, is_multilingual=True,
        task_to_id={"transcribe": 110, "translate": 111}, prev_sot_token_id=112, no_timestamps_token_id=113,
        max_initial_timestamp_index=50, max_length=100, return_timestamps=False, begin_suppress_tokens=[5, EOS],
        suppress_tokens=[7, 9, *range(97, 114)], forced_decoder_ids=None,
    )  # fmt: skip
    return model


SOURCE = torch.tensor([[3, 4, 5, 4, 3, 5]])
"""A source of a model with 6 tokens, for `chances` and `fit_of_draws`."""


@torch.no_grad()
def chances(model, start):
    """The chances of all answers to `SOURCE`, see `distributions.joint`. start: the decoder's first token."""

    def conditional(texts):
        ids = torch.cat([torch.full((len(texts), 1), start), texts], dim=1)
        logits = model(SOURCE.expand(len(texts), -1), decoder_input_ids=ids, use_cache=False).logits[:, -1]
        return logits.double().softmax(dim=-1)

    return distributions.joint(conditional, model.config.vocab_size)


def fit_of_draws(fast, chances):
    """How well 1,200 answers that are drawn for `SOURCE` fit their chances, see `distributions.fit`. At once they would
    have 10 GB of states."""
    torch.manual_seed(0)
    options = dict(do_sample=True, top_k=0, max_new_tokens=distributions.PLACES, num_return_sequences=200)
    drawn = torch.cat([fast.generate(SOURCE, **options)[:, 1:] for _ in range(6)])
    return distributions.fit(drawn[None], chances[None], fast.config.vocab_size)
