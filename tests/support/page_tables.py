"""Tables of pages for rows of different lengths, and rows of a cache in the pages of a pool."""

import math

import torch

PAGE = 64


def tables(lengths, nodes, width, seed=0):
    """Pages of each row, out of order, and 0, the scratch page, where a row has no page; and the count of pages."""
    needed = [math.ceil((length + nodes) / PAGE) for length in lengths]
    rng = torch.Generator().manual_seed(seed)
    order = (torch.randperm(sum(needed) + 2, generator=rng) + 1).tolist()  # two belong to nobody
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    return table, sum(needed) + 3


def pool_of(rows, table, pages):
    """Rows [B, Hkv, S, D] in a pool [P, Hkv, PAGE, D] that has NaN in all pages that are not in the table."""
    pool = torch.full((pages, rows.shape[1], PAGE, rows.shape[3]), torch.nan).to(rows.dtype)
    for row, entries in zip(rows, table.tolist()):
        for number, page in enumerate(entries):
            if page:
                pool[page] = row[:, number * PAGE : (number + 1) * PAGE]
    return pool
