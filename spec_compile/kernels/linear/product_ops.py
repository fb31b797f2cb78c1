"""The ops of products of few rows, one for each sort of result; each makes a `Product` of its arguments.

An RMSNorm needs a whole row before it can divide by its root mean square. The product that ends at the residual stream
(`product_to_stream`) does the first half, times the norm's weight, and sums squares. The product that follows
(`product` with squares) divides its result. So the norm needs no kernel.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ...quantised import layout_of
from ...quantised.rows import rounds_activations
from .. import ops
from ..all_reduce import EXCHANGES, all_reduce
from ..card import card_of
from ..launching import LIBRARY, new_op
from ..ops import as_rows
from . import cpu_gemm
from .plans import MAX_HEAD, ProductPlan, appending, ceil_div, squared_columns
from .product import Gate, Normed, Product, QkvHeads, ResidualStream, RmsNorm
from .skinny_gemm import launch, plan_of, run

try:
    from ..all_reduce_kernel import all_reduce_add
except ImportError:  # no Triton, and so no plan
    all_reduce_add = None


# Quantised layers, whatever computes them.


def _quantised_product(x: Tensor, parts: list[Tensor], bias: Tensor | None, kind: str) -> Tensor:
    """A layer by the kernel of a CPU if that serves it, else by its plain meaning."""
    if not parts or not x.dim():
        raise ValueError(f"x, parts: expected [..., I] and the parts of a layer, got {list(x.shape)} and {len(parts)}")
    if not rounds_activations.get():
        return layout_of(kind).unrounded(x, parts, bias)  # guard: rounded-activations
    form = cpu_gemm.form_here(kind, x, parts)
    if form is not None:
        return cpu_gemm.multiply(form, x, *parts, bias)
    cpu_gemm.check_activations(x)
    try:
        return layout_of(kind).product(x, parts, bias)
    except (IndexError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"parts: expected a layer of the kind {kind!r} with {x.shape[-1]} inputs") from error


LIBRARY.define("quantised_linear(Tensor x, Tensor[] parts, Tensor? bias, str kind) -> Tensor")
LIBRARY.impl(
    "quantised_linear", lambda *arguments: _quantised_product(*arguments).contiguous(), "CompositeExplicitAutograd"
)
quantised_linear = torch.ops.spec_compile.quantised_linear
"""A quantised linear layer: x [..., I], the parts of a layout, bias [O] or None -> [..., O] of x's dtype.

kind: the layout's. It is the same text for all layers that are laid out alike, so that they are compiled once.
"""


@torch.library.register_fake("spec_compile::quantised_linear")
def _(x, parts, bias, kind):
    cpu_gemm.check_devices(x, *parts, bias)
    return x.new_empty(*x.shape[:-1], layout_of(kind).outputs(parts, x.shape[-1]))


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, kind: str) -> Tensor:
    """``F.linear``, or with a kind `quantised_linear` of its two parts."""
    return _quantised_product(x, [weight, scales], bias, kind) if kind else F.linear(x, weight.to(x.dtype), bias)


# Products by the kernel for a GPU.


@torch.library.custom_op("spec_compile::product", mutates_args=())
def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None, kind: str = "",
    squares: Tensor | None = None, eps: float = 0.0, gated: bool = False,
) -> Tensor:  # fmt: skip
    """``F.linear``: x [..., I], weight [O, I], bias [O] -> [..., O], summed in float32, rounded once to x's dtype.

    scales, kind: what a quantised weight has, see `Product`.
    squares, eps: x is `scaled` of `product_to_stream`, these are its squares and the eps of its norm. The result is
    ``F.linear(x / rms, weight, bias)``, with rms the root of the mean of the squares plus eps.
    gated: the result is ``silu(gate) * up`` [..., O / 2] of the halves of the outputs.
    """
    layer = Product(x, weight, bias, scales, kind, _normed(squares, eps), Gate() if gated else None)
    plan = plan_of(x, weight, kind)
    return plain_product(layer) if plan is None else run(layer, plan)


@product.register_fake
def _(x, weight, bias=None, scales=None, kind="", squares=None, eps=0.0, gated=False):
    return x.new_empty(*x.shape[:-1], weight.shape[0] // (2 if gated else 1))


def _normed(squares: Tensor | None, eps: float) -> Normed | None:
    return None if squares is None else Normed(squares, eps)


def plain_product(layer: Product) -> Tensor:
    """A product in plain PyTorch, with what is before it, and its gate. A `Normed`, and a gate after it, is computed in
    float32."""
    x, bias = layer.x, layer.bias
    if isinstance(layer.before, RmsNorm):
        norm, eps, offset = layer.before
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        x = norm * wide.to(x.dtype) if offset is None else (wide * (norm.float() + offset)).to(x.dtype)
    if not isinstance(layer.before, Normed):
        out = packed_linear(x, layer.weight, bias, layer.scales, layer.kind)
    else:
        squares, eps = layer.before
        inverse = torch.rsqrt(squares.sum(dim=1) / x.shape[-1] + eps).view(*x.shape[:-1], 1)
        out = packed_linear(x, layer.weight, None, layer.scales, layer.kind).float() * inverse
        out = out if bias is None else out + bias.float()
    if isinstance(layer.after, Gate):
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out.to(x.dtype)


@new_op("product_to_stream", lambda x, weight, bias, residual, norm, offset, *_: empty_stream(residual, norm, offset))
def product_to_stream(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, offset: float,
    scales: Tensor | None = None, kind: str = "", group_name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The residual stream after a linear layer, and the first half of the RMSNorm that follows.

    x [..., I], weight [O, I], bias [O] or None, residual [..., O], norm_weight [O], all of one dtype; scales, kind: of
    a quantised weight, see `Product`.
    group_name: names ranks, each of which has its columns of x and of the weight, and its bias. Their products are
    summed, in float32 if there is a kernel. All else, and the results, are the same on all ranks, to the bit.

    -> stream [..., O], ``F.linear(x, weight, bias) + residual``, rounded twice as these are;
    scaled [..., O], ``stream * (norm_weight + offset)``;
    squares [R, T] float32: sums of the squares of each `squared_columns` columns of the stream's R rows.
    """
    layer, plan = Product(x, weight, bias, scales, kind), plan_of(x, weight, kind)
    if plan is None:
        out = plain_product(layer)
        out = all_reduce(out, group_name) if group_name else out
        return plain_stream(out, residual, norm_weight, offset)
    after = stream_after(residual, norm_weight, offset)
    if group_name:
        stream = _sum_of_ranks(layer, plan, after, group_name)
    else:
        stream = run(replace(layer, after=after), plan)
    return stream.view(residual.shape), after.scaled.view(residual.shape), after.squares


def empty_stream(residual: Tensor, norm_weight: Tensor, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the results of `product_to_stream`."""
    after = stream_after(residual, norm_weight, offset)
    return residual.new_empty(residual.shape), after.scaled.view(residual.shape), after.squares


def stream_after(residual: Tensor, norm_weight: Tensor, offset: float) -> ResidualStream:
    """The argument of a kernel that adds to residual [..., O], with memory for what it returns besides the stream."""
    size = residual.shape[-1]
    squares = residual.new_empty(residual.numel() // size, ceil_div(size, squared_columns(size)), dtype=torch.float32)
    before = as_rows(residual)
    return ResidualStream(before, norm_weight.contiguous(), offset, before.new_empty(before.shape), squares)


def plain_stream(out: Tensor, residual: Tensor, norm_weight: Tensor, offset: float) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `product_to_stream` in plain PyTorch, from a product that is rounded."""
    stream, size = out + residual, residual.shape[-1]
    scaled = (stream.float() * (norm_weight.float() + offset)).to(stream.dtype)
    wide = F.pad(stream.reshape(-1, size).float().square(), (0, -size % squared_columns(size)))
    return stream, scaled, wide.unflatten(1, (-1, squared_columns(size))).sum(dim=2)


def _sum_of_ranks(layer: Product, plan: ProductPlan, after: ResidualStream, group_name: str) -> Tensor:
    """The residual stream [R, O] after the sum of all ranks' products, which stay in float32 until they are summed.

    If the GPUs share memory (`all_reduce.prepare`), one kernel sums; else `all_reduce` comes before it.
    """
    exchange = EXCHANGES.get(group_name)
    stream = torch.empty_like(after.scaled)  # before the product, whose memory it must not take while that runs
    if exchange is not None and stream.numel() <= exchange.words:  # all of its numbers fit into the ranks' memory
        launch(replace(layer, after=exchange), None, plan.parts, plan.tile(len(stream)))
        part = None
    else:
        part = run(layer, plan, torch.float32).view(stream.shape)
        part = all_reduce(part, group_name) if exchange is None else part
    all_reduce_add(exchange, part, stream, after, squared_columns(stream.shape[1]))
    return stream


@torch.library.custom_op("spec_compile::product_to_heads", mutates_args=("key_cache", "value_cache"))
def product_to_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, q_norm: Tensor | None,
    k_norm: Tensor | None, head_eps: float, head_offset: float | None, key_cache: Tensor, value_cache: Tensor,
    lengths: Tensor, table: Tensor | None = None, scales: Tensor | None = None, kind: str = "",
    squares: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """A linear layer to queries, keys and values, and what `tree_attention` does to them before it attends.

    x [B, N, I], weight [(H + 2 Hkv) D, I], bias [(H + 2 Hkv) D] or None; scales, kind, squares, eps: of `product`;
    key_cache, value_cache [P, Hkv, S, D], and the others: of `attention.base.AttentionCall`. Nothing is written beyond
    the last slot of a row. -> queries [B, N, H, D], normed and rotated.
    """
    heads = QkvHeads(cos, sin, q_norm, k_norm, head_eps, head_offset, key_cache, value_cache, lengths, table)
    layer, plan = Product(x, weight, bias, scales, kind, _normed(squares, eps), heads), plan_of(x, weight, kind)
    if plan is None:
        return _plain_heads(plain_product(layer), heads)
    size = key_cache.shape[3]
    out = x.new_empty(x.numel() // x.shape[-1], len(weight) - 2 * key_cache.shape[1] * size)
    heads = heads._replace(**{name: getattr(heads, name).contiguous() for name in ("cos", "sin", "lengths")})
    heads = heads._replace(table=table.contiguous() if heads.page else None)
    tile = appending(plan.tile(len(out)), size if q_norm is not None else 0, card_of(x.device).memory)
    launch(replace(layer, after=heads), out, plan.parts, tile)
    return out.view(*x.shape[:-1], -1, size)


@product_to_heads.register_fake
def _(
    x, weight, bias, cos, sin, q_norm, k_norm, head_eps, head_offset, key_cache, value_cache, lengths, table=None,
    scales=None, kind="", squares=None, eps=0.0,
):  # fmt: skip
    kv_heads, size = key_cache.shape[1], key_cache.shape[3]
    return x.new_empty(*x.shape[:-1], weight.shape[0] // size - 2 * kv_heads, size)


def _plain_heads(out: Tensor, heads: QkvHeads) -> Tensor:
    """The queries of `product_to_heads` in plain PyTorch, from the product [B, N, (H + 2 Hkv) D]."""
    kv_heads, size = heads.key_cache.shape[1], heads.key_cache.shape[3]
    out = out.unflatten(-1, (-1, size)).transpose(1, 2)
    q, k, v = out.split([out.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if heads.q_norm is not None:
        from ..norms import rms_norm  # needs Triton

        q, k = (rms_norm(x, w, heads.eps, heads.offset) for x, w in ((q, heads.q_norm), (k, heads.k_norm)))
    q, k = (ops.rotated(x, heads.cos, heads.sin) for x in (q, k))
    ops.append_block(heads.key_cache, heads.value_cache, None, k, v, heads.lengths, heads.table)
    return q.transpose(1, 2).contiguous()


def why_not_append(size: int, value_size: int, normed: bool) -> str | None:
    """Why `product_to_heads` cannot append heads of `size`, keys and values, the keys normed or not; None if it can."""
    if size != value_size or size % 2:
        return f"keys of {size} and values of {value_size}"
    if normed and (size > MAX_HEAD or size & (size - 1)):
        return f"norms of heads of {size}"
    return None
