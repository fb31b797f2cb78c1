"""Models from before transformers' attention interface: their attention becomes calls of it in the capture."""

from torch import Tensor, nn

from ..capture.modules import MODULES, Attend, decoder, heads_of, tell_positions, xglm


def bert(module: nn.Module, attend: Attend) -> None:
    """Attention of BERT's form, in RoFormer with rotations."""

    def forward(hidden_states: Tensor, attention_mask=None, sinusoidal_pos=None, *_, **__) -> tuple[Tensor, None]:
        size = module.attention_head_size
        q, k, v = (heads_of(project(hidden_states), size) for project in (module.query, module.key, module.value))
        if sinusoidal_pos is not None:
            rotated = (q, k, v) if module.rotary_value else (q, k)
            positions = sinusoidal_pos[0, 0][:, None]  # [1, 1, B, T, D] -> [B, 1, T, D]
            q, k, v = (*module.apply_rotary_position_embeddings(positions, *rotated), v)[:3]
        return attend(module, q, k, v, None, scaling=size**-0.5)[0].flatten(2), None

    module.forward = forward


def roformer(module: nn.Module, attend: Attend) -> int:
    """The whole model, which counts its positions without being told."""
    return tell_positions(module, module.roformer.encoder.embed_positions, "weight")


CHANGES = {
    f"transformers.models.{name}": change
    for name, change in {
        "git.modeling_git.GitSelfAttention": bert,
        "megatron_bert.modeling_megatron_bert.MegatronBertSelfAttention": bert,
        "mvp.modeling_mvp.MvpAttention": xglm,
        "mvp.modeling_mvp.MvpForCausalLM": decoder,
        "rembert.modeling_rembert.RemBertSelfAttention": bert,
        "roformer.modeling_roformer.RoFormerForCausalLM": roformer,
        "roformer.modeling_roformer.RoFormerSelfAttention": bert,
        "trocr.modeling_trocr.TrOCRAttention": xglm,
        "trocr.modeling_trocr.TrOCRForCausalLM": decoder,
    }.items()
}
"""See `capture.modules.MODULES`."""
MODULES |= CHANGES
