"""JetSpec drafts (arXiv:2606.18394): DFlash whose blocks are causal."""

import torch
from torch import Tensor

from .dflash import DFlashTrainer


class JetSpecTrainer(DFlashTrainer):
    """A DFlash draft in which a slot sees, of its block, only itself and earlier slots.

    All slots have the same weight in the loss, because an early slot does not see the later ones and cannot help them.
    """

    name = "jetspec"
    causal = True

    def slot_weights(self) -> Tensor:
        return torch.ones(self.block_size)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        config, tensors = super().publish()
        config["dflash_config"]["causal_head"] = True
        return config, tensors
