"""`Ranks`: the processes that share one model, as one of them sees them."""

from dataclasses import dataclass, field

from .slices import Slices


@dataclass
class Ranks:
    """The group of tensor parallelism, and this process's place in it.

    rank, size: this process's number, and how many there are. name: of the process group, for `kernels.all_reduce`.
    """

    rank: int
    size: int
    name: str
    slices: Slices = field(init=False)

    def __post_init__(self) -> None:
        self.slices = Slices(self.rank, self.size)
