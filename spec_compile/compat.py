"""The differences between supported versions of torch and transformers, and the private parts that are used."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._inductor.runtime import cache_dir_utils, runtime_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AttentionInterface
from transformers.integrations import finegrained_fp8, moe

from .folders import own_folder
from .inventory import configured

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])

CACHE = "cache" if TRANSFORMERS >= (5, 24) else "past_key_values"
"""The name of a model's cache among the arguments of ``generate()`` and of a forward, and in their outputs."""
STATES = CACHE if TRANSFORMERS >= (5, 24) else "cache_params"
"""The same for a Mamba without attention, whose cache has only states."""

COMPILE_LOCK = torch._dynamo.convert_frame.compile_lock
"""An RLock. Whoever compiles or exports acquires it, because neither is safe in two threads at once."""

INDUCTOR_OPTIONS = {"cpp.simdlen": 1} if TORCH < (2, 13) or os.environ.get("ATEN_CPU_CAPABILITY") else {}
"""Options of every compilation. Before 2.13, some integer and mask expressions that Inductor vectorises on a CPU give
wrong results or do not compile (seen with 2.11: argmax over several rows, range checks of dynamic embeddings). So do
vectors of AVX2 on a CPU with AVX-512, which the variable forces (seen with 2.13: rounds with wrong tokens), because the
C++ compiler is told of AVX-512 all the same."""
CPU_OPTIONS = {**INDUCTOR_OPTIONS, "realize_reads_threshold": 0, "size_asserts": False, "alignment_asserts": False}
"""Options on a CPU. Values that layers share are computed once, so that all layers have the same kernels. Compiled code
checks no shapes, which takes it several microseconds a layer."""
GPU_OPTIONS = {"triton.cudagraphs": False, "emulate_precision_casts": True, "assert_indirect_indexing": False}
"""Options on a GPU. `runtime.steps` captures rounds into CUDA graphs, not Inductor. Fused values are rounded to 16 bits
wherever the model rounds them, so that rounds of all sizes compute the same. Assertions of indices are off, because
Inductor (2.11 to 2.13) also checks rows that do not exist: with 5 rows and tiles of 8, the argmax of row 6 would end
the process."""

CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}  # fmt: skip
"""The folders of compilers below the user's cache folder, by the variables of the environment that name others."""
_default_cache_dir = cache_dir_utils.default_cache_dir
"""Names the folder of Inductor if nobody names another: one in the folder of temporary files."""

EXPERTS_INTERFACES = moe.ALL_EXPERTS_FUNCTIONS, finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
"""Tables of the functions that compute routed experts, by the value of `_experts_implementation` in a configuration."""
default_gate = moe._default_apply_gate
"""The gate of experts that have none."""

default_store = dist.distributed_c10d._get_default_store
"""Returns the store through which the processes of torch.distributed have found each other."""
_gather_flat = dist.all_gather_single if TORCH >= (2, 13) else dist.all_gather_into_tensor
"""``(output, input, group=)``: the inputs of all ranks one after the other; its old name warns."""


def gather_parts(x: Tensor, group_name: str) -> Tensor:
    """All ranks' x, [ranks, *x.shape]."""
    group = dist.distributed_c10d._resolve_process_group(group_name)
    parts = x.new_empty(group.size() * x.numel())
    _gather_flat(parts, x.reshape(-1), group=group)
    return parts.view(group.size(), *x.shape)


def use_own_caches() -> None:
    """Have compilers keep what they compile in folders of this user (`folders.own_folder`). OSError if there are none.

    Folders in the environment count, if they are safe. Inductor has the value of `_default_cache_dir` put there as soon
    as torch._dynamo is imported, so that value is nobody's choice.
    """
    default = os.path.abspath(_default_cache_dir())
    for variable, name in CACHES.items():
        given = os.environ.get(variable)
        is_chosen = given and not (name == "inductor" and os.path.abspath(given) == default)
        os.environ[variable] = str(own_folder(name, given if is_chosen else None))
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    # Precompiled headers, and a table of pickles, lie in the folder of temporary files whatever the environment says.
    cache_dir_utils.default_cache_dir = runtime_utils.default_cache_dir = lambda: folder
    codecache = sys.modules.get("torch._inductor.codecache")
    if hasattr(codecache, "_HEADER_DIR"):
        codecache._HEADER_DIR = os.path.join(folder, "precompiled_headers")
        codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
    memo = getattr(sys.modules.get("torch._inductor.runtime.caching.memoizers"), "should_pad_memoizer", None)
    if memo is not None and not memo._disk_cache._cache_dir.is_relative_to(folder):
        memo._disk_cache.__init__(memo._disk_cache._cache_dir.name)


def renew_compile_threads() -> None:
    """Make Inductor start a new pool of threads in a forked process, which has none of its parent's threads.

    Inductor itself replaces its pools of processes.
    """
    inductor = sys.modules.get("torch._inductor.async_compile")
    if inductor is not None:
        inductor.AsyncCompile.pool.cache_clear()


@contextmanager
def attention_implementation(model: nn.Module, name: str, function: Callable) -> Iterator[None]:
    """A context in which `model` calls `function` as its attention, registered as `name`.

    No mask function is registered under `name`, so transformers builds no mask. Every config is restored on exit.
    """
    AttentionInterface.register(name, function)
    try:
        with configured(model, "_attn_implementation", name):
            yield
    finally:
        AttentionInterface._global_mapping.pop(name, None)


def check_compiler() -> None:
    """ValueError if Inductor has no C++ compiler, which it needs to compile for a CPU. OSError if it has no folder."""
    from torch._inductor import cpp_builder, exc

    use_own_caches()
    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, OSError) as error:
        raise ValueError(
            f"compile: rounds on a CPU are compiled with a C++ compiler, and there is none ({error}); install one, "
            "such as g++, name it in the environment variable CXX, or pass compile=False, which runs them eagerly"
        ) from error


@contextmanager
def brief_operators() -> Iterator[None]:
    """A context in which Inductor describes an op without a lowering by its name only.

    Before torch 2.13 it writes down all that the op's arguments were computed from, each as often as it was read, which
    takes exponential time: minutes for an op that comes first in the eighth layer.
    """
    from torch._inductor.exc import OperatorIssue

    describe = OperatorIssue.operator_str
    OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: f"  target: {target}")
    try:
        yield
    finally:
        OperatorIssue.operator_str = describe


def forget_shapes(*graphs: torch.fx.GraphModule, modes: Iterable[FakeTensorMode] = ()) -> None:
    """Free the tensors that the symbolic shapes of these exported graphs and of these modes hold.

    Nothing else frees them: unbounded caches refer to every `ShapeEnv`, and each has tensors, and a cache with sizes in
    C++ that refer back to it.
    """
    values = [node.meta.get("val") for gm in graphs for node in gm.graph.nodes]
    every = {id(mode): mode for mode in (*modes, *(x.fake_mode for x in values if isinstance(x, FakeTensor)))}
    for shapes in filter(None, [mode.shape_env for mode in every.values()]):
        shapes.tracked_fakes = None
        getattr(shapes, "fake_tensor_cache", {}).clear()
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def levels_of_cpu() -> tuple[bool, ...]:
    """If the CPU has each of `kernels.cpu.LEVELS`: none, AVX2, AVX-512, its BF16, and AMX."""
    cpu = torch.cpu
    avx512 = cpu._is_avx512_supported()
    bf16, amx = avx512 and cpu._is_avx512_bf16_supported(), cpu._is_amx_tile_supported()
    return True, cpu._is_avx2_supported(), avx512, bf16, amx


def tensors_in(value) -> list[Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def argmax(logits: Tensor) -> Tensor:
    """``logits.argmax(-1)``, int64 [...], the first of equals, by two plain reductions (see `INDUCTOR_OPTIONS`)."""
    size = logits.shape[-1]
    indices = torch.arange(size, device=logits.device)
    largest = logits == logits.amax(dim=-1, keepdim=True)
    return torch.where(largest, indices, size - 1).amin(dim=-1)


def backend_of(module: nn.Module) -> Callable | None:
    """The ``backend=`` with which ``torch.compile`` compiled a module, or None."""
    backend = getattr(getattr(module, "dynamo_ctx", None), "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_fn", backend)
