"""Published shapes of models with recurrences and short convolutions; see `shapes.SHAPES`."""

NEMOTRON = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}
LAYERS = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
"""Of Nemotron-H-8B, as published."""
HYBRIDS = {
    "qwen3-next-80b": ("qwen3_next", dict(num_hidden_layers=32, vocab_size=151936, max_position_embeddings=262144)),
    "qwen3.5-9b": ("qwen3_5_text", dict(max_position_embeddings=262144)),
    "falcon-h1-7b": ("falcon_h1", dict(hidden_size=3072, intermediate_size=12288, num_hidden_layers=44,
                                       num_attention_heads=12, num_key_value_heads=2, head_dim=128, vocab_size=130048,
                                       mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128, mamba_d_state=256,
                                       max_position_embeddings=262144)),
    "nemotron-h-8b": ("nemotron_h", dict(layers_block_type=[NEMOTRON[layer] for layer in LAYERS], hidden_size=4096,
                                         intermediate_size=21504, num_key_value_heads=8, mamba_num_heads=128,
                                         max_position_embeddings=8192)),
    "lfm2-1.2b": ("lfm2", dict(hidden_size=2048, intermediate_size=12288, num_hidden_layers=16,
                               full_attn_idxs=[2, 5, 8, 10, 12, 14], num_attention_heads=32, num_key_value_heads=8)),
}  # fmt: skip
"""Qwen3-Next-80B-A3B has 32 of its 48 layers, as fit into 141 GB. Sizes that are not named are transformers' own."""
