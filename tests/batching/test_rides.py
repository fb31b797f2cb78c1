"""Prompts that ride along with rounds: answers are those of ``generate()``, whatever rides with what."""

import functools
import gc
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from batch_requests import ALGORITHMS, TEXT, demo, generated, stopped, tokenizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spec_compile import speculate
from spec_compile.batching import decoding, prefill
from spec_compile.cache import ROUNDED
from spec_compile.drafting import caches
from spec_compile.runtime.draft_budget import VaryingTreeBudget
from spec_compile.runtime.round import RidingVerify
from spec_compile.runtime.runtime import Runtime
from spec_compile.runtime.session import MixedKind, Piece, Session, StepKind
from spec_compile.runtime.verify import choose_route

LONG = tokenizer()(TEXT).input_ids


@dataclass(eq=False)
class Prompt:
    row: int
    turn: int
    done: int
    stop: int


@functools.cache
def fast(name):
    options = ALGORITHMS.get(name, {}) | dict(max_cache_len=320, attention_backend="sdpa")
    if options.get("draft") == "itself":
        options["draft"] = demo()
    return speculate(demo(), name.split()[0], compile=False, check=False, **options)


@pytest.fixture
def rode(monkeypatch):
    """The pieces that rode along. A CPU takes turns by itself, because its products cost the same apart."""
    pieces = []
    monkeypatch.setattr(Runtime, "mixes", True)
    ride = prefill.PrefillRows.ride
    monkeypatch.setattr(prefill.PrefillRows, "ride", lambda self, piece: pieces.append(ride(self, piece)) or pieces[-1])
    return pieces


@pytest.mark.sweep(["eagle3 tree", "eagle3 drawn"])
@pytest.mark.parametrize("name", ["ngram", *ALGORITHMS])
def test_answers_are_those_of_generate(name, rode, monkeypatch):
    """Also if drafters do not catch up when a row leaves, as among many rows."""
    monkeypatch.setattr(decoding, "RIDDEN_ROWS", 1)
    draws = {}
    if name == "eagle3 drawn":  # rounds draw, as on a GPU
        draws = dict(do_sample=True, temperature=0.8, top_k=20)
        gpu = torch.device("cuda")
        route = "spec_compile.runtime.request.choose_route"
        monkeypatch.setattr(route, lambda config, given, _, *more: choose_route(config, given, gpu, *more))
    manager, run = stopped(fast(name), max_requests_per_batch=4, max_batch_tokens=64)
    prompts = [LONG[3 * n : 3 * n + 1 + 37 * n % 190] for n in range(7)]
    for number, prompt in enumerate(prompts):
        # The host chooses the tokens of one request, whose rounds take no prompts with them.
        more = draws | (dict(repetition_penalty=1.2) if number == 5 else {})
        manager.add_request(
            prompt, f"r{number}", max_new_tokens=10, eos_token_id=-1, **more, **(dict(seed=number) if draws else {})
        )
    outputs = run()
    assert len(rode) >= 4 and any(sum(map(bool, shares.values())) > 1 for shares in rode)
    for number, prompt in enumerate(prompts):
        more = draws | (dict(repetition_penalty=1.2) if number == 5 else {})
        alone = generated(
            fast(name), prompt, seed=number, max_new_tokens=10, eos_token_id=None, pad_token_id=0, **more
        )  # fmt: skip
        assert outputs[f"r{number}"].generated_tokens == alone
    manager.destroy()


def test_a_piece_of_too_few_tokens_is_refused(rode):
    with pytest.raises(ValueError, match="max_batch_tokens: expected at least 64, got 63"):
        stopped(fast("ngram"), max_batch_tokens=63)


def test_pieces_compute_the_most_for_their_cost(rode):
    manager, _ = stopped(fast("ngram"), max_requests_per_batch=6, max_batch_tokens=512)
    prompts, session = manager.scheduler.prefill, manager.scheduler.decoder.session(6)
    for missing, size in (((500,), 480), ((500, 60), 480), ((52, 60), 224), ((0, 60), 224)):
        prompts.sequences = [SimpleNamespace(row=row, done=0, stop=stop) for row, stop in enumerate(missing)]
        assert prompts.piece(session, StepKind.ROUND, 1).size == size
    manager.scheduler = None


@pytest.mark.parametrize(("rows", "nodes"), [(8, 16), (16, 8), (64, 2), (256, 2), (512, 1)])
def test_rounds_with_prompts_draft_few_nodes_of_many_rows(rode, rows, nodes):
    manager, _ = stopped(fast("ngram"), max_requests_per_batch=2, max_batch_tokens=512)
    decoder, policy = manager.scheduler.decoder, VaryingTreeBudget([1, 2, 4, 8, 16, 32])
    assert decoder.riding_nodes(SimpleNamespace(batch=rows, policies={StepKind.ROUND: policy})) == nodes
    manager.scheduler = None


def test_slices_of_prompts_in_turn(rode):
    manager, _ = stopped(fast("ngram"), max_requests_per_batch=6, max_batch_tokens=512)
    prompts = manager.scheduler.prefill
    session = prompts.session(prompts.number)
    first, second = Prompt(row=1, turn=4, done=100, stop=140), Prompt(row=0, turn=9, done=0, stop=500)
    prompts.sequences[:2] = [second, first]
    for number, shares, begins in (
        (4, {first: 64, second: 64}, [(1, 100), (1, 132), (0, 0), (0, 32)]),
        (1, {first: 32, second: 0}, [(1, 100)]),
    ):
        piece = Piece(session, number, 32)
        assert prompts.ride(piece) == shares
        assert session.slices[:, :number].T.tolist() == [[*begin] for begin in begins]
    second.stop, first.stop = 20, 101
    prompts.ride(Piece(session, 4, 32))
    assert session.slices[:, :4].T.tolist() == [[1, 100], [0, 0], [0, 0], [0, 0]]
    manager.scheduler = None


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle3 tree", "mtp", "dflash", "draft_model"])
def test_a_draft_processes_slices_as_it_does_chunks(name, rode):
    """A prompt that ends in its last slice, which comes twice, one that goes on, and one that takes no part."""
    manager, _ = stopped(fast(name), max_requests_per_batch=3)
    runtime, session = fast(name).speculation.engine.runtime, manager.scheduler.prefill.session(3)
    state, drafter, count = session.state, session.drafter, 5
    state.set_pages([(row, number, 1 + 2 * row + number) for row in range(3) for number in range(2)])
    for row, length in enumerate((60, 90, 6)):
        state.enter(row, LONG[row : row + length], [], lengths=5)
    taps = [torch.randn(3, 64, runtime.verify.hidden_size) for _ in runtime.algorithm.plan.taps]
    tensors = [tensor for cache in caches(drafter) for tensor in cache.tensors]

    found = []
    for slices in ([], [(1, 5), (1, 37), (0, 5), (0, 37), (0, 37)]):
        for buffer in (*tensors, *drafter.row_buffers()):
            buffer.zero_()
        if slices:
            row, begin = session.slices[:, :count].copy_(torch.tensor(slices).T)
            slots = begin[:, None] + torch.arange(32)
            features = [torch.stack([tap[row, begin - 5 : begin + 27] for row, begin in slices]) for tap in taps]
            riding = RidingVerify(lambda: None, session._compiled.prefill(), session.slices[:, :count], 32, None)
            ids = state.tokens[row[:, None], slots]
            rows = runtime.algorithm.drafter(count, ROUNDED)
            rows.share(session.slice_drafter)
            riding._draft(rows, ids, slots, features, 128)
        else:
            drafter.prefill(state, state.tokens[:, 5:69], torch.arange(5, 69).expand(3, -1), taps, 128)
        keys = [part for x in tensors for part in (x[1, :, 5:59], x[3, :, 5:], x[4, :, :5])]
        found.append([part.clone() for part in (*keys, *drafter.row_buffers())])
    assert any(part.any() for part in found[0])
    for chunk, slices in zip(*found):
        torch.testing.assert_close(chunk, slices)
    manager.destroy()


class Storages(TorchDispatchMode):
    """The memory that operators read and did not make."""

    def __init__(self):
        super().__init__()
        self.read, self.made = dict[int, StorageWeakRef](), set[int]()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.lift_fresh.default:  # a constant that Python made
            self.made.add(args[0].untyped_storage()._cdata)
        results = op(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.made:
                self.read[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.read:
                self.made.add(x.untyped_storage()._cdata)
        return results


@torch.no_grad()
@pytest.mark.parametrize("name", ["eagle3 tree", "mtp", "dflash", "draft_model"])
def test_all_that_a_step_reads_outlives_its_function(name, rode):
    """A captured graph does not keep the function that was captured."""
    manager, _ = stopped(fast(name), max_requests_per_batch=2)
    session, prompts = manager.scheduler.decoder.session(2), manager.scheduler.prefill.session(2)
    kind = MixedKind(StepKind.ROUND, Piece(prompts, 4, 32))
    step = session._function(kind, 1)
    with Storages() as storages:
        step(128)
    del step
    gc.collect()
    assert len(storages.read) > 20 and not any(each.expired() for each in storages.read.values())
    manager.destroy()


@pytest.mark.parametrize("captured", [True, False])
def test_no_step_is_captured_for_a_prompt(rode, monkeypatch, captured):
    """Without a captured step prompts take chunks of their own."""
    monkeypatch.setattr(Session, "has", lambda self, kind, nodes: captured)
    manager, run = stopped(fast("ngram"), max_requests_per_batch=2)
    for number in range(4):
        manager.add_request(LONG[number : 60 + 9 * number], f"r{number}", max_new_tokens=9, eos_token_id=-1)
    outputs = run()
    assert bool(rode) == captured
    for name, output in outputs.items():
        alone = generated(fast("ngram"), output.prompt_ids, max_new_tokens=9, eos_token_id=None, pad_token_id=0)
        assert output.generated_tokens == alone, name
    manager.destroy()


def test_rounds_that_may_not_draft_teach_nothing(rode, monkeypatch):
    learned = []
    monkeypatch.setattr(decoding, "RIDDEN_NODES", 1)
    monkeypatch.setattr(VaryingTreeBudget, "choose", lambda *_: 4)
    monkeypatch.setattr(
        VaryingTreeBudget, "learn", lambda self, nodes, trees, seconds: learned.append((nodes, not trees))
    )
    manager, run = stopped(fast("ngram"), max_requests_per_batch=2)
    for number in range(4):
        manager.add_request(LONG[number : 60 + 9 * number], max_new_tokens=9, eos_token_id=-1)
    run()
    assert rode and manager.scheduler.decoder.rounds_by_nodes[1] and {*learned} == {(4, False), (1, True)}
    manager.destroy()
