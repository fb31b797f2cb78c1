"""N-gram drafts on a GPU: continuations of the same words in a row's own text, its reference and a corpus.

`propose` gives the trees of a fresh `trie.NgramTrie` that holds the documents of the corpus, then the row's reference
and then the row's own text, except that it weighs no more than `match_limit` matches: the longest, and the most recent
among equals. It keeps nothing between calls and reads the tokens once, in place. Two kernels (match.cu, compiled on
first use) read nothing back, so that they can be captured in a CUDA graph; call it once with the same `match_limit`
before capturing, because the first call compiles them.
"""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..kernels.card import card_of, launches_early
from ..tree import MAX_NODES
from .store import MatchOptions


def join_documents(documents: Sequence[Tensor | Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Documents as one corpus: int32, with -1 between them. No match and no continuation crosses a -1."""
    end = torch.tensor([-1], dtype=torch.int32)
    parts = [part for ids in documents for part in (torch.as_tensor(ids).to("cpu", torch.int32), end)]
    return torch.cat(parts[:-1] or [end[:0]]).to(device)


def propose(
    tokens: Tensor, committed: Tensor, corpus: Tensor, corpus_length: Tensor, references: Tensor,
    reference_lengths: Tensor, num_nodes: int, options: MatchOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A draft tree that continues each row's end.

    tokens [B, S] int64: the first committed[b] of row b are text.
    committed [B] int64: 1 or more.
    corpus [C] int32 or int64: the first corpus_length[b] are text for row b, with -1 between documents (see
        `join_documents`).
    corpus_length [B] int64, or [1] if it is the same for all rows.
    references [B, R] int32: the first reference_lengths[b] of row b are a text that only this row drafts from, with -1
        between documents.
    reference_lengths [B] int64: 0 for a row without one.
    num_nodes: 1 to 64.

    Returns tokens, parents [B, num_nodes], count [B] and match [B], all int64. Node 0 is the row's last token with
    parent -1, parents come before children, siblings differ; slots from count on hold token 0 and parent 0. The match
    is the length of the longest match that goes on, 0 if none.

    The text [5, 7, 8, 5], no reference and an empty corpus give the chain 5, 7, 8, 5 with parents [-1, 0, 1, 2] and
    match 1.
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"num_nodes must be from 1 to {MAX_NODES}, not {num_nodes}")
    if any(each.dtype != torch.int64 for each in (tokens, committed, corpus_length, reference_lengths)):
        raise TypeError("tokens, committed, corpus_length and reference_lengths must be int64")
    if corpus.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"corpus must be int32 or int64, not {str(corpus.dtype).removeprefix('torch.')}")
    if references.dtype != torch.int32:
        raise TypeError(f"references must be int32, not {str(references.dtype).removeprefix('torch.')}")
    rows = tokens.shape[:1]
    if references.dim() != 2 or references.shape[:1] != rows or reference_lengths.shape != rows:
        raise ValueError("the shapes must be references [B, R], reference_lengths [B], as many rows as tokens")
    if tokens.dim() != 2 or committed.shape != tokens.shape[:1] or corpus.dim() != 1:
        raise ValueError("the shapes must be tokens [B, S], committed [B], corpus [C]")
    if corpus_length.shape != rows and corpus_length.numel() != 1:
        raise ValueError("corpus_length must have the shape [B] or [1]")
    texts = tokens, committed, corpus, corpus_length.expand(rows).contiguous(), references, reference_lengths
    return torch.ops.spec_compile.ngram_match(*texts, num_nodes, [*options.numbers, options.match_limit])


@torch.library.custom_op("spec_compile::ngram_match", mutates_args=(), device_types="cuda")
def match_op(
    tokens: Tensor, committed: Tensor, corpus: Tensor, corpus_length: Tensor, references: Tensor,
    reference_lengths: Tensor, num_nodes: int, options: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `propose`. options: `MatchOptions.numbers` and the `match_limit`."""
    inputs = tokens, committed, corpus, corpus_length, references, reference_lengths
    if any(tensor.device != tokens.device for tensor in inputs):
        raise ValueError("tokens, committed, corpus, references and their lengths must be on one device")
    chosen, out = MatchOptions.of(options), empty_outputs(tokens, num_nodes)
    if tokens.shape[0] == 0:
        return out
    check_memory(chosen, num_nodes, tokens.device)
    with torch.cuda.device(tokens.device):
        shape = shape_for(chosen)
        kernels = _compiled(shape, tokens.device.index)
        steps, _workspace = launches(shape, card_of(tokens.device).processors, inputs, num_nodes, chosen, out)
        for step in steps:
            kernels[step.kernel](step, torch.cuda.current_stream().cuda_stream)
    return out


@match_op.register_fake
def _(tokens, committed, corpus, corpus_length, references, reference_lengths, num_nodes, options):
    return empty_outputs(tokens, num_nodes)


def empty_outputs(tokens: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the results of `propose`, for the rows of tokens [B, S]."""
    batch = tokens.shape[0]
    tree, summary = tokens.new_empty((batch, num_nodes)), tokens.new_empty((batch,))
    return tree, torch.empty_like(tree), summary, torch.empty_like(summary)


@dataclass(frozen=True)
class MatchShape:
    """The sizes that the kernels are compiled with.

    words: 64-bit words in a set of matches, 1 or 2.
    scan_items: positions that a thread reads at a time.
    scan_blocks: blocks of the scan that a multiprocessor holds.
    slack: keys that a block of the scan collects before it drops all but the best.
    min_span: fewest positions that a block of the scan looks at.
    """

    words: int
    scan_threads: int = 256
    scan_items: int = 16
    scan_blocks: int = 4
    build_threads: int = 512
    slack: int = 1024
    min_span: int = 1024

    def macros(self) -> dict[str, int]:
        tile, warps, nodes = self.scan_items * self.scan_threads, self.build_threads // 32, MAX_NODES
        entries, matches = (warps + 1) * nodes, 64 * self.words
        build = (warps + 2) * (12 * nodes + 8) + warps * nodes * (8 * self.words + 2) + matches * (8 + 4 + 1)
        build += entries * 2 + entries // 4 + 4 * (257 + 256 + self.build_threads + 2 * warps)
        return dict(
            WORDS=self.words, SCAN_THREADS=self.scan_threads, SCAN_ITEMS=self.scan_items, SCAN_BLOCKS=self.scan_blocks,
            BUILD_THREADS=self.build_threads, SLACK=self.slack, BUILD_BYTES=-(-build // 16) * 16,
            SCAN_BYTES=4 * (tile + self.slack) + 2 * tile + 4 * (256 + 257 + 24 + 2),
        )  # fmt: skip

    def build_bytes(self, deepest: int) -> int:
        matches = 64 * self.words
        return self.macros()["BUILD_BYTES"] + deepest * (8 * self.words * matches + 4 * matches + 4 * (matches + 4))


def shape_for(options: MatchOptions) -> MatchShape:
    return MatchShape(words=-(-options.match_limit // 64))


@dataclass
class Launch:
    kernel: str
    grid: int
    threads: int
    shared_bytes: int
    values: list[int]
    types: list[type]


def launches(
    shape: MatchShape, multiprocessors: int, inputs: tuple[Tensor, ...], num_nodes: int, options: MatchOptions,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:  # fmt: skip
    """The two kernel launches that fill `out`, and the workspace they need. inputs: see `propose`."""
    tokens, *others = inputs
    committed, corpus, corpus_length, references, reference_lengths = others
    batch, columns = tokens.shape
    if (columns > 1 and tokens.stride(1) != 1) or not all(tensor.is_contiguous() for tensor in others):
        raise ValueError(
            "rows of tokens, committed, corpus, corpus_length, references and reference_lengths must be contiguous"
        )
    # The scan has enough blocks to fill the GPU, each with enough positions to pay for its start.
    positions = columns + corpus.numel() + references.shape[1]
    blocks = max(multiprocessors * shape.scan_blocks, positions >> 23)
    blocks = max(1, min(blocks, -(-positions // shape.min_span), shape.build_threads))
    best = tokens.new_empty((batch, blocks, options.match_limit))
    at_least = tokens.new_empty((batch, options.max_match_window_size + 2, blocks), dtype=torch.int32)
    deepest = deepest_node(options, num_nodes)
    wide = int(corpus.dtype == torch.int64)
    texts = (
        tokens, tokens.stride(0), columns, committed, corpus, wide, corpus_length, corpus.numel(),
        references, references.shape[1], reference_lengths,
    )  # fmt: skip
    branch_length, *windows, min_breadth, max_breadth, by_frequency = options.numbers
    limit = options.match_limit

    # Both kernels read the same texts; `types[1]` of `_launch` is the stride among them.
    scan = _launch(
        "ngram_scan", batch * blocks, shape.scan_threads, shape.macros()["SCAN_BYTES"],
        *texts, batch, blocks, shape.min_span, *windows, limit, best, at_least,
    )  # fmt: skip
    build = _launch(
        "ngram_build", batch, shape.build_threads, shape.build_bytes(deepest),
        *texts, blocks, best, at_least, branch_length, *windows, min_breadth, max_breadth, by_frequency, limit,
        deepest, num_nodes, *out,
    )  # fmt: skip
    return [scan, build], (best, at_least)


def _launch(kernel: str, grid: int, threads: int, shared_bytes: int, *arguments) -> Launch:
    values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
    types = [ctypes.c_void_p if isinstance(value, Tensor) else ctypes.c_int for value in arguments]
    types[1] = ctypes.c_longlong  # the stride
    return Launch(kernel, grid, threads, shared_bytes, values, types)


def deepest_node(options: MatchOptions, num_nodes: int) -> int:
    """The depth of the deepest node that a draft may have."""
    return min(options.branch_length - options.min_match_window_size, num_nodes - 1)


def check_memory(options: MatchOptions, num_nodes: int, device: torch.device) -> None:
    """ValueError if drafts with these options need more shared memory than a program has on a device."""
    most, need = card_of(device).memory, shape_for(options).build_bytes(deepest_node(options, num_nodes))
    if need > most:
        raise ValueError(
            f"branch_length, match_limit: these n-grams need {need} bytes of shared memory, the GPU has {most}; lower "
            "branch_length, match_limit or num_draft_tokens"
        )


def compile_kernels(options: MatchOptions, device: torch.device) -> None:
    """Compile what `match.propose` launches with these options on a device, which takes most of a second."""
    with torch.cuda.device(device):
        _compiled(shape_for(options), torch.cuda.current_device())


def _check(result):
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"the n-gram kernels: {status!r}")
    return values[0] if values else None


def binary_for(shape: MatchShape, capability: tuple[int, int]) -> bytes:
    """The kernels for GPUs of a compute capability, as a module that the driver loads; it needs no GPU."""
    from cuda.bindings import nvrtc

    flags = ["--gpu-architecture=sm_{}{}".format(*capability), "--std=c++17"]
    flags += [f"-D{name}={value}" for name, value in shape.macros().items()]
    source = Path(__file__).with_name("match.cu").read_bytes()
    program = _check(nvrtc.nvrtcCreateProgram(source, b"match.cu", 0, [], []))
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if int(status) != 0:
        log = bytes(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"the n-gram kernels do not compile: {log.decode(errors='replace')}")
    binary = bytes(_check(nvrtc.nvrtcGetCUBINSize(program)))
    _check(nvrtc.nvrtcGetCUBIN(program, binary))
    _check(nvrtc.nvrtcDestroyProgram(program))
    return binary


@functools.cache
def _compiled(shape: MatchShape, device: int):
    """The kernels on this device, by name: functions of a launch and a stream."""
    try:
        from cuda.bindings import driver
    except ImportError as error:  # a dependency of torch's own CUDA packages
        raise ImportError("the n-gram kernels need the package cuda-bindings: pip install cuda-bindings") from error

    binary = binary_for(shape, torch.cuda.get_device_capability(device))
    torch.cuda.current_stream().synchronize()  # the device's context is current
    module = _check(driver.cuModuleLoadData(binary))
    where = torch.device("cuda", device)
    most, is_early = card_of(where).memory, launches_early(where)

    def kernel(name: str):
        function = _check(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, attribute, most))

        def run(step: Launch, stream: int) -> None:
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = step.grid, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = step.threads, 1, 1
            config.sharedMemBytes, config.hStream = step.shared_bytes, stream
            if name == "ngram_build" and is_early:  # may start while the scan still runs
                early = driver.CUlaunchAttribute()
                early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                early.value.programmaticStreamSerializationAllowed = 1
                config.attrs, config.numAttrs = [early], 1
            _check(driver.cuLaunchKernelEx(config, function, (tuple(step.values), tuple(step.types)), 0))

        return run

    return {name: kernel(name) for name in ("ngram_scan", "ngram_build")}
