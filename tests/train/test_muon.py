"""Muon: its updates beside PyTorch's, one matrix at a time, and the matrices that it is given."""

import pytest
import torch
from torch import nn

from spec_compile.train.updates import Muon, matrices_of, orthogonalised


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_pytorch(dtype):
    """Matrices of one shape are updated together; one without a gradient stays as it is."""
    shapes = [(12, 5), (5, 12), (12, 5), (8, 8), (1, 6), (12, 5)]
    g = torch.Generator().manual_seed(0)
    mine = [torch.randn(shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in mine]
    one = Muon(mine)
    other = torch.optim.Muon(theirs, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for group in (*one.param_groups, *other.param_groups):
            group["lr"] = 0.01 * (step + 1)
        for a, b in zip(mine[:-1], theirs[:-1]):
            a.grad = torch.randn(a.shape, generator=g, dtype=dtype)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    assert torch.equal(mine[-1], theirs[-1])
    for a, b in zip(mine, theirs):
        assert torch.allclose(a, b, atol=4e-3), (a - b).abs().max()


def test_singular_values_are_about_one():
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(1))
    for x in (matrices, matrices.mT, torch.zeros(1, 4, 4) + torch.eye(4) * 1e-3):
        values = torch.linalg.svdvals(orthogonalised(x).float())
        assert values.min() > 0.5 and values.max() < 1.4


def test_only_linear_layers_are_matrices():
    module = nn.ModuleDict(
        {"layer": nn.Linear(4, 6), "one": nn.Linear(4, 1), "table": nn.Embedding(9, 4), "frozen": nn.Linear(4, 4)}
    )
    module["frozen"].weight.requires_grad_(False)
    assert [id(matrix) for matrix in matrices_of(module)] == [id(module["layer"].weight)]
