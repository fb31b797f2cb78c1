"""Kernels that are compiled side by side before they run."""

import threading
import time

import pytest
import torch
from triton.runtime.jit import JITFunction

from spec_compile import kernels
from spec_compile.kernels import norms, together
from spec_compile.kernels.together import compile_together


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_launches_of_this_thread_only_compile(gpu, monkeypatch):
    """Other threads launch meanwhile, new memory is zero, and all is as before afterwards."""
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, grid, warmup: seen.append((self, grid, warmup)))
    before = JITFunction.run, torch.empty, torch.Tensor.new_empty

    def launch(kernel):
        JITFunction.run(kernel, grid=(1,), warmup=False)

    def function():
        launch("here")
        other = threading.Thread(target=launch, args=("there",))
        other.start()
        other.join()
        for empty in (torch.empty(1 << 16), torch.empty_like(torch.ones(9)), torch.ones(3).new_empty(1 << 12)):
            assert not empty.any()

    compile_together(function, function)
    assert seen == 2 * [("here", (1,), True), ("there", (1,), False)]
    assert (JITFunction.run, torch.empty, torch.Tensor.new_empty) == before
    assert "new_empty" not in vars(torch.Tensor)


def test_kernels_are_loaded_once_and_those_that_do_not_load_raise_later(gpu, monkeypatch):
    class Kernel:
        loads = 0

        def _init_handles(self):
            self.loads += 1
            raise RuntimeError("out of resources")

    class Compiling:
        def __init__(self, kernel):
            self.kernel, self.future = kernel, None

    compiled, compiling, failed = Kernel(), Compiling(Kernel()), Compiling(None)
    results = iter([compiled, compiling, compiled, failed])
    monkeypatch.setattr(JITFunction, "run", lambda *args, grid, warmup: next(results))
    compile_together(lambda: [JITFunction.run("kernel", grid=(1,), warmup=False) for _ in range(4)])
    assert compiled.loads == compiling.kernel.loads == 1


def test_work_ahead_leaves_its_errors_to_others():
    done = threading.Event()
    together.ahead(lambda: done.set() or 1 / 0)
    assert done.wait(10)


def test_threads_compile_one_after_the_other(gpu, monkeypatch):
    """Else the first to leave would restore a launcher over which the second had put its own."""
    before, inside, overlaps = JITFunction.run, [], []

    def function():
        overlaps.append(len(inside))
        inside.append(1)
        time.sleep(0.05)
        inside.pop()

    threads = [threading.Thread(target=compile_together, args=(function,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [0, 0, 0] and JITFunction.run is before


def test_errors_of_functions_are_raised_and_launches_go_on(gpu):
    before = JITFunction.run
    with pytest.raises(ZeroDivisionError):
        compile_together(lambda: 1 / 0)
    assert JITFunction.run is before


def test_nothing_runs_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compile_together(lambda: 1 / 0)


@pytest.mark.gpu
def test_what_was_compiled_together_is_only_launched(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels.load(torch.device("cuda"))
    x, weight = torch.randn(5, 1152, device="cuda"), torch.randn(1152, device="cuda")
    expected = norms.rms_norm(x.cpu(), weight.cpu(), 1e-5, None)
    outputs = []

    def run():
        outputs.append(torch.ops.spec_compile.rms_norm(x, weight, 1e-5, None))

    compile_together(run)
    assert not outputs.pop().any()
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *args, **options: pytest.fail("compiled in a launch"))
    run()
    torch.testing.assert_close(outputs.pop().cpu(), expected)
