"""Gemma 4's assistants: a few decoder layers whose queries read the target's own keys and values.

A forward joins the embedding of a token with the target's state before it, or with the assistant's output for the draft
before it. Its layers have no keys of their own: each reads those of the target's last layer of its kind, full or
sliding, that computes any. So all drafts of a round are drafted at the position of the last committed token, and see
the tokens before it.

Shapes: B rows, R nodes, h the target's hidden size, H the assistant's, V the vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...passes.outputs import FINAL


class ClusteredHead(nn.Module):
    """An output layer that scores the tokens of a few clusters: those whose centroids fit the state best.

    centroids: [clusters, H].
    token_ordering: [V] int64; the tokens of the first cluster, of the second, and so on: V / clusters each.
    chosen: clusters that are scored.
    """

    def __init__(self, centroids: nn.Linear, token_ordering: Tensor, chosen: int):
        super().__init__()
        self.centroids, self.chosen = centroids, chosen
        self.register_buffer("token_ordering", token_ordering)

    def forward(self, x: Tensor, head_weight: Tensor) -> Tensor:
        """Logits [B, R, V] of x [B, R, H], minus infinity outside the chosen clusters; only their rows of `head_weight`
        [V, H] are read.

        token_ordering = [3, 0, 2, 1] and two clusters: the second has the tokens 2 and 1.
        """
        clusters = self.centroids(x).topk(self.chosen, dim=-1).indices
        members = self.token_ordering.view(self.centroids.out_features, -1)
        tokens = members[clusters].flatten(2)  # [B, R, scored]
        scores = (F.embedding(tokens, head_weight) @ x[:, :, :, None])[:, :, :, 0]
        everywhere = scores.new_full((*x.shape[:2], head_weight.shape[0]), float("-inf"))
        return everywhere.scatter(2, tokens, scores)


class Assistant(nn.Module):
    """An assistant over the tensors of a model of transformers, in the form in which it is captured.

    layers, norm, rotary_emb: of its decoder; the layers' attention is ``spec_compile::attention``.
    embed_tokens: the target's input embedding, a module.
    pre_projection: [h of the embedding; h of the state] -> H.
    post_projection: H -> h.
    head_weight: [V, H].
    clusters: see `ClusteredHead`; None: all tokens are scored.
    sources: for each layer the target's layer whose keys and values it reads, their KV heads and the size of a head.
    """

    taps = (FINAL,)

    def __init__(
        self, layers: nn.ModuleList, norm: nn.Module, rotary_emb: nn.Module, embed_tokens: nn.Module,
        pre_projection: nn.Linear, post_projection: nn.Linear, head_weight: Tensor, clusters: ClusteredHead | None,
        sources: tuple[tuple[int, int, int], ...],
    ):  # fmt: skip
        super().__init__()
        self.layers, self.norm, self.rotary_emb, self.embed_tokens = layers, norm, rotary_emb, embed_tokens
        self.pre_projection, self.post_projection = pre_projection, post_projection
        self.head_weight, self.clusters, self.sources = head_weight, clusters, sources
        self.hidden_size = post_projection.out_features
        self.report: list[str] = []

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids, positions [B, R] int64, state [B, R, h] -> (recycled [B, R, h], normed [B, R, H]).

        recycled: the state for the next draft.
        normed: the factor of `head_weight`.

        The keys and values in the trace are zeros, in whose place `assistant.read_target` puts the target's cache.
        """
        x = self.pre_projection(torch.cat([self.embed_tokens(input_ids), state], dim=-1))
        for layer, (_, kv_heads, size) in zip(self.layers, self.sources):
            kind, absent = layer.self_attn.layer_type, x.new_zeros(x.shape[0], kv_heads, x.shape[1], size)
            x = layer(
                x, shared_kv_states={kind: (absent, absent)}, attention_mask=None, position_ids=positions,
                position_embeddings=self.rotary_emb(x, positions, kind),
            )  # fmt: skip
        normed = self.norm(x)
        return self.post_projection(normed), normed
