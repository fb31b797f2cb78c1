"""Cases of tree attention: trees, strided inputs, and the kernels' results against their plain meaning."""

import random

import torch
from places import places

from spec_compile.kernels.attention import tree_attention as attention
from spec_compile.kernels.attention.base import AttentionCall, plain_attention
from spec_compile.tree import ancestry

PLACES = places(torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-6
SMALL = attention.Tuning(block_m=16, block_n=16, least=32, warps=4, stages=2)


def chain(nodes):
    return list(range(-1, nodes - 1))


def star(nodes):
    return [-1] + [0] * (nodes - 1)


def random_tree(nodes):
    return [-1, *(random.Random(nodes * 100 + i).randrange(i) for i in range(1, nodes))]


def merged(batch, nodes, heads, sizes, dtype):
    """Views [B, heads, N, size] of one product, as a merged projection gives them, among NaN that nobody may read."""
    columns = sum(count * size for count, size in zip(heads, sizes))
    product = torch.full((batch + 1, nodes + 2, columns + 8), torch.nan, dtype=dtype)[:batch, 1:-1, 8:]
    product.copy_(torch.randn(batch, nodes, columns))
    parts = product.split([count * size for count, size in zip(heads, sizes)], dim=2)
    return [part.unflatten(2, (count, size)).transpose(1, 2) for part, count, size in zip(parts, heads, sizes)]


def move(x, device):
    """To the device, strides and all."""
    if x is None or device == "cpu":
        return x
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    return torch.as_strided(x, (size,), (1,)).to(device).as_strided(x.shape, x.stride())


def bits(x):
    return x.cpu().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def turn(x, cos, sin):
    """x [B, H, N, D] turned by the angles of each half, [B, N, D], and rounded once."""
    a, b = x.double().chunk(2, -1)
    (cos_a, cos_b), (sin_a, sin_b) = (part[:, None].chunk(2, -1) for part in (cos, sin))
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], -1).to(x.dtype)


def normed(x, weight, offset):
    """The RMSNorm of each head of x [B, H, N, D], in double precision but where it is rounded."""
    scaled = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    if offset is None:
        return (scaled.to(x.dtype).double() * weight.double()).to(x.dtype)
    return (scaled * (weight.double() + offset)).to(x.dtype)


def paths(batch, nodes):
    """Ascending paths from the root, and how many of their slots count."""
    rng = random.Random(nodes)
    path, count = torch.zeros(batch, nodes, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    for row in range(batch):
        chosen = [0, *sorted(rng.sample(range(1, nodes), rng.randrange(nodes)))] if row else range(nodes)
        path[row, : len(chosen)] = torch.tensor(list(chosen))
        count[row] = len(chosen) if row != 2 else 0
    return path, count


class Case:
    """Random inputs of one call, with NaN in every slot of the cache that nobody may see."""

    def __init__(
        self, place, lengths, nodes, parents=None, heads=(2, 1), sizes=(16, 16), capacity=None, causal=False,
        window=None, softcap=None, sinks=False, rotary=False, norms=False, offset=None, kept=None,
        slopes=None, distances=None, by_query=False,
    ):  # fmt: skip
        self.device, self.dtype = place
        batch = len(lengths)
        capacity = capacity or max(lengths) + nodes + 5
        self.q, self.k, self.v = merged(batch, nodes, (heads[0], heads[1], heads[1]), (sizes[0], *sizes), self.dtype)
        self.kept = kept or self.dtype
        self.clean = [torch.zeros(batch, heads[1], capacity, size).to(self.kept) for size in sizes]
        self.caches = [torch.full(cache.shape, torch.nan).to(self.kept) for cache in self.clean]
        for clean, cache in zip(self.clean, self.caches):
            for row, length in enumerate(lengths):
                held = torch.randn(heads[1], length, clean.shape[3]).to(self.kept)
                clean[row, :, :length] = cache[row, :, :length] = held
        self.lengths = torch.tensor(lengths)
        tree = torch.tensor([parents if parents is not None else chain(nodes)] * batch)
        ancestors, depth = ancestry(tree) if nodes <= 64 else (None, torch.arange(nodes))
        self.ancestors = None if causal else ancestors
        self.positions = self.lengths[:, None] + (torch.arange(nodes) if causal else depth)
        self.sinks = torch.randn(heads[0], dtype=self.dtype) if sinks else None
        self.slopes = 2.0 ** -torch.arange(1, heads[0] + 1) if slopes else None
        self.slopes = self.slopes.to(slopes) if slopes else None
        if distances is not None:
            self.slopes = torch.randn(heads[0], distances).to(self.dtype)
        if by_query:
            self.slopes = torch.randn(batch, nodes, heads[0], distances).to(self.dtype)
        self.rest = sizes[0] ** -0.5, softcap, window
        angles = torch.randn(2, batch, nodes, sizes[0]).to(self.dtype)  # not even those of the two halves are equal
        self.angles = tuple(angles) if rotary else (None, None)
        self.norms = tuple(1 + 0.3 * torch.randn(2, sizes[0]).to(self.dtype)) if norms else (None, None)
        self.offset = offset
        self.unit = torch.ones(sizes[1])  # what the numbers of each column of the output are measured in

    def expected(self):
        """Output and caches of the twin, computed in double precision."""
        new = (self.as_kept(x) for x in (self.new_keys(), self.v))
        q, k, v, *caches = (x.double() for x in (self.q, *new, *self.clean))
        q = self.turned(self.q, self.norms[0]).double()
        sinks = None if self.sinks is None else self.sinks.double()
        seen = self.lengths, self.ancestors, self.positions
        call = AttentionCall(q, k, v, *caches, *seen, sinks, *self.rest, slopes=self.slopes)
        return plain_attention(call, int(self.lengths.max()) + q.shape[2])

    def new_keys(self):
        """The block's keys as the cache is to hold them."""
        return self.turned(self.k, self.norms[1])

    def as_kept(self, x):
        """Keys or values as the cache rounds them."""
        return (x.clamp(-448, 448) if self.kept == torch.float8_e4m3fn else x).to(self.kept)

    def turned(self, x, weight):
        """Queries or keys, normed and rotated."""
        x = x if weight is None else normed(x, weight, self.offset)
        return x if self.angles[0] is None else turn(x, *self.angles)

    def inputs(self):
        tensors = self.q, self.k, self.v, *self.caches, self.lengths, self.ancestors, self.positions, self.sinks
        turning = (move(x, self.device) for x in (*self.angles, *self.norms))
        rest = *self.rest, None, *turning, EPS, self.offset
        return AttentionCall(*(move(x, self.device) for x in tensors), *rest, slopes=move(self.slopes, self.device))

    def check(self, config=SMALL):
        inputs = self.inputs()
        if config is not None and (self.device, self.dtype) == ("cuda", torch.float32):
            config = config._replace(block_m=16, block_n=16)  # larger blocks of float32 take long to compile
        self.compare(attention.launch(inputs, config), inputs[3:5])

    def compare(self, out, caches):
        tolerance = TOLERANCE[self.dtype]
        out, expected = out.cpu().double() / self.unit, self.expected() / self.unit
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        for cache, before, new in zip(caches, self.caches, map(self.as_kept, (self.new_keys(), self.v))):
            after = before.clone()
            for row, length in enumerate(self.lengths.tolist()):
                there = slice(length, length + new.shape[2])
                after[row, :, there] = new[row]
                if self.angles[0] is not None and new is not self.v:
                    turned = cache[row, :, there].cpu()
                    ulp = torch.finfo(self.dtype).eps
                    atol = 1e-5 if self.norms[0] is None else max(1e-5, 8 * ulp)  # a norm may round the other way
                    torch.testing.assert_close(turned, new[row], rtol=ulp, atol=atol)
                    after[row, :, there] = turned
            assert torch.equal(bits(cache), bits(after))  # the block's slots hold it, all others are as they were


FP8 = torch.float8_e4m3fn
