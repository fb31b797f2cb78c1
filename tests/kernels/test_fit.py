"""Kernels compiled for GPUs from a T4 to a B200, without one: they fit into its shared memory, and have no instruction
that it lacks. ``python tests/targets.py`` prints what they take.
"""

import pytest

pytest.importorskip("triton.backends.nvidia")

from compiled import CARDS, compile_family, faults
from kernel_families import SCRIPTS, WITHOUT

BY_DEFAULT = (75, "drafts"), (90, "products")


@pytest.mark.parametrize(
    ("capability", "family"),
    [pytest.param(capability, family, marks=[] if (capability, family) in BY_DEFAULT else pytest.mark.slow)
     for capability in CARDS for family in SCRIPTS if family not in WITHOUT.get(capability, ())],
)  # fmt: skip
def test_kernels_fit(capability, family):
    kernels = compile_family(family, capability)
    assert kernels and faults(kernels, capability) == []
    families = {each["tensor"] for group in kernels.values() for each in group if each["name"] == "small_m_kernel"}
    assert family != "products" or families == {90: {"wgmma"}, 100: {"tcgen05"}}.get(capability, {"mma"})


def test_faults_are_noticed():
    kernel = {"name": "k", "memory": 70_000, "lacking": ["cp.async"], "registers": 9, "spilled": 0, "tensor": ""}
    assert faults({"a": [kernel]}, 75) == ["a: k takes 70000 bytes of shared memory", "a: k has cp.async"]
    assert faults({"a": [kernel | {"lacking": []}]}, 80) == []
