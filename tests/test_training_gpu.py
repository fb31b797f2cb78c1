"""Training's kernels, and its CUDA graphs: those of a head's rollout against its launches, and on a GPU itself."""

import pytest
import torch

from spec_compile.training.attention import join, join_backward

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def parts(batch, heads, slots, size, steps, dtype, device):
    """What `join` and `join_backward` take: (q, keys, values, causal, total), grad, dq."""
    g = torch.Generator().manual_seed(steps)

    def made(*shape):
        return torch.randn(shape, generator=g).to(device, dtype)

    q, causal, grad, dq = (made(batch, slots, heads, size).transpose(1, 2) for _ in range(4))
    keys, values = made(2, steps, batch, slots, heads, size)
    total = 3 * torch.randn(batch, heads, slots, generator=g).to(device)
    # The edges: a slot whose causal part has nearly all of the shares, and one where it has nearly none.
    total[0, 0, 0], total[-1, -1, -1] = 80.0, -80.0
    return (q, keys, values, causal, total), grad, dq


def compare_joins(sizes, dtype, device, tolerance):
    """The kernels against PyTorch's operations in float64."""
    rollout_kernel = pytest.importorskip("spec_compile.kernels.rollout_kernel")
    inputs, grad, dq = parts(*sizes, dtype, device)
    exact = [part.double() for part in inputs]
    out, joint = rollout_kernel.join(*inputs, 0.3)
    wanted_out, wanted_joint = join(*exact, 0.3)
    assert out.dtype == dtype and joint.dtype == torch.float32 and out.shape == grad.shape
    mine = [out, joint, *rollout_kernel.join_backward(grad, *inputs[:3], out, joint, dq, 0.3)]
    theirs = join_backward(grad.double(), *exact[:3], out.double(), joint.double(), dq.double(), 0.3)
    for got, wanted in zip(mine, [wanted_out, wanted_joint, *theirs]):
        assert got.shape == wanted.shape and torch.allclose(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 64, 1), (2, 3, 5, 80, 7), (1, 2, 37, 128, 3), (3, 1, 11, 24, 2)], ids=str)
def test_drafted_keys_in_one_kernel(sizes):
    compare_joins(sizes, torch.float32, "cpu", 1e-4)


def test_joined_attention_differentiates():
    """`join_backward` against autograd through `join` in float64, for keys and values and the query's own part."""
    (q, keys, values, causal, total), grad, dq = parts(2, 2, 4, 8, 3, torch.float64, "cpu")
    q, keys, values = (part.detach().clone().requires_grad_() for part in (q, keys, values))
    out, joint = join(q, keys, values, causal, total.double(), 0.3)
    wanted = torch.autograd.grad((out * grad).sum(), [q, keys, values])
    got = join_backward(grad, q, keys, values, out, joint, dq, 0.3)
    for mine, theirs in zip((got[0] - dq, *got[1:]), wanted):
        assert torch.allclose(mine, theirs)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 64, 1), (2, 3, 511, 80, 7), (4, 9, 447, 64, 6), (2, 4, 300, 128, 3)], ids=str
)
def test_drafted_keys_on_a_gpu(sizes):
    compare_joins(sizes, torch.bfloat16, "cuda", 2e-2)
