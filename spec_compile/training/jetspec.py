"""JetSpec drafts (arXiv:2606.18394): DFlash whose blocks are causal."""

import torch
from torch import Tensor

from .dflash import DFlashTrainer


class JetSpecTrainer(DFlashTrainer):
    """A DFlash draft each of whose slots sees of its block only what lies before it.

    All slots weigh alike in the loss: an early slot cannot be spent on the later ones, which it does not see.
    """

    name = "jetspec"
    causal = True

    def slot_weights(self) -> Tensor:
        return torch.ones(self.block_size)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        config, tensors = super().publish()
        config["dflash_config"]["causal_head"] = True
        return config, tensors
