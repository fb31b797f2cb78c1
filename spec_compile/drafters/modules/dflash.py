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

from ...runtime.state import State
from ..draft_weights import DraftWeights
from ..trees.propose import BlockProposer
from .layers import LayerKnobs, rotary


class DFlashDraft(nn.Module):
    """A DFlash draft: ``project`` the target's states for the context, then ``forward`` over a block.

    embedding [V, h], head_weight [Vd, h]: may be the target's own parameters; moving or casting the draft would then
    move or cast the target.
    draft_to_target [Vd] int64: the target's id of each row of head_weight (None: row i is token i).
    mask_embedding [h]: of the mask (None: its row of the embedding).

    taps: the target's states that it reads, numbered as in `eagle.Head`.
    block_size: slots of a block it was trained with.
    sample_from_anchor: slot j of a block at position p drafts the token at p + j + 1, so that there are as many drafts
    as slots (DSpark, DeepSpec); else it drafts the token at p + j, and the first slot drafts none.
    causal: True for each layer whose slots see only the slots before them in the block.
    embedding_scale: factor of the block's embeddings.
    output_scale, softcap: logits become ``softcap * tanh(output_scale * logits / softcap)``.
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
        self.blocks = nn.ModuleList(layer.make(config, number) for number in range(layer.num_layers))
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
        """input_ids, positions [B, T] int64 of blocks -> (logits [B, T, Vd],), also for a slot that drafts nothing."""
        return (self.logits(self.states(input_ids, positions)),)

    def states(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The normed states [B, T, h] that the logits come from."""
        x = F.embedding(input_ids, self.embedding)
        if self.mask_embedding is not None:
            x = torch.where((input_ids == self.mask_token_id)[:, :, None], self.mask_embedding, x)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        rope = self.rotary_emb(x, positions)
        for block in self.blocks:
            x = block(x, rope)
        return self.norm(x)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [B, T, Vd] of normed states."""
        logits = F.linear(normed, self.head_weight)
        if self.output_scale != 1:
            logits = logits * self.output_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def describe(self) -> list[str]:
        """Lines about its further parts, for its report."""
        return []

    def proposer(self, *how) -> BlockProposer:
        """Proposes trees by the output of `forward`. how: the arguments of `BlockProposer`."""
        return BlockProposer(*how).to(self.embedding.device)

    def propose(self, proposer: BlockProposer, state: State, logits: Tensor) -> None:
        """Propose trees below the last committed tokens. logits: the output of `forward`."""
        proposer.propose(state, logits, self.first, self.draft_to_target)


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
