"""Muon, an optimizer of matrices: momentum whose singular values are all made about one.

Jordan et al. (2024), https://kellerjordan.github.io/posts/muon. Updates are scaled to the size of AdamW's, so that both
take the same learning rate (Liu et al., "Muon is scalable for LLM training", arXiv:2502.16982, section 2.2).
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM, ITERATIONS = 0.95, 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b, c of an iteration x -> a x + (b x x^T + c (x x^T)^2) x, which pushes singular values towards one."""


class Muon(torch.optim.Optimizer):
    """m <- 0.95 m + 0.05 g, and p <- p - lr * 0.2 sqrt(max(rows, columns)) * orthogonalised(0.95 m + 0.05 g).

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
