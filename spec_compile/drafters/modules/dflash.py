"""The draft of DFlash (block diffusion for flash speculative decoding, arXiv:2602.06036): a block of tokens at once.

A block is the last committed token and masks after it. Its layers attend to the block itself and to a context: keys
and values that each layer makes of the target's states at the committed tokens, which nothing ever changes. So only the
last token of the text is fed to the draft, and a block is drafted in one forward.

Shapes: B rows, T slots, h the target's hidden size, which is the draft's, V the vocabulary, Vd the words it can draft.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

from ..draft_weights import DraftWeights
from .confidence import Confidence
from .layers import ConvolvedLayer, Layer, LayerKnobs, rotary
from .transitions import Transition, table_rank


class DFlashDraft(nn.Module):
    """A DFlash draft: ``project`` the target's states for the context, then ``forward`` over a block.

    embedding [V, h], head_weight [Vd, h]: may be the target's own parameters; moving or casting the draft would then
    move or cast the target.
    draft_to_target [Vd] int64: the target's id of each row of head_weight (None: row i is token i).
    mask_embedding [h]: of the mask (None: its row of the embedding).

    taps: the target's states that it reads, numbered as in `head.Head`.
    block_size: slots of a block it was trained with.
    sample_from_anchor: slot j of a block at position p drafts the token at p + j + 1, so that there are as many drafts
    as slots (DSpark, DeepSpec); else it drafts the token at p + j, and the first slot drafts none.
    causal: True for each layer whose slots see only the slots before them in the block.
    embedding_scale: factor of the block's embeddings.
    output_scale, softcap: logits become ``softcap * tanh(output_scale * logits / softcap)``.
    transition: how a block's drafts depend on each other (None: they do not).
    confidence: predicts their acceptance (None: it does not). It reads W1 of `transition` if its rank is not 0;
        ValueError if `transition` has no W1 of this rank.
    """

    flavour = "DFlash"

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        head_weight: Tensor,
        taps: tuple[int, ...],
        block_size: int,
        mask_token_id: int,
        layer: LayerKnobs,
        sample_from_anchor: bool = False,
        causal: tuple[bool, ...] = (),
        embedding_scale: float = 1.0,
        output_scale: float = 1.0,
        softcap: float | None = None,
        transition: Transition | None = None,
        confidence: Confidence | None = None,
    ):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_size, self.taps, self.block_size, self.mask_token_id = size, tuple(taps), block_size, mask_token_id
        self.sample_from_anchor, self.causal = sample_from_anchor, causal or (False,) * layer.num_layers
        self.embedding_scale, self.output_scale, self.softcap = embedding_scale, output_scale, softcap
        self.embedding, self.head_weight = embedding, head_weight
        self.register_parameter("mask_embedding", None)
        self.register_buffer("draft_to_target", None, persistent=False)
        self.fc = nn.Linear(len(taps) * size, size, bias=False)
        self.hidden_norm, self.norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        block = ConvolvedLayer if layer.conv_taps else Layer
        self.blocks = nn.ModuleList(block(config, number, layer) for number in range(layer.num_layers))
        if confidence is not None and confidence.rank not in (0, table_rank(transition)):
            raise ValueError(
                f"confidence: it reads {confidence.rank} numbers of the token before, and the transition's table has "
                f"{table_rank(transition)}; give it a Markov transition of this rank, or a rank of 0"
            )
        self.transition, self.confidence = transition, confidence
        self.rotary_emb = rotary(config, embedding.device)
        self.report: list[str] = []

    @property
    def first(self) -> int:
        """The first slot of a block that drafts."""
        return 0 if self.sample_from_anchor else 1

    def project(self, features: list[Tensor]) -> Tensor:
        """The tapped states, each [B, T, h], in the order of `taps` -> the context [B, T, h]."""
        return self.hidden_norm(self.fc(torch.cat(features, dim=-1)))

    def forward(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """input_ids, positions [B, T] int64 of blocks -> (logits [B, T, Vd],), also for a slot that drafts nothing, or
        with a transition or a confidence (logits, the normed states [B, T, h] that they come from)."""
        x = F.embedding(input_ids, self.embedding)
        if self.mask_embedding is not None:
            x = torch.where((input_ids == self.mask_token_id)[:, :, None], self.mask_embedding, x)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        rope = self.rotary_emb(x, positions)
        for block in self.blocks:
            x = block(x, rope)
        normed = self.norm(x)
        logits = F.linear(normed, self.head_weight)
        if self.output_scale != 1:
            logits = logits * self.output_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return (logits,) if self.transition is None and self.confidence is None else (logits, normed)

    def log_confidence(self, normed: Tensor, previous: Tensor | None = None) -> Tensor | None:
        """Logarithms [...] float32 of the chances that drafts are accepted; None if the draft does not predict them.

        normed [..., h]: of their places.
        previous [...] int64: the target's ids of the tokens before them, which only drafts with a transition need. Both
            are broadcast, see `Confidence.forward`.
        """
        if self.confidence is None:
            return None
        before = self.transition.embed(previous) if self.confidence.rank else None
        return self.confidence(normed, before)


class ContextProjection(nn.Module):
    """Makes the keys and values of the context of all layers in one product.

    It holds the layers' key and value projections a second time, stacked.

    weights: of the draft; the stacked matrix may have a copy in fewer bits.
    parts: equal stretches that the key-value heads are cut into.
    part: the stretch that it holds.
    """

    def __init__(self, draft: DFlashDraft, weights: DraftWeights, parts: int = 1, part: int = 0):
        super().__init__()
        self.parts, self.part = parts, part
        first = draft.blocks[0].self_attn
        self.draft, self.head_dim, self.eps = draft, first.head_dim, first.k_norm.variance_epsilon
        for name, value in self._stacked().items():
            self.register_buffer(name, value, persistent=False)
        self.copy = weights.linear(self.weight, self.bias)

    def _stacked(self) -> dict[str, Tensor | None]:
        layers = [block.self_attn for block in self.draft.blocks]
        linears = [linear for layer in layers for linear in (layer.k_proj, layer.v_proj)]
        biased = linears[0].bias is not None
        return {
            "weight": torch.cat([self._rows(linear.weight) for linear in linears]),
            "bias": torch.cat([self._rows(linear.bias) for linear in linears]) if biased else None,
            "key_norm": torch.stack([layer.k_norm.weight.detach() for layer in layers])[:, None],
        }

    def _rows(self, tensor: Tensor) -> Tensor:
        """The rows of a projection for the stretch of heads."""
        return tensor.detach().chunk(self.parts)[self.part]

    def refresh(self) -> None:
        """The draft's projections have changed: stack them again."""
        for name, value in self._stacked().items():
            if value is not None:
                getattr(self, name).copy_(value)

    def forward(self, features: list[Tensor], positions: Tensor) -> list[Tensor]:
        """The tapped states [B, T, h] of tokens at positions [B, T] -> key, value, key, ... of each layer in turn,
        [B, Hkv, T, D]."""
        x = self.draft.project(features)
        out = F.linear(x, self.weight, self.bias) if self.copy is None else self.copy(x)
        parts = out.unflatten(2, (len(self.key_norm), 2, -1, self.head_dim))
        keys, values = parts.unbind(dim=3)  # [B, T, layers, Hkv, D]
        wide = keys.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        keys = self.key_norm * normed.to(keys.dtype)
        cos, sin = (angle[:, :, None, None] for angle in self.draft.rotary_emb(x, positions))
        keys = keys * cos + rotate_half(keys) * sin
        return [part[:, :, i].transpose(1, 2) for i in range(keys.shape[2]) for part in (keys, values)]
