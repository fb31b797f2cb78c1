"""Kernels compiled for GPUs from a T4 to a B200, without one: they fit into its shared memory, and have no instruction
that it lacks. ``python tests/targets.py`` prints what they take.
"""

import pytest

pytest.importorskip("triton.backends.nvidia")

from compiled import CARDS, compile_family, faults, leaves_unfinished
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
    unfinished = {each["name"] for group in kernels.values() for each in group if each["unfinished"]}
    assert family == "training" or not unfinished  # whose steps do not write what the step before reads
    families = {each["tensor"] for group in kernels.values() for each in group if each["name"] == "skinny_gemm_kernel"}
    assert "products" not in family or families == {90: {"wgmma"}, 100: {"tcgen05"}}.get(capability, {"mma"})


def test_faults_are_noticed():
    kernel = {"name": "k", "memory": 70_000, "lacking": ["cp.async"], "registers": 9, "spilled": 0, "tensor": ""}
    assert faults({"a": [kernel]}, 75) == ["a: k takes 70000 bytes of shared memory", "a: k has cp.async"]
    assert faults({"a": [kernel | {"lacking": []}]}, 80) == []


LOOP = """
.L_x_3:
    HGMMA.64x128x16.F32.BF16 R24, R116, gdesc[UR16], R24 ;
    HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16], R24, gsb0 ;
    WARPGROUP.DEPBAR.LE gsb0, 0x{left} ;
@!P3 BRA `(.L_x_3) ;
    WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""


@pytest.mark.parametrize("left, unfinished", [("0", False), ("1", True)])
def test_unfinished_products_are_noticed(left, unfinished):
    assert leaves_unfinished(LOOP.format(left=left)) == unfinished
    from_memory = LOOP.replace("R116, gdesc", "gdesc[UR20], gdesc").replace("R88, gdesc", "gdesc[UR20], gdesc")
    assert not leaves_unfinished(from_memory.format(left=left))
