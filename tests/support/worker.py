"""A process that runs tests: seeds, one thread, and tiny models built once."""

import atexit
import functools
import gc
import importlib.util
import itertools
import logging
import os
import random
from types import SimpleNamespace

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start; for why see `torch.set_num_threads` below
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # the compiler knows the CPU's vectors, which it shows in 10 s
os.environ["SPEC_COMPILE_CACHE"] = "off"  # every start of a test is a full one, unless the test names a folder
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels run in its interpreter; it looks when imported
    if importlib.util.find_spec("triton"):
        from interpreter import hasten

        hasten()

os.environ.setdefault("SPEC_COMPILE_CHILDREN", "0")  # what is compiled is compiled before its first call, as by True

import captures
import hypothesis
import models
import sweeps
import transformers
from cpu_levels import first_or_best, level  # noqa: F401, fixtures
from forwards import interpreted, new_compilations  # noqa: F401, fixtures
from toy_graphs import half_on_gpu  # noqa: F401, a fixture

from spec_compile import api
from spec_compile.capture.admit import admit
from spec_compile.runtime import session
from spec_compile.runtime.pipeline import RoundPipeline

captures.share()
torch.fx.config.do_not_emit_stack_traces = True  # of each call that is traced, which is a sixth of a capture
torch._dynamo.config.fake_tensor_cache_enabled = False  # it costs more than it saves where models have few layers
torch.set_num_threads(1)  # a second thread on a busy core makes OpenMP wait, up to 50 times longer
transformers.logging.set_verbosity_error()
logging.getLogger("torch.__trace").setLevel(logging.CRITICAL)  # pytest would keep megabytes of its records
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    sweeps.mark(items)
    yield
    items[:] = items[:: config.getoption("--every")]


def pytest_collection_finish():
    """Python does not look for garbage among modules and tests again, of which there are a million objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Nor among what a file of tests leaves: models and graphs that are built once a process."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """A worker, which has told all that it will, ends without freeing each object first, which takes ten seconds."""
    if hasattr(config, "workerinput"):
        atexit._run_exitfuncs()  # child processes end, and temporary folders go
        os._exit(0)
    gc.unfreeze()  # when Python ends, they are garbage like everything else


@pytest.fixture(autouse=True)
def seed():
    """Every test begins with the same random state, and with one thread: a benchmark takes more for itself."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def steps_of_drawn_times(monkeypatch):
    """Steps take 0.8 to 1.2 ms, whatever they do: no test's rounds depend on what else the machine does meanwhile."""
    clock = itertools.accumulate(iter(functools.partial(random.Random(0).uniform, 0.8e-3, 1.2e-3), None))
    monkeypatch.setattr(RoundPipeline, "_now", lambda _: next(clock))
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


@functools.cache
def _captured(name: str):
    model = models.ADMITTED[name]()
    admit(model)
    return model, api.capture(model)


@pytest.fixture
def captured():
    """A function: name of a tiny model -> (model, its captured graph), built once and not to be changed."""
    return _captured


@pytest.fixture
def two_layers(monkeypatch):
    """Models that scripts load have their first two layers alone, which makes capturing them four times faster."""
    load = transformers.AutoModelForCausalLM.from_pretrained

    def load_shallow(name, **options):
        options.setdefault("config", transformers.AutoConfig.from_pretrained(name, num_hidden_layers=2))
        return load(name, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load_shallow)
