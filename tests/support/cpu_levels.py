"""Products on a CPU at each level of instructions that it has."""

import pytest

from spec_compile.kernels.linear import few_rows

NEEDS_KERNEL = pytest.mark.skipif(few_rows.BEST == 0, reason="needs a CPU with AVX2, and the package built")


@pytest.fixture(params=range(1, few_rows.BEST + 1), ids=lambda level: few_rows.LEVELS[level])
def level(request, monkeypatch):
    """A level, which is the best one during the test."""
    monkeypatch.setattr(few_rows, "BEST", request.param)
    return request.param


@pytest.fixture(params=sorted({min(few_rows.WIDE - 1, few_rows.BEST), few_rows.BEST}))
def narrow_or_best(request, monkeypatch):
    """The same of two levels: the best, and one at which a library multiplies weights as numbers. True: the kernel
    multiplies these, too."""
    monkeypatch.setattr(few_rows, "BEST", request.param)
    return request.param >= few_rows.WIDE
