"""The checks after capture: a model is refused unless the graphs compute what it computes.

Rounding to 16 bits hides small faults, so a model of 16 bits is compared twice, by the limits in `yardstick`:

- In float32 with the same weights (`in_float32`). A wrong scale, mask, position, window or eps shows there.
- In its 16 bits and by its kernels, as it will be used. Wrong rounding shows there.

Where a model is nearly undecided, rounding decides: which experts a token goes to, or which token attention sees most.
So a difference in 16 bits on one text proves nothing, nor does any in a mixture of experts. The model is refused if it
differs on each of several texts.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin

from ..cache import ROUNDED, Cache
from ..errors import UnsupportedModelError, log
from ..graph import ModelGraph, calls
from ..kernels.recurrence.kinds import BLOCK
from ..kernels.together import compile_together
from ..quantised import unrounded_activations
from ..tree import ancestry
from . import copies, replaced
from .quantised import embedded_tokens, output_matrix, refuse, with_plain_meaning
from .yardstick import (
    DistantLogits,
    compare_logits,
    compare_rounding,
    exact_logits,
    full_precision,
    has_half,
    in_float32,
    in_float32_if_possible,
)

TEXTS = 4
"""Random texts that a model may be checked on."""
ROUTERS = {"aten.topk.default", "spec_compile.route.default"}
"""Operators that choose experts. The second is defined only on machines with Triton."""
SHORTEST = 16
"""Tokens of a text that is longer than no window."""
LONGEST = 1024
"""Tokens of the longest text of a check. For a longer window, only its argument to attention is checked, and of an
indexer that chooses more tokens only that they are all chosen."""
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 7, 8, 8, 12, 14]
"""A tree of 16 nodes, as many as a round may have."""
PREFIX = 8
"""Tokens before that tree."""
CAPTURE = "the captured graph"
TREE = "the tree attention of the rewritten graph"
TIES: list[Callable[[ModelGraph], AbstractContextManager[Any]]] = []
"""Contexts in which the model's own forward decides between equal numbers as its graph does; `contrib` adds some. Each
gives an object whose `warning` is for the user; it is empty if nothing was decided otherwise."""


@contextmanager
def own_forward(graph: ModelGraph) -> Iterator[list[Any]]:
    """All contexts of `TIES`; yields their objects."""
    with ExitStack() as stack:
        yield [stack.enter_context(context(graph)) for context in TIES]


@torch.no_grad()
def check_capture(model: PreTrainedModel, graph: ModelGraph) -> None:
    """Compare the captured graph with the model's own forward on random ids.

    The text is shorter than a window that attention is told of: `check_generation` looks beyond it. Quantised layers
    have their plain meaning on both sides. A model whose own forward does not run in float32, as with FlashAttention,
    is compared only in 16 bits. Raises UnsupportedModelError if they differ.
    """
    name, model = type(model).__name__, with_plain_meaning(model)
    announced = announced_window(model.config)
    untold = 0 if announced in reaches(graph) else announced
    if untold > LONGEST:
        refuse(model, f"has a sliding window of {announced} that its attention is not told of")
    more = BLOCK + 17 if graph.recurrences else 17 if untold else 0
    length = min(max(SHORTEST, untold) + more, LONGEST, graph.position_limit or LONGEST)

    def check(seed: int) -> None:
        ids = random_ids(graph, 2, length, seed).to(model.device)
        positions = torch.arange(length, device=ids.device).expand_as(ids)

        def expected() -> Tensor:
            return model(input_ids=ids, position_ids=positions, use_cache=False).logits

        def captured() -> Tensor:
            return graph.gm(ids, positions)[0]

        if not has_half(graph):
            with in_float32():
                return compare_logits(name, CAPTURE, captured(), expected())
        # First the computation in float32, then the rounding in 16 bits, where each side is the other's yardstick.
        exact, wide = exact_logits(name, captured), in_float32_if_possible("the model's own forward", expected, model)
        plain, ours = expected(), captured()
        if wide is None:
            compare_rounding(name, CAPTURE, plain, ours, exact)
        else:
            compare_logits(name, CAPTURE, exact, wide)
        compare_rounding(name, CAPTURE, ours, plain, exact)

    with own_forward(graph):
        on_some_text(graph, check)


@torch.no_grad()
def check_tree(name: str, graph: ModelGraph, verify: ModelGraph) -> None:
    """Compare a small tree after a prefix with plain forwards of the captured graph over each of its paths.

    If the model has recurrences, a path of the tree is then committed and the same tree compared after it, because only
    later tokens show how a commit changed a state. An attention backend that takes only 16 bits is compared only in 16
    bits. Raises UnsupportedModelError if they differ.
    """
    path = [0, 2, 5, 8, 13] if graph.recurrences else []
    prefix = min(PREFIX, (graph.position_limit or LONGEST) - len(PARENTS) - len(path))
    ancestors, depth = ancestry(torch.tensor([PARENTS], device=graph.device))

    def check(seed: int) -> None:
        ids = random_ids(graph, 1, prefix + len(PARENTS), seed).to(graph.device)
        committed = torch.cat([ids[:, :prefix], ids[:, prefix:][:, path], ids[:, prefix:]], dim=1)

        def run(texts: Tensor) -> Tensor:
            return graph.gm(texts, torch.arange(texts.shape[1], device=ids.device).expand_as(texts))[0]

        def linear() -> Tensor:
            first = linear_logits(run, ids, prefix, ancestors[0].tolist())
            if not path:
                return first
            return torch.cat([first, linear_logits(run, committed, prefix + len(path), ancestors[0].tolist())])

        def tree(dtype: torch.dtype) -> Tensor:
            return tree_logits((verify, verify), cached(graph, verify, dtype), ids, prefix, ancestors, depth, path)

        compile_together(partial(tree, graph.dtype))
        if not has_half(graph):
            with in_float32(by_kernels=True):
                return compare_logits(name, TREE, tree(graph.dtype), linear())
        compare_tree(name, graph.dtype, tree, linear, exact_logits(name, linear))

    on_some_text(graph, check)


def compare_tree(
    name: str, dtype: torch.dtype, tree: Callable[[torch.dtype], Tensor], plain: Callable[[], Tensor], exact: Tensor
) -> None:  # fmt: skip
    """Compare `tree` with the float32 logits `exact`, in float32 if it runs so, and in 16 bits.

    tree: a function of the dtype of keys and values that gives the logits of a tree.
    plain: gives the logits of plain forwards in `dtype`.
    Raises UnsupportedModelError if they differ.
    """
    wide = in_float32_if_possible(TREE, partial(tree, torch.float32))
    if wide is not None:
        compare_logits(name, TREE, wide, exact)
    compare_rounding(name, TREE, tree(dtype), plain(), exact)


def cached(graph: ModelGraph, verify: ModelGraph, dtype: torch.dtype) -> ModelGraph:
    """All that `Cache` reads of a graph, to hold keys and values in `dtype` for `verify`, rewritten from `graph`."""
    return replace(
        graph, dtype=dtype, layers=verify.layers, scaled_cache=verify.scaled_cache, has_adapters=verify.has_adapters
    )


def tree_logits(
    graphs: tuple[ModelGraph, ModelGraph], kept: ModelGraph, ids: Tensor, prefix: int, ancestors: Tensor, depth: Tensor,
    path: list[int],
) -> Tensor:  # fmt: skip
    """Logits [N, V] of the nodes of a tree, ids [1, prefix + N], with a cache for `kept`.

    graphs: one that prefills, and one that verifies.
    path: nodes to commit, after which the same tree is verified again, so that the result is [2 N, V]; may be empty.
    """
    prefill, verify = graphs
    slots, begin = ids.shape[1] + len(path), prefix - 2 if path else 0
    # Prefill in two chunks, over which a state is carried.
    cache = Cache(kept, 1, -(-slots // ROUNDED) * ROUNDED)  # as a session's
    cache.states.reset(torch.tensor([slots], device=ids.device))
    start = torch.zeros(1, dtype=torch.int64, device=ids.device)
    for first, last in ((0, begin), (begin, prefix)):
        if first < last:
            for counted in cache.states.tensors[:1]:
                counted.fill_(last - first)
            positions = torch.arange(first, last, device=ids.device)[None]
            prefill.gm(ids[:, first:last], positions, start + first, None, cache.argument, prefix)
    # Verify the tree; without a path to commit that is all.
    tree = ids[:, prefix:]
    logits = verify.gm(tree, prefix + depth, start + prefix, ancestors, cache.argument, slots)[0][0]
    if not path:
        return logits
    # Commit the path: its states, then its keys and values, moved after the prefix. Verify the tree again.
    nodes, length = torch.tensor([path], device=ids.device), prefix + len(path)
    cache.states.commit(nodes, start + len(path))
    for tensor in cache.tensors:
        tensor[:, :, prefix:length] = tensor[:, :, prefix + nodes[0]]
    again = verify.gm(tree, length + depth, start + length, ancestors, cache.argument, slots)[0][0]
    return torch.cat([logits, again])


def linear_logits(run: Callable[[Tensor], Tensor], ids: Tensor, prefix: int, ancestors: list[int]) -> Tensor:
    """Logits [N, V] at the end of each node's path. Each path to a leaf is run as a separate text.

    run: a function of texts [B, T] that gives their logits [B, T, V].
    ancestors: the bits of each node; 0b1011 says that the path of node 3 is nodes 0, 1, 3, so the text that ends with
        node 3 has the logits of nodes 0 and 1, too.
    """
    # The paths to leaves, each as a text after the prefix.
    nodes = len(ancestors)
    paths = [[j for j in range(nodes) if bits >> j & 1] for bits in ancestors]
    inner = {node for path in paths for node in path[:-1]}
    paths = [path for node, path in enumerate(paths) if node not in inner]
    length = prefix + max(map(len, paths))
    texts = ids[:, :length].repeat(len(paths), 1)  # a path's last token does not see what follows it
    places: dict[int, tuple[int, int]] = {}
    for row, path in enumerate(paths):
        texts[row, prefix : prefix + len(path)] = ids[0, prefix:][path]
        places |= {node: (row, prefix + depth) for depth, node in enumerate(path)}
    logits = run(texts)
    rows, columns = torch.tensor([places[node] for node in range(nodes)], device=ids.device).T
    return logits[rows, columns]


def on_some_text(graph: ModelGraph, check: Callable[[int], None]) -> None:
    """Run ``check(seed)`` until it passes, at most `TEXTS` times. A difference in float32 counts at once, unless the
    model routes to experts."""
    routes = any(str(node.target) in ROUTERS for node in calls(graph.gm))
    for seed in range(TEXTS):
        try:
            return check(seed)
        except UnsupportedModelError as error:
            if seed == TEXTS - 1 or not (routes or isinstance(error, DistantLogits)):
                raise


def reaches(graph: ModelGraph) -> list[int]:
    """Lengths of text after which some layer behaves differently: the end of a window, the tokens that an indexer
    chooses, the end of a second chunk less a few tokens, and `LONGEST` for biases by distance, which some models round
    to 8 bits where they are large."""
    windows = [layer.window for layer in graph.layers if layer.window is not None]
    chunks = [max(2 * layer.chunk - 6, 1) for layer in graph.layers if layer.chunk is not None]
    indexes = [spec.topk for spec in graph.indexes]
    return windows + chunks + indexes + [LONGEST] * any(layer.slopes for layer in graph.layers)


def announced_window(config: PreTrainedConfig) -> int:
    """The sliding window that the configuration gives its layers, in tokens (0: none)."""
    config = config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) is False or (types and "sliding_attention" not in types):
        return 0
    return getattr(config, "sliding_window", None) or 0


def random_ids(graph: ModelGraph, batch: int, length: int, seed: int) -> Tensor:
    """Random token ids, int64 [batch, length]."""
    return torch.randint(0, graph.common_tokens, (batch, length), generator=torch.Generator().manual_seed(seed))


# The check of generation: the graphs must give the logits of the model's `generate`.


STEPS = 4
"""Tokens that are generated, the first from the prompt and the others from the cache."""
PADDING = 7
"""Tokens of padding on the left of the second of two rows."""
PATH = [0, 2, 5, 8]
"""Nodes of a path from the root of `PARENTS`, as many as `STEPS`."""
GENERATE = "the model's own generate(), over its cache,"
ANY, UNPADDED, SINGLE = "any", "without padding", "of one row"
"""Batches in which `generate` gives every row the answer of its text."""


@torch.no_grad()
def check_generation(model: PreTrainedModel, graph: ModelGraph, prefill: ModelGraph, verify: ModelGraph) -> str:
    """Compare a few steps of transformers' `generate` with the graphs; return the batches that agree.

    A forward over a whole text does not use the model's cache, nor the mask of a batch that is padded on the left. On a
    short text `generate` is compared with the captured graph. On a text that is longer than any window, where a forward
    takes seconds, it is compared with the graphs that were rewritten to prefill and to verify. If the model overrides
    methods of transformers' loop, that loop serves it: only its forward is compared, and `ANY` is returned.
    Raises UnsupportedModelError if a single row differs.
    """
    model, overridden = with_plain_meaning(model), replaced.overridden(model)
    limit = LONGEST if graph.position_limit is None else min(LONGEST, graph.position_limit - STEPS)
    short = min(SHORTEST + PADDING + 2, limit)
    far_reaches = reaches(graph)
    long = min(max(far_reaches, default=0) + PADDING + 2, limit - len(PARENTS))
    generates = _forward_logits if overridden else _generated_logits

    def check(*padding: int) -> None:
        with own_forward(graph) as ties:
            if not overridden:
                short_text = partial(random_ids, graph, len(padding), short)
                on_some_text(graph, lambda seed: _compare_steps(model, graph, short_text(seed), padding))
            if far_reaches and long > PADDING + STEPS:  # guard: windows-are-crossed
                far = partial(_compare_far, model, graph, (prefill, verify), generates, long, padding[-1])
                on_some_text(graph, far)
        for warning in (tie.warning for tie in ties if tie.warning):
            log.warning("%s %s", type(model).__name__, warning)

    for batches, padding in ((ANY, (0, PADDING)), (UNPADDED, (0, 0))):
        if short > max(padding) + 1:
            try:
                check(*padding)
                return batches
            except UnsupportedModelError:
                pass  # perhaps only the padding differs, or the rows of a batch (RWKV), so compare without
    check(0)
    return SINGLE


def _compare_steps(model: PreTrainedModel, graph: ModelGraph, ids: Tensor, padding: tuple[int, ...]) -> None:
    """UnsupportedModelError if `generate` fails or differs. ids [B, T]: the first `padding[b]` of row b are masked."""
    name, ids = type(model).__name__, ids.to(model.device)

    # The captured graph clamps time steps everywhere, the model clamps them only in prompts.
    tokens = 1 if graph.clamps_prompts else STEPS

    def steps() -> tuple[Tensor, Tensor]:
        return _generated_logits(model, ids, padding, tokens)

    if not has_half(graph):
        with unrounded_activations():  # another order of sums would move their codes
            generated, texts = steps()
            expected = _captured_logits(graph, texts, padding, generated.shape[1])
        return compare_logits(name, GENERATE, generated.to(expected.dtype), expected)
    wide = in_float32_if_possible(GENERATE, steps, model)
    generated, texts = wide or steps()
    exact = exact_logits(name, lambda: _captured_logits(graph, texts, padding, generated.shape[1]))
    if wide:
        compare_logits(name, GENERATE, generated, exact)
    else:
        compare_rounding(name, GENERATE, generated, _captured_logits(graph, texts, padding, generated.shape[1]), exact)


def _compare_far(
    model: PreTrainedModel, graph: ModelGraph, rewritten: tuple[ModelGraph, ModelGraph], generates: Callable,
    length: int, padding: int, seed: int,
) -> None:  # fmt: skip
    """UnsupportedModelError if the path of a tree after a long text has other logits than `generates` gives its tokens.

    rewritten: the graphs that prefill and verify.
    generates: as `_generated_logits`.
    length: tokens of the text, of which the first `padding` are masked.
    """
    name = type(model).__name__
    drawn = random_ids(graph, 1, length + len(PARENTS), seed).to(model.device)
    ancestors, depth = ancestry(torch.tensor([PARENTS], device=graph.device))
    prefix = length - padding - 1

    def steps() -> tuple[Tensor, Tensor]:
        return generates(model, drawn[:, :length], (padding,), STEPS)

    def tree(dtype: torch.dtype) -> Tensor:
        """The logits of the path, whose root is the last token of the prompt."""
        ids = drawn[:, : prefix + len(PARENTS)].clone()
        ids[:, :prefix] = texts[:, :prefix]
        ids[:, prefix:][:, PATH] = texts[:, prefix : prefix + STEPS]
        return tree_logits(rewritten, cached(graph, rewritten[1], dtype), ids, prefix, ancestors, depth, [])[None, PATH]

    def captured() -> Tensor:
        return _captured_logits(graph, texts, (padding,), STEPS)

    if not has_half(graph):
        with full_precision(), unrounded_activations():
            generated, texts = steps()
            compile_together(partial(tree, graph.dtype))
            return compare_logits(name, TREE, tree(graph.dtype), generated.to(graph.dtype))
    wide = in_float32_if_possible(GENERATE, steps, model)
    generated, texts = wide or steps()
    compile_together(partial(tree, graph.dtype))
    compare_tree(name, graph.dtype, tree, captured, generated if wide else exact_logits(name, captured))


def _forward_logits(model: PreTrainedModel, ids: Tensor, padding: tuple[int, ...], tokens: int) -> tuple:
    """As `_generated_logits`, of one forward over a text that is drawn to its end."""
    texts = torch.cat([ids[:, padding[0] :], ids[:, 1:tokens]], dim=1)
    return model(input_ids=texts, use_cache=False).logits[:, -tokens:], texts


def _generated_logits(model: PreTrainedModel, ids: Tensor, padding: tuple[int, ...], tokens: int) -> tuple:
    """Logits [B, steps, V] of `generate`, and the texts [B, T + steps - 1] that they follow, padded on the right."""
    pads = torch.tensor(padding, device=ids.device)[:, None]
    mask = (torch.arange(ids.shape[1], device=ids.device) >= pads).long()
    try:
        output = generated(model, ids, mask, tokens)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedModelError(
            f"model: {type(model).__name__} fails in transformers' own generate() ({type(error).__name__}: {reason})"
        ) from error
    texts = torch.stack([row.roll(-pad) for row, pad in zip(output.sequences[:, :-1], padding)])
    return torch.stack(output.logits, dim=1), texts


def _captured_logits(graph: ModelGraph, texts: Tensor, padding: tuple[int, ...], steps: int) -> Tensor:
    """Logits [B, steps, V] of the captured graph at the positions where `generate` chose tokens."""
    rows = torch.arange(len(texts), device=texts.device)[:, None]
    last = texts.shape[1] - 1 - torch.tensor(padding, device=texts.device)[:, None]
    logits = graph.gm(texts, torch.arange(texts.shape[1], device=texts.device).expand_as(texts))[0]
    return logits[rows, last + torch.arange(1 - steps, 1, device=texts.device)]


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor, tokens: int) -> Any:
    """Generate `tokens` greedy tokens by transformers' `generate`, with raw logits and without the model's settings.

    On a GPU attention with padding is made of its plain ops: with a mask of one column for all keys, as of MiniMax's
    steps, torch 2.11's kernel reads a misaligned address, after which nothing runs.
    """
    plain = sdpa_kernel(SDPBackend.MATH) if ids.is_cuda and not mask.all() else nullcontext()
    other = copies.shallow(model)
    other.generation_config = GenerationConfig(pad_token_id=0)
    unreadable = [*range(embedded_tokens(model), output_matrix(model).shape[0])] or None
    with plain:
        return GenerationMixin.generate(
            other, ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, num_beams=1, use_cache=True,
            return_dict_in_generate=True, output_logits=True, disable_compile=True, suppress_tokens=unreadable,
        )  # fmt: skip
