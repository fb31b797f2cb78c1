"""`Updates` of a draft's weights, its optimizers, and the drafts that are accepted on held-out text."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .data import Batch, move
from .features import TargetFeatures
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


MOMENTUM, ITERATIONS = 0.95, 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b, c of an iteration x -> a x + (b x x^T + c (x x^T)^2) x, which pushes singular values towards one."""


class Muon(torch.optim.Optimizer):
    """Momentum whose singular values are all made about one (https://kellerjordan.github.io/posts/muon).

    m <- 0.95 m + 0.05 g, and p <- p - lr * 0.2 sqrt(max(rows, columns)) * orthogonalised(0.95 m + 0.05 g). Updates have
    the size of AdamW's, so that both take the same learning rate (Liu et al., "Muon is scalable for LLM training",
    arXiv:2502.16982, section 2.2).

    Matrices of one shape are updated together, because launching their kernels takes longer than they run.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float = 1e-3):
        """matrices: [rows, columns] each. lr: as of AdamW."""
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for shape, matrices in by_shape.items():
                step = self._direction(matrices) * (-group["lr"] * 0.2 * max(shape) ** 0.5)
                torch._foreach_add_(matrices, list(step.to(matrices[0].dtype)))

    def _direction(self, matrices: list[Tensor]) -> Tensor:
        """The orthogonalised momentum of matrices of one shape, [n, rows, columns]."""
        for matrix in matrices:
            if "momentum" not in self.state[matrix]:
                self.state[matrix]["momentum"] = torch.zeros_like(matrix)
        momentum, grads = [self.state[matrix]["momentum"] for matrix in matrices], [matrix.grad for matrix in matrices]
        torch._foreach_lerp_(momentum, grads, 1 - MOMENTUM)
        return orthogonalised(torch.stack(torch._foreach_lerp(grads, momentum, MOMENTUM)))


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with singular values of about one, by Newton-Schulz iterations.

    They run in bfloat16 on a GPU, whose products are then several times as fast, and else in float32.
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices.float()
    x = x.mT if x.shape[1] > x.shape[2] else x  # the smaller products
    x = x / x.float().norm(dim=(1, 2), keepdim=True).clamp(min=1e-7).to(x.dtype)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if matrices.shape[1] > matrices.shape[2] else x


def matrices_of(module: nn.Module) -> list[Tensor]:
    """The weights of a module's linear layers that are trained. Embeddings, tables and output matrices are none."""
    linears = (part for part in module.modules() if isinstance(part, nn.Linear))
    return [part.weight for part in linears if part.weight.requires_grad and min(part.weight.shape) > 1]
