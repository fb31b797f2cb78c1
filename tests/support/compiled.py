"""Kernels compiled for GPUs that are not there: what they take of shared memory and registers, by which instructions.

Triton compiles without a GPU, but not in a process that interprets. So `compile_family` starts one that runs this file.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CARDS = {
    75: ("T4", 40, 65_536),
    80: ("A100", 108, 166_912),
    86: ("RTX 3090", 82, 101_376),
    89: ("RTX 4090", 128, 101_376),
    90: ("H200", 132, 232_448),
    100: ("B200", 148, 232_448),
    120: ("RTX 5090", 170, 101_376),
}
"""By compute capability: a GPU's name, multiprocessors, bytes of shared memory that a program may take."""
LACKING = {
    75: r"cp\.async|mma\S*bf16|mma\S*tf32|mma\S*e4m3|griddepcontrol|wgmma|tcgen05|cluster",
    80: r"cp\.async\.bulk|mma\S*e4m3|griddepcontrol|wgmma|tcgen05|cluster",
    86: r"cp\.async\.bulk|mma\S*e4m3|griddepcontrol|wgmma|tcgen05|cluster",
    89: r"cp\.async\.bulk|griddepcontrol|wgmma|tcgen05|cluster",
    90: r"tcgen05",
    100: r"wgmma",
    120: r"wgmma|tcgen05",
}
"""Instructions that a GPU lacks."""
FAMILIES = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
"""Kinds of instructions of tensor cores, the groups of warps' first."""


def compile_family(script: str, capability: int) -> dict[str, list[dict]]:
    """The kernels that a script of `kernel_families` launches, by its case: `facts_of` each."""
    command = [sys.executable, __file__, script, str(capability)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def faults(kernels: dict[str, list[dict]], capability: int) -> list[str]:
    """What keeps the compiled kernels from a GPU: too much memory, or instructions that it lacks."""
    memory, found = CARDS[capability][2], []
    for case, each in ((case, each) for case, group in kernels.items() for each in group):
        if each["memory"] > memory:
            found.append(f"{case}: {each['name']} takes {each['memory']} bytes of shared memory")
        if each["lacking"]:
            found.append(f"{case}: {each['name']} has {', '.join(each['lacking'])}")
    return found


def facts_of(kernel, capability: int) -> dict:
    """Facts of a compiled kernel.

    memory: bytes of shared memory.
    registers, spilled: registers of a thread, and bytes of its stack, where the compiler puts what has no register.
    tensor: the kind of instructions of the tensor cores; "" if it has none.
    lacking: its instructions that the GPU lacks.
    unfinished: see `leaves_unfinished`.
    """
    ptx = kernel.asm["ptx"]
    code = "\n".join(line for line in ptx.splitlines() if not line.lstrip().startswith(("//", ".")))
    tensor = next((name for name, text in FAMILIES.items() if text in code), "")
    registers, spilled = _resources(kernel.asm["cubin"])
    lacking = sorted(set(re.findall(LACKING[capability], code)))
    memory = kernel.metadata.shared
    return {
        "name": kernel.metadata.name, "memory": memory, "registers": registers, "spilled": spilled, "tensor": tensor,
        "lacking": lacking, "unfinished": tensor == "wgmma" and leaves_unfinished(_disassembled(kernel.asm["cubin"])),
    }  # fmt: skip


def leaves_unfinished(code: str) -> bool:
    """True if a step of a loop ends before groups of warps (wgmma) have finished products whose first operand is in
    registers. Triton 3.6 may let the next step write other numbers into these.

    code: of nvdisasm. The products of a group end with "gsb0"; "DEPBAR.LE gsb0, 0x1" waits for all groups but the last.
    """
    steps, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(steps)
        elif step := re.search(r"(HGMMA\S* R\d+, R\d+, .*|DEPBAR\.LE gsb0.*|BRA .*)", line):
            steps.append(step[1])
            if (target := re.search(r"\.L_x_\d+", step[1])) and target[0] in labels:
                loops.append(steps[labels[target[0]] :])
    for loop in loops:
        groups = 0
        for step in loop:
            if left := re.search(r"gsb0, 0x(\w+)", step):
                groups = min(groups, int(left[1], 16))
            groups += step.startswith("HGMMA") and "gsb0" in step
        if groups:
            return True
    return False


def _disassembled(binary: bytes) -> str:
    return _ask("nvdisasm", ["-c"], binary)


def _resources(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    text = _ask("cuobjdump", ["-res-usage"], binary)
    return tuple(int(re.findall(rf"{name}:(\d+)", text)[-1]) for name in ("REG", "STACK"))


def _ask(tool: str, options: list[str], binary: bytes) -> str:
    """What a tool of CUDA's, which comes with Triton, tells about a compiled kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(script: str, capability: int) -> None:
    """Run a script, and print the facts of its kernels as JSON."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from spec_compile.kernels import card

    name, processors, memory = CARDS[capability]
    here = card.Card(name, divmod(capability, 10), processors, memory)

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    class Compiled:
        """Compiles a kernel where it would be launched, with some options for a GPU."""

        def __init__(self, kernel, **options):
            self.kernel, self.options = kernel, options

        def __getitem__(self, grid):
            def run(*args, **options):
                space["found"].append(self.kernel.warmup(*args, grid=grid, **options | self.options))

            return run

    def compiled(module, *names, **options):
        for name in names:
            setattr(module, name, Compiled(getattr(module, name), **options))

    driver.set_active(Driver())
    facts = {"card_of": lambda device: here, "launches_early": lambda device: here.capability >= card.HOPPER}
    originals = {name: getattr(card, name) for name in facts}
    for module in [*sys.modules.values()]:  # others import the functions later
        for name, original in originals.items():
            if getattr(module, name, None) is original:
                setattr(module, name, facts[name])
    half = torch.float16 if here.lacks_tensor_cores else torch.bfloat16
    space = {"torch": torch, "re": re, "compiled": compiled, "CARD": here, "HALF": half, "found": [], "results": {}}
    import kernel_families

    exec(compile(kernel_families.SCRIPTS[script], script, "exec"), space)
    found = {case: [facts_of(kernel, capability) for kernel in group] for case, group in space["results"].items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
