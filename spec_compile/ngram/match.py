"""The n-gram drafter on the device: what followed the same words before, in a row's own text and in a corpus.

`propose` gives the trees that a fresh `runtime.ngram.NgramTrie` would give that holds the documents of the corpus and
then the row's own text, except that it weighs no more than `match_limit` matches: the longest, of equals the most
recent. It holds nothing between calls: the tokens that lie on the device are read once. On a CPU it is plain Python;
on a GPU two kernels (ngram_match.cu, compiled on first use) that read nothing back, so that they can be captured in a
CUDA graph. Call it once with the same `match_limit` before capturing.
"""

import ctypes
import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import check_int

MAX_DRAFT_TOKENS = 64
MAX_MATCH_LIMIT = 128


@dataclass(frozen=True)
class MatchOptions:
    """What to match and how to grow trees from it; as in `NgramTrie`, but for `match_limit`.

    branch_length: 2 to 256, most tokens of match and continuation together.
    min_match_window_size, max_match_window_size: 1 <= min <= max < branch_length, lengths of suffix to match.
    min_bfs_breadth, max_bfs_breadth: 1 <= min <= max, continuations of a node.
    match_type: "BFS" (the most recent continuations, longest match first) or "PROB" (the most frequent).
    match_limit: 1 to 128, the matches a tree is grown from.
    """

    branch_length: int = 18
    min_match_window_size: int = 1
    max_match_window_size: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    match_limit: int = 64

    def __post_init__(self):
        def check(name: str, low: int, high: int) -> None:
            check_int(name, getattr(self, name), low, high)

        check("branch_length", 2, 256)
        check("min_match_window_size", 1, self.branch_length - 1)
        check("max_match_window_size", self.min_match_window_size, self.branch_length - 1)
        check("min_bfs_breadth", 1, 1 << 20)
        check("max_bfs_breadth", self.min_bfs_breadth, 1 << 20)
        check("match_limit", 1, MAX_MATCH_LIMIT)
        if self.match_type not in ("BFS", "PROB"):
            raise ValueError(f'match_type must be "BFS" (recency) or "PROB" (frequency), not {self.match_type!r}')


def join_documents(documents: Sequence[Tensor | Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Documents as one corpus: int32, with -1 between them. No match and no continuation crosses a -1."""
    end = torch.tensor([-1], dtype=torch.int32)
    parts = [part for ids in documents for part in (torch.as_tensor(ids).to("cpu", torch.int32), end)]
    return torch.cat(parts[:-1] or [end[:0]]).to(device)


def propose(
    tokens: Tensor, committed: Tensor, corpus: Tensor, corpus_length: Tensor, num_nodes: int, options: MatchOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A draft tree that continues each row's end.

    tokens [B, S] int64 of which the first committed[b] >= 1 of row b are text; committed [B] int64; corpus [C], int32
    or int64, of which the first corpus_length [1] int64 tokens are text, with -1 between documents (see
    `join_documents`); num_nodes: 1 to 64. -> tokens, parents [B, num_nodes], count [B], longest match [B], all int64:
    node 0 is the row's last token with parent -1, parents come before children, siblings differ; slots from count on
    hold token 0 and parent 0. The match is the longest one that goes on, 0 if none.
    """
    if not 1 <= num_nodes <= MAX_DRAFT_TOKENS:
        raise ValueError(f"num_nodes must be from 1 to {MAX_DRAFT_TOKENS}, not {num_nodes}")
    if tokens.dtype != torch.int64 or committed.dtype != torch.int64 or corpus_length.dtype != torch.int64:
        raise TypeError("tokens, committed and corpus_length must be int64")
    if corpus.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"corpus must be int32 or int64, not {str(corpus.dtype).removeprefix('torch.')}")
    if tokens.dim() != 2 or committed.shape != tokens.shape[:1] or corpus.dim() != 1 or corpus_length.numel() != 1:
        raise ValueError("the shapes must be tokens [B, S], committed [B], corpus [C], corpus_length [1]")
    return torch.ops.spec_compile.ngram_match(
        tokens,
        committed,
        corpus,
        corpus_length,
        num_nodes,
        options.branch_length,
        options.min_match_window_size,
        options.max_match_window_size,
        options.min_bfs_breadth,
        options.max_bfs_breadth,
        options.match_type == "PROB",
        options.match_limit,
    )


@torch.library.custom_op("spec_compile::ngram_match", mutates_args=())
def _ngram_match(
    tokens: Tensor,
    committed: Tensor,
    corpus: Tensor,
    corpus_length: Tensor,
    num_nodes: int,
    branch_length: int,
    min_window: int,
    max_window: int,
    min_breadth: int,
    max_breadth: int,
    by_frequency: bool,
    match_limit: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = MatchOptions(
        branch_length,
        min_window,
        max_window,
        min_breadth,
        max_breadth,
        "PROB" if by_frequency else "BFS",
        match_limit,
    )
    run = propose_on_gpu if tokens.is_cuda else propose_plainly
    return run(tokens, committed, corpus, corpus_length, num_nodes, options)


@_ngram_match.register_fake
def _(tokens, committed, corpus, corpus_length, num_nodes, *options):
    return _outputs(tokens, num_nodes)


def _outputs(tokens: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = tokens.shape[0]
    tree, summary = tokens.new_empty((batch, num_nodes)), tokens.new_empty((batch,))
    return tree, torch.empty_like(tree), summary, torch.empty_like(summary)


# ---- plainly ------------------------------------------------------------------------------------------------------


def propose_plainly(
    tokens: Tensor, committed: Tensor, corpus: Tensor, corpus_length: Tensor, num_nodes: int, options: MatchOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`propose` in plain Python: what the kernels must give, for any device but slowly."""
    out = _outputs(tokens, num_nodes)
    texts = [corpus[: int(corpus_length)].long().cpu()]
    for row in range(tokens.shape[0]):
        own = tokens[row, : int(committed[row])].cpu()
        tree, parents, longest = _grow(own, *texts, num_nodes, options)
        padding = [0] * (num_nodes - len(tree))
        for tensor, value in zip(out, (tree + padding, parents + padding, len(tree), longest)):
            tensor[row] = torch.tensor(value)
    return out


@dataclass
class _Match:
    length: int
    following: list[int]


def _grow(own: Tensor, corpus: Tensor, num_nodes: int, options: MatchOptions) -> tuple[list[int], list[int], int]:
    matches = _best_matches(own, corpus, num_nodes, options)
    tree, parents = [int(own[-1])], [-1]
    children: dict[tuple[int, int], int] = {}

    def add(parent: int, token: int) -> int:
        node = children.setdefault((parent, token), len(tree))
        if node == len(tree):
            tree.append(token)
            parents.append(parent)
        return node

    def full() -> bool:
        return len(tree) == num_nodes

    longest = max((match.length for match in matches), default=0)
    anchors = [
        (window, [match.following for match in matches if match.length >= window])
        for window in range(longest, options.min_match_window_size - 1, -1)
        if longest
    ]
    if options.match_type == "PROB":
        _by_frequency(anchors, add, full, options)
    else:
        _by_recency(anchors, add, full, options)
    return tree, parents, longest


def _best_matches(own: Tensor, corpus: Tensor, num_nodes: int, options: MatchOptions) -> list[_Match]:
    """The longest `match_limit` matches that go on, of equals the most recent; most recent first."""
    suffix = own[-options.max_match_window_size :].flip(0)
    text = torch.cat([corpus, torch.tensor([-1]), own])
    length, alive = torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool)
    for back, token in enumerate(suffix):
        earlier = torch.cat([torch.full((back,), -1), text])[: len(text)]
        alive = alive & (earlier == token)
        length += alive
    length[:-1][text[1:] < 0] = 0  # nothing follows
    length[-1] = 0
    found = [(int(length[at]), at) for at in (length >= options.min_match_window_size).nonzero().flatten().tolist()]
    found = heapq.nlargest(options.match_limit, found)
    matches = []
    for size, at in sorted(found, key=lambda match: -match[1]):
        following = text[at + 1 : at + 1 + options.branch_length - options.min_match_window_size].tolist()
        matches.append(_Match(size, following[: following.index(-1)] if -1 in following else following))
    return matches


def _followers(texts: list[list[int]], depth: int) -> dict[int, list[list[int]]]:
    """The texts that go on after `depth` tokens, by the next token; the most recent token first."""
    groups: dict[int, list[list[int]]] = {}
    for text in texts:
        if len(text) > depth:
            groups.setdefault(text[depth], []).append(text)
    return groups


def _by_recency(anchors, add, full, options: MatchOptions) -> None:
    """For each anchor breadth first: the most recent followers of each node, fewer the deeper it lies."""
    deepest = options.branch_length - 1
    low, high = options.min_bfs_breadth, options.max_bfs_breadth
    for window, texts in anchors:
        queue = [(texts, 0, 0)]
        for texts, depth, node in queue:
            if window + depth > deepest:
                continue
            breadth = low + (deepest - window - depth) * (high - low) // deepest
            for token, group in list(_followers(texts, depth).items())[:breadth]:
                if full():
                    return
                queue.append((group, depth + 1, add(node, token)))


def _by_frequency(anchors, add, full, options: MatchOptions) -> None:
    """The most frequent followers first, by their share of the matches; a shorter anchor is worth half as much."""
    heap: list[tuple] = []

    def offer(texts: list[list[int]], window: int, depth: int, node: int, score: float) -> None:
        if window + depth == options.branch_length:
            return
        groups = sorted(_followers(texts, depth).items(), key=lambda item: -len(item[1]))
        total = sum(len(group) for _, group in groups)
        for token, group in groups[: options.max_bfs_breadth]:
            worth = score * len(group) / total
            heapq.heappush(heap, (-worth, -window, next(order), token, group, depth + 1, node))

    order = iter(range(1 << 62))
    for place, (window, texts) in enumerate(anchors):
        offer(texts, window, 0, 0, 0.5**place)
    while heap and not full():
        score, window, _, token, texts, depth, parent = heapq.heappop(heap)
        offer(texts, -window, depth, add(parent, token), -score)


# ---- on the GPU ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """How the kernels are laid out. `words`: of 64 bits in a set of matches, 1 or 2."""

    words: int
    scan_threads: int = 256
    scan_items: int = 16  # positions that a thread reads at a time
    scan_blocks: int = 4  # that a multiprocessor holds
    build_threads: int = 512
    slack: int = 1024
    min_span: int = 1024  # positions that a block of the scan looks at, at least

    def macros(self) -> dict[str, int]:
        tile, warps, nodes = self.scan_items * self.scan_threads, self.build_threads // 32, MAX_DRAFT_TOKENS
        entries, matches = (warps + 1) * nodes, 64 * self.words
        build = (warps + 2) * (12 * nodes + 8) + warps * nodes * (8 * self.words + 2) + matches * (8 + 4 + 1)
        build += entries * 2 + entries // 4 + 4 * (257 + 256 + self.build_threads + 2 * warps)
        return dict(
            WORDS=self.words,
            SCAN_THREADS=self.scan_threads,
            SCAN_ITEMS=self.scan_items,
            SCAN_BLOCKS=self.scan_blocks,
            BUILD_THREADS=self.build_threads,
            SLACK=self.slack,
            SCAN_BYTES=4 * (tile + self.slack) + 2 * tile + 4 * (256 + 257 + 24 + 2),
            BUILD_BYTES=-(-build // 16) * 16,
        )

    def build_bytes(self, deepest: int) -> int:
        matches = 64 * self.words
        return self.macros()["BUILD_BYTES"] + deepest * (8 * self.words * matches + 4 * matches + 4 * (matches + 4))


def shape_for(options: MatchOptions) -> Shape:
    return Shape(words=-(-options.match_limit // 64))


@dataclass
class Launch:
    kernel: str
    grid: int
    threads: int
    shared_bytes: int
    values: list[int]
    types: list[type]


def launches(
    shape: Shape,
    multiprocessors: int,
    tokens: Tensor,
    committed: Tensor,
    corpus: Tensor,
    corpus_length: Tensor,
    num_nodes: int,
    options: MatchOptions,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    """The two kernel launches that fill `out`, and the workspace they need."""
    batch, columns = tokens.shape
    if (columns > 1 and tokens.stride(1) != 1) or not committed.is_contiguous() or not corpus.is_contiguous():
        raise ValueError("rows of tokens, committed and corpus must be contiguous")
    positions = columns + corpus.numel()
    blocks = max(multiprocessors * shape.scan_blocks, positions >> 23)
    blocks = max(1, min(blocks, -(-positions // shape.min_span), shape.build_threads))
    best = tokens.new_empty((batch, blocks, options.match_limit))
    at_least = tokens.new_empty((batch, options.max_match_window_size + 2, blocks), dtype=torch.int32)
    deepest = min(options.branch_length - options.min_match_window_size, num_nodes - 1)
    texts = (
        tokens,
        tokens.stride(0),
        columns,
        committed,
        corpus,
        int(corpus.dtype == torch.int64),
        corpus_length,
        corpus.numel(),
    )
    windows = options.min_match_window_size, options.max_match_window_size
    breadths = options.min_bfs_breadth, options.max_bfs_breadth
    limit, by_frequency = options.match_limit, int(options.match_type == "PROB")

    def launch(kernel: str, grid: int, threads: int, shared_bytes: int, *arguments) -> Launch:
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        types = [ctypes.c_void_p if isinstance(value, Tensor) else ctypes.c_int for value in arguments]
        types[1] = ctypes.c_longlong  # the stride
        return Launch(kernel, grid, threads, shared_bytes, values, types)

    scan = launch(
        "ngram_scan",
        batch * blocks,
        shape.scan_threads,
        shape.macros()["SCAN_BYTES"],
        *texts,
        batch,
        blocks,
        shape.min_span,
        *windows,
        limit,
        best,
        at_least,
    )
    build = launch(
        "ngram_build",
        batch,
        shape.build_threads,
        shape.build_bytes(deepest),
        *texts,
        blocks,
        best,
        at_least,
        options.branch_length,
        *windows,
        *breadths,
        by_frequency,
        limit,
        deepest,
        num_nodes,
        *out,
    )
    return [scan, build], (best, at_least)


def propose_on_gpu(
    tokens: Tensor, committed: Tensor, corpus: Tensor, corpus_length: Tensor, num_nodes: int, options: MatchOptions
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`propose` as two kernels on the tensors' device."""
    inputs = (tokens, committed, corpus, corpus_length)
    if any(tensor.device != tokens.device for tensor in inputs):
        raise ValueError("tokens, committed, corpus and corpus_length must be on one device")
    shape, out = shape_for(options), _outputs(tokens, num_nodes)
    if tokens.shape[0] == 0:
        return out
    properties = torch.cuda.get_device_properties(tokens.device)
    with torch.cuda.device(tokens.device):
        kernels = _compiled(shape, tokens.device.index)
        steps, _workspace = launches(shape, properties.multi_processor_count, *inputs, num_nodes, options, out)
        for step in steps:
            kernels[step.kernel](step, torch.cuda.current_stream().cuda_stream)
    return out


@functools.cache
def _compiled(shape: Shape, device: int):
    """The kernels on this device, by name: functions of a launch and a stream."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:  # a dependency of torch's own CUDA packages
        raise ImportError("the n-gram kernels need the package cuda-bindings: pip install cuda-bindings") from error

    def check(result):
        status, *values = result
        if int(status) != 0:
            raise RuntimeError(f"the n-gram kernels: {status!r}")
        return values[0] if values else None

    major, minor = torch.cuda.get_device_capability(device)
    flags = [f"--gpu-architecture=sm_{major}{minor}", "--std=c++17"]
    flags += [f"-D{name}={value}" for name, value in shape.macros().items()]
    source = Path(__file__).with_suffix(".cu").read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(source, b"ngram_match.cu", 0, [], []))
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if int(status) != 0:
        log = bytes(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"the n-gram kernels do not compile: {log.decode(errors='replace')}")
    binary = bytes(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, binary))
    check(nvrtc.nvrtcDestroyProgram(program))
    torch.cuda.current_stream().synchronize()  # the device's context is current
    module = check(driver.cuModuleLoadData(binary))
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin

    def kernel(name: str):
        function = check(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, attribute, most))

        def run(step: Launch, stream: int) -> None:
            if step.shared_bytes > most:
                raise ValueError(
                    f"these options need {step.shared_bytes} bytes of shared memory, this device has {most}: "
                    "lower match_limit, branch_length or num_nodes"
                )
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = step.grid, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = step.threads, 1, 1
            config.sharedMemBytes, config.hStream = step.shared_bytes, stream
            if name == "ngram_build" and major >= 9:  # may start while the scan still runs
                early = driver.CUlaunchAttribute()
                early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                early.value.programmaticStreamSerializationAllowed = 1
                config.attrs, config.numAttrs = [early], 1
            check(driver.cuLaunchKernelEx(config, function, (tuple(step.values), tuple(step.types)), 0))

        return run

    return {name: kernel(name) for name in ("ngram_scan", "ngram_build")}
