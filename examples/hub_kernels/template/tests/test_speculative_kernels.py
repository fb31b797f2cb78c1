"""Both functions against plain PyTorch, in float32 and, on a GPU, in bfloat16."""

import importlib

import torch
from torch.nn import functional as F

PLACES = [("cpu", torch.float32)] + [("cuda", torch.bfloat16)] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PARENTS = [-1, 0, 0, 1, 1, 3]
"""Of a tree; node 5's path is 0, 1, 3, 5."""


def kernels():
    return importlib.import_module("speculative_kernels")


def ancestors_of(parents: list[int]) -> list[int]:
    """Bits: [-1, 0, 0, 1] -> [0b0001, 0b0011, 0b0101, 0b1011]."""
    bits = []
    for node, parent in enumerate(parents):
        bits.append(1 << node | (bits[parent] if parent >= 0 else 0))
    return bits


def draw(place, lengths, nodes, heads=4, kv_heads=2, size=24, slots=128):
    device, dtype = place
    batch, options = len(lengths), {"device": device, "dtype": dtype}
    q = torch.randn(batch, heads, nodes, size, **options)
    k, v = (torch.randn(batch, kv_heads, nodes, size, **options) for _ in range(2))
    caches = [torch.randn(batch, kv_heads, slots, size, **options) for _ in range(2)]
    return q, k, v, torch.tensor(lengths, device=device), caches


def attended(q, k, v, seen, lengths, caches, window=None, softcap=None, sinks=None):
    """[B, N, H, D] in float64, node by node. seen: of each node, the nodes that it sees, in the order of positions."""
    group, out = q.shape[1] // k.shape[1], q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).double()
    for row, length in enumerate(lengths.tolist()):
        for node, nodes in enumerate(seen):
            keys, values = (
                torch.cat([cache[row, :, :length], new[row, :, nodes]], 1).double().repeat_interleave(group, 0)
                for cache, new in zip(caches, (k, v))
            )
            keys, values = (x[:, -window:] if window else x for x in (keys, values))
            scores = (keys @ q[row, :, node].double()[:, :, None])[..., 0] * q.shape[3] ** -0.5
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            extra = [] if sinks is None else [sinks[:, None].double()]
            shares = torch.cat([scores, *extra], 1).softmax(1)[:, : scores.shape[1]]
            out[row, node] = (shares[:, None] @ values)[:, 0]
    return out


def check(out, expected):
    assert out.shape == expected.shape and out.is_contiguous()
    assert (out.double() - expected).norm() <= TOLERANCE[out.dtype] * expected.norm()


def test_trees():
    for place in PLACES:
        for options in ({}, {"window": 3}, {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}):
            q, k, v, lengths, caches = draw(place, [70, 0, 33], len(PARENTS))
            options = {name: x.to(q) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            bits = ancestors_of(PARENTS)
            seen = [[j for j in range(len(bits)) if each >> j & 1] for each in bits]
            expected = attended(q, k, v, seen, lengths, caches, **options)
            ancestors = torch.tensor([bits] * 3, device=place[0])
            check(kernels().tree_attention(q, k, v, ancestors, lengths, *caches, **options), expected)
            assert torch.equal(caches[0][2, :, 33:39], k[2]) and torch.equal(caches[1][0, :, 70:76], v[0])


def test_a_prompt_and_single_tokens():
    for place in PLACES:
        for nodes in (1, 80):
            q, k, v, lengths, caches = draw(place, [40, 5], nodes)
            seen = [[*range(node + 1)] for node in range(nodes)]
            expected = attended(q, k, v, seen, lengths, caches)
            check(kernels().tree_attention(q, k, v, None, lengths, *caches), expected)


def test_pages():
    """Rows of two pages of 64 slots that lie apart, with page 0 as scratch, give what whole rows give."""
    for place in PLACES:
        q, k, v, lengths, caches = draw(place, [70, 62], 3)
        table = torch.tensor([[4, 1], [2, 3]], dtype=torch.int32, device=place[0])
        pages = [torch.zeros(5, 2, 64, 24).to(cache) for cache in caches]
        for new, cache in zip(pages, caches):
            new[table.flatten()] = cache.unflatten(2, (2, 64)).transpose(1, 2).flatten(0, 1)
        ancestors = torch.tensor([ancestors_of([-1, 0, 0])] * 2, device=place[0])
        expected = kernels().tree_attention(q, k, v, ancestors, lengths, *caches)
        check(kernels().tree_attention(q, k, v, ancestors, lengths, *pages, table=table), expected.double())
        assert torch.equal(pages[0][3, :, 0], k[1, :, 2])  # slot 64 of the second row


def test_products():
    for device, dtype in PLACES:
        for shape, outputs in (((1, 64), 48), ((3, 5, 96), 33)):
            x = torch.randn(shape, device=device, dtype=dtype)
            weight = torch.randn(outputs, shape[-1], device=device, dtype=dtype) / shape[-1] ** 0.5
            check(kernels().few_rows_linear(x, weight), F.linear(x.double(), weight.double()))


def test_wrong_shapes_are_named():
    q, k, v, lengths, caches = draw(PLACES[0], [4], 2)
    ancestors = torch.tensor([[1, 3]])
    wrong = {
        "k": (q, k[:, :1], v, ancestors, lengths, *caches),
        "ancestors": (q, k, v, ancestors[:, :1], lengths, *caches),
        "lengths": (q, k, v, ancestors, lengths.int(), *caches),
        "q": (q[0], k, v, ancestors, lengths, *caches),
        "v": (q, k, v.double(), ancestors, lengths, *caches),
        "the cache of v": (q, k, v, ancestors, lengths, caches[0], caches[1][..., :8]),
    }
    for name, arguments in wrong.items():
        assert message(kernels().tree_attention, *arguments).startswith(f"{name}: expected")
    table = torch.zeros(1, 1, dtype=torch.int32)
    assert message(kernels().tree_attention, q, k, v, ancestors, lengths, *caches, table=table).startswith("table")
    assert message(kernels().few_rows_linear, q, k).startswith("weight: expected 2 dimensions")


def message(function, *arguments, **named) -> str:
    try:
        function(*arguments, **named)
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError")
