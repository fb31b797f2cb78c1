"""Classes with modules that are changed for the capture: the same tokens as transformers' generate()."""

import models
import pytest
import torch

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.capture import modules
from spec_compile.capture.checks import check_capture
from spec_compile.capture.trace import capture
from spec_compile.graph import LayerSpec
from spec_compile.kernels.attention import BACKENDS, ROLES, Use

BASE, GQA, GPT2 = models.BASE, models.GQA, models.GPT2
FALCON = dict(BASE, ffn_hidden_size=96)
ZAYA = dict(models.GQA16, num_experts=4, moe_intermediate_size=32, router_hidden_size=32)
CLASSES = {
    "gptj": ("GPTJConfig", "GPTJForCausalLM", dict(GPT2, rotary_dim=8)),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", dict(GPT2, rotary_dim=8)),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", BASE),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM", dict(
        vocab_size=models.VOCAB, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        window_size=8, max_position_embeddings=512)),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", dict(
        vocab_size=models.VOCAB, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=512)),
    "falcon_groups": ("FalconConfig", "FalconForCausalLM", dict(
        FALCON, num_kv_heads=2, new_decoder_architecture=True)),
    "falcon_alibi": ("FalconConfig", "FalconForCausalLM", dict(
        FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True), dict(embed=0.12)),
    "bloom": ("BloomConfig", "BloomForCausalLM", dict(vocab_size=models.VOCAB, hidden_size=64, n_layer=2, n_head=4)),
    "bloom_6_heads": ("BloomConfig", "BloomForCausalLM", dict(
        vocab_size=models.VOCAB, hidden_size=96, n_layer=2, n_head=6)),
    "mpt": ("MptConfig", "MptForCausalLM", dict(
        vocab_size=models.VOCAB, d_model=64, n_heads=4, n_layers=2, max_seq_len=512, use_cache=True)),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", dict(
        models.GQA16, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=2, attention_chunk_size=16, no_rope_layers=[1, 0], floor_scale=512)),
    # transformers 5.17 runs Doge on sdpa without a causal mask: the same model on both
    "doge": ("DogeConfig", "DogeForCausalLM", dict(GQA, keep_window_size=512, attn_implementation="eager")),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", dict(GQA, sliding_window=8, num_local_experts=4)),
    "longcat_flash": ("LongcatFlashConfig", "LongcatFlashForCausalLM", dict(
        vocab_size=models.VOCAB, hidden_size=64, num_layers=1, num_hidden_layers=2, num_attention_heads=4,
        ffn_hidden_size=96, q_lora_rank=32, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, head_dim=8,
        v_head_dim=12, qk_head_dim=24, moe_topk=2, n_routed_experts=4, zero_expert_num=2, expert_ffn_hidden_size=32,
        max_position_embeddings=512)),
    "zaya": ("ZayaConfig", "ZayaForCausalLM", dict(
        ZAYA, layer_types=["hybrid", "hybrid_sliding"], sliding_window=8, cca_time0=3)),
    "zaya_no_taps": ("ZayaConfig", "ZayaForCausalLM", dict(ZAYA, cca_time0=1, cca_time1=1)),
}  # fmt: skip
"""Name -> the arguments of `models.build`."""
OFTEN = {"gptj", "gpt_neo", "falcon_alibi", "bloom", "llama4", "doge", "phimoe", "longcat_flash", "zaya"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in CLASSES]
)
def pair(request):
    """A model, and what `speculate` makes of it."""
    model = models.build(*CLASSES[request.param])
    return model, spec_compile.speculate(model, compile=False)


def assert_equal_tokens(pair, ids, mask=None):
    """48 greedy tokens of both, of which some are drafted in trees."""
    request = dict(attention_mask=torch.ones_like(ids) if mask is None else mask, do_sample=False, max_new_tokens=48)
    model, fast = pair
    want = model.generate(ids, eos_token_id=None, **request)
    assert torch.equal(fast.generate(ids, eos_token_id=None, reference=[*want], **request), want)
    assert max(fast.speculation.stats.nodes) > 1, "nothing was drafted"


@pytest.mark.sweep("falcon_alibi llama4 zaya")
def test_one_row(pair):
    assert_equal_tokens(pair, models.prompts()[0][0])


@pytest.mark.sweep(4)
def test_rows_padded_on_the_left(pair):
    assert_equal_tokens(pair, *models.prompts()[1:])
    assert pair[1].speculation.stats.tokens > 0


def test_biases_are_rounded_as_falcons_are():
    """Its biases have 8 bits, which shows behind position 256."""
    model = models.build(*CLASSES["falcon_alibi"])
    assert_equal_tokens((model, spec_compile.speculate(model, compile=False)), models.prompts((300,))[0][0])


def test_positions_that_llama4_counts_for_itself():
    """They scale queries, and count the padding, so that a padded batch is left to transformers."""
    config, cls, sizes = CLASSES["llama4"]
    model = models.build(config, cls, dict(sizes, floor_scale=8))
    fast = spec_compile.speculate(model, compile=False)
    assert_equal_tokens((model, fast), models.prompts((60,))[0][0])
    with pytest.warns(UserWarning, match="attention_mask"):
        _, ids, mask = models.prompts()
        assert torch.equal(
            *(each.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8) for each in (model, fast))
        )


@pytest.mark.sweep("codegen-512 gptj-512 mpt-512 bloom-None")
@pytest.mark.parametrize(
    "name, limit", [("codegen", 512), ("gptj", 512), ("xglm", 512), ("mpt", 512), ("doge", 512), ("bloom", None)]
)
def test_tables_limit_positions(name, limit):
    assert capture(models.build(*CLASSES[name])).position_limit == limit


def test_a_wrong_function_is_refused(monkeypatch):
    path = "transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention"
    monkeypatch.setitem(modules.MODULES, path, lambda module, attend: modules._replace_scores(module, attend, 0.26))
    model = models.build(*CLASSES["gpt_neox_japanese"])
    with pytest.raises(UnsupportedModelError, match="GPTNeoXJapaneseForCausalLM: the captured graph differs"):
        check_capture(model, capture(model))


def test_chunks_that_attention_is_not_told_of(monkeypatch):
    """They are longer than the text of the check."""
    config, cls, sizes = CLASSES["llama4"]
    model = models.build(config, cls, dict(sizes, attention_chunk_size=4096))
    path = "transformers.models.llama4.modeling_llama4.Llama4TextDecoderLayer"
    change = modules.MODULES[path]

    def untold(layer, attend):
        return change(layer, lambda *args, chunk=None, **kwargs: attend(*args, **kwargs))

    monkeypatch.setitem(modules.MODULES, path, untold)
    with pytest.raises(UnsupportedModelError, match="chunked layers that its attention is not told of"):
        spec_compile.speculate(model, compile=False)


@pytest.mark.parametrize("feature", [dict(slopes=True), dict(chunk=16)], ids=["slopes", "chunk"])
def test_a_backend_says_what_it_lacks(feature):
    layer = LayerSpec(4, 2, 64, 64, scale=0.125, window=None, softcap=None, sinks=False, **feature)
    for role in ROLES:
        lack = BACKENDS["flashinfer"].why_not(layer, torch.bfloat16, Use(role=role), torch.device("cpu"))
        assert lack and ("ALiBi" in lack or "chunks of positions" in lack)
