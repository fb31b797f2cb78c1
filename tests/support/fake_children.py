"""Children without processes, which have done their jobs when a test says so."""

import json

import pytest

from spec_compile.artefacts import compiler as compiling
from spec_compile.artefacts.graphs import graph_of
from spec_compile.artefacts.parts import read_job
from spec_compile.runtime import background


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
            done = None if key in self.fails else compiling.compile_part(read_job(job))
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
    monkeypatch.setattr(background, "children", lambda: children)
    monkeypatch.setattr(background, "check_compiler", lambda: None)
    monkeypatch.setattr(compiling, "compile_part", lambda job: json.dumps(job.rows).encode())
    monkeypatch.setattr(compiling, "load_part", lambda data: graph_of(json.loads(data)))
    return children
