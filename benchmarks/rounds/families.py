"""The time of each family of kernels in a captured round."""

from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.rounds.captured import filling
from spec_compile.runtime.session import StepKind

FAMILIES = {
    "norms": ("rsqrt", "rms_norm", "l2_norms"),
    "recurrences": ("linear_attention", "linear_commit", "convolution_", "selective", "walk_kernel"),
    "attention": ("attention", "append_kernel", "tree_kernel", "tail_tiles", "prompt_kernel", "merge_"),
    "matrix products": ("skinny_gemm", "gemm", "cutlass", "nvjet", "splitk", "gemv", "cublas"),
    "rotary embedding, activations": ("triton_poi", "triton_red", "triton_per"),
    "experts": ("experts_kernel", "route_kernel", "sort_kernel", "combine_kernel"),
    "n-gram": ("ngram",),
    "compaction": ("compact",),
    "copies and fills": ("memcpy", "memset", "elementwise"),
}
"""Family -> parts of its kernels' names; a kernel belongs to the first family that matches."""


def families(fast, nodes: int, repeats: int = 5) -> tuple[dict[str, float], int]:
    """Microseconds of each family in one round over trees as in `rounds`, and the number of kernels.

    A kernel may begin before the previous one ends and wait, so it counts from that one's end to its own.
    """
    session = fast.speculation.engine.session(1)
    step, fill = session.get(StepKind.ROUND, nodes), filling(fast, session.state)
    spent, kernels = defaultdict(float), 0
    for _ in range(repeats):
        fill(nodes)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            step(128)
            torch.cuda.synchronize()
        events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.device_time > 0]
        events.sort(key=lambda event: event.time_range.end)
        last, kernels = events[0].time_range.start, len(events)
        for event in events:
            name = event.name.lower()
            family = next((f for f, words in FAMILIES.items() if any(w in name for w in words)), "all the rest")
            spent[family] += (event.time_range.end - last) / repeats
            last = event.time_range.end
    return dict(spent), kernels
