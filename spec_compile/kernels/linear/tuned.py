"""Plans that `tune-kernels` has found on a GPU: a JSON file for each name of a GPU and version of Triton.

An entry has the parts, the tiles, and the microseconds of 1, 16 and 64 rows together, before and with the plan:

    "bfloat16 4096x4096": [2, [[64, 256, 16, 4, 4, 1, 1, 16, 1], ...], 35.1, 33.0]

The file of one machine serves every other one with this GPU and version, in the same folder.
"""

import json
import os
import re
from pathlib import Path

import torch

from ...folders import cache_folder, make_folder
from .plans import ProductPlan, ProductTile


def file_of(gpu: str, triton: str) -> Path:
    """The file of a GPU and a version of Triton, in the folder for caches of this user."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-")
    return cache_folder() / "plans" / f"{name}_triton-{triton}.json"


def name_of(kind: str, dtype: torch.dtype, outputs: int, inputs: int) -> str:
    """The key of a product in the file. kind: of a quantised weight's `WeightLayout`. dtype: of the weight's tensor."""
    return " ".join([*kind.split(), str(dtype).removeprefix("torch."), f"{outputs}x{inputs}"])


def read(path: Path) -> dict[str, ProductPlan]:
    """The plans of a file, by `name_of`; none where there is no file. ValueError, naming it, if it is damaged."""
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
        plans = {
            name: ProductPlan(parts, tuple(ProductTile(*tile) for tile in tiles))
            for name, (parts, tiles, *_) in table.items()
        }
        numbers = [number for plan in plans.values() for number in sum(plan.tiles, (plan.parts, len(plan.tiles)))]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise ValueError("a number is missing, or below 1")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected plans as tune-kernels writes them ({error}); delete it, or run tune-kernels again"
        ) from error
    return plans


def add(path: Path, plans: dict[str, ProductPlan], times: tuple[float, ...] = ()) -> None:
    """Write plans to a file, next to the plans of other products. times: microseconds, before and with the plans."""
    try:
        known = json.loads(path.read_text()) if read(path) else {}
    except ValueError:
        known = {}  # a damaged file is replaced
    entries = {name: [*plan, *(round(time, 2) for time in times)] for name, plan in plans.items()}
    make_folder(path.parent)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({**known, **entries}, indent=1))
    new.replace(path)
