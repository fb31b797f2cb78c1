"""The op of products on a CPU in bfloat16 that follow one another, with what stands around each of them.

Between products a decoder layer computes little, but each piece of compiled code costs some microseconds of Python, as
much as a product of a small model. So additions, norms and gates join the products, and the four products between two
calls of attention are one call. `passes.cpu_products` puts the op into the graph.
"""

import operator
import weakref
from dataclasses import replace

import torch
from torch import Tensor

from ..launching import LIBRARY, are_plain, expect
from . import cpu_gemm
from .cpu_gemm import ProductForm
from .product import Gate, Product, RmsNorm
from .product_ops import plain_product

KNOWN = 4096
"""Most chains of the kernel that are kept for later calls."""


def cpu_products(x: Tensor, residual: Tensor | None, tensors: list[Tensor], layers: str) -> tuple[Tensor, Tensor]:
    """Products of which each multiplies the result of the one before it.

    x: [..., I]; the input of the first product.
    residual: [..., H]; the residual stream, of x's dtype. A product that has a norm then adds its input to the stream
    first, and norms the sum. None: it norms its input.

    tensors: for each product its weight [O, I], and scales [O, ...], bias [O] and the weight [I] of its norm if it has
    them.
    layers: for each product its kind, as in `Product`, letters for its tensors, eps and offset of its `RmsNorm`, and 1
    if its result is ``silu(gate) * up`` [..., O / 2] of the halves of the outputs. `entries` makes both arguments for
    one product, which are joined for several. "PerChannel 0,wsn,1e-05,0.0,0;" has scales and a norm. One text takes two
    microseconds less of a call than lists of texts and numbers.

    -> the stream after the last addition (empty without a residual), and the last product [..., O]. Each step is
    rounded as PyTorch does without a compiler. A row has the same bits with any number of rows.

    Example: among the products o, gate and up, down, and the next layer's q, k and v, the second and the fourth have a
    norm. x is what attention gives. The results are the next layer's stream and its queries, keys and values.
    """
    known = _known_chain(x, tensors, layers)
    products = [] if known else _checked(x, tensors, layers)
    has_norm = known[2] is not None if known else any(each.before is not None for each in products)
    if residual is not None and not has_norm:
        raise ValueError("norms: expected one, whose product adds to the residual")
    if len(products) > 1:
        stream = x.new_empty(0) if residual is None else residual
        for each in products:
            adds = residual is not None and each.before is not None
            after, x = cpu_products(x, stream if adds else None, *entries(each))
            stream = after if adds else stream
        return stream, x
    if products:
        stream = x.new_empty(0)
        if residual is not None:
            expect("residual", residual, x.shape, x.dtype)
            x = stream = x + residual
        return stream, plain_product(replace(products[0], x=x)).contiguous()
    chain, outputs, width, _ = known
    if residual is None:
        stream, residual_at = x.new_empty(0), 0
    else:
        expect("residual", residual, (*x.shape[:-1], width), torch.bfloat16)
        stream = torch.empty_like(residual := residual.contiguous(), memory_format=torch.contiguous_format)
        residual_at = residual.data_ptr()
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


def entries(layer: Product) -> tuple[list, str]:
    """The arguments `tensors` and `layers` for one product. Tensors may be nodes of a graph."""
    norm, eps, offset = layer.before or (None, 0.0, 0.0)
    tensors = {"w": layer.weight, "s": layer.scales, "b": layer.bias, "n": norm}
    some = {letter: each for letter, each in tensors.items() if each is not None}
    numbers = f"{eps},{'' if offset is None else offset},{layer.after is not None:d}"
    return [*some.values()], f"{layer.kind},{''.join(some)},{numbers};"


def products_of(x: Tensor, _residual: Tensor | None, tensors: list, layers: str) -> list[Product]:
    """The products of the op's arguments, each with x in the place of its input."""
    products, rest = list[Product](), tensors
    for layer in layers.split(";")[:-1]:
        kind, letters, eps, offset, gated = layer.split(",")
        weight, scales, bias, norm = map(dict(zip(letters, rest)).get, "wsbn")
        before = None if norm is None else RmsNorm(norm, float(eps), float(offset) if offset else None)
        products.append(Product(x, weight, bias, scales, kind, before, Gate() if gated == "1" else None))
        rest = rest[len(letters) :]
    if not products or rest or any(each.weight is None for each in products):
        raise ValueError(f"tensors: expected a weight, and what else layers name, of each product, got {len(tensors)}")
    return products


def _checked(x: Tensor, tensors: list[Tensor], layers: str) -> list[Product]:
    """`products_of` the op's arguments, which fit each other."""
    products, inputs = products_of(x, None, tensors, layers), x.shape[-1]
    for layer in products:
        if bool(layer.kind) == (layer.scales is None):
            raise ValueError(f"scales: expected some for a quantised layer only, got {layer.kind!r}, {layer.scales}")
        if layer.before is not None:
            norm = layer.before.weight
            is_other = x.dtype is torch.bfloat16 and norm.dtype is not x.dtype
            if is_other or norm.shape != (inputs,) or not norm.is_contiguous():
                raise ValueError(f"norm: expected contiguous bfloat16 [{inputs}], got {cpu_gemm.told(norm)}")
        inputs = _outputs(layer, inputs)
    return products


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


_known: dict[tuple, tuple[list[weakref.ref], tuple | None]] = {}
"""By layers, inputs, level and addresses of tensors: these tensors, and the result of `_new_chain`."""


def _known_chain(x: Tensor, tensors: list[Tensor], layers: str) -> tuple | None:
    """The result of `_new_chain` for these tensors, or None if the kernel does not serve.

    The same tensors at the same addresses are laid out as before. When they are gone, others may have their addresses.
    """
    if not x.dim() or not x.shape[-1]:
        raise ValueError(f"x: expected rows of at least one input, got the shape {list(x.shape)}")
    if x.dtype is not torch.bfloat16 or are_plain():
        cpu_gemm.check_activations(x)
        return None
    inputs = x.shape[-1]
    key = layers, inputs, cpu_gemm.BEST, *map(Tensor.data_ptr, tensors)
    known = _known.get(key)
    if known is None or not all(map(operator.is_, map(operator.call, known[0]), tensors)):
        if len(_known) == KNOWN:
            _known.clear()
        chain = _new_chain(x.new_empty(1, inputs), _checked(x, tensors, layers))
        known = _known[key] = [*map(weakref.ref, tensors)], chain
    chain = known[1]
    if chain is None or chain[3] or cpu_gemm.multiplies(x.dtype, x.numel() // inputs):
        return chain
    return None  # a library multiplies this many rows by weights of bfloat16


def _new_chain(x: Tensor, products: list[Product]) -> tuple | None:
    """The value of `_known_chain` for rows like x [1, I]: the chain of the kernel, the outputs of its last product, the
    width of its norms (None without one), and True if all weights are codes. None if the kernel does not serve."""
    chain, width = cpu_gemm.new_chain(cpu_gemm.BEST), None
    for layer in products:
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
    return chain, x.shape[1], width, all(layer.kind for layer in products)


LIBRARY.define("cpu_products(Tensor x, Tensor? residual, Tensor[] tensors, str layers) -> (Tensor, Tensor)")
LIBRARY.impl("cpu_products", cpu_products, "CPU")
CPU_PRODUCTS = torch.ops.spec_compile.cpu_products.default


@torch.library.register_fake("spec_compile::cpu_products")
def _(x, residual, tensors, layers):
    cpu_gemm.check_devices(x, residual, *tensors)
    stream = x.new_empty(0) if residual is None else residual.new_empty(residual.shape)
    for layer in _checked(x, tensors, layers):
        if layer.before is not None and residual is not None:
            expect("residual", residual, x.shape, x.dtype)
        x = x.new_empty(*x.shape[:-1], _outputs(layer, x.shape[-1]))
    return stream, x
