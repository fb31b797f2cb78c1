"""Where tests of kernels run: in Triton's interpreter, in float32, or with ``pytest -m gpu`` on a CUDA device."""

import pytest
import torch

GPU = torch.cuda.is_available()
triton = pytest.importorskip("triton")
if not GPU and isinstance(triton.language.max, triton.JITFunction):
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no CUDA device")]
INTERPRETER = pytest.mark.skipif(GPU, reason="the kernels run on the CUDA device")


def places(*dtypes: torch.dtype) -> list:
    """Parameters (device, dtype): the interpreter, and a GPU with each of `dtypes`."""
    on_gpu = [pytest.param(("cuda", dtype), id=f"cuda-{str(dtype)[6:]}", marks=ON_GPU) for dtype in dtypes]
    return [pytest.param(("cpu", torch.float32), id="interpreter", marks=INTERPRETER), *on_gpu]
