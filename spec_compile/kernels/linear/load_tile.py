"""Loads of the tiles that a step of a product multiplies. Import this module only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def addresses(pointer, row, stride, k):
    """The addresses [R, K] of the columns k [K] of rows [R] of a matrix."""
    return pointer + row.to(tl.int64)[:, None] * stride + k[None, :]


@triton.jit
def load_rows(x_at, start, k, n, rows, inputs, EVEN: tl.constexpr):
    """Activations [BLOCK_N, BLOCK_K] in the columns start + k of the rows n, 0 after the last row and column.

    x_at: `addresses` of the first columns. EVEN: no tile reaches beyond the inputs.
    """
    mask = (n < rows)[:, None]
    if not EVEN:
        mask = mask & (k < inputs - start)[None, :]
    return tl.load(x_at + start, mask=mask, other=0.0)


@triton.jit
def load_tile(w_at, x_at, start, k, n, rows, inputs, EVEN: tl.constexpr):
    """Weights [BLOCK_O, BLOCK_K], which are read once, and `load_rows` of the same columns."""
    if EVEN:
        a = tl.load(w_at + start, eviction_policy="evict_first")
    else:
        a = tl.load(w_at + start, mask=(k < inputs - start)[None, :], other=0.0, eviction_policy="evict_first")
    return a, load_rows(x_at, start, k, n, rows, inputs, EVEN)
