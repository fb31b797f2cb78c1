"""Routed experts on a GPU: both products of a layer of published models, ours compared with PyTorch's grouped_mm.

    python -m benchmarks.kernels.experts [--models Qwen3-30B-A3B Mixtral ...] [--tokens 1 64 2048] [--json FILE]

A figure is the microseconds of both products, the gate and the sum by the router's weights, in a CUDA graph of several
draws of tokens and experts. "floor" is the time in which the GPU reads the weights of the chosen experts, or multiplies
if that takes longer. "ours" is the form that `plans.tile` chooses; "looked through" and "sorted" are the two forms with
its tile, the first one up to 512 tokens. "bits" says if every token has the same bits as among the most tokens.
grouped_mm has weights of 16 bits only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import command_line, save_rows, show, stamp
from benchmarks.timers import bandwidth, captured, product_speed, replay_us
from spec_compile.kernels.experts import ExpertFormat, launch, plans
from spec_compile.quantised import mxfp4

SILU = ExpertFormat("silu")
CLAMPED = ExpertFormat("clamped", True, True, True, 1.702, 7.0)
MODELS = {
    "Qwen3-30B-A3B": (8, 128, 2048, 768, SILU),
    "Qwen3-30B-A3B FP8": (8, 128, 2048, 768, replace(SILU, block=128)),
    "Mixtral": (2, 8, 4096, 14336, SILU),
    "gpt-oss-20b": (4, 32, 2880, 2880, CLAMPED),
    "gpt-oss-20b MXFP4": (4, 32, 2880, 2880, replace(CLAMPED, transposed=False, mxfp4=2880)),
    "DeepSeek-V2-Lite": (6, 64, 2048, 1408, SILU),
}
"""Experts of a token, experts, inputs, columns between the products, and the format of the first product."""
DRAWS, MOST_LOOKED_THROUGH = 4, 512
KEYS = ("model", "tokens")
"""The fields that tell the rows of the results apart."""


def weights(experts: int, outputs: int, inputs: int, layout: ExpertFormat) -> list[Tensor]:
    """Random parts of one product of all experts."""
    bias = [torch.randn(experts, outputs, device="cuda").bfloat16()] if layout.biased else []
    if layout.mxfp4:
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, device="cuda")
        scales = torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8, device="cuda")
        return [*mxfp4.pack(blocks, scales), *bias]
    shape = (inputs, outputs) if layout.transposed else (outputs, inputs)
    weight = torch.empty(experts, *shape, dtype=torch.bfloat16, device="cuda").normal_(std=inputs**-0.5)
    if layout.block:
        blocks = [-(-size // layout.block) for size in shape]
        return [weight.to(torch.float8_e4m3fn), torch.rand(experts, *blocks, device="cuda") + 0.5]
    return [weight, *bias]


@dataclass
class Layer:
    """A layer's experts: the formats and parts of both products."""

    first: ExpertFormat
    second: ExpertFormat
    up: list[Tensor]
    down: list[Tensor]

    def ours(self, x: Tensor, ids: Tensor, routing: Tensor, **form) -> Tensor:
        """form: fields of `ExpertTile` in place of those of `plans.tile`."""

        def chosen(parts: list[Tensor], layout: ExpertFormat) -> plans.ExpertTile:
            shape = len(x), ids.shape[1], len(parts[0]), layout.sizes(parts), layout.scale_size, 2
            return plans.tile(*shape)._replace(**form)

        inner = launch.up(x, ids, self.up, self.first, chosen(self.up, self.first))
        return launch.down(inner, ids, routing, self.down, self.second, chosen(self.down, self.second))

    def library(self, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        """The same by grouped_mm over rows sorted by their experts."""
        top, (flat, order) = ids.shape[1], ids.flatten().sort()
        ends = (flat[None] <= torch.arange(len(self.up[0]), device="cuda")[:, None]).sum(dim=1, dtype=torch.int32)

        def product(rows: Tensor, parts: list[Tensor], layout: ExpertFormat) -> Tensor:
            weight = parts[0] if layout.transposed else parts[0].transpose(1, 2)
            out = F.grouped_mm(rows, weight, offs=ends)
            return out + parts[-1][flat] if layout.biased else out

        inner = self.first.gated(product(x[order // top], self.up, self.first))
        rows = product(inner, self.down, self.second)
        pairs = torch.empty_like(rows).index_copy_(0, order, rows).unflatten(0, ids.shape)
        return (pairs * routing[:, :, None]).sum(dim=1).to(x.dtype)


def layer(experts: int, size: int, inner: int, first: ExpertFormat) -> Layer:
    second = ExpertFormat(
        transposed=first.transposed, biased=first.biased, block=first.block, mxfp4=inner if first.mxfp4 else 0
    )
    return Layer(first, second, weights(experts, 2 * inner, size, first), weights(experts, size, inner, second))


def draw(tokens: int, top: int, experts: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random x [T, size] bfloat16, ids [T, k] and the router's weights [T, k]."""
    ids = torch.rand(tokens, experts, device="cuda").topk(top).indices
    return torch.randn(tokens, size, device="cuda").bfloat16(), ids, torch.rand(tokens, top, device="cuda")


def time_of(run: Callable, draws: list[tuple]) -> float:
    """Microseconds of run(x, ids, weights)."""
    return replay_us(captured(lambda: [run(*each) for each in draws])) / len(draws)


def floor(mixture: Layer, draws: list[tuple], speeds: tuple[float, float]) -> float:
    """Microseconds to read the chosen experts or to multiply. speeds: bytes and operations a second."""
    whole = [*mixture.up, *mixture.down]
    share = sum(len(ids.unique()) for _, ids, _ in draws) / len(draws) / len(whole[0])
    numbers = sum(
        outputs * inputs for outputs, inputs in (mixture.first.sizes(mixture.up), mixture.second.sizes(mixture.down))
    )
    return (
        max(sum(part.nbytes for part in whole) * share / speeds[0], 2 * draws[0][1].numel() * numbers / speeds[1]) * 1e6
    )


def measure(name: str, counts: list[int], speeds: tuple[float, float]) -> list[dict]:
    """The figures of one model, a row for each number of tokens."""
    top, experts, size, inner, first = MODELS[name]
    mixture, rows = layer(experts, size, inner, first), []
    most = draw(max(counts), top, experts, size)
    everything = mixture.ours(*most)
    for tokens in counts:
        draws = [draw(tokens, top, experts, size) for _ in range(DRAWS)]
        row = {"model": name, "tokens": tokens, "floor": floor(mixture, draws, speeds)}
        row["ours"] = time_of(mixture.ours, draws)
        if tokens <= MOST_LOOKED_THROUGH:
            row["looked through"] = time_of(lambda *each: mixture.ours(*each, sorted=False), draws)
        row["sorted"] = time_of(lambda *each: mixture.ours(*each, sorted=True, shared=False), draws)
        if not first.scale_size:
            row["grouped_mm"] = time_of(mixture.library, draws)
        row["same_bits"] = torch.equal(mixture.ours(*(each[:tokens] for each in most)), everything[:tokens])
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = command_line(__doc__, results="")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 512, 2048, 4096])
    options = parser.parse_args()
    speeds, rows = (bandwidth()["read"], product_speed()), []
    for name in options.models:
        rows += measure(name, options.tokens, speeds)
    figures = ("floor", "ours", "looked through", "sorted", "grouped_mm")
    cells = [
        (row["model"], str(row["tokens"]), *(f"{row[name]:.1f}" if name in row else "" for name in figures),
         "same" if row["same_bits"] else "DIFFER")
        for row in rows
    ]  # fmt: skip
    show((*KEYS, *figures, "bits"), cells, "microseconds of both products")
    if options.json:
        save_rows(options.json, rows, KEYS, stamp(torch.device("cuda")))


if __name__ == "__main__":
    main()
