"""Everything that differs between the supported versions of torch and transformers, in one place."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType

import torch
import torch._dynamo
from torch import Tensor, nn
from transformers import AttentionInterface

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

COMPILE_LOCK = torch._dynamo.convert_frame.compile_lock
"""Held by whoever compiles; an RLock. Exporting is not safe in two threads at once, either."""

INDUCTOR_OPTIONS = {"cpp.simdlen": 1} if TORCH < (2, 13) else {}
"""For every compilation: before 2.13, some integer and mask expressions that Inductor vectorises on a CPU give wrong
results or do not compile (seen with 2.11: argmax over several rows, range checks of dynamic embeddings)."""
CPU_OPTIONS = {**INDUCTOR_OPTIONS, "realize_reads_threshold": 0}
"""What layers share is computed once, and their kernels come out alike."""
GPU_OPTIONS = {"triton.cudagraphs": False}
"""Rounds are captured here, not by Inductor."""


def renew_compile_threads() -> None:
    """In a forked process: forget Inductor's pool of threads, which the process does not have, so that it makes another
    (it forgets its pools of processes by itself)."""
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        inductor.AsyncCompile.pool.cache_clear()


@contextmanager
def attention_implementation(model: nn.Module, name: str, function: Callable) -> Iterator[None]:
    """Run `model` with `function` as its attention, registered as `name`; every config is restored on exit.

    No mask function is registered under `name`, so transformers builds no mask at all.
    """
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")]
    AttentionInterface.register(name, function)
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
        AttentionInterface._global_mapping.pop(name, None)


def compile_step(function: Callable, name: str, device: str = "cpu", dynamic: bool | None = True) -> Callable:
    """Compile a method of no tensor arguments into one graph by Inductor, as its own entry in Dynamo's cache.

    Integer arguments become symbolic sizes; they must be at least 2 (0 and 1 would be specialised). Guards are
    dropped: everything the step reads lives in buffers of fixed shape that the step's owner never replaces.
    """
    code = function.__code__.replace(co_name=name)
    own = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return torch.compile(
        own.__get__(function.__self__),
        fullgraph=True,
        dynamic=dynamic,
        options={
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
            **(CPU_OPTIONS if device == "cpu" else GPU_OPTIONS),
        },
    )


def check_compiler() -> None:
    """ValueError if Inductor has no C++ compiler, which it needs to compile for a CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError) as error:
        raise ValueError(
            f"compile: rounds on a CPU are compiled with a C++ compiler, and there is none ({error}); install one, "
            "such as g++, name it in the environment variable CXX, or pass compile=False, which runs them eagerly"
        ) from error


EXAMPLE = 37
"""How many nodes or tokens a piece is first called with: a number that no size of a model has."""


def compile_piece(function: Callable, name: str) -> Callable:
    """Compile a function of tensors, some of whose sizes are the number of nodes, as its own entry in Dynamo's cache.

    The sizes that are `EXAMPLE` in the first call may differ in later ones; all others must stay, for guards are
    dropped as in `compile_step`.
    """
    compiled, called = compile_step(function, name, "cuda", dynamic=None), False

    def call(*arguments):
        nonlocal called
        for tensor in [] if called else tensors_in(arguments):
            for dim in (dim for dim, size in enumerate(tensor.shape) if size == EXAMPLE):
                torch._dynamo.mark_dynamic(tensor, dim)
        called = True
        return compiled(*arguments)

    return call


def tensors_in(value) -> list[Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def argmax(logits: Tensor) -> Tensor:
    """``logits.argmax(-1)``, the first of equal ones, as two plain reductions (see `INDUCTOR_OPTIONS`)."""
    size = logits.shape[-1]
    places = torch.arange(size, device=logits.device)
    largest = logits == logits.amax(dim=-1, keepdim=True)
    return torch.where(largest, places, size - 1).amin(dim=-1)


def backend_of(module: nn.Module) -> Callable | None:
    """The function behind the ``backend=`` that a module was compiled with by ``torch.compile``, if there is one."""
    found = getattr(getattr(module, "dynamo_ctx", None), "callback", None)
    while hasattr(found, "_torchdynamo_orig_backend"):
        found = found._torchdynamo_orig_backend
    return getattr(found, "compiler_fn", found)
