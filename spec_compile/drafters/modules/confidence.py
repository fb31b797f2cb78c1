"""DSpark's prediction of acceptance (arXiv:2607.05147): a row of weights next to the output matrix of the draft.

    c_k = sigmoid(w . [h_k ; W1[x_(k-1)]] + b)

is the probability that draft k is accepted if all before it are. h_k is the normed state of its place, x_(k-1) is the
token before it, and W1 is the table of `transitions.Markov`. Some drafts leave W1 out: then c_k only depends on h_k.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class Confidence(nn.Module):
    """The row of weights. Parameters have their published names.

    hidden_size: of the draft.
    rank: numbers that it reads of the token before; 0 for none.
    """

    def __init__(self, hidden_size: int, rank: int = 0):
        super().__init__()
        self.hidden_size, self.rank = hidden_size, rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def describe(self) -> str:
        """A line for the draft's report."""
        reads = "its place and the token before it" if self.rank else "its place"
        return f"the draft predicts from {reads} how likely each draft is to be accepted"

    def forward(self, hidden: Tensor, before: Tensor | None = None) -> Tensor:
        """log(c) [...] float32, at most 0. The arguments are those of `logits`."""
        return F.logsigmoid(self.logits(hidden, before))

    def logits(self, hidden: Tensor, before: Tensor | None = None) -> Tensor:
        """log(c / (1 - c)) [...] float32.

        hidden [..., h]: normed states.
        before [..., rank]: rows of W1; None if rank is 0. Its leading dimensions and those of `hidden` are broadcast,
            so that the candidates of a place share its state: hidden [B, P, 1, h] and before [B, P, K, rank] give
            [B, P, K].
        """
        of_place, of_token = self.proj.weight.split([self.hidden_size, self.rank], dim=1)
        logits = F.linear(hidden, of_place, self.proj.bias).float()
        if before is not None:
            logits = logits + F.linear(before, of_token).float()
        return logits[..., 0]
