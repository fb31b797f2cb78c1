"""The option ``draft_weights``: copies of a draft's matrices in fewer bits, which its products read in their place.

A product of few rows takes as long as its weights take to be read. The target verifies every draft, so rounding the
draft's weights changes how many are accepted, and no answer. The matrices themselves stay as they are: the target may
share them, and `refresh` rounds them anew.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..capture.copies import shallow
from ..errors import did_you_mean
from ..graph import ModelGraph, attribute
from ..kernels.linear import PRODUCT, QUANTISED, for_few_rows, linear_layers
from ..passes import PIPELINE
from ..passes.linears import merge_linears
from ..passes.outputs import select_logits
from ..quantised import Packed, rounded

PARTS = ("layers", "output")
"""The parts of a draft: the products of its layers, and its output matrix."""


def parse(value: str | dict | None) -> dict[str, str]:
    """The format of each part that gets one. TypeError or ValueError, naming the option, if `value` is none."""
    if value is not None and not isinstance(value, (str, dict)):
        raise TypeError(f"draft_weights: expected {_known()}, got {type(value).__name__} ({value!r})")
    parts = dict.fromkeys(PARTS, value) if isinstance(value, str) else dict(value or {})
    for part, name in parts.items():
        for value, known in ((part, PARTS), (name, rounded.FORMATS)):
            if value not in known:
                raise ValueError(f"draft_weights: expected {_known()}, got {value!r}.{did_you_mean(str(value), known)}")
    return parts


def _known() -> str:
    return f"one of {', '.join(rounded.FORMATS)}, or a dict of these for {' and '.join(PARTS)}"


@dataclass
class Copy:
    """A matrix [O, I] and its copy. is_published: the copy is as the draft's files have it."""

    weight: Tensor
    packed: Packed
    is_published: bool


class DraftWeights:
    """The copies of one draft's matrices.

    option: ``draft_weights``.
    draft: the head, whose ``published`` matrices are copied as they are if no format is asked for and a kernel reads
        them, or the draft model.
    output: its output matrix; None: that is in the graph, as its ``head_weight``.
    target: the model; its own output matrix may be the draft's.
    """

    def __init__(self, option: str | dict | None, draft: nn.Module, output: Tensor | None = None):
        self.draft, self.formats, self._output = draft, parse(option), output
        published = getattr(draft, "published", None)
        self._published = {} if published is None else published.matrices
        self._copies: dict[tuple[int, str], Copy] = {}
        self._left: dict[str, int] = {}

    def pipeline(self, passes: list | None = None) -> list:
        """The passes (None: `PIPELINE`), with those that put copies in the place of matrices."""
        passes = list(PIPELINE if passes is None else passes)
        if not self.formats and not self._published:
            return passes
        before, after = passes.index(merge_linears), passes.index(select_logits) + 1
        return [*passes[:before], self.pack_layers, *passes[before:after], self.pack_output, *passes[after:]]

    def pack_layers(self, graph: ModelGraph, settings) -> str:
        """A pass: all products but that with ``graph.head_weight``. It comes before layers are merged."""
        return self._pack(graph, [node for node in linear_layers(graph) if node.args[1].target != graph.head_weight])

    def pack_output(self, graph: ModelGraph, settings) -> str:
        """A pass: the product with ``graph.head_weight``, after `select_logits` has found it."""
        return self._pack(graph, [node for node in linear_layers(graph) if node.args[1].target == graph.head_weight])

    def _pack(self, graph: ModelGraph, nodes: list) -> str:
        changed = 0
        for node in nodes:
            weight, is_output = attribute(graph.gm, node.args[1].target), node.args[1].target == graph.head_weight
            is_output |= self._output is not None and weight.data_ptr() == self._output.data_ptr()
            packed = self.copy_of(weight, "output" if is_output else "layers")
            if packed is None:
                continue
            parts = []
            for name, tensor in packed.parts.items():
                target = f"draft_{node.name}_{name}"
                graph.gm.register_buffer(target, tensor, persistent=False)
                with graph.gm.graph.inserting_before(node):
                    parts.append(graph.gm.graph.get_attr(target))
            bias = node.args[2] if len(node.args) > 2 else None
            node.target, node.args = QUANTISED, (node.args[0], parts, bias, packed.layout.kind)
            changed += 1
        return f"{changed} products read copies of the draft's weights in fewer bits"

    def copy_of(self, weight: Tensor, part: str) -> Packed | None:
        """The copy of a matrix [O, I], made once; None: it is read as it is. part: of PARTS."""
        if type(weight.data) is not Tensor:
            return None
        key = weight.data_ptr(), part
        if key not in self._copies:
            if part in self.formats:
                packed = self._rounded(weight, part)
            else:
                stored = self._published.get(weight.data_ptr())
                packed = None if stored is None else for_few_rows(stored, weight.dtype)
            if packed is None:
                return None
            self._copies[key] = Copy(weight, packed, part not in self.formats)
        return self._copies[key].packed

    def _rounded(self, weight: Tensor, part: str) -> Packed | None:
        packed = rounded.FORMATS[self.formats[part]](weight)
        if packed is None:
            self._left[f"{list(weight.shape)}"] = weight.nbytes
            return None
        return for_few_rows(packed, weight.dtype) or packed

    def read_bytes(self, weight: Tensor, part: str) -> int:
        """Bytes that a product with a matrix reads."""
        copy = self._copies.get((weight.data_ptr(), part))
        return weight.nbytes if copy is None else _bytes(copy.packed)

    def linear(self, weight: Tensor, bias: Tensor | None = None, part: str = "layers") -> "DraftLinear | None":
        """A product outside of the graph, x [..., I] -> [..., O], with a copy of a matrix; None: there is no copy."""
        packed = self.copy_of(weight, part)
        return None if packed is None else DraftLinear(packed._replace(bias=bias), weight.dtype)

    def with_projection(self, draft: nn.Module, graph: ModelGraph) -> nn.Module:
        """`draft`, or another object over its state whose ``project`` reads a copy of ``fc``, which the captured
        `graph` does not read."""
        fc = getattr(draft, "fc", None)
        read = {attribute(graph.gm, n.target).data_ptr() for n in graph.gm.graph.nodes if n.op == "get_attr"}
        if not isinstance(fc, nn.Linear) or fc.weight.data_ptr() in read or self.copy_of(fc.weight, "layers") is None:
            return draft
        other = shallow(draft)
        other.fc = self.linear(fc.weight, fc.bias)
        return other

    @torch.no_grad()
    def refresh(self) -> None:
        """The draft's matrices have changed: round them again. ValueError if a copy would take another layout."""
        for (_, part), copy in self._copies.items():
            if copy.is_published:
                continue
            packed = self._rounded(copy.weight, part)
            if packed.layout != copy.packed.layout:
                raise ValueError(
                    f"draft_weights: the new weights take the layout {packed.layout.kind!r}, not "
                    f"{copy.packed.layout.kind!r}, because of larger scales; call speculate() again"
                )
            for old, new in zip(copy.packed.parts.values(), packed.parts.values()):
                old.copy_(new)  # guard: draft-weights

    def explain(self) -> list[str]:
        """A line for each part that has copies."""
        lines = []
        for part in PARTS:
            copies = [copy for (_, of), copy in self._copies.items() if of == part]
            if not copies:
                continue
            before, after = (sum(sizes) for sizes in zip(*((c.weight.nbytes, _bytes(c.packed)) for c in copies)))
            name = "as published" if copies[0].is_published else self.formats[part]
            lines.append(
                f"draft_weights: {'output matrix' if part == 'output' else 'layers'} {name}, {after / 1e6:.1f} MB of "
                f"copies are read in place of {before / 1e6:.1f} MB, which stay"
            )
        if self._left:
            sizes = ", ".join(self._left)
            lines.append(f"draft_weights: matrices whose inputs no group divides are read as they are: {sizes}")
        copies = [*self._copies.values()]
        if copies and not all(for_few_rows(copy.packed, copy.weight.dtype) for copy in copies):
            lines.append("draft_weights: no kernel reads these copies here, so they cost time: for tests of acceptance")
        return lines


class DraftLinear(nn.Module):
    """A product of a draft outside of its graph: x [..., I] of a dtype -> [..., O]."""

    def __init__(self, packed: Packed, dtype: torch.dtype):
        super().__init__()
        self.kind, self.bias = packed.layout.kind, packed.bias
        self.has_kernel = for_few_rows(packed, dtype) is not None
        for number, part in enumerate(packed.parts.values()):
            self.register_buffer(f"part_{number}", part, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [*self._buffers.values()]
        if self.has_kernel:
            return PRODUCT(x, parts[0], self.bias, parts[1], self.kind)
        return QUANTISED(x, parts, self.bias, self.kind)


def _bytes(packed: Packed) -> int:
    return sum(part.nbytes for part in packed.parts.values())
