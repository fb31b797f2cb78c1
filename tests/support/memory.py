"""What a test's tensors take: the bytes that a model holds, and the most that were allocated within a context."""

import gc
import time

from torch import nn
from torch.profiler import ProfilerActivity, profile

from spec_compile.inventory import held_tensors


def held_bytes(*modules: nn.Module) -> int:
    """Bytes of the memory behind the parameters and buffers of modules, where shared memory counts once."""
    storages = {}
    for module in modules:
        for tensor in held_tensors(module):
            names = tensor.__tensor_flatten__()[0] if hasattr(type(tensor.data), "__tensor_flatten__") else []
            state = vars(tensor).get("quant_state")
            parts = [getattr(tensor, name) for name in names] or [tensor]
            parts += [] if state is None else [state.absmax, state.code]
            storages |= {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


class Peak:
    """A context on a CPU; `bytes` is the most that was allocated between `begin` and its end beyond what was there at
    `begin`, `left` what of that remained. What is freed in it counts only if it was allocated in it."""

    def __enter__(self):
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def begin(self) -> None:
        gc.collect()
        self._begin = time.time_ns()

    def __exit__(self, *error) -> None:
        gc.collect()
        self._profile.__exit__(*error)
        events = self._profile.profiler.kineto_results.events()
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        self.bytes = self.left = 0
        for moment, change in changes:
            if moment >= self._begin:
                self.left += change
                self.bytes = max(self.bytes, self.left)
