"""Linear attention with decay: with the delta rule (Gated DeltaNet, Kimi Delta Attention), and without (Mamba-2).

Inputs, all float32: q, k [B, T, Hk, Dk], v [B, T, H, Dv], g [B, T, H] or [B, T, H, Dk] (logarithms of the decay), and
for the delta rule beta [B, T, H]. Head h reads the key head h // (H / Hk). State S [B, H, Dk, Dv] float32:

    decay:  S_i = e^g_i S + k_i v_i^T                                    o_i = S_i^T q_i
    delta:  S_i = e^g_i S + k_i beta_i (v_i - e^g_i S^T k_i)^T

Along a path both are S_i = e^G_i S_0 + the sum over ancestors j of e^T_ij k_j d_j^T. G_i sums g from the root to i, and
T_ij from the node after j to i. For decay d_j is v_j. For delta it solves a triangular system (the UT form of Yang et
al. 2024, "Gated Delta Networks", section 3.3, with ancestry in place of the causal mask). The system is solved by
substitution, because an inverse by repeated squaring fails in float32.
"""

import torch
from torch import Tensor

from .base import Inputs, RecurrenceKind, is_ancestor

BLOCK = 64
"""Tokens of a chain that are computed at once."""


def _state(inputs: Inputs) -> tuple[tuple[int, ...], torch.dtype]:
    _, k, v, *_ = inputs
    return (v.shape[2], k.shape[3], v.shape[3]), torch.float32


def _attend(inputs: Inputs, state: Tensor, sees: Tensor) -> tuple[Tensor | None, Tensor]:
    """Outputs [B, N, H, Dv] of the nodes of trees, and the state after the last node. sees [B, N, N]: `is_ancestor`."""
    q, k, v, g, *beta = inputs
    group = v.shape[2] // k.shape[2]
    # Heads first: q, k [B, H, N, Dk], v [B, H, N, Dv], g [B, H, 1 or Dk, N].
    q, k = (None if x is None else x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (q, k))
    v = v.transpose(1, 2)
    g = (g[..., None] if g.dim() == 3 else g).permute(0, 2, 3, 1)

    # Decays between a node and each of its ancestors are sums of g along the path. All terms have one sign, so nothing
    # cancels; the difference of two sums from the root would cancel.
    path = sees[:, None, None].to(v.dtype)  # [B, 1, 1, N, N]
    strict = path - torch.eye(v.shape[2], dtype=v.dtype, device=v.device)
    between = (path * g[..., None, :]) @ strict  # [B, H, 1 or Dk, N, N]
    decay = torch.where(sees[:, None, None], between, -torch.inf).exp()
    from_root = (path @ g[..., None]).squeeze(-1).transpose(2, 3).exp()  # [B, H, N, 1 or Dk]

    written = v
    if beta:
        (beta,) = (x.transpose(1, 2)[..., None] for x in beta)  # [B, H, N, 1]
        expected = (k * from_root) @ state
        system = beta * _products(k, k, decay) * strict[:, 0]
        written = torch.linalg.solve_triangular(system, beta * (v - expected), upper=False, unitriangular=True)
    after = state * from_root[:, :, -1, :, None]
    after = after + (k * decay[..., -1, :].transpose(2, 3)).transpose(2, 3) @ written
    if q is None:
        return None, after
    out = (q * from_root) @ state + _products(q, k, decay) @ written
    return out.transpose(1, 2), after


def _products(x: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """x_i . k_j with decay for each ancestor j of each node i, and 0 for other nodes j. -> [B, H, N, N]."""
    if decay.shape[2] == 1:
        return x @ k.transpose(2, 3) * decay[:, :, 0]
    return torch.einsum("bhic,bhjc,bhcij->bhij", x, k, decay)


def _chunk(inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
    """`RecurrenceKind.chunk` by blocks of BLOCK tokens. Tokens from valid[b] on have no decay and write nothing."""
    tokens, outputs = inputs[1].shape[1], []
    counts = torch.arange(tokens, device=state.device) < valid[:, None]
    q, k, v, g, *beta = inputs
    g = torch.where(counts.view(*counts.shape, *[1] * (g.dim() - 2)), g, 0)
    if beta:
        beta = [torch.where(counts[:, :, None], x, 0) for x in beta]
    else:
        v = torch.where(counts[:, :, None, None], v, 0)
    for begin in range(0, tokens, BLOCK):
        block = [None if x is None else x[:, begin : begin + BLOCK] for x in (q, k, v, g, *beta)]
        size = block[1].shape[1]
        chain = torch.ones(len(k), size, size, dtype=torch.bool, device=state.device).tril()
        out, state = _attend(block, state, chain)
        outputs.append(out)
    return (None if q is None else torch.cat(outputs, dim=1)), state


def _tree(inputs: Inputs, state: Tensor, ancestors: Tensor) -> Tensor:
    return _attend(inputs, state, is_ancestor(ancestors))[0].contiguous()


DECAY = RecurrenceKind("decay", kept=(1, 2, 3), constants=(), output=2, state=_state, chunk=_chunk, tree=_tree)
DELTA = RecurrenceKind("delta", kept=(1, 2, 3, 4), constants=(), output=2, state=_state, chunk=_chunk, tree=_tree)
