"""All drafts share these: copies of weights in fewer bits, the choice of ranks, and states of the target."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..capture.copies import shallow, shared_copy
from ..capture.quantised import mark
from ..capture.trace import tapped
from ..errors import UnsupportedModelError, did_you_mean
from ..graph import ModelGraph, attribute, calls
from ..kernels.linear import PRODUCT, QUANTISED, few_rows_linear, for_few_rows, linear_layers
from ..parallel.ranks import ALONE, Alone
from ..parallel.slices import Cut
from ..passes import PIPELINE
from ..passes.linears import add_buffer, merge_linears
from ..passes.outputs import select_logits
from ..passes.products import product_of
from ..quantised import Packed, rounded

# The option ``draft_weights``: copies of a draft's matrices in fewer bits, which its products read in their place.
#
# A product of few rows takes as long as its weights take to be read. The target verifies every draft, so rounding the
# draft's weights changes how many are accepted, and no answer. The matrices themselves stay as they are: the target may
# share them, and `refresh` rounds them anew.

PARTS = ("layers", "output")
"""The parts of a draft: the products of its layers, and its output matrix."""


def parse_formats(value: str | dict | None) -> dict[str, str]:
    """The format of each part that gets one. TypeError or ValueError, naming the option, if `value` is none."""
    expected = f"one of {', '.join(rounded.FORMATS)}, or a dict of these for {' and '.join(PARTS)}"
    if value is not None and not isinstance(value, (str, dict)):
        raise TypeError(f"draft_weights: expected {expected}, got {type(value).__name__} ({value!r})")
    parts = dict.fromkeys(PARTS, value) if isinstance(value, str) else dict(value or {})
    for part, name in parts.items():
        for value, known in ((part, PARTS), (name, rounded.FORMATS)):
            if value not in known:
                raise ValueError(f"draft_weights: expected {expected}, got {value!r}.{did_you_mean(str(value), known)}")
    return parts


class DraftWeights:
    """The copies of one draft's matrices.

    option: ``draft_weights``.
    draft: the head, whose ``published`` matrices are copied as they are if no format is asked for and a kernel reads
        them, or the draft model.
    output: its output matrix, which may be the target's; None: it is in the graph, as its ``head_weight``.
    """

    def __init__(self, option: str | dict | None, draft: nn.Module, output: Tensor | None = None):
        self.draft, self.formats, self._output = draft, parse_formats(option), output
        self._published = getattr(getattr(draft, "published", None), "matrices", {})
        self._copies: dict[tuple[int, str], tuple[Tensor, Packed]] = {}  # address and part -> matrix [O, I] and copy
        self._left: dict[str, None] = {}  # sizes of the matrices that are read as they are

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
            with graph.gm.graph.inserting_before(node):
                parts = [add_buffer(graph.gm, f"draft_{node.name}_{name}", x) for name, x in packed.parts.items()]
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
            self._copies[key] = weight, packed
        return self._copies[key][1]

    def _rounded(self, weight: Tensor, part: str) -> Packed | None:
        packed = rounded.FORMATS[self.formats[part]](weight)
        if packed is None:
            self._left[f"{list(weight.shape)}"] = None
            return None
        return for_few_rows(packed, weight.dtype) or packed

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
        for (_, part), (weight, before) in self._copies.items():
            if part not in self.formats:  # as it was published
                continue
            packed = self._rounded(weight, part)
            if packed.layout != before.layout:
                raise ValueError(
                    f"draft_weights: the new weights take the layout {packed.layout.kind!r}, not "
                    f"{before.layout.kind!r}, because of larger scales; call speculate() again"
                )
            for old, new in zip(before.parts.values(), packed.parts.values()):
                old.copy_(new)  # guard: draft-weights

    def explain(self) -> list[str]:
        """A line for each part that has copies."""
        lines = []
        for part in PARTS:
            copies = [copy for (_, of), copy in self._copies.items() if of == part]
            if not copies:
                continue
            before = sum(weight.nbytes for weight, _ in copies)
            after = sum(tensor.nbytes for _, packed in copies for tensor in packed.parts.values())
            name = self.formats.get(part, "as published")
            lines.append(
                f"draft_weights: {'output matrix' if part == 'output' else 'layers'} {name}, {after / 1e6:.1f} MB of "
                f"copies are read in place of {before / 1e6:.1f} MB, which stay"
            )
        if self._left:
            sizes = ", ".join(self._left)
            lines.append(f"draft_weights: matrices whose inputs no group divides are read as they are: {sizes}")
        if not all(for_few_rows(packed, weight.dtype) for weight, packed in self._copies.values()):
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


# The ranks of tensor parallelism

BYTES_A_SECOND = 4.3e12
"""Rate at which an H200 reads weights."""
SUM_SECONDS, GATHER_SECONDS = 6.2e-6, 20e-6
"""Time of a sum over ranks by our kernel, and of a gather by NCCL, on two H200s."""


def choose_ranks(option: int | None, ranks: Alone, graph: ModelGraph, head_bytes: int = 0) -> tuple[Alone, str]:
    """The ranks that share a draft, and a line for ``explain()``.

    option: ``draft_tensor_parallel_size``: 1 (it is whole on each), the number of ranks, or None: the faster of the two
    by the bytes that a pass of the draft reads and the sums that sharing needs.
    ranks: share the target.
    graph: the captured draft.
    head_bytes: size of an output matrix that is not in the graph.

    Raises ValueError, naming the option, if it is another number.
    """
    if option not in (None, 1, ranks.size):
        raise ValueError(
            f"draft_tensor_parallel_size: expected 1 (the draft is whole on each rank) or {ranks.size} (as many as "
            f"share the model), got {option}"
        )
    if ranks.size == 1:
        return ALONE, ""
    # Count the bytes of a pass, the time that sharing saves, and the time that the exchange takes.
    products = [product for node in calls(graph.gm) if (product := product_of(node)) is not None]
    weights = {part.target for product in products for part in product.parts}
    read = head_bytes + sum(attribute(graph.gm, name).nbytes for name in weights)
    saved = read * (1 - 1 / ranks.size) / BYTES_A_SECOND
    paid = 2 * len(graph.layers) * SUM_SECONDS + bool(head_bytes) * GATHER_SECONDS
    pays = saved > paid and graph.device.type == "cuda"
    # Choose, and say why.
    heads = all(layer.heads % ranks.size == 0 for layer in graph.layers)
    if option == ranks.size and not heads:
        raise UnsupportedModelError(
            f"draft_tensor_parallel_size: the draft's {graph.layers[0].heads} heads do not divide among {ranks.size} "
            "ranks; pass 1"
        )
    is_shared = option == ranks.size or (option is None and pays and heads)
    reason = f"a pass reads {read / 1e6:.0f} MB, of which sharing saves {saved * 1e6:.0f} us and pays {paid * 1e6:.0f}"
    if option is not None:
        reason = "as it was asked for"
    where = f"shared by {ranks.size} ranks" if is_shared else "whole on each rank"
    return (ranks if is_shared else ALONE), f"the draft is {where}: {reason}"


class DraftHead(nn.Module):
    """The output matrix [V, H] of a draft; if ranks share it, each has some of its rows."""

    def __init__(self, weight: Tensor, ranks: Alone, weights: DraftWeights):
        super().__init__()
        self.ranks, self.size = ranks, weight.shape[0]
        self.weight = weight if ranks.size == 1 else ranks.slices.part(weight, Cut(0, ranks.size))
        self.copy = weights.linear(self.weight, part="output")

    def forward(self, x: Tensor) -> Tensor:
        """Logits [..., V] of x [..., H]."""
        logits = few_rows_linear(x, self.weight) if self.copy is None else self.copy(x)
        if self.ranks.size == 1:
            return logits
        gathered = torch.ops.spec_compile.all_gather(logits, self.ranks.size, self.ranks.name)
        return gathered[..., : self.size]


def tapped_states(model: PreTrainedModel, taps: tuple[int, ...], ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The tapped states [B, T, h] of the target at ids, and its choice of the next token at each [B, T]."""
    model = mark(shared_copy(model))
    with tapped(model, taps) as states:
        logits = model(input_ids=ids, use_cache=False).logits
    return states, logits.argmax(dim=-1)


def keep_row(buffer: Tensor, states: Tensor, row: Tensor, present: Tensor) -> None:
    """Copy the state at row [B] of states [B, T, C] to buffer [B, C], for the sequences with present [B]."""
    index = row.clamp(0, states.shape[1] - 1)[:, None, None].expand(-1, 1, states.shape[2])
    buffer.copy_(torch.where(present[:, None], states.gather(1, index)[:, 0], buffer.clone()))
