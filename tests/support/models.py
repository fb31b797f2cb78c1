"""Tiny random causal LMs for the tests: `ADMITTED`, `HYBRIDS`, `INDEXED` and `REFUSED` map a name to a zero-argument
builder of a fresh fp32 CPU eval() model. Two calls give equal weights, and the global random state is left alone."""

import functools
from unittest import mock

import torch
import transformers

# fmt: off
VOCAB, SPECIAL = 96, dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
BASE = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=512)
GQA = dict(BASE, num_key_value_heads=2)
GQA16 = dict(GQA, head_dim=16)
GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=512)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
WIN, FULL, LIN = "sliding_attention", "full_attention", "linear_attention"

# name: (name of the classes without Config and ForCausalLM, or both classes; config[, keywords of `_randomise`])
_ADMITTED = {
    "llama": ("Llama", GQA),
    "qwen2": ("Qwen2", GQA, dict(seed=2)),
    "qwen3": ("Qwen3", GQA16),
    "smollm3": ("SmolLM3", dict(GQA, no_rope_layers=[1, 0])),
    "mistral": ("Mistral", dict(GQA, sliding_window=8), dict(seed=4)),
    "gemma": ("Gemma", GQA16, dict(embed=0.1, final=2.0)),
    # transformers 5.17 runs Gemma2 on sdpa, which drops the softcap; 5.23 refuses sdpa: the same model on both
    "gemma2": ("Gemma2", dict(GQA16, num_hidden_layers=4, sliding_window=8, layer_types=[WIN, FULL] * 2,
        query_pre_attn_scalar=16, attn_logit_softcapping=5.0, final_logit_softcapping=10.0,
        attn_implementation="eager"), dict(std=0.4, embed=0.03, final=6.0, seed=3)),
    "gemma3": (("Gemma3TextConfig", "Gemma3ForCausalLM"), dict(GQA16, num_hidden_layers=4, sliding_window=8,
        layer_types=[WIN, WIN, FULL, WIN], query_pre_attn_scalar=16), dict(std=0.4, embed=0.03, final=6.0, seed=4)),
    "phi": ("Phi", BASE),
    "phi3": ("Phi3", dict(GQA, sliding_window=None)),
    "gpt2": (("GPT2Config", "GPT2LMHeadModel"), GPT2),
    "gpt_neox": ("GPTNeoX", BASE),
    "olmo2": ("Olmo2", GQA, dict(seed=3)),
    "olmo3": ("Olmo3", dict(GQA, num_hidden_layers=4, sliding_window=8, layer_types=[WIN, WIN, WIN, FULL])),
    "granite": ("Granite", dict(GQA, embedding_multiplier=3.0, residual_multiplier=0.8, attention_multiplier=0.2,
        logits_scaling=0.7)),
    "glm4": ("Glm4", GQA16, dict(seed=4)),
    "nemotron": ("Nemotron", GQA16),
    "stablelm": ("StableLm", dict(GQA, use_qkv_bias=True)),
    "mixtral": ("Mixtral", dict(GQA, num_local_experts=4, num_experts_per_tok=2)),
    "qwen2_moe": ("Qwen2Moe", dict(GQA, **MOE, shared_expert_intermediate_size=48), dict(seed=2)),
    "qwen3_moe": ("Qwen3Moe", dict(GQA16, **MOE, norm_topk_prob=True)),
    "deepseek_v3": ("DeepseekV3", dict(BASE, num_hidden_layers=3, num_key_value_heads=4, q_lora_rank=32,
        kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, first_k_dense_replace=1,
        n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=32)),
    "opt": ("OPT", dict(vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, word_embed_proj_dim=64), dict(embed=0.1, final=4.0, seed=2)),
    "starcoder2": ("Starcoder2", dict(GQA, sliding_window=8)),
    "gpt_bigcode": ("GPTBigCode", dict(GPT2, multi_query=True)),
    "cohere": ("Cohere", dict(GQA, logit_scale=1.0), dict(seed=3)),
    "cohere2": ("Cohere2", dict(GQA, num_hidden_layers=4, logit_scale=1.0, sliding_window=8, layer_types=[WIN, WIN, WIN,
        FULL]), dict(seed=1)),
    "gpt_oss": ("GptOss", dict(GQA16, num_hidden_layers=4, sliding_window=8, layer_types=[WIN, FULL] * 2,
        num_local_experts=4, num_experts_per_tok=2, rope_parameters=dict(rope_type="default", rope_theta=10000.0))),
}

GDN = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
           layer_types=[LIN, FULL])
SSD = dict(GQA, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=16)
MLA = dict(BASE, num_key_value_heads=4, layer_types=[LIN, FULL], kv_lora_rank=24, qk_rope_head_dim=8,
           qk_nope_head_dim=16, v_head_dim=12, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1)
_HYBRID = {  # layers with recurrences or short convolutions
    "qwen3_next": ("Qwen3Next", dict(GQA16, **MOE, **GDN, shared_expert_intermediate_size=32), dict(seed=1)),
    "qwen3_5": (("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"), dict(GQA16, **GDN)),
    "qwen3_5_moe": (("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"), dict(GQA16, **MOE, **GDN,
        shared_expert_intermediate_size=32)),
    "olmo_hybrid": ("OlmoHybrid", dict(GQA, **dict(GDN, linear_num_key_heads=4, linear_key_head_dim=12,
        linear_value_head_dim=24))),
    "kimi_linear": ("KimiLinear", dict(MLA, linear_num_heads=4, linear_head_dim=16, num_local_experts=4,
        n_shared_experts=1)),
    "bailing_hybrid": ("BailingHybrid", dict(MLA, q_lora_rank=32, head_dim=16, num_experts=4)),
    "bamba": ("Bamba", dict(SSD, attn_layer_indices=[1])),
    "falcon_h1": ("FalconH1", dict(SSD, head_dim=16, mamba_d_ssm=128)),
    "granitemoehybrid": ("GraniteMoeHybrid", dict(SSD, layer_types=[LIN, FULL], num_local_experts=4,
        num_experts_per_tok=2, shared_intermediate_size=48)),
    "nemotron_h": ("NemotronH", dict(GQA16, layers_block_type=[LIN, "mlp", FULL, "moe"], mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, ssm_state_size=16, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, n_group=1, topk_group=1)),
    "zamba2": ("Zamba2", dict(BASE, num_key_value_heads=4, num_hidden_layers=3, layers_block_type=[LIN, "hybrid", LIN],
        mamba_d_state=16, mamba_headdim=16, n_mamba_heads=8, mamba_ngroups=2, chunk_size=16, num_mem_blocks=1,
        adapter_rank=8)),
    "zamba": ("Zamba", dict(BASE, num_key_value_heads=4, num_hidden_layers=3, layers_block_type=[LIN, "hybrid",
        "hybrid"], mamba_d_state=8, mamba_dt_rank=8, n_mamba_heads=4)),
    "jamba": ("Jamba", dict(GQA, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=4, num_experts_per_tok=2, mamba_d_state=8, mamba_dt_rank=8)),
    "lfm2": ("Lfm2", dict(GQA, block_auto_adjust_ff_dim=False, layer_types=["conv", FULL])),
    "lfm2_moe": ("Lfm2Moe", dict(GQA, **MOE, layer_types=["conv", FULL], num_dense_layers=1)),
    "lfm3": ("Lfm3", dict(GQA, num_hidden_layers=3, layer_types=["conv", FULL, WIN], sliding_window=8)),
    "zaya": ("Zaya", dict(GQA16, layer_types=["hybrid", "hybrid_sliding"], sliding_window=8, num_experts=4,
        moe_intermediate_size=32, router_hidden_size=32)),
    "mamba": ("Mamba", dict(vocab_size=VOCAB, hidden_size=64, state_size=8, num_hidden_layers=2, time_step_rank=8)),
    "mamba2": ("Mamba2", dict(vocab_size=VOCAB, hidden_size=64, state_size=16, num_hidden_layers=2, num_heads=8,
        head_dim=16, n_groups=1, chunk_size=16)),
}

DSA = dict(BASE, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16,
           v_head_dim=12, n_routed_experts=4, num_local_experts=4, n_shared_experts=1, n_group=2, topk_group=1,
           num_experts_per_tok=2, moe_intermediate_size=32, shared_experts_intermediate_size=32, head_dim=8,
           mlp_layer_types=["dense", "sparse"], index_topk=8, index_head_dim=16, index_n_heads=16)
DSA3 = dict(DSA, num_hidden_layers=3, mlp_layer_types=["dense"] * 3, indexer_types=["full", "shared", "full"])
_INDEXED = {  # layers with an indexer, which chooses 8 tokens; 16 heads leave no ties at 0
    "deepseek_v32": ("DeepseekV32", DSA),
    "glm_moe_dsa": ("GlmMoeDsa", DSA3),
    "axk2": ("AXK2", DSA),
    "hy_v4": ("HYV4", DSA3),
    "dots3_note": (("Dots3NoteTextConfig", "Dots3NoteForCausalLM"), dict(DSA, layer_types=["indexed_attention", WIN],
        sliding_window=8)),
}

_UNMASKED = {  # recurrences, too, but padding changes transformers' own answer
    "minimax": ("MiniMax", dict(GQA16, layer_types=[LIN, FULL], num_local_experts=4, num_experts_per_tok=2,
        block_size=16)),
    "recurrent_gemma": ("RecurrentGemma", dict(GQA, num_hidden_layers=3, lru_width=64, attention_window_size=64),
        dict(embed=0.06, final=3.0, seed=1)),
    "rwkv": ("Rwkv", dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, context_length=512,
        intermediate_size=96, rescale_every=1)),
}

_REFUSED = {
    "switch": (("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration"), dict(vocab_size=VOCAB,
        d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=2,
        decoder_start_token_id=0), dict(std=0.4, embed=0.15)),
}

_KEEP = ("A_log", "dt_bias", "recurrent_param", "time_decay", "time_first", "time_mix")  # state-space decays


@torch.no_grad()
def _randomise(model, g, std=0.25, embed=0.25, head=0.5, final=0.0):
    def normal(p, s):
        p.copy_(torch.randn(p.shape, generator=g) * s)

    tables = {id(m.weight): embed for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    out = model.get_output_embeddings()
    if hasattr(out, "weight") and id(out.weight) not in tables:
        tables[id(out.weight)] = head
    for name, p in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if leaf.startswith(_KEEP):
            continue
        if leaf == "sinks":
            normal(p, 1.0)
        elif "bias" in leaf:
            normal(p, 0.1)
        elif p.ndim == 1:  # a norm's scale, stored around 1 or (Gemma) around 0
            p.add_(torch.randn(p.shape, generator=g) * 0.1)
            if name.rsplit(".", 2)[-2] in ("norm", "final_norm", "final_layer_norm") and ".layers." not in name:
                p.add_(final)  # a sharper head where it is tied to small embeddings
        else:
            normal(p, tables.get(id(p), std))
    for name, b in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            normal(b, 0.05)


def build(config, model, kwargs, over=()):
    over = dict(over)
    seed = over.pop("seed", 0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        cfg = getattr(transformers, config)(**kwargs, **SPECIAL)
        net = getattr(transformers, model)(cfg).float().eval()
    _randomise(net, torch.Generator().manual_seed(seed), **over)
    for key, value in SPECIAL.items():
        setattr(net.config, key, value)
        setattr(net.generation_config, key, value)
    return net


def _rows(table):
    """By name the arguments of `build`, of the models that this version of transformers has."""
    rows = {}
    for name, (classes, *rest) in table.items():
        config, model = (f"{classes}Config", f"{classes}ForCausalLM") if isinstance(classes, str) else classes
        if hasattr(transformers, model):
            rows[name] = config, model, *rest
    return rows


def _builders(rows):
    """What builds the model of each row; further arguments change its config."""

    def builder(config, model, kwargs, *over):
        return lambda **sizes: build(config, model, dict(kwargs, **sizes), *over)

    return {name: builder(*row) for name, row in rows.items()}


_ADMITTED, _HYBRID, _UNMASKED, _INDEXED, _REFUSED = map(_rows, (_ADMITTED, _HYBRID, _UNMASKED, _INDEXED, _REFUSED))
ADMITTED, HYBRIDS, UNMASKED, INDEXED, REFUSED = map(_builders, (_ADMITTED, _HYBRID, _UNMASKED, _INDEXED, _REFUSED))


def with_outputs(count, name="llama"):
    """A model that generates `count` tokens, fewer or more than the VOCAB that it reads."""
    model = ADMITTED[name]()
    matrix = model.get_output_embeddings().weight
    rows = matrix.repeat(-(-count // len(matrix)), 1)[:count] * torch.linspace(1.0, 0.9, count)[:, None]
    model.lm_head = torch.nn.Linear(matrix.shape[1], count, bias=False)
    model.lm_head.weight = torch.nn.Parameter(rows.detach())
    return model


def speculate_captured(model, *args, **options):
    """`speculate` of a model whose weights and modules stay as they are: it is captured once a process."""
    from spec_compile import speculate

    with mock.patch("spec_compile.api.capture", captured):
        return speculate(model, *args, **options)


@functools.cache
def captured(model, whole=False):
    """The graph of a model that stays as it is."""
    import captures

    return captures.capture(model, whole)


def prompts(lengths=(24, 9, 15), seed=1):
    """Random prompts without special tokens: list of [1, n] tensors, and their left-padded batch with its mask."""
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, VOCAB, (1, n), generator=g) for n in lengths]
    width = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(r, (width - r.shape[1], 0), value=0) for r in rows])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(r), (width - r.shape[1], 0)) for r in rows])
    return rows, ids, mask


def greedy(net, ids, mask=None, new=48):
    """Hugging Face's greedy tokens (end of sequence neutralised) and the top-1/top-2 gap of each step."""
    net.generation_config.eos_token_id = None
    out = net.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, do_sample=False,
                       max_new_tokens=new, output_logits=True, return_dict_in_generate=True)
    net.generation_config.eos_token_id = SPECIAL["eos_token_id"]
    top = torch.stack(out.logits, 1).topk(2, -1).values
    return out.sequences[:, -new:], top[..., 0] - top[..., 1]
