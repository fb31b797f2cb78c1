"""`Updates`: the optimizers of a draft, a step of them, and the drafts that are accepted on held-out text."""

import torch
from torch import Tensor

from .data import Batch, move
from .features import TargetFeatures
from .muon import Muon, matrices_of
from .trainer import Trainer, trained_parameters

BETAS = (0.9, 0.95)
"""The coefficients of AdamW."""


class Updates:
    """Updates the weights of a trainer's draft."""

    def __init__(
        self, trainer: Trainer, features: TargetFeatures, optimizer: str | None, learning_rate: float | None,
        clip: float,
    ):  # fmt: skip
        """optimizer, learning_rate, clip: see `TrainingOptions`."""
        self.trainer, self.features, self.clip = trainer, features, clip
        self.device, dtype = features.model.device, features.model.dtype
        self._mixed = self.device.type == "cuda" or dtype.itemsize == 2
        self.parameters = trained_parameters(trainer.module)
        size, highest = trainer.learning_rate
        self.learning_rate = learning_rate or min(size / trainer.module.hidden_size, highest)
        self.optimizers = self._make_optimizers(optimizer or trainer.optimizer)

    def _make_optimizers(self, name: str) -> list[torch.optim.Optimizer]:
        """AdamW, or Muon for the matrices of linear layers and AdamW for all else."""
        matrices = matrices_of(self.trainer.module) if name == "muon" else []
        taken = {id(matrix) for matrix in matrices}
        others = [parameter for parameter in self.parameters.values() if id(parameter) not in taken]
        adamw = torch.optim.AdamW(others, betas=BETAS, weight_decay=0.0, fused=self.device.type == "cuda")
        return [Muon(matrices), adamw] if matrices else [adamw]

    def step(self, batch: Batch, seed: int, factor: float = 1.0) -> Tensor:
        """Update the weights once. Returns the loss, a scalar on the device.

        seed: of the random numbers of this step
        factor: of the learning rate
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        features = self.features(move(batch.ids, self.device), self.trainer.learns_from_choices)
        with self._precision():
            loss = self.trainer.loss(batch, features, generator)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * factor
            optimizer.step()
        return loss.detach()

    def count(self, batches: list[Batch], steps: int, *others: Trainer) -> Tensor:
        """(drafts that reach a depth, drafts that equal the target's choices down to it) of the draft, [1, steps, 2].

        others: trainers of other drafts that read the same states, whose counts follow, [1 + others, steps, 2]
        """
        trainers = (self.trainer, *others)
        counts = torch.zeros(len(trainers), steps, 2, dtype=torch.int64)
        for batch in batches:
            features = self.features(move(batch.ids, self.device))
            with self._precision():
                counts += torch.tensor([list(each.accepted(batch, features, steps)) for each in trainers])
        return counts

    def _precision(self) -> torch.autocast:
        """The context of forwards: bfloat16 matrix products on a GPU or with a model in 16 bits."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._mixed)
