"""The checks after capture: the graphs must compute what the model computes, or the model is refused."""

import torch
from transformers import PreTrainedModel

from .errors import UnsupportedModelError
from .graph import ModelGraph
from .runtime.session import SPAN
from .runtime.state import Cache
from .runtime.tree import ancestry

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}
"""Largest accepted difference of logits, relative to their spread: of any logit, or in 16 bits, where single ones are
noise, of any position (root mean square over the vocabulary)."""
LONGEST = 1024
"""Longest text that is run for a check; of longer windows it is checked that attention is told of them."""


@torch.no_grad()
def check_capture(model: PreTrainedModel, graph: ModelGraph) -> None:
    """Compare the captured graph with the model's own forward on random ids, longer than any window."""
    windows = [layer.window for layer in graph.layers if layer.window is not None]
    announced = _announced_window(model)
    if announced > LONGEST and announced not in windows:
        raise UnsupportedModelError(
            f"model: {type(model).__name__} has a sliding window of {announced} that its attention is not told of"
        )
    length = min(max([24, announced, *windows]) + 17, LONGEST, graph.position_limit or LONGEST)
    ids = _random_ids(graph, 2, length).to(model.device)
    own = model(input_ids=ids, use_cache=False).logits
    positions = torch.arange(length, device=ids.device).expand_as(ids)
    _compare(type(model).__name__, "the captured graph", graph.gm(ids, positions)[0], own)


@torch.no_grad()
def check_tree(name: str, graph: ModelGraph, verify: ModelGraph) -> None:
    """Compare a small tree behind a prefix with plain forwards over each of its paths."""
    windows = [layer.window for layer in graph.layers if layer.window is not None]
    parents = [-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 6, 7, 8, 8, 12, 14]  # 16 nodes behind 16: sizes of rounds
    nodes = len(parents)
    prefix = min(max([13, *windows]) + 3, LONGEST, (graph.position_limit or LONGEST) - nodes)
    slots = prefix + nodes
    ids = _random_ids(graph, 1, slots).to(graph.device)
    cache = Cache(graph, 1, -(-slots // SPAN) * SPAN).tensors  # of as whole pages as a session's
    start = torch.zeros(1, dtype=torch.int64, device=ids.device)
    steps = torch.arange(prefix, device=ids.device)[None]
    verify.gm(ids[:, :prefix], steps, start, None, cache, prefix)
    ancestors, depth = ancestry(torch.tensor([parents], device=ids.device))
    tree = verify.gm(ids[:, prefix:], prefix + depth, start + prefix, ancestors, cache, slots)[0][0]
    paths = [[j for j in range(nodes) if int(ancestors[0, node]) >> j & 1] for node in range(nodes)]
    texts = ids.repeat(nodes, 1)  # what follows a path's end is not seen by it
    for node, path in enumerate(paths):
        texts[node, prefix : prefix + len(path)] = ids[0, prefix:][path]
    linear = graph.gm(texts, torch.arange(slots, device=ids.device).expand_as(texts))[0]
    ends = torch.tensor([prefix + len(path) - 1 for path in paths], device=ids.device)
    expected = linear[torch.arange(nodes, device=ids.device), ends]
    _compare(name, "the tree attention of the rewritten graph", tree, expected)


def _announced_window(model: PreTrainedModel) -> int:
    """The sliding window that the configuration says some layer has (0: none)."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) is False or (types and "sliding_attention" not in types):
        return 0
    return getattr(config, "sliding_window", None) or 0


def _random_ids(graph: ModelGraph, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, graph.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


def _compare(name: str, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    spread = expected.float().std().clamp(min=1e-6)
    difference = (got.float() - expected.float()).abs()
    if expected.dtype.itemsize == 2:
        difference = difference.square().mean(dim=-1).sqrt()
    error = (difference.max() / spread).item()
    limit = TOLERANCE[expected.dtype]
    if not error <= limit:
        raise UnsupportedModelError(
            f"model: {name}: {what} differs from the model's own forward by {error:.1e} of the logits' spread "
            f"(allowed: {limit:.0e}); it would change the answer"
        )
