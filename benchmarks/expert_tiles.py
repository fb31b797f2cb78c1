"""Routed experts of published shapes for `packed_kernel.py`: random weights, and the tiles that could serve."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from spec_compile.kernels.experts import ExpertFormat, launch, mxfp4, plans
from spec_compile.kernels.experts.plans import ExpertTile as Tile
from spec_compile.kernels.linear import tune
from spec_compile.kernels.linear.quantised.fp8_block import FP8

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROUTES = 16
"""Choices of experts that one graph has, so that no weights stay in a cache."""


class Shape(NamedTuple):
    """experts, and those that a token chooses; columns of x, and between the products; first: the first product."""

    experts: int
    top: int
    size: int
    inner: int
    first: ExpertFormat


CLAMPED = ExpertFormat("clamped", True, alpha=1.702, limit=7.0, biased=True)
SHAPES = {
    "mxfp4": Shape(32, 4, 2880, 2880, CLAMPED),
    "experts-bf16": Shape(128, 8, 2048, 768, ExpertFormat("silu")),
    "experts-fp8": Shape(128, 8, 2048, 768, ExpertFormat("silu", block=128)),
}
"""Of gpt-oss-20b with MXFP4, and of Qwen3-30B-A3B."""
SMALL = {
    "mxfp4": Shape(4, 2, 512, 64, CLAMPED),
    "experts-bf16": Shape(4, 2, 256, 64, ExpertFormat("silu")),
    "experts-fp8": Shape(4, 2, 256, 128, ExpertFormat("silu", block=128)),
}
"""For Triton's interpreter."""
TILES = {
    "mxfp4": [Tile(64, 256, 0, 4, 3), Tile(64, 256, 0, 4, 4), Tile(128, 256, 0, 4, 3, 168), Tile(128, 256, 0, 4, 3),
              Tile(128, 256, 0, 4, 4), Tile(128, 256, 0, 8, 3)],
    "experts-bf16": [*(Tile(64, 128, 0, 4, stages) for stages in (3, 4, 5)), Tile(64, 64, 0, 4, 5),
                     Tile(64, 64, 0, 4, 8), Tile(64, 256, 0, 4, 2), Tile(64, 256, 0, 4, 3), Tile(128, 64, 0, 4, 4),
                     Tile(128, 64, 0, 8, 6), Tile(128, 128, 0, 8, 3)],
    "experts-fp8": [*(Tile(64, 128, 0, 4, stages) for stages in (3, 4, 5, 6, 8)), Tile(128, 128, 0, 4, 4),
                    Tile(128, 128, 0, 8, 4), Tile(128, 128, 0, 8, 6)],
}  # fmt: skip
"""With as many rows as the present tile has."""
PREFETCH = 0, 2, 4, 8
"""Tiles that the second product fetches before it waits, tried with its fastest tile."""


class Mixture:
    """The experts of a layer with random weights. device: "meta": there are none, to compile alone."""

    def __init__(self, name: str, shape: Shape, device: str = DEVICE):
        self.name, self.shape, self.device = name, shape, device
        self.kinds = [shape.first, ExpertFormat(biased=shape.first.biased, block=shape.first.block)]
        if name == "mxfp4":
            self.kinds = [replace(kind, mxfp4=inputs) for kind, inputs in zip(self.kinds, (shape.size, shape.inner))]
        self.sizes = [(2 * shape.inner, shape.size), (shape.size, shape.inner)]
        self.parts = [self._parts(*sizes) for sizes in self.sizes]

    def _parts(self, outputs: int, inputs: int) -> list[torch.Tensor]:
        experts = self.shape.experts
        if self.name == "mxfp4":
            chunks = -(-inputs // mxfp4.WIDTH)
            on = dict(dtype=torch.int32, device=self.device)
            words = torch.randint(-(1 << 31), 1 << 31, (experts, outputs, 32 * chunks), **on)
            units = torch.full((experts, 2 * chunks, outputs), 0x70707070, **on)
            return [words, units, torch.zeros(experts, outputs, device=self.device).bfloat16()]
        weight = torch.empty(experts, outputs, inputs, dtype=torch.bfloat16, device=self.device).normal_(std=0.02)
        if self.name == "experts-bf16":
            return [weight if ON_GPU else weight.float()]
        scales = torch.ones(experts, -(-outputs // 128), -(-inputs // 128), device=self.device)
        return [weight.to(FP8), scales]

    @property
    def expert_bytes(self) -> float:
        return sum(part.nbytes for side in self.parts for part in side) / self.shape.experts

    def routes(self, tokens: int) -> torch.Tensor:
        """Experts of so many tokens [tokens, top], chosen independently."""
        return torch.rand(tokens, self.shape.experts, device=DEVICE).topk(self.shape.top).indices

    def present(self, tokens: int) -> list[Tile]:
        """The tiles of both products that the plans have."""
        scale, size = self.kinds[0].scale_size, 2
        return [plans.tile(tokens, self.shape.top, self.shape.experts, sizes, scale, size) for sizes in self.sizes]

    def candidates(self, tokens: int, side: int) -> list[Tile]:
        """Tiles of a product, the present one first. Those whose columns are cut otherwise have other bits."""
        present = self.present(tokens)[side]
        tiles = [tile._replace(block_n=present.block_n, parts=present.parts) for tile in TILES[self.name]]
        if self.name == "mxfp4":
            cuts = -(-self.sizes[side][1] // mxfp4.WIDTH)
            counts = [count for count in (1, 2, 3, 4, 6) if cuts % count == 0]
            tiles = [tile._replace(parts=count, shared=count > 1) for tile in tiles for count in counts]
            tiles += [tile._replace(shared=False) for tile in tiles if tile.parts == present.parts > 1]
        return [present, *(tile for tile in tiles if tile != present)]

    def multiply(self, ids: torch.Tensor, tiles: list[Tile]) -> torch.Tensor:
        dtype = torch.bfloat16 if ON_GPU else torch.float32
        x = torch.linspace(-1, 1, self.shape.size, device=DEVICE).to(dtype).repeat(len(ids), 1)
        inside = launch.up(x, ids, self.parts[0], self.kinds[0], tiles[0])
        weights = torch.ones(ids.shape, dtype=dtype, device=DEVICE)
        return launch.down(inside, ids, weights, self.parts[1], self.kinds[1], tiles[1])


def jobs(names: list[str], counts: list[int]) -> set:
    """(format, rows, tile, tile) of all that `time_experts` runs but for what it fetches early."""
    made = set()
    for name in names:
        for rows in counts:
            mixture = Mixture(name, SHAPES[name], "meta")
            present = mixture.present(rows)
            made |= {(name, rows, tile, present[1]) for tile in mixture.candidates(rows, 0)}
            made |= {(name, rows, present[0], tile) for tile in mixture.candidates(rows, 1)}
    return made


def time_experts(name: str, counts: list[int], bandwidth: float) -> dict[str, dict]:
    """Microseconds of a layer's experts with the present tiles, with others of one product at a time, and with the
    fastest of both. A tile that changes a bit, though it cuts the columns alike, is passed over."""
    mixture, results = Mixture(name, SHAPES[name]), {}
    for tokens in counts:
        routes, present = [mixture.routes(tokens) for _ in range(ROUTES)], mixture.present(tokens)
        want = mixture.multiply(routes[0], present)
        floor = sum(len(ids.unique()) for ids in routes) / ROUTES * mixture.expert_bytes / bandwidth * 1e6

        def run(tiles, routes=routes):
            for ids in routes:
                mixture.multiply(ids, tiles)

        def taken(tiles, run=run):
            return tune.graph_time(partial(run, tiles)) / ROUTES

        now, fastest, tried = taken(present), list(present), {}
        for side, label in enumerate(("up", "down")):
            times = []
            options = mixture.candidates(tokens, side)
            for tile in options:
                tiles = [tile if number == side else other for number, other in enumerate(present)]
                if tile.parts != present[side].parts or torch.equal(mixture.multiply(routes[0], tiles), want):
                    times.append((taken(tiles), tile))
            if side == 1:
                quickest = min(times, key=lambda each: each[0])[1]
                tiles = [quickest._replace(prefetch=count) for count in PREFETCH]
                times += [(taken([present[0], tile]), tile) for tile in tiles]
            tried[label] = sorted(times, key=lambda each: each[0])
            fastest[side] = tried[label][0][1]
            cells = "; ".join(f"{each:.2f} {tuple(tile)}" for each, tile in tried[label][:5])
            print(f"{name} {tokens} tokens, {label}: {len(times)} of {len(options)} tiles, best {cells}", flush=True)
        best = taken(fastest)
        print(f"{name} {tokens} tokens: floor {floor:.2f}, present {now:.2f}, fastest of both {best:.2f}", flush=True)
        results[f"{name} {tokens}"] = {"floor": floor, "present": now, "fastest": best, "tried": tried}
    return results


def check(name: str, counts: list[int]) -> int:
    """Every tile multiplies a small mixture once in the interpreter; how many there are."""
    mixture, seen = Mixture(name, SMALL[name]), set()
    for tokens in sorted({min(count, 2) for count in counts}):
        for side in range(2):
            for tile in mixture.candidates(tokens, side):
                tiles = mixture.present(tokens)
                tiles[side] = tile
                if (side, tile) not in seen:
                    assert mixture.multiply(mixture.routes(tokens), tiles).isfinite().all(), tile
                    seen.add((side, tile))
    return len(seen)
