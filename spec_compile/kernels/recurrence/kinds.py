"""The kinds of recurrences: the meaning of their inputs, and their computation over chains and trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..launching import new_op

Inputs = Sequence[Tensor | None]


@dataclass(frozen=True)
class RecurrenceKind:
    """A layer's recurrence, S_i = f(S_parent(i), inputs of token i), with an output for each token.

    Its inputs are a list of tensors [B, T, ...] with an entry for each token, except the constants. Linear attention
    has [q, k, v, g] and kept = (1, 2, 3), because k, v and g change the state and q only reads it.

    name: its key in `KINDS`.
    kept: numbers of the inputs that change the state; a commit reads them from a stash.
    constants: numbers of the inputs that are weights, without rows and tokens.
    output: number of the input that has the shape of the output; the output is float32.
    state: ``state(inputs)`` is the shape of a row's state, and its dtype.
    chunk: ``chunk(inputs, state, valid)`` is the outputs [B, T, ...] of a chain of T tokens after `state` [B, ...], and
        the state after the first valid[b] tokens. Outputs of later tokens mean nothing. If the inputs that are not kept
        are None, the outputs are None.
    tree: ``tree(inputs, state, ancestors)`` is the outputs of the nodes of a tree after `state`, which is not written.
    """

    name: str
    kept: tuple[int, ...]
    constants: tuple[int, ...]
    output: int
    state: Callable[[Inputs], tuple[tuple[int, ...], torch.dtype]]
    chunk: Callable[[Inputs, Tensor, Tensor], tuple[Tensor | None, Tensor]]
    tree: Callable[[Inputs, Tensor, Tensor], Tensor]


def is_ancestor(ancestors: Tensor) -> Tensor:
    """ancestors [B, N] int64 bits -> [B, N, N] bool: True at [b, i, j] if node j is node i or an ancestor of it.

    [0b1, 0b11, 0b101] gives [[1, 0, 0], [1, 1, 0], [1, 0, 1]].
    """
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    return ((ancestors[:, :, None] >> nodes) & 1).bool()


def parents_of(ancestors: Tensor) -> Tensor:
    """ancestors [B, N] int64 bits -> [B, N] int64: the parent of each node, -1 for the root.

    [0b1, 0b11, 0b101] gives [-1, 0, 0].
    """
    nodes = torch.arange(ancestors.shape[1], device=ancestors.device)
    above = is_ancestor(ancestors) & (nodes[:, None] > nodes)
    return torch.where(above, nodes, -1).amax(dim=2)


# Linear attention with decay: with the delta rule (Gated DeltaNet, Kimi Delta Attention), and without (Mamba-2).
#
# Inputs, all float32: q, k [B, T, Hk, Dk], v [B, T, H, Dv], g [B, T, H] or [B, T, H, Dk] (logarithms of the decay), and
# for the delta rule beta [B, T, H]. Head h reads the key head h // (H / Hk). State S [B, H, Dk, Dv] float32:
#
#     decay:  S_i = e^g_i S + k_i v_i^T                                    o_i = S_i^T q_i
#     delta:  S_i = e^g_i S + k_i beta_i (v_i - e^g_i S^T k_i)^T
#
# Along a path both are S_i = e^G_i S_0 + the sum over ancestors j of e^T_ij k_j d_j^T. G_i sums g from the root to i,
# and T_ij from the node after j to i. For decay d_j is v_j. For delta it solves a triangular system (the UT form of
# Yang et al. 2024, "Gated Delta Networks", section 3.3, with ancestry in place of the causal mask). The system is
# solved by substitution, because an inverse by repeated squaring fails in float32.


BLOCK = 64
"""Tokens of a chain that are computed at once."""


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


def _linear_chunk(inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
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


DECAY, DELTA = (
    RecurrenceKind(
        name, kept, constants=(), output=2, chunk=_linear_chunk,
        tree=lambda inputs, state, ancestors: _attend(inputs, state, is_ancestor(ancestors))[0].contiguous(),
        state=lambda inputs: ((inputs[2].shape[2], inputs[1].shape[3], inputs[2].shape[3]), torch.float32),
    )
    for name, kept in (("decay", (1, 2, 3)), ("delta", (1, 2, 3, 4)))
)  # fmt: skip


# Selective scan (Mamba-1), whose decay differs between channels and entries of the state.
#
#     h_i = e^(dt_i a) h_parent(i) + (dt_i x_i) b_i^T        y_i = h_i c_i
#
# Inputs, all float32: c, b [B, T, n]; x, dt [B, T, d]; a [d, n], negative. State h [B, d, n] float32. Nodes of a tree
# share no decays, so each is computed from the state after its parent.


def _selective_step(
    state: Tensor, c: Tensor | None, b: Tensor, x: Tensor, dt: Tensor, a: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Output [B, d] and next state [B, d, n] of a token: c, b [B, n], x, dt [B, d]. c: None if only the state is asked
    for."""
    state = (dt[:, :, None] * a).exp() * state + (dt * x)[:, :, None] * b[:, None]
    return None if c is None else (state @ c[:, :, None])[:, :, 0], state


# Recurrences whose channels do not mix: the gated linear unit RG-LRU (RecurrentGemma), and WKV (RWKV 4).
#
#     gated:  h_i = a_i h_parent(i) + x_i                            out_i = h_i
#     wkv:    n_i = e^w n_parent(i) + e^k_i v_i                      out_i = (n_parent(i) + e^(u + k_i) v_i)
#             d_i = e^w d_parent(i) + e^k_i                                / (d_parent(i) + e^(u + k_i))
#
# Inputs, all float32: of gated x, a [B, T, C] (De et al. 2024, "Griffin", section 2.4); of wkv k, v [B, T, C] and the
# weights w, u [C] (Peng et al. 2023, "RWKV", section 3.1). State of gated [B, C]. State of wkv [B, 3, C]: n and d
# divided by e^m, and m, the largest exponent so far, so that nothing overflows. d is 0 before the first token and at
# least 1 after it.


LOWEST = -1e38
"""The largest exponent of no token."""


def _gated_step(state: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Output and next state [B, C] of a token."""
    state = a * state + x
    return state, state


def _wkv_step(state: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Output [B, C] and next state [B, 3, C] of a token. u: None if only the state is asked for."""
    n, d, m = state.unbind(1)
    m, out = torch.where(d > 0, m, LOWEST), None
    if u is not None:
        top = torch.maximum(m, u + k)
        old, new = (m - top).exp(), (u + k - top).exp()
        out = (old * n + new * v) / (old * d + new)
    top = torch.maximum(m + w, k)
    old, new = (m + w - top).exp(), (k - top).exp()
    return out, torch.stack([old * n + new * v, old * d + new, top], dim=1)


# The selective scan and recurrences by channel, one token after the other.


STEPS: dict[str, tuple[Callable[..., tuple[Tensor | None, Tensor]], int]] = {
    "selective": (_selective_step, 4), "gated": (_gated_step, 2), "wkv": (_wkv_step, 2),
}  # fmt: skip
"""The step of a token, and how many inputs have entries for tokens, the last of them of the output's shape; all others
are weights."""


def _step(kind: str, inputs: Inputs, state: Tensor, token: int) -> tuple[Tensor | None, Tensor]:
    step, count = STEPS[kind]
    return step(state, *(None if x is None else x[:, token] for x in inputs[:count]), *inputs[count:])


def _stepped_chunk(kind: str, inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
    outputs = []
    for token in range(inputs[1].shape[1]):
        out, after = _step(kind, inputs, state, token)
        state = torch.where((token < valid).view(-1, *[1] * (state.dim() - 1)), after, state)
        outputs.append(out)
    return (None if outputs[0] is None else torch.stack(outputs, dim=1)), state


@new_op("stepped_tree", lambda kind, inputs, *_: inputs[0].new_empty(inputs[STEPS[kind][1] - 1].shape))
def stepped_tree(kind: str, inputs: list[Tensor], state: Tensor, ancestors: Tensor) -> Tensor:
    """Outputs [B, N, C] of the nodes of a tree. An op, because a compiled loop would have a fixed number of nodes."""
    rows, before = torch.arange(len(state), device=state.device), parents_of(ancestors) + 1
    states = state.new_empty(len(state), before.shape[1] + 1, *state.shape[1:])
    states[:, 0] = state
    # The selective scan reads the states of all nodes at once.
    given, outputs = [None, *inputs[1:]] if kind == "selective" else inputs, []
    for node in range(before.shape[1]):
        out, states[:, node + 1] = _step(kind, given, states[rows, before[:, node]], node)
        outputs.append(out)
    return (states[:, 1:] @ inputs[0][..., None])[..., 0] if kind == "selective" else torch.stack(outputs, dim=1)


SELECTIVE = RecurrenceKind(
    "selective", kept=(1, 2, 3, 4), constants=(4,), output=2,
    state=lambda inputs: (tuple(inputs[4].shape), torch.float32),
    chunk=partial(_stepped_chunk, "selective"), tree=partial(torch.ops.spec_compile.stepped_tree, "selective"),
)  # fmt: skip
GATED = RecurrenceKind(
    "gated", kept=(0, 1), constants=(), output=0, state=lambda inputs: ((inputs[0].shape[2],), torch.float32),
    chunk=partial(_stepped_chunk, "gated"), tree=partial(torch.ops.spec_compile.stepped_tree, "gated"),
)  # fmt: skip
WKV = RecurrenceKind(
    "wkv", kept=(0, 1, 2), constants=(2, 3), output=0, state=lambda inputs: ((3, inputs[0].shape[2]), torch.float32),
    chunk=partial(_stepped_chunk, "wkv"), tree=partial(torch.ops.spec_compile.stepped_tree, "wkv"),
)  # fmt: skip


# Short depthwise convolution over a token and its predecessors, with the last w committed inputs as its state.
#
#     out_i = weight[:, w - 1] * x_i + weight[:, w - 2] * x_parent(i) + ...    (w terms)
#
# Inputs: x [B, T, C]; weight [C, w]. State [B, w, C] of x's dtype, the oldest input first. No window reaches the
# oldest; it is kept because caches of transformers have it. With w = 4 and the state [q, r, s, t], a root a with
# children b and c has the windows [r, s, t, a], [s, t, a, b] and [s, t, a, c].


def shifted(state: Tensor, x: Tensor, valid: Tensor) -> Tensor:
    """The state [B, w, C] after the first valid[b] inputs of x [B, T, C]: the last of the state and of these.

    Entry e is entry e + valid of [state, x]. w = 4, the state [q, r, s, t] and x [a, b, c] give [s, t, a, b] if valid
    is 2.
    """
    history = state.shape[1]
    source = (valid[:, None] + torch.arange(history, device=x.device))[:, :, None].expand_as(state)
    old = state.gather(1, source.clamp(max=history - 1))
    new = x.gather(1, (source - history).clamp(min=0)).to(state.dtype)
    return torch.where(source < history, old, new)


def _window_chunk(inputs: Inputs, state: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor]:
    x, weight = inputs
    after = shifted(state, x, valid)
    if weight is None:
        return None, after
    known = torch.cat([state[:, 1:], x.to(state.dtype)], dim=1)
    columns = weight.float().unbind(1)
    return sum(known[:, tap : tap + x.shape[1]].float() * column for tap, column in enumerate(columns)), after


def _window_tree(inputs: Inputs, state: Tensor, ancestors: Tensor) -> Tensor:
    """`known` has the state and then the nodes; each of its entries has a predecessor among them.

    w = 4, parents [-1, 0, 0]: known = [r, s, t, a, b, c], predecessor = [0, 0, 1, 2, 3, 3]; the first entry has none,
    and no window reaches beyond it.
    """
    x, weight = inputs
    history, nodes = state.shape[1] - 1, x.shape[1]
    known = torch.cat([state[:, 1:], x.to(state.dtype)], dim=1)
    parents = parents_of(ancestors)
    before = torch.arange(-1, history - 1, device=x.device).expand(len(x), -1)
    predecessor = torch.cat([before, parents + history], dim=1).clamp(min=0)
    entry = torch.arange(history, history + nodes, device=x.device).expand(len(x), -1)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for column in reversed(weight.float().unbind(1)):
        out = out + known.gather(1, entry[:, :, None].expand(-1, -1, x.shape[2])).float() * column
        entry = predecessor.gather(1, entry)
    return out


CONVOLUTION = RecurrenceKind(
    "convolution", kept=(0,), constants=(1,), output=0, chunk=_window_chunk, tree=_window_tree,
    state=lambda inputs: ((inputs[1].shape[1], inputs[0].shape[2]), inputs[0].dtype),
)  # fmt: skip
