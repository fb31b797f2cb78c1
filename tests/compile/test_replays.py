"""Functions that record themselves as CUDA graphs, with a stand-in for CUDA."""

import weakref
from contextlib import nullcontext

import pytest
import torch

from spec_compile.compile import replay as replays


@pytest.fixture
def stand_in(monkeypatch):
    """A function: what takes the place of `record`, the rest of CUDA doing nothing."""
    monkeypatch.setattr(replays, "aside", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return lambda record: monkeypatch.setattr(replays, "record", record)


def test_replays_follow_what_is_copied_and_what_stays(stand_in):
    """With a stand-in for CUDA: a recorded graph reads the memory that it was recorded with."""
    recorded = []

    def record(function, pool, stream):
        output = function()
        recorded.append(function)
        return (lambda: [held.copy_(new) for held, new in zip(output, function())]), output

    stand_in(record)
    replayed = replays.Replays(lambda x, cache, weight: [x * weight + cache], [1], 2)
    weight, caches = torch.tensor(3.0), [torch.tensor(10.0), torch.tensor(20.0)]
    for cache in caches:
        results = [replayed(torch.tensor(float(step)), cache, weight)[0] for step in range(6)]
        assert [float(result) for result in results] == [step * 3 + float(cache) for step in range(6)]
    assert len(recorded) == 2
    caches[0].fill_(5.0)
    assert float(replayed(torch.tensor(1.0), caches[0], weight)[0]) == 8 and len(recorded) == 2
    assert float(replayed(torch.tensor(1.0), caches[0], torch.tensor(2.0))[0]) == 7  # other weights begin anew
    assert replayed(torch.ones(2), caches[0], weight)[0].shape == (2,)


def test_replays_do_not_record_what_returns_an_argument(stand_in):
    stand_in(lambda *_: pytest.fail("recorded"))
    replayed, x = replays.Replays(lambda x, weight: [x.view(-1)], [], 1), torch.ones(3)
    for _ in range(5):
        assert replayed(x, torch.ones(()))[0].data_ptr() == x.data_ptr()


def test_a_forward_that_cannot_be_recorded_runs_itself(stand_in):
    def record(*_):
        raise replays.CaptureError("a wait for the GPU")

    stand_in(record)
    replayed = replays.Replays(lambda x, weight: [x * weight], [], 1)
    results = [float(replayed(torch.tensor(float(step)), torch.tensor(2.0))[0]) for step in range(6)]
    assert results == [0, 2, 4, 6, 8, 10]


def test_a_graph_keeps_no_cache(stand_in):
    """A cache of long ago must not take memory, only because a graph was recorded over it."""
    stand_in(lambda function, pool, stream: (lambda: None, function()))
    replayed = replays.Replays(lambda x, cache, weight: [x * weight + cache], [1], 2)
    weight, cache = torch.tensor(3.0), torch.tensor(10.0)
    for _ in range(4):
        replayed(torch.tensor(1.0), cache, weight)
    assert len(replayed._graphs) == 1
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_capture_that_fails_ends_its_allocations():
    """Otherwise torch aborts when a pool of memory ends."""
    x, stream = torch.ones(8, device="cuda"), torch.cuda.Stream()
    with replays.aside(stream):
        (x + 1).sum().item()
    with pytest.raises(replays.CaptureError):
        replays.record(lambda: (x + 1).sum().item(), torch.cuda.graph_pool_handle(), stream)
    torch.cuda.empty_cache()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = torch.ones(8, device="cuda")
    del held, pool
    replay, output = replays.record(lambda: torch.ones(8, device="cuda") * 2, torch.cuda.graph_pool_handle(), stream)
    replay()
    assert output.sum().item() == 16
