"""Matrix products of few rows: at most 64 rows of activations with weights read from memory once.

Such a product takes as long as reading the weights. What a plain kernel loses at its beginning and end is kept small:

- The work, tiles of the weights, is dealt to the programs in equal runs that may begin and end anywhere ("stream-K").
  A row of tiles of several programs is summed by the last of them to arrive, in a fixed order: results do not vary.
- Programs begin while the kernel before them still runs (see `dependent_launch`). The form for single rows, without
  tensor cores, fills its pipeline with weights before it waits for the activations; the other fetches a few of its
  first weights to the L2 cache (to fetch more, or in bulk, made whole rounds slower). So **no kernel of a layer may
  write weights**. A kernel launched the same way after this one begins no earlier than when all that came before this
  one is done.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU
    triton = None

MAX_ROWS = 64
DEPENDENT_LAUNCH = True
"""Let the ops use programmatic dependent launch."""


class Plan(NamedTuple):
    """How one product is computed."""

    block_o: int  # a tile: so many rows of the weights
    block_k: int  # and columns
    programs: int
    warps: int = 4
    stages: int = 4  # tiles in the pipeline
    dot: bool = True  # on the tensor cores; else at most 4 rows
    late: int = 1 << 30  # let the next kernel begin when a program has so many tiles left
    prefetch: int = 0  # of each program's first tiles, so many are fetched to L2 before the wait
    pdl: bool = True  # programmatic dependent launch


if triton is not None:

    @triton.jit
    def _wait():
        """Wait for the kernel before this one -> 0. Loads that must come later add this to their address."""
        return tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def _release(left, late):
        """Let the next kernel begin if at most `late` tiles are left."""
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.le.s32 p, $1, $2; @p griddepcontrol.launch_dependents; mov.u32 $0, 0;}",
            "=r,r,r",
            [left, late],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def _prefetch(address):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit(do_not_specialize=["rows", "share", "more", "late", "prefetch"])
    def _skinny(
        x,
        weight,
        bias,
        out,
        partial,
        arrived,
        rows,
        outputs,
        inputs,
        x_stride,
        share,
        more,
        late,
        prefetch,
        BLOCK_N: tl.constexpr,
        BLOCK_O: tl.constexpr,
        BLOCK_K: tl.constexpr,
        PARTS: tl.constexpr,
        GROUP: tl.constexpr,
        STAGES: tl.constexpr,
        GATED: tl.constexpr,
        DOT: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Program p takes `share` tiles, one more if p < `more`, of the list of all tiles, row by row.

        `partial` holds two tiles a program, fp32: its part of the tile row it begins in, and of the one it ends in.
        `arrived`, zeros, counts the programs done with a tile row; it is zeros again at the end.
        """
        program = tl.program_id(0)
        steps = tl.cdiv(inputs, BLOCK_K)
        begin = program * share + tl.minimum(program, more)
        end = begin + share + (program < more)
        r = tl.arange(0, BLOCK_O)
        n = tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        if GATED:  # rows of the gate and of the up projection alternate
            row = r // 2 + (r % 2) * (outputs // 2)
            HEIGHT: tl.constexpr = BLOCK_O // 2
            height = outputs // 2
        else:
            row = r
            HEIGHT: tl.constexpr = BLOCK_O
            height = outputs
        if DOT and PDL:
            o = tl.minimum(begin // steps * HEIGHT + row, outputs - 1)
            line = tl.arange(0, BLOCK_K // 64 if BLOCK_K > 64 else 1) * 64
            lines = weight + o.to(tl.int64)[:, None] * inputs + begin % steps * BLOCK_K + line[None, :]
            for step in range(0, tl.minimum(tl.minimum(steps - begin % steps, end - begin), prefetch)):
                _prefetch((lines + step * BLOCK_K).to(tl.int64))
            _wait()
        while begin < end:
            tile = begin // steps
            first_step = begin % steps
            last_step = tl.minimum(steps, first_step + end - begin)
            o = tl.minimum(tile * HEIGHT + row, outputs - 1)
            w_at = weight + o.to(tl.int64)[:, None] * inputs + k[None, :]
            x_at = x + n[:, None] * x_stride + k[None, :]
            if DOT:
                acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
                for step in tl.range(first_step, last_step):
                    if PDL:
                        _release(end - begin - (step - first_step), late)
                    inside = (k < inputs - step * BLOCK_K)[None, :]
                    a = tl.load(w_at + step * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
                    b = tl.load(x_at + step * BLOCK_K, mask=(n < rows)[:, None] & inside, other=0.0)
                    acc = tl.dot(a, b.T, acc, input_precision="ieee")
            else:
                # The pipeline's first loads are issued before the loop, and only those of the weights may come before
                # _wait: x of the next step goes to registers. Step -1 loads no weights.
                b = tl.zeros([BLOCK_N, BLOCK_K], x.dtype.element_ty)
                if BLOCK_N == 1:
                    sums = tl.zeros([BLOCK_O, BLOCK_K], tl.float32)
                else:
                    sums = tl.zeros([BLOCK_N, BLOCK_O, BLOCK_K], tl.float32)
                for step in tl.range(first_step - 1, last_step, num_stages=STAGES):
                    ahead = (step + 1) * BLOCK_K
                    if PDL:
                        ahead += _wait()
                        _release(end - begin - (step - first_step), late)
                    ahead = tl.multiple_of(ahead, 16)
                    b_rows = tl.where(step + 1 < last_step, rows, 0)
                    inside = (k < inputs - ahead)[None, :]
                    b_next = tl.load(x_at + ahead, mask=(n < b_rows)[:, None] & inside, other=0.0)
                    inside = (k < tl.where(step >= first_step, inputs - step * BLOCK_K, 0))[None, :]
                    a = tl.load(w_at + step * BLOCK_K, mask=inside, other=0.0, eviction_policy="evict_first")
                    if BLOCK_N == 1:
                        sums += a.to(tl.float32) * b.to(tl.float32)
                    else:
                        sums += a.to(tl.float32)[None, :, :] * b.to(tl.float32)[:, None, :]
                    b = b_next
                if BLOCK_N == 1:
                    acc = tl.sum(sums, 1)[:, None]
                else:
                    acc = tl.sum(sums, 2).T
            done = last_step - first_step == steps
            if PARTS > 1:
                if not done:
                    start = tile * steps
                    longer = more * (share + 1)  # tiles of the programs that have one more
                    first = tl.where(start < longer, start // (share + 1), more + (start - longer) // share)
                    stop = start + steps - 1
                    last = tl.where(stop < longer, stop // (share + 1), more + (stop - longer) // share)
                    at = r[:, None] * BLOCK_N + n[None, :]
                    slot = 2 * program + (program * share + tl.minimum(program, more) < start)
                    tl.store(partial + slot.to(tl.int64) * (BLOCK_O * BLOCK_N) + at, acc)
                    tl.debug_barrier()  # every thread's stores come before the release by one of them
                    done = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == last - first
                    if done:
                        acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
                        for group in tl.static_range(0, PARTS, GROUP):
                            p = first + group + tl.arange(0, GROUP)
                            slots = (2 * p + (p * share + tl.minimum(p, more) < start)).to(tl.int64)
                            parts = tl.load(
                                partial + slots[:, None, None] * (BLOCK_O * BLOCK_N) + at[None, :, :],
                                mask=(p <= last)[:, None, None],
                                other=0.0,
                                cache_modifier=".cg",
                            )
                            acc += tl.sum(parts, 0)
                        tl.store(arrived + tile, 0)
            if done:
                if bias is not None:
                    acc += tl.load(bias + o).to(tl.float32)[:, None]
                if GATED:
                    gate, up = acc.reshape(HEIGHT, 2, BLOCK_N).permute(0, 2, 1).split()
                    value = gate / (1 + tl.exp(-gate)) * up
                else:
                    value = acc
                column = tile * HEIGHT + tl.arange(0, HEIGHT)
                tl.store(
                    out + n[None, :].to(tl.int64) * height + column[:, None],
                    value.to(out.dtype.element_ty),
                    mask=(column < height)[:, None] & (n < rows)[None, :],
                )
            begin += last_step - first_step


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _parts(steps: int, tiles: int, programs: int) -> int:
    """At most so many programs share a row of `steps` tiles; a power of two."""
    share = tiles // programs
    if tiles % programs == 0 and (steps % share == 0 or share % steps == 0):
        parts = max(1, steps // share)
    else:
        parts = (steps + share - 2) // share + 1
    return 1 << (parts - 1).bit_length()


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, plan: Plan, gated: bool = False) -> None:
    """Run the kernel: x [N, I] of any row stride, weight [O, I] and bias [O] contiguous, out [N, O] contiguous.

    Gated: the first half of the weights' rows is a gate, the second half what it gates; out [N, O / 2].
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    block_n = triton.next_power_of_2(rows)
    if plan.dot:
        block_n = max(16, block_n)
    steps = _ceil(inputs, plan.block_k)
    height = _ceil(outputs, plan.block_o)
    programs = min(plan.programs, steps * height)
    share, more = divmod(steps * height, programs)
    parts = _parts(steps, steps * height, programs)
    tile = plan.block_o * block_n
    partial = arrived = None
    if parts > 1:
        partial = torch.empty(2 * programs * tile, dtype=torch.float32, device=x.device)
        arrived = _zeros(x.device, height)
    _skinny[(programs,)](
        x,
        weight,
        bias,
        out,
        partial,
        arrived,
        rows,
        outputs,
        inputs,
        x.stride(0),
        share,
        more,
        plan.late,
        plan.prefetch,
        BLOCK_N=block_n,
        BLOCK_O=plan.block_o,
        BLOCK_K=plan.block_k,
        PARTS=parts,
        GROUP=min(parts, max(1, 1024 * plan.warps // tile)),  # 32 registers of partial sums a thread
        STAGES=plan.stages,
        GATED=gated,
        DOT=plan.dot,
        PDL=plan.pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **({"launch_pdl": True} if plan.pdl else {}),
    )


COUNTERS = 1 << 20
_counters: dict[torch.device, Tensor] = {}
_next: dict[torch.device, int] = {}


def prepare(device: torch.device) -> None:
    """Allocate what launches on a device share. Else the first launch does, or while a graph is captured each one."""
    if device not in _counters:
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _next[device] = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _zeros(device: torch.device, count: int) -> Tensor:
    """Counters that a launch may use and leaves zero; those of launches that run at the same time differ."""
    count = _ceil(count, 32) * 32  # aligned, so that every launch has the same specialisation
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        prepare(device)
    begin = _next[device] if _next[device] + count <= COUNTERS else 0
    _next[device] = begin + count
    return _counters[device][begin : begin + count]


def plan(rows: int, outputs: int, inputs: int, processors: int = 132) -> Plan | None:
    """The plan for a product on so many multiprocessors; None where cuBLAS is not slower, or the kernel cannot run.

    Found on an H200 with the layers of Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B; `prefetch` with kernels before the
    product that let it begin at once. Programs that all fit at once share rows of tiles only as far as each
    multiprocessor gets at most one.
    """
    if not 0 < rows <= MAX_ROWS or inputs % 16 or outputs * inputs < 1 << 19:
        return None
    if rows == 1:
        tiles = _ceil(outputs, 8)
        if tiles <= processors:
            return Plan(8, 512, tiles, stages=9, dot=False, late=6)
        if tiles <= 4 * processors:
            return Plan(8, 512, tiles, dot=False, late=6)
        if tiles <= 8 * processors:
            return Plan(16, 512 if inputs > 1024 else 256, _ceil(outputs, 16), dot=False, late=6)
        if inputs >= 4096:
            return Plan(4, 1024, _ceil(outputs, 4), stages=5, dot=False, late=6)
    elif rows <= 4 and outputs <= 8 * processors:
        return Plan(8, 256, _ceil(outputs, 8), stages=14, dot=False, late=6)
    tiles = _ceil(outputs, 64)
    if tiles > 2 * processors and (rows > 32 or tiles > 7 * processors):
        return Plan(128, 128, _ceil(outputs, 128), warps=8, stages=4 if rows > 32 else 3, late=1, prefetch=1)
    if tiles > processors:
        return Plan(64, 128, tiles, late=1, prefetch=1)
    narrow = _ceil(outputs, 32)
    if rows <= 16 and inputs > 2 * outputs and 0.9 * processors < narrow <= processors:  # no row of tiles is shared
        return Plan(32, 256, narrow, stages=6, late=1)
    if rows <= 16 and outputs * inputs <= 1 << 22 and narrow * (processors // narrow) > 0.9 * processors:
        return Plan(32, 256, narrow * (processors // narrow), stages=6, late=4, prefetch=2)
    shares = min(processors // tiles, _ceil(inputs, 128), 8)
    if shares > 1 and tiles * shares < 0.8 * processors:
        return None
    return Plan(64, 128, tiles * shares, stages=8 if shares == 1 and rows <= 16 else 5, late=1, prefetch=2)


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU; the plans are for no other."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 0


def _plan(x: Tensor, weight: Tensor) -> Plan | None:
    """The plan where the kernel can run and is worth it."""
    if triton is None or not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or x.numel() == 0:
        return None
    if weight.dtype != x.dtype or not weight.is_contiguous() or weight.data_ptr() % 16:
        return None
    processors = _processors(x.device)
    return plan(x.numel() // x.shape[-1], *weight.shape, processors) if processors else None


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, how: Plan, gated: bool) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = x.new_empty(flat.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])
    launch(flat, weight, bias, out, how._replace(pdl=DEPENDENT_LAUNCH), gated)
    return out.view(*x.shape[:-1], out.shape[1])


@torch.library.custom_op("spec_compile::skinny_matmul", mutates_args=())
def skinny_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``: x [..., I], weight [O, I], bias [O] or None -> [..., O], fp32 accumulation, x's dtype.

    The kernel takes bf16 and fp16, up to 64 rows, on Hopper, where `plan` has one; else it is ``F.linear``.
    """
    how = _plan(x, weight)
    if how is None:
        return F.linear(x, weight, bias)
    return _run(x, weight, bias if bias is None else bias.contiguous(), how, False)


@skinny_matmul.register_fake
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("spec_compile::skinny_swiglu", mutates_args=())
def skinny_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = F.linear(x, weight).chunk(2, -1)``.

    x [..., I], weight [O, I] -> [..., O / 2]. The kernel rounds once, at the end.
    """
    how = _plan(x, weight)
    if how is None or weight.shape[0] % 2:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up
    return _run(x, weight, None, how, True)


@skinny_swiglu.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)
