"""Products on a CPU at each level of instructions that it has."""

import pytest

from spec_compile.kernels.linear import cpu_gemm

NEEDS_KERNEL = pytest.mark.skipif(cpu_gemm.BEST == 0, reason="needs a CPU with AVX2, and the package built")


@pytest.fixture(params=range(1, cpu_gemm.BEST + 1), ids=lambda level: cpu_gemm.LEVELS[level])
def level(request, monkeypatch):
    """A level, which is the best one during the test."""
    monkeypatch.setattr(cpu_gemm, "BEST", request.param)
    monkeypatch.setattr(cpu_gemm, "SUPPORTED", False)  # with AMX a library multiplies, too
    return request.param


@pytest.fixture(params=sorted({min(1, cpu_gemm.BEST), cpu_gemm.BEST}), ids=lambda level: cpu_gemm.LEVELS[level])
def first_or_best(request, monkeypatch):
    """The same of two levels: the first, at which a library multiplies weights of float32, and the best."""
    monkeypatch.setattr(cpu_gemm, "BEST", request.param)
    monkeypatch.setattr(cpu_gemm, "SUPPORTED", False)  # with AMX a library multiplies, too
    return request.param
