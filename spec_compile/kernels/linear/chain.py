"""Products on a CPU in bfloat16, each of the result of the one before it, with what stands around them, in one call.

Between two calls of attention a decoder layer has four products. As four ops, each costs some microseconds of Python.
`passes.chain_products` puts this op into the graph.
"""

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from ..launching import are_plain
from . import around, few_rows

KNOWN = 4096
"""Chains whose addresses are kept."""
DTYPE = operator.attrgetter("dtype")


class Link(NamedTuple):
    """A product of a chain, as `around.around_product` takes it.

    kind, parts: of a quantised layer and the number of its parts; "" and 1: a weight.
    adds: its input is added to the stream and normed, before the product.
    has_bias, is_gated: of the product.
    offset: of the norm.
    """

    kind: str
    parts: int
    adds: bool
    has_bias: bool
    is_gated: bool
    offset: float | None

    @property
    def text(self) -> str:
        """The text from which `links_of` makes this link again."""
        flags = "".join("01"[flag] for flag in (self.adds, self.has_bias, self.is_gated))
        return f"{self.kind}|{self.parts}|{flags}|{self.offset}"


def chain_products(
    x: Tensor, residual: Tensor, norms: list[Tensor], eps: list[float], parts: list[Tensor], biases: list[Tensor],
    links: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The stream after the last addition, and the last product.

    x [..., I], residual [..., H]: the input of the first product, and the stream, of one dtype.
    norms, eps: the weight and eps of each norm.
    parts, biases: of all products, one after the other.
    links: their texts, with ";" between two.

    Example: with the links o, gate and up, down, and the next layer's q, k and v, of which the second and the fourth
    add, x is what attention gives, and the results are the next layer's stream and its queries, keys and values.
    """
    known = _known_chain(x, norms, eps, parts, biases, links)
    if known is None:
        return _one_by_one(x, residual, _split(norms, eps, parts, biases, links))
    chain, outputs, width = known
    if residual.dtype is not torch.bfloat16 or residual.shape != (*x.shape[:-1], width):
        shape = [*x.shape[:-1], width]
        raise ValueError(f"residual: expected bfloat16 {shape}, got {residual.dtype} {list(residual.shape)}")
    x, residual = x.contiguous(), residual.contiguous()
    stream, out = residual.new_empty(residual.shape), x.new_empty(*x.shape[:-1], outputs)
    rows = x.numel() // x.shape[-1]
    threads = torch.get_num_threads()
    chain.run(x.data_ptr(), residual.data_ptr(), stream.data_ptr(), out.data_ptr(), rows, threads)
    return stream, out


@functools.cache
def links_of(text: str) -> tuple[Link, ...]:
    """The links of a text; ValueError if it has others than `Link.text`."""
    links = []
    try:
        for link in text.split(";"):
            kind, parts, flags, offset = link.split("|")
            adds, has_bias, is_gated = (flag == "1" for flag in flags)
            links.append(Link(kind, int(parts), adds, has_bias, is_gated, None if offset == "None" else float(offset)))
    except ValueError as error:
        raise ValueError(f"links: expected texts of `Link`, got {text!r}") from error
    return tuple(links)


_known: dict[tuple, tuple] = {}
"""By texts, levels, addresses, dtypes, sizes and strides of tensors: chains of the kernel, the outputs of the last
product, and the width of the stream."""


def _known_chain(
    x: Tensor, norms: list[Tensor], eps: list[float], parts: list[Tensor], biases: list[Tensor], links: str
) -> tuple | None:  # fmt: skip
    """The chain of the kernel, its outputs, and the width of the stream; None: it does not serve."""
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x: expected rows of at least one input, got the shape {list(x.shape)}")
    if are_plain() or x.dtype != torch.bfloat16:
        return None
    rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
    if rows > few_rows.MAX_ROWS and any(not link.kind for link in links_of(links)):
        return None  # because a library multiplies so many rows by weights of bfloat16
    tensors = *norms, *parts, *biases
    key = (
        links, inputs, few_rows.BEST, *eps, *map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors),
        *map(Tensor.stride, tensors), *map(DTYPE, tensors),
    )  # fmt: skip
    if key not in _known:
        if len(_known) == KNOWN:
            _known.clear()
        _known[key] = _made(x.new_empty(1, inputs), _split(norms, eps, parts, biases, links))
    return _known[key]


def _made(x: Tensor, split: list["_Product"]) -> tuple | None:
    """A chain of the kernel for rows like x [1, I]."""
    chain, width = few_rows.made_chain(), None
    for link, norm, eps, parts, bias in split:
        form = around.form_of(x, parts, link.kind)
        if form is None or (bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous())):
            return None
        scales = parts[1] if len(parts) > 1 else None
        place = few_rows.Around(norm, eps, link.offset, is_gated=link.is_gated)
        chain.add(*few_rows.constants(form, x.dtype, x.shape[1], parts[0], scales, bias), *place.constants)
        if norm is not None:
            if width not in (None, x.shape[1]):
                raise ValueError(f"norms: expected all to be of one stream, got {width} and {x.shape[1]} inputs")
            width = x.shape[1]
        x = x.new_empty(1, parts[0].shape[0] // (2 if link.is_gated else 1))
    if width is None:
        raise ValueError("links: expected one that adds to the stream")
    return chain, x.shape[1], width


class _Product(NamedTuple):
    """A link with its tensors, as `around_product` takes them."""

    link: Link
    norm: Tensor | None
    eps: float
    parts: list[Tensor]
    bias: Tensor | None


def _split(
    norms: list[Tensor], eps: list[float], parts: list[Tensor], biases: list[Tensor], links: str
) -> list[_Product]:  # fmt: skip
    counts = len(norms), len(eps), len(parts), len(biases)
    taken = links_of(links)
    adding = sum(link.adds for link in taken)
    wanted = adding, adding, sum(link.parts for link in taken), sum(link.has_bias for link in taken)
    if counts != wanted or any(link.parts < 1 for link in taken):
        raise ValueError(f"norms, eps, parts, biases: expected {wanted} of them, as the links say, got {counts}")
    both, each_part, each_bias = zip(norms, eps), iter(parts), iter(biases)
    split = []
    for link in taken:
        norm, each = next(both) if link.adds else (None, 0.0)
        own = [next(each_part) for _ in range(link.parts)]
        split.append(_Product(link, norm, each, own, next(each_bias) if link.has_bias else None))
    return split


def _one_by_one(x: Tensor, stream: Tensor, split: list[_Product]) -> tuple[Tensor, Tensor]:
    for link, norm, eps, parts, bias in split:
        tail = eps, link.offset, parts, bias, link.kind, link.is_gated
        if norm is None:
            x = around.AROUND(x, None, *tail)
        else:
            stream, x = around.ADD_AROUND(x, stream, norm, *tail)
    return stream, x


# `torch.library.custom_op` would add 15 microseconds to each of the calls of a round.
_LIBRARY = torch.library.Library("spec_compile", "FRAGMENT")
_LIBRARY.define(
    "chain_products(Tensor x, Tensor residual, Tensor[] norms, float[] eps, Tensor[] parts, Tensor[] biases, str links)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.impl("chain_products", chain_products, "CPU")
CHAIN = torch.ops.spec_compile.chain_products.default


@torch.library.register_fake("spec_compile::chain_products")
def _(x, residual, norms, eps, parts, biases, links):
    few_rows.check_devices(x, residual, *norms, *parts, *biases)
    for link, _, _, own, _ in _split(norms, eps, parts, biases, links):
        x = x.new_empty(*x.shape[:-1], around.outputs_of(x, own, link.kind, link.is_gated))
    return residual.new_empty(residual.shape), x
