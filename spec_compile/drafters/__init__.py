"""Drafters: what proposes trees. A new one is one file here and one entry in `DRAFTERS`."""

from torch import Tensor, nn

from ..runtime.accept import Accepted
from ..runtime.state import State


class Drafter(nn.Module):
    """What a round asks of a drafter. The methods marked [graph] run inside the compiled round."""

    taps: tuple[int, ...] = ()
    """Hidden states of the target that `prefill` and `observe` are given, numbered as in `passes.Settings`."""

    draws: bool = False
    """Whether it draws its tokens at random, and gives ``state.propose`` the distributions they were drawn from."""

    seconds: float = 0.0
    """Time spent proposing on the host, ever (0 where it is part of the graph)."""

    def small_buffers(self) -> list[Tensor]:
        """The buffers that a round changes and that must be put back after a round of warm-up."""
        return list(self.buffers())

    def mute(self) -> None:
        """The rounds that follow are warm-up: leave no trace outside `small_buffers`."""

    def begin(self, state: State, prompts: list[list[int]], references: list[Tensor]) -> None:
        """A new call of generate(): `prompts`, one a row, and `references` that the output may copy from."""

    def prefill(self, state: State, features: list[Tensor]) -> None:
        """[graph] Hidden states [B, T, C] of a chunk of the prompt at slots ``state.lengths`` onwards."""

    def observe(self, state: State, features: list[Tensor], accepted: Accepted) -> None:
        """[graph] Hidden states [B, N, C] of the verified nodes, and which of them were accepted."""

    def propose(self, state: State) -> None:
        """[graph] Call ``state.propose`` with the trees to verify next, siblings distinct, parents first."""
        raise NotImplementedError

    def end(self, lengths: list[int]) -> None:
        """The call of generate() is over, however it ended; `lengths`: tokens of each row less one, if it began."""
