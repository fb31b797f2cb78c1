"""Instructions of Hopper that Triton does not have. Import this module only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def wait_for_kernel_before():
    """Wait until the kernel before this one is done -> 0. A load that must come later adds this to its address."""
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def let_next_kernel_begin(left, late):
    """Let the next kernel begin if left <= late."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.le.s32 p, $1, $2; @p griddepcontrol.launch_dependents; mov.u32 $0, 0;}",
        "=r,r,r",
        [left, late],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finished(sums):
    """sums, float32, once the tensor cores have finished them.

    A loop whose next step only adds to them does not wait. Where the tensor cores read one operand from registers,
    Triton 3.6 then writes the next step's numbers into registers that they may still read: sums change now and then.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def prefetch_l2(address):
    """Fetch the line of the L2 cache at each address, an int64."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def nanoseconds():
    """The GPU's clock, int64."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def trap():
    """End the kernel with an error, after the host can see what this thread has stored."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
