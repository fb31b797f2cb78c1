"""N-gram matching on the device: the trees are the trie's, and the kernels give the trees of the plain version.

Without a GPU the kernels' own source runs on the CPU, compiled with the few CUDA functions that it uses emulated.
"""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from ngram_plain import propose_plainly

from spec_compile.kernels.card import Card
from spec_compile.ngram import match as ngram_match
from spec_compile.ngram.match import MatchShape, empty_outputs, join_documents, propose
from spec_compile.ngram.store import MatchOptions
from spec_compile.ngram.trie import NgramTrie


def make_options(choose, **fixed) -> MatchOptions:
    branch_length = (choose(2, 8), choose(2, 30), 18, 70)[choose(0, 3)]
    low = choose(1, min(branch_length - 1, 4))
    breadth = choose(1, 4)
    chosen = dict(
        branch_length=branch_length,
        min_match_window_size=low,
        max_match_window_size=min(branch_length - 1, low + choose(0, 12)),
        min_bfs_breadth=breadth,
        max_bfs_breadth=breadth + (choose(0, 4), choose(0, 100))[choose(0, 1)],
        match_type=("BFS", "PROB")[choose(0, 1)],
        match_limit=128,
    )
    return MatchOptions(**(chosen | fixed))


def make_text(choose, longest: int) -> list[int]:
    """Random tokens, phrases that recur, or one phrase over and over; of few different tokens, so that much matches."""
    kind, tokens, length = choose(0, 2), choose(1, 6), choose(0, longest)
    rng = random.Random(choose(0, 1 << 30))
    if kind == 0:
        return [rng.randrange(tokens) for _ in range(length)]
    phrases = [[rng.randrange(tokens) for _ in range(rng.randint(1, 12))] for _ in range(1 if kind == 2 else 4)]
    text: list[int] = []
    while len(text) < length:
        text += rng.choice(phrases)
        if rng.random() < 0.1:
            text.append(rng.randrange(tokens))
    return text[:length]


def make_case(choose, rows: int = 1, longest: int = 32, **fixed):
    """(rows' texts, documents, number of nodes, options); a row's text and the documents have 4 * longest tokens."""
    texts = [make_text(choose, longest) or [choose(0, 3)] for _ in range(rows)]
    documents = [make_text(choose, longest) for _ in range(choose(0, 3))]
    return texts, documents, choose(1, 64), make_options(choose, **fixed)


def make_references(choose, rows: int, longest: int = 32) -> list[list[list[int]]]:
    """For each row none, one or two texts that only this row drafts from."""
    return [[make_text(choose, longest) for _ in range(choose(0, 2))] for _ in range(rows)]


def tensors(texts, documents, device="cpu", dtype=torch.int32, room=5, references=None):
    """(tokens, committed, corpus, corpus_length, references, reference_lengths), with other tokens after each text."""
    tokens = torch.randint(0, 4, (len(texts), max(map(len, texts)) + room), generator=torch.Generator().manual_seed(0))
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    corpus = join_documents(documents)
    joined = [join_documents(own) for own in references or [[]] * len(texts)]
    own = torch.randint(-1, 4, (len(texts), max(map(len, joined)) + room), dtype=torch.int32)
    for row, reference in enumerate(joined):
        own[row, : len(reference)] = reference
    garbage = torch.randint(-1, 4, (room,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    inputs = (
        tokens,
        torch.tensor([len(text) for text in texts]),
        torch.cat([corpus, garbage]).to(dtype),
        torch.tensor([len(corpus)] * len(texts)),
        own,
        torch.tensor([len(reference) for reference in joined]),
    )
    return tuple(tensor.to(device) for tensor in inputs)


def make_inputs(choose, rows, longest, limit):
    """(tensors of a random case, number of nodes, options)"""
    texts, documents, num_nodes, options = make_case(choose, rows, longest, match_limit=limit)
    references = make_references(choose, rows, longest)
    inputs = tensors(texts, documents, dtype=(torch.int32, torch.int64)[choose(0, 1)], references=references)
    inputs[3][::2] = inputs[3][::2] // choose(1, 3)  # rows that read less of the corpus
    return inputs, num_nodes, options


def plain(out) -> list:
    return [tensor.tolist() for tensor in out]


def from_trie(texts, documents, num_nodes, options: MatchOptions, references=None) -> list:
    """The proposals for each row of a fresh trie that holds the documents, the row's references and its own text."""
    drafts = []
    for text, own in zip(texts, references or [[]] * len(texts)):
        trie = NgramTrie(**{name: value for name, value in vars(options).items() if name != "match_limit"})
        for document in (*documents, *own):
            trie.add(document)
        stream = trie.open()
        trie.extend(stream, text[: len(text) // 2])
        trie.extend(stream, text[len(text) // 2 :])
        drafts.append(trie.propose(stream, num_nodes))
    trees = torch.stack([d.tokens for d in drafts]), torch.stack([d.parents for d in drafts])
    return [*plain(trees), [d.count for d in drafts], [d.match for d in drafts]]


@pytest.mark.parametrize("seed", range(150))
def test_trees_are_those_of_the_trie(seed):
    choose = random.Random(seed).randint
    texts, documents, num_nodes, options = make_case(choose)
    references = make_references(choose, 1)
    ours = plain(propose(*tensors(texts, documents, references=references), num_nodes, options))
    assert ours == from_trie(texts, documents, num_nodes, options, references)


def test_defaults_are_those_of_the_trie():
    assert NgramTrie().options == MatchOptions()


def test_nothing_crosses_the_end_of_a_document():
    options = MatchOptions(max_match_window_size=3)
    inputs = tensors([[8, 1, 2]], [[9, 8], [1, 2, 5, 6], [7, 1], [2, 6]])
    assert plain(propose(*inputs, 6, options)) == [[[2, 5, 6, 6, 0, 0]], [[-1, 0, 1, 0, 0, 0]], [4], [2]]


def test_a_row_drafts_from_its_own_reference_only():
    options = MatchOptions()
    inputs = tensors([[1, 2], [1, 2], [1, 2]], [[1, 2, 5]], references=[[[1, 2, 7], [9, 2, 8]], [], [[1, 2, 6]]])
    out = propose(*inputs, 4, options)
    assert plain(out) == [[[2, 7, 5, 8], [2, 5, 0, 0], [2, 6, 5, 0]], [[-1, 0, 0, 0]] * 3, [4, 2, 3], [2, 2, 2]]


def test_arguments():
    names = "tokens", "committed", "corpus", "corpus_length", "references", "reference_lengths"
    good = dict(zip(names, tensors([[1, 2]], [[1, 2, 3]])))

    def refused(error, match, num_nodes=4, **change):
        with pytest.raises(error, match=match):
            propose(**(good | change), num_nodes=num_nodes, options=MatchOptions())

    refused(ValueError, "num_nodes must be from 1 to 64", num_nodes=65)
    refused(TypeError, "must be int64", committed=good["committed"].int())
    refused(TypeError, "corpus must be int32 or int64, not float32", corpus=torch.ones(3))
    refused(ValueError, "shapes must be", tokens=good["tokens"][0])
    refused(ValueError, r"corpus_length must have the shape \[B\] or \[1\]", corpus_length=torch.ones(2).long())
    refused(TypeError, "references must be int32, not int64", references=good["references"].long())
    refused(ValueError, "as many rows as tokens", references=good["references"][0])
    refused(TypeError, "reference_lengths must be int64", reference_lengths=good["reference_lengths"].int())
    for limit in (0, 129):
        with pytest.raises(ValueError, match="match_limit must be from"):
            MatchOptions(match_limit=limit)
    with pytest.raises(TypeError, match="match_limit must be an int"):
        MatchOptions(match_limit=1.5)


def test_the_op_is_sound():
    arguments = (*tensors([[1, 2, 1]], [[1, 2, 3]]), 4, [18, 1, 12, 1, 10, 0, 64])
    torch.library.opcheck(torch.ops.spec_compile.ngram_match, arguments)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """`propose` by the kernels' source compiled for the CPU, with small blocks so that little text fills many."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder, emulator = tmp_path_factory.mktemp("emulator"), Path(__file__).with_name("cuda_on_a_cpu.cpp")
    source = Path(ngram_match.__file__).with_name("match.cu")
    libraries = {}

    def library(shape: MatchShape, architecture: int):
        if (shape, architecture) not in libraries:
            path = folder / f"emulator{len(libraries)}.so"
            macros = [f"-D{name}={value}" for name, value in shape.macros().items()]
            macros += [f'-DSOURCE="{source}"', f"-D__CUDA_ARCH__={architecture}"]
            flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-Wno-unknown-pragmas"]
            subprocess.run([compiler, *flags, *macros, "-o", path, emulator], check=True)
            libraries[shape, architecture] = ctypes.CDLL(str(path))
        return libraries[shape, architecture]

    def run(inputs, num_nodes, options, multiprocessors, architecture=800):
        words = ngram_match.shape_for(options).words
        shape = MatchShape(
            words, scan_threads=128, scan_items=4, scan_blocks=2, build_threads=128, slack=256, min_span=32
        )
        out = tuple(torch.full_like(tensor, 77) for tensor in empty_outputs(inputs[0], num_nodes))
        steps, _workspace = ngram_match.launches(shape, multiprocessors, inputs, num_nodes, options, out)
        for step in steps:
            assert step.threads == 128
            values = [type_(value) for type_, value in zip(step.types, step.values)]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            status = library(shape, architecture).launch(step.kernel.encode(), step.grid, step.shared_bytes, pointers)
            assert status == 0, (step.kernel, status)
        return out

    return run


def same_emulated(emulated, seed, rows=None, longest=32, architecture=800):
    choose = random.Random(seed).randint
    inputs, num_nodes, options = make_inputs(choose, rows or choose(1, 3), longest, (128, choose(1, 64))[seed % 2])
    expected = plain(propose(*inputs, num_nodes, options))
    assert plain(emulated(inputs, num_nodes, options, choose(1, 40), architecture)) == expected


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(250))
def test_kernels_without_a_gpu(emulated, seed):
    same_emulated(emulated, seed)


@pytest.mark.parametrize("seed", range(40))
def test_kernels_without_a_gpu_on_longer_texts(emulated, seed):
    same_emulated(emulated, seed, rows=1, longest=3000)


@pytest.mark.parametrize("seed", range(4))
def test_kernels_of_a_gpu_without_sums_of_warps(emulated, seed):
    same_emulated(emulated, seed, architecture=750)


CAPABILITIES = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)


@pytest.mark.parametrize("capability", CAPABILITIES[:1] + tuple(pytest.param(each, marks=pytest.mark.slow) for each in
                                                               CAPABILITIES[1:]))  # fmt: skip
@pytest.mark.parametrize("words", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kernels_compile_for_every_gpu(capability, words):
    """By CUDA's compiler, which needs no GPU; and their static part fits into the smallest shared memory."""
    pytest.importorskip("cuda.bindings.nvrtc")
    assert ngram_match.binary_for(MatchShape(words), capability)[:4] == b"\x7fELF"
    assert max(MatchShape(words).macros()[name] for name in ("SCAN_BYTES", "BUILD_BYTES")) <= 65_536


def test_drafts_without_room_in_shared_memory_are_refused(monkeypatch):
    """A T4 has 64 KB: enough for the defaults with all nodes, and not for long branches of many matches."""
    monkeypatch.setattr(ngram_match, "card_of", lambda device: Card("T4", (7, 5), 40, 65_536))
    device, wide = torch.device("cuda"), MatchOptions(branch_length=60, match_limit=128)
    ngram_match.check_memory(MatchOptions(), 64, device)
    ngram_match.check_memory(wide, 8, device)
    with pytest.raises(ValueError, match=r"branch_length, match_limit: .* need \d+ bytes .*, the GPU has 65536; lower"):
        ngram_match.check_memory(wide, 64, device)


@pytest.mark.parametrize("tokens", [3, 6, 12, 40, 150])
@pytest.mark.parametrize("seed", range(6))
def test_kernels_without_a_gpu_on_few_matches(emulated, seed, tokens):
    """Random texts, of which about `limit` places match: each counts, wherever it lies in a block."""
    rng = random.Random(seed)
    texts, documents = ([[rng.randrange(tokens) for _ in range(length)]] for length in (2000, 3000))
    inputs = tensors(texts, documents)
    for limit in (20, 60, 128):
        options = MatchOptions(min_match_window_size=1 + (seed + tokens) % 2, match_limit=limit)
        expected = plain(propose(*inputs, 64, options))
        assert plain(emulated(inputs, 64, options, multiprocessors=1 + seed % 2)) == expected


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("seed", range(150))
def test_kernels(seed):
    choose = random.Random(seed).randint
    limit = (64, 128, choose(1, 128))[seed % 3]
    longest = 20_000 if seed % 10 == 0 else (32, 300)[seed % 2]
    inputs, num_nodes, options = make_inputs(choose, choose(1, 4), longest, limit)
    out = propose(*(tensor.to("cuda") for tensor in inputs), num_nodes, options)
    assert plain(out) == plain(propose_plainly(*inputs, num_nodes, options))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_rounds_in_a_captured_graph(match_type):
    """A text and a corpus that grow between replays of one graph."""
    rng = random.Random(0)
    options = MatchOptions(match_type=match_type)
    text = make_text(rng.randint, 4000) + [1, 2] * 20
    documents = [make_text(rng.randint, 3000) for _ in range(8)]
    inputs = tensors([text, text[::-1]], documents, "cuda", room=100)
    _, committed, _, corpus_length, _, _ = inputs
    corpus_size = int(corpus_length[0])
    propose(*inputs, 32, options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = propose(*inputs, 32, options)
    for step in range(1, 20):
        committed.copy_(torch.tensor([len(text) * step // 19, step]))
        corpus_length.fill_(corpus_size * step // 19)
        graph.replay()
        first = plain(out)
        graph.replay()
        assert plain(out) == first
        assert first == plain(propose_plainly(*(tensor.cpu() for tensor in inputs), 32, options))
