"""Compile the kernels of each family for GPUs that are not there, and print what they take.

    python tests/targets.py [FAMILY ...] [--capability 75 86 ...] [--all]

Prints a line for each family and compute capability: kernels, the most bytes of shared memory, the most registers, and
kernels that spill registers, with bytes of their stack. --all: a line for each kernel. Exits with 1 if a kernel takes
more memory than the GPU has, has instructions that it lacks, or does not compile.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

from compiled import CARDS, compile_family, faults
from kernel_families import SCRIPTS, WITHOUT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help=", ".join(SCRIPTS))
    parser.add_argument("--capability", nargs="*", type=int, choices=CARDS, default=[*CARDS])
    parser.add_argument("--all", action="store_true", help="a line for each kernel")
    arguments, failed = parser.parse_args(), False
    for capability in arguments.capability:
        for family in (each for each in arguments.family or SCRIPTS if each not in WITHOUT.get(capability, ())):
            began = time.monotonic()
            try:
                kernels = compile_family(family, capability)
            except AssertionError as error:
                print(f"sm_{capability} {family}: does not compile\n{error}", flush=True)
                failed = True
                continue
            each = [kernel for group in kernels.values() for kernel in group]
            spills = {kernel["name"]: kernel["spilled"] for kernel in each if kernel["spilled"]}
            print(
                f"sm_{capability} {family}: {len(each)} kernels, {max(kernel['memory'] for kernel in each)} bytes, "
                f"{max(kernel['registers'] for kernel in each)} registers, stacks {spills or 'none'}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            found = faults(kernels, capability)
            print(*(f"  {fault}" for fault in found), sep="\n", end="\n" if found else "")
            failed = failed or bool(found)
            for case, group in kernels.items() if arguments.all else ():
                for kernel in group:
                    print(f"  {case}: {kernel}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
