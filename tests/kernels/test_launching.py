"""`plain_kernels`: the functions of a GPU compute the plain meaning, without their kernels."""

import threading

import pytest
import torch

from spec_compile.kernels import launching


@pytest.fixture
def launched():
    """An op of a CPU and what its function for a GPU has been called with."""
    calls = []

    @torch.library.custom_op("spec_compile_test::twice", mutates_args=(), device_types="cpu")
    def twice(x: torch.Tensor, more: int = 0) -> torch.Tensor:
        return x * 2 + more

    registered = {}
    twice.register_kernel = lambda device: lambda function: registered.setdefault(device, function)
    launch = launching.on_gpu(twice)(lambda x, more=0: calls.append((x, more)) or x)
    return registered["cuda"], launch, calls


def test_the_plain_meaning_inside_and_the_kernel_outside(launched):
    run, launch, calls = launched
    x = torch.randn(3)
    with launching.plain_kernels():
        assert launching.are_plain() and torch.equal(run(x, more=1), x * 2 + 1) and not calls
        with launching.plain_kernels():
            pass
        assert torch.equal(run(x), x * 2) and not calls, "an inner context leaves the outer one"
    assert run(x) is x and len(calls) == 1 and not launching.are_plain()
    assert launch(x) is x and len(calls) == 2, "the launch itself is not changed"


def test_it_is_of_one_thread_and_ends_with_an_error():
    seen = []
    with pytest.raises(ZeroDivisionError), launching.plain_kernels():
        thread = threading.Thread(target=lambda: seen.append(launching.are_plain()))
        thread.start()
        thread.join()
        1 / 0  # noqa: B018
    assert seen == [False] and not launching.are_plain()


@pytest.mark.gpu
def test_products_norms_and_attention_launch_nothing():
    from triton.runtime.jit import JITFunction

    from spec_compile.kernels.linear import PRODUCT
    from spec_compile.kernels.norms import rms_norm

    x, weight = torch.randn(4, 64, device="cuda"), torch.randn(32, 64, device="cuda")
    expected = torch.nn.functional.linear(x, weight)
    with pytest.MonkeyPatch.context() as patch, launching.plain_kernels():
        patch.setattr(JITFunction, "run", lambda *_, **__: pytest.fail("a kernel was launched"))
        torch.testing.assert_close(PRODUCT(x, weight), expected, rtol=1e-4, atol=1e-4)
        rms_norm(x, weight[0], 1e-6, None)
