"""DFlash drafts (arXiv:2602.06036, section 4): whole blocks, begun at random places of a text."""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..drafters.checkpoints.target import Target
from ..drafters.modules.confidence import Confidence
from ..drafters.modules.dflash import DFlashDraft
from ..drafters.modules.layers import LayerKnobs
from ..drafters.modules.transitions import Transition
from ..passes.tap_hidden_states import FINAL
from .blocks import BlockAttention, Blocks, BlockTrainer
from .data import Batch
from .options import LAYER_OPTIONS, TrainingOptions
from .sizes import check_taps, draft_config, published_config
from .trainer import as_master, seeded

STATES = 5
"""States of the target that a draft reads by default."""


class DFlashTrainer(BlockTrainer):
    """Five layers over five of the target's states, unless options name other numbers.

    The mask token, which fills a block's slots after the first, is the token that is supervised least often.
    """

    name = "dflash"
    takes = LAYER_OPTIONS | {"taps", "block_size", "per_position_loss_weight"}
    learning_rate = (2.4, 2e-3)
    default_block_size = 16
    architecture = "DFlashDraftModel"

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.target, self.device = target, target.embedding.device
        self.config = draft_config(target, options, layers=5)
        self.block_size = options.block_size or self.default_block_size
        self.position_weight = options.per_position_loss_weight or self.position_weight
        taps = default_taps(target.num_layers) if options.taps is None else options.taps
        check_taps(taps, target.num_layers)
        self.mask = rarest_token(counts)
        knobs = LayerKnobs(num_layers=self.config.num_hidden_layers, qk_norm=True)
        embedding, output = target.embedding.detach(), target.head_weight.detach()
        with seeded(options.seed):
            draft = DFlashDraft(
                self.config, embedding, output, taps, self.block_size, self.mask, knobs,
                sample_from_anchor=self.first == 0, causal=(self.causal,) * knobs.num_layers,
            )  # fmt: skip
            draft.transition, draft.confidence = self.link(options)
        self.module = as_master(draft, embedding).eval()
        self.taps, self.steps = (*taps, FINAL), self.block_size - self.first

    @classmethod
    def of_module(cls, target: Target, module: DFlashDraft, steps: int) -> "DFlashTrainer":
        """As `HeadTrainer.of_module`. All `steps` of a block are trained."""
        trainer = cls.__new__(cls)
        trainer.target, trainer.device, trainer.module = target, target.embedding.device, module.eval()
        trainer.block_size, trainer.mask, trainer.steps = module.block_size, module.mask_token_id, steps
        trainer.taps = (*module.taps, FINAL)
        return trainer

    def link(self, options: TrainingOptions) -> tuple[Transition | None, Confidence | None]:
        """The draft's transition and its prediction of acceptance, with weights to begin with; DFlash has none."""
        return None, None

    def tokens(self, batch: Batch, drawn: Blocks) -> tuple[Tensor, Tensor]:
        """See `BlockTrainer`. A block is a row, [B * n, T]: its anchor's token and masks."""
        first = batch.ids.gather(1, drawn.anchors)[:, :, None]
        ids = F.pad(first, (0, self.block_size - 1), value=self.mask).flatten(0, 1)
        return ids, (drawn.anchors[:, :, None] + torch.arange(self.block_size)).flatten(0, 1)

    def states(self, ids: Tensor, positions: Tensor, anchors: Tensor, states: list[Tensor]) -> Tensor:
        draft = self.module
        x = F.embedding(ids, draft.embedding)
        rope = draft.rotary_emb(x, positions)
        with DFlashAttention(draft, draft.project(states), anchors):
            for block in draft.blocks:
                x = block(x, rope)
        return draft.norm(x).unflatten(0, anchors.shape)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The tensors by z-lab's names. The embedding and the output matrix are the target's and not among them."""
        tensors = {name.replace("blocks.", "layers."): value for name, value in self.module.state_dict().items()}
        config = published_config(
            self.config, self.target, self.architecture,
            model_type="qwen3",
            num_target_layers=self.target.num_layers,
            block_size=self.block_size,
            layer_types=["full_attention"] * self.config.num_hidden_layers,
            dflash_config={"target_layer_ids": [tap - 1 for tap in self.module.taps], "mask_token_id": self.mask},
        )  # fmt: skip
        return config, tensors


class DFlashAttention(BlockAttention):
    """Attention of DFlash's blocks, whose context is made of the target's states.

    A slot sees its whole block, or in causal layers of the draft only itself and earlier slots. A layer passes queries,
    keys and values with a row for each block, [B * n, ...].
    """

    def __init__(self, draft: DFlashDraft, context: Tensor, anchors: Tensor):
        """context: [B, L, h], of which each layer makes keys and values. anchors: see `Blocks`."""
        super().__init__(anchors, draft.block_size)
        self.draft, self.context, self.shape = draft, context, anchors.shape
        positions = torch.arange(context.shape[1], device=context.device)[None]
        self.rope = draft.rotary_emb(context, positions)

    def attend(self, q, k, v, sinks, scale, window, softcap, layer):
        """As in `Causal`."""
        module = self.draft.blocks[layer].self_attn
        # Keys and values of the context are made once a sequence, [B, Hkv, L, D], and shared by its n blocks.
        projections = module.k_proj, module.v_proj
        keys, values = (project(self.context).unflatten(2, (-1, module.head_dim)) for project in projections)
        keys = module.k_norm(keys).transpose(1, 2)
        keys, values = apply_rotary_pos_emb(keys, keys, *self.rope)[1], values.transpose(1, 2)
        q, k, v = (heads.unflatten(0, self.shape).transpose(1, 2) for heads in (q, k, v))
        out = self.attend_blocks(q, k, v, keys, values, scale, self.draft.causal[layer])
        return out.unflatten(1, (self.shape[1], -1)).flatten(0, 1)


def rarest_token(counts: Tensor) -> int:
    """The token that is supervised least often, the last of several. counts: [V]."""
    return len(counts) - 1 - int(counts.flip(0).argmin())


def default_taps(num_layers: int) -> tuple[int, ...]:
    """`STATES` taps, evenly from layer 2 to the last but two; in a small model from the first to the last layer."""
    if num_layers >= STATES + 3:
        return tuple(2 + round(i * (num_layers - 4) / (STATES - 1)) for i in range(STATES))
    count = min(STATES, num_layers)
    return tuple(1 + round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count))
