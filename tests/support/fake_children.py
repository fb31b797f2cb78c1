"""Children without processes, which have done their jobs when a test says so."""

import json

import pytest

from spec_compile.compile import cold_start, workers
from spec_compile.compile import part as compiling
from spec_compile.compile.serialise import graph_of


class Doing:
    """Children that have done their jobs when `finish` is called; a job that `fails` gets no result."""

    def __init__(self):
        self.jobs, self.done, self.fails, self.is_broken, self.forgotten = {}, {}, set(), False, []

    def submit(self, key, job):
        if self.is_broken:
            raise OSError("no processes")
        self.jobs[key] = job

    def forget(self, key):
        self.jobs.pop(key, None)
        self.forgotten.append(key)

    def finish(self):
        for key, job in [*self.jobs.items()]:  # others submit meanwhile
            done = None if key in self.fails else compiling.compile_part(job)
            self.done[key] = (None, "reason") if done is None else (done, "")

    def help(self):
        self.finish()
        return False

    def collect(self, keys):
        if self.is_broken:
            raise OSError("no processes")
        return [(key, *self.done[key]) for key in keys if key in self.done]


@pytest.fixture
def doing(monkeypatch):
    """Models are compiled in the background by these children, without Inductor."""
    children = Doing()
    monkeypatch.setenv("SPEC_COMPILE_CHILDREN", "1")
    monkeypatch.setattr(workers, "workers", lambda: children)
    monkeypatch.setattr(cold_start, "check_compiler", lambda: None)
    monkeypatch.setattr(compiling, "compile_part", lambda job: json.dumps(json.loads(job)["rows"]).encode())
    monkeypatch.setattr(compiling, "load_part", lambda data: graph_of(json.loads(data)))
    return children
