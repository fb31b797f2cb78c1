"""The thread of tiers and its child processes: real ones, and every way in which Python can end meanwhile."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import models
import psutil
import pytest
import torch
from fake_children import doing  # noqa: F401, a fixture

from spec_compile import speculate
from spec_compile.compile import cold_start as background
from spec_compile.compile import workers

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let jobs in the background ignore it
sys.path.insert(0, "tests/support")
import models, torch
torch.set_num_threads(1)
from spec_compile import speculate
from spec_compile.compile.workers import workers
fast = speculate(models.ADMITTED["llama"](), num_draft_tokens=4, max_cache_len=128, check=False)
ids = torch.tensor([[3, 4, 5, 6, 7]])
def ask():
    return fast.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
def when(condition):
    while not condition():
        time.sleep(0.01)
tiers = fast.speculation.engine.runtime.cold_start
ask()
MOMENT
print(workers().folder, *(process.pid for process in workers().processes), flush=True)
END
"""
MOMENTS = {
    "at once": "", "tracing": "when(lambda: tiers.untraced > 1)", "compiling": "when(lambda: workers().processes)",
}  # fmt: skip
ENDS = {
    "end": ("", 0), "exit": ("sys.exit(3)", 3), "error": ("raise SystemExit('no')", 1), "_exit": ("os._exit(4)", 4),
    "Ctrl-C": ("signal.raise_signal(signal.SIGINT)", 1),
    "Ctrl-C in warmup": ("signal.setitimer(signal.ITIMER_REAL, 1); signal.signal(signal.SIGALRM, "
                         "signal.default_int_handler); fast.speculation.warmup(); time.sleep(60)", 1),
    "model deleted": ("import gc; del fast, tiers; gc.collect()", 0),
    "forked": ("child = os.fork(); ask(); child and os.waitpid(child, 0)", 0),
}  # fmt: skip
CASES = [(end, moment) for end in ENDS for moment in MOMENTS]
CASES = [case for case in CASES if case[0] != "_exit" or case[1] == "compiling"]  # only children can clear up after it
LONG = 120
NO_END = dict(eos_token_id=None, pad_token_id=0)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize(("end", "moment"), CASES)
def test_python_ends_at_once_and_leaves_nothing_behind(end, moment):
    text, code = ENDS[end]
    script = SCRIPT.replace("MOMENT", MOMENTS[moment]).replace("END", text)
    environment = {**os.environ, "SPEC_COMPILE_CHILDREN": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == code or (code == 1 and done.returncode == -signal.SIGINT), done.stderr
    is_interrupted = "Ctrl-C" in end
    tracebacks = done.stderr.count("Traceback") - done.stderr.count("During handling of the above")
    assert tracebacks == is_interrupted and ("KeyboardInterrupt" in done.stderr) == is_interrupted
    assert not done.stderr or is_interrupted or done.stderr == "no\n", done.stderr
    folder, *pids = done.stdout.split()
    begin = time.monotonic()
    while os.path.exists(folder) or not all(gone(int(pid)) for pid in pids):
        assert time.monotonic() < begin + LONG
        time.sleep(0.05)


@pytest.mark.parametrize(
    "device, dtype",
    [
        pytest.param("cpu", torch.float32, marks=pytest.mark.slow),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_children_compile_what_calls_run(device, dtype, monkeypatch):
    """Answers before, while and after children compile. On a GPU steps are captured anew."""
    monkeypatch.setenv("SPEC_COMPILE_CHILDREN", "1" if device == "cpu" else "4")
    workers.workers.cache_clear()
    model, is_exact = models.ADMITTED["llama"]().to(device, dtype), dtype == torch.float32
    fast = speculate(model, num_draft_tokens=4, max_cache_len=128, check=False)
    ids, options = torch.randint(3, models.VOCAB, (1, 20)).to(device), dict(max_new_tokens=12, **NO_END)
    runtime = fast.speculation.engine.runtime
    want = model.generate(ids, do_sample=False, **options)

    def ask():
        torch.manual_seed(0)
        drawn = fast.generate(ids, do_sample=True, **options)
        got = fast.generate(ids, do_sample=False, **options)
        assert torch.equal(got, want) or not is_exact
        return drawn

    drawn = ask()
    (session,) = fast.speculation.engine.sessions.values()
    made = {**session.made}
    begin = time.monotonic()
    while runtime.cold_start.waits:
        assert time.monotonic() < begin + 5 * LONG
        time.sleep(0.1)
        assert torch.equal(ask(), drawn) or not is_exact
    source = runtime.parts
    assert source.adopted and not source.failures
    assert torch.equal(ask(), drawn) or not is_exact
    if runtime.on_gpu:
        assert not {*map(id, made.values())} & {*map(id, session.made.values())}
    before = source.adopted
    fast.speculation.warmup()
    assert source.adopted >= before and not source.failures
    assert torch.equal(ask(), drawn) or not is_exact
    workers.workers().close()
    workers.workers.cache_clear()


@pytest.mark.slow
def test_the_thread_ends_when_nothing_is_left_and_begins_again(doing):  # noqa: F811
    fast = speculate(models.ADMITTED["llama"](), num_draft_tokens=4, max_cache_len=128, check=False)

    def ask(rows):
        ids = torch.randint(3, models.VOCAB, (rows, 9))
        fast.generate(ids, max_new_tokens=4, do_sample=False, **NO_END)
        begin = time.monotonic()
        while background.background._thread is not None:
            assert time.monotonic() < begin + LONG
            doing.finish()
            time.sleep(0.05)
        return fast.speculation.engine.runtime.parts.adopted

    assert 0 < ask(1) < ask(2)
