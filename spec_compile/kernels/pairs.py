"""Sums in pairs, whose order of additions does not depend on how numbers are distributed over threads.

    [a, b, c, d] -> [a + b, c + d] -> (a + b) + (c + d)

Import this module only where Triton is installed. Sizes are powers of two up to 4096. A sum of squares of 16-bit
numbers is the same with and without fused multiply-adds, because such squares are exact in float32.
"""

import triton
import triton.language as tl


@triton.jit
def sum_in_pairs(x, R: tl.constexpr, SIZE: tl.constexpr):
    """x [R, SIZE] -> [R]."""
    for halving in tl.static_range(1, 13):
        if SIZE >> halving > 0:
            x = tl.sum(tl.reshape(x, [R, SIZE >> halving, 2]), 2)
    return tl.reshape(x, [R])


@triton.jit
def sum_rows_in_pairs(x, GROUPS: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """x [GROUPS * SIZE, N] -> [GROUPS, N], sums of SIZE rows each."""
    for halving in tl.static_range(1, 13):
        if SIZE >> halving > 0:
            x = tl.sum(tl.reshape(x, [GROUPS * (SIZE >> halving), 2, N]), 1)
    return tl.reshape(x, [GROUPS, N])
