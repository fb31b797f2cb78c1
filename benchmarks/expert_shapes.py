"""Published shapes of mixtures of experts; see `shapes.SHAPES`."""

EXPERTS = {
    "qwen3-30b-a3b": ("qwen3_moe", dict(num_hidden_layers=48, head_dim=128, norm_topk_prob=True,
                                        max_position_embeddings=40960,
                                        rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
    "gpt-oss-20b": ("gpt_oss", dict(num_hidden_layers=24, num_local_experts=32)),
    "mixtral-8x7b": ("mixtral", dict(max_position_embeddings=32768)),
}  # fmt: skip
"""Sizes that are not named are transformers' own."""
