"""The op of products on a CPU in bfloat16 that follow one another, with what stands around each of them.

Between products a decoder layer computes little, but each piece of compiled code costs some microseconds of Python, as
much as a product of a small model. So additions, norms and gates join the products, and the four products between two
calls of attention are one call. `passes.cpu_products` puts the op into the graph.
"""

import operator
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from ..launching import LIBRARY, are_plain, expect
from . import cpu_gemm
from .cpu_gemm import ProductForm
from .product import Gate, Product, RmsNorm
from .product_ops import plain_product

KNOWN = 4096
"""Most chains of the kernel that are kept for later calls."""
DTYPE = operator.attrgetter("dtype")
NORM = 3
"""Place of the norm's weight among the four tensors of a product."""


def cpu_products(
    x: Tensor, residual: Tensor | None, tensors: list[Tensor | None], kinds: list[str], numbers: list[float]
) -> tuple[Tensor, Tensor]:
    """Products of which each multiplies the result of the one before it.

    x: [..., I]; the input of the first product.
    residual: [..., H]; the residual stream, of x's dtype. A product that has a norm then adds its input to the stream
    first, and norms the sum. None: it norms its input.

    tensors: four for each product: its weight [O, I], scales [O, ...], bias [O], and the weight [I] of its RMSNorm. All
    but the first may be None.
    kinds: a text for each, as in `Product`; "" if the layer is not quantised.
    numbers: four for each: eps, offset and rounds_first of its `RmsNorm`, and 1 if it is gated: its result is
    ``silu(gate) * up`` [..., O / 2] of the halves of the outputs. `entries` makes the three lists of one product; those
    of several are joined. Each list more would take a microsecond of a call.

    -> the stream after the last addition (empty without a residual), and the last product [..., O]. Each step is
    rounded as PyTorch does without a compiler. A row has the same bits with any number of rows.

    Example: among the products o, gate and up, down, and the next layer's q, k and v, the second and the fourth have a
    norm. x is what attention gives. The results are the next layer's stream and its queries, keys and values.
    """
    known = _known_chain(x, tensors, kinds, numbers)
    layers = [] if known else _layers(x, tensors, kinds, numbers)  # checks them, too
    has_norm = known[2] is not None if known else any(layer.before is not None for layer in layers)
    if residual is not None and not has_norm:
        raise ValueError("norms: expected one, whose product adds to the residual")
    if len(layers) > 1:
        stream = x.new_empty(0) if residual is None else residual
        for place, kind in enumerate(kinds):
            four = slice(4 * place, 4 * place + 4)
            adds = residual is not None and tensors[four][NORM] is not None
            after, x = cpu_products(x, stream if adds else None, tensors[four], [kind], numbers[four])
            stream = after if adds else stream
        return stream, x
    if layers:
        stream = x.new_empty(0)
        if residual is not None:
            expect("residual", residual, x.shape, x.dtype)
            x = stream = x + residual
        return stream, plain_product(replace(layers[0], x=x)).contiguous()
    chain, outputs, width = known
    stream, residual_at = x.new_empty(0), 0
    if residual is not None:
        expect("residual", residual, (*x.shape[:-1], width), torch.bfloat16)
        residual = residual.contiguous()
        stream, residual_at = residual.new_empty(residual.shape), residual.data_ptr()
    x, rows = x.contiguous(), x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], outputs)
    chain.run(x.data_ptr(), residual_at, stream.data_ptr(), out.data_ptr(), rows, torch.get_num_threads())
    return stream, out


def supports(dtype: torch.dtype, parts: list[Tensor], kind: str) -> bool:
    """True if the kernel multiplies few rows of a dtype by a layer with these parts."""
    x = parts[0].new_empty(1, parts[0].shape[1], dtype=dtype)
    return dtype == torch.bfloat16 and _form_of(x, parts, kind) is not None


def _form_of(x: Tensor, parts: list[Tensor], kind: str) -> ProductForm | None:
    """How the kernel takes a product of bfloat16; None: it does not."""
    if kind:
        return cpu_gemm.form_here(kind, x, parts)
    fits = not are_plain() and parts[0].dtype is x.dtype and parts[0].is_contiguous()
    return cpu_gemm.NUMBERS[x.dtype] if fits and cpu_gemm.multiplies(x.dtype, x.numel() // x.shape[-1]) else None


def entries(
    weight, scales, bias, kind: str, norm=None, eps: float = 0.0, offset: float = 0.0, rounds_first=False, gated=False
) -> tuple[list, list, list]:
    """The lists `tensors`, `kinds` and `numbers` of one product. Tensors may be nodes of a graph."""
    return [weight, scales, bias, norm], [kind], [eps, offset, float(rounds_first), float(gated)]


def _layers(x: Tensor, tensors: list[Tensor | None], kinds: list[str], numbers: list[float]) -> list[Product]:
    """The products of the op's lists. Each has x in the place of its input."""
    if not kinds or not len(tensors) == len(numbers) == 4 * len(kinds) or any(each is None for each in tensors[::4]):
        raise ValueError(
            f"tensors, kinds, numbers: expected 4, 1 and 4 for each product, the first of the tensors a weight, got "
            f"{len(tensors)}, {len(kinds)} and {len(numbers)}"
        )
    layers, inputs = [], x.shape[-1]
    for place, kind in enumerate(kinds):
        weight, scales, bias, norm = tensors[4 * place : 4 * place + 4]
        eps, offset, rounds_first, is_gated = numbers[4 * place : 4 * place + 4]
        if bool(kind) == (scales is None):
            raise ValueError(f"scales: expected some for a quantised layer only, got {scales} for the kind {kind!r}")
        if norm is not None:
            is_other = x.dtype is torch.bfloat16 and norm.dtype is not x.dtype
            if is_other or norm.shape != (inputs,) or not norm.is_contiguous():
                raise ValueError(f"norm: expected contiguous bfloat16 [{inputs}], got {cpu_gemm.told(norm)}")
        before = None if norm is None else RmsNorm(norm, eps, None if rounds_first else offset)
        layers.append(Product(x, weight, bias, scales, kind, before, Gate() if is_gated else None))
        inputs = _outputs(layers[-1], inputs)
    return layers


def _outputs(layer: Product, inputs: int) -> int:
    """Numbers of a row of a product's result. ValueError if its weight does not fit its inputs or its gate."""
    from ...quantised import layout_of

    weight = layer.weight
    if not weight.dim() or (not layer.kind and (weight.dim() != 2 or weight.shape[1] != inputs)):
        raise ValueError(f"weight: expected [O, {inputs}], got {cpu_gemm.told(weight)}")
    outputs = layout_of(layer.kind).outputs([weight, layer.scales], inputs) if layer.kind else weight.shape[0]
    if layer.after is not None and outputs % 2:
        raise ValueError(f"weight: expected an even number of outputs for a gate, got {cpu_gemm.told(weight)}")
    return outputs // 2 if layer.after is not None else outputs


_known: dict[tuple, tuple | None] = {}
"""By numbers, levels, and the addresses, dtypes, sizes and strides of tensors: results of `_new_chain`."""


def _known_chain(x: Tensor, tensors: list[Tensor | None], kinds: list[str], numbers: list[float]) -> tuple | None:
    """The chain of the kernel, the outputs of its last product, and the width of its norms (None without one); or None
    if the kernel does not serve."""
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x: expected rows of at least one input, got the shape {list(x.shape)}")
    if x.dtype != torch.bfloat16:
        cpu_gemm.check_activations(x)
        return None
    rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
    if are_plain() or not (all(kinds) or cpu_gemm.multiplies(x.dtype, rows)):
        return None  # a library multiplies this many rows by weights of bfloat16
    given = [each for each in tensors if each is not None]
    key = (
        inputs, cpu_gemm.BEST, *kinds, *numbers, *map(operator.is_, tensors, repeat(None)),
        *map(Tensor.data_ptr, given), *map(Tensor.numel, given), *map(Tensor.stride, given), *map(DTYPE, given),
    )  # fmt: skip
    if key not in _known:
        if len(_known) == KNOWN:
            _known.clear()
        _known[key] = _new_chain(x.new_empty(1, inputs), _layers(x, tensors, kinds, numbers))
    return _known[key]


def _new_chain(x: Tensor, layers: list[Product]) -> tuple | None:
    """The value of `_known_chain` for rows like x [1, I]."""
    chain, width = cpu_gemm.new_chain(), None
    for layer in layers:
        weight, bias, norm = layer.weight, layer.bias, layer.before
        form = _form_of(x, [weight] if layer.scales is None else [weight, layer.scales], layer.kind)
        if form is None or (bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous())):
            return None
        around = 0, -1, 0.0, 0.0, False
        if norm is not None:
            if width not in (None, x.shape[1]):
                raise ValueError(f"norms: expected all to be of one stream, got {width} and {x.shape[1]} inputs")
            width, offset = x.shape[1], norm.offset
            around = norm.weight.data_ptr(), norm.weight.numel(), norm.eps, offset or 0.0, offset is None
        numbers = cpu_gemm.constants(form, x.dtype, x.shape[1], weight, layer.scales, bias)
        chain.add(*around, layer.after is not None, *numbers)
        x = x.new_empty(1, _outputs(layer, x.shape[1]))
    return chain, x.shape[1], width


LIBRARY.define(
    "cpu_products(Tensor x, Tensor? residual, Tensor?[] tensors, str[] kinds, float[] numbers) -> (Tensor, Tensor)"
)
LIBRARY.impl("cpu_products", cpu_products, "CPU")
CPU_PRODUCTS = torch.ops.spec_compile.cpu_products.default


@torch.library.register_fake("spec_compile::cpu_products")
def _(x, residual, tensors, kinds, numbers):
    cpu_gemm.check_devices(x, residual, *tensors)
    stream = x.new_empty(0) if residual is None else residual.new_empty(residual.shape)
    for layer in _layers(x, tensors, kinds, numbers):
        if layer.before is not None and residual is not None:
            expect("residual", residual, x.shape, x.dtype)
        x = x.new_empty(*x.shape[:-1], _outputs(layer, x.shape[-1]))
    return stream, x
