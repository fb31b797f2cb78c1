"""Traced functions as parts and as jobs."""

import torch

from spec_compile.compat import CPU_OPTIONS
from spec_compile.compile.part import Part, job_of


def described(traced):
    """A part that reads and writes as the trace says."""
    part = Part(None, None, "part", "")
    part.describe(traced.sources, traced.result)
    return part


def job(traced, options=CPU_OPTIONS):
    return job_of(traced.rows, traced.specs, options, torch.get_num_threads())
