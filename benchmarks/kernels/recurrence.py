"""Chunks of prompts through one recurrence on a GPU: our kernels compared with the plain form in PyTorch.

    python -m benchmarks.kernels.recurrence [--models Qwen3-Next MiniMax Falcon-H1-7B Mamba2-2.7B] [--tokens 512 2048]

A figure is the microseconds of one chunk, whose tokens all count. "kernel" moves the state over one token after the
other and sums as a round does; "plain" computes blocks of tokens at once. "floor" is the time of a large copy of as
many bytes as the inputs, the output and two states have.
"""

import argparse

import torch
from torch import Tensor

from benchmarks.common import show
from benchmarks.timers import bandwidth, captured, median_ms, replay_us
from spec_compile.kernels.recurrence import KINDS, initial_state, launch

HEADS = {
    "Qwen3-Next": ("delta", 16, 32, 128, 128),
    "MiniMax": ("decay", 64, 64, 128, 128),
    "Falcon-H1-7B": ("decay", 1, 24, 256, 128),
    "Mamba2-2.7B": ("decay", 1, 80, 128, 64),
}
"""Model -> kind, key heads, heads, sizes of a key and of a value. Qwen3.5's default sizes are those of Qwen3-Next."""
CHANNELS = {"Qwen3-Next": 8192, "Falcon-H1-7B": 3584, "Mamba2-2.7B": 5376}
"""Model -> channels of the short convolution of 4 inputs before the recurrence."""


def recurrence_inputs(model: str, tokens: int) -> tuple[str, list[Tensor]]:
    """The kind of a model's recurrence, and random inputs of a chunk."""
    kind, key_heads, heads, dk, dv = HEADS[model]
    q, k, v = (torch.randn(1, tokens, *size, device="cuda") for size in ((key_heads, dk), (key_heads, dk), (heads, dv)))
    decay, beta = torch.rand(2, 1, tokens, heads, device="cuda")
    return kind, [q, torch.nn.functional.normalize(k, dim=-1), v, -decay, *([beta] if kind == "delta" else [])]


def convolution_inputs(model: str, tokens: int) -> tuple[str, list[Tensor]]:
    """Random inputs of the short convolution before the recurrence."""
    x, weight = torch.randn(1, tokens, CHANNELS[model], device="cuda"), torch.randn(CHANNELS[model], 4, device="cuda")
    return "convolution", [x.bfloat16(), weight.bfloat16()]


def measure(kind: str, inputs: list[Tensor], copy: float) -> tuple[float, float, float]:
    """Microseconds of the floor, of the kernel and of the plain form. copy: bytes a second of a large copy."""
    state = initial_state(kind, inputs, 1)
    valid = torch.tensor([inputs[0].shape[1]], device="cuda")
    out = launch.run(kind, inputs, state, None, None, valid)
    size = sum(x.nbytes for x in inputs) + out.nbytes + 2 * state.nbytes
    kernel = replay_us(captured(lambda: launch.run(kind, inputs, state, None, None, valid)))
    return size / copy * 1e6, kernel, median_ms(lambda: KINDS[kind].chunk(inputs, state, valid), 10) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048])
    options = parser.parse_args()
    copy, cells = bandwidth()["copy"], []
    for model in options.models:
        makers = [recurrence_inputs, *([convolution_inputs] if model in CHANNELS else [])]
        for make in makers:
            for tokens in options.tokens:
                kind, inputs = make(model, tokens)
                cells.append((model, kind, str(tokens), *(f"{each:.1f}" for each in measure(kind, inputs, copy))))
    show(("model", "kind", "tokens", "floor", "kernel", "plain"), cells, "microseconds of a chunk")


if __name__ == "__main__":
    main()
