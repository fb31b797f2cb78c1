"""Documents of training text, and the batches that are made of them."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

WINDOW = 32
"""Batches whose sequences are sorted by length together, so that little is padded."""
WIDTH = 64
"""Batches wider than this many tokens are padded to a multiple of it."""


@dataclass(frozen=True)
class Document:
    """A text: ids [n] int32, and supervised [n] bool, the tokens that a draft is to learn to draft."""

    ids: Tensor
    supervised: Tensor

    def piece(self, begin: int, end: int) -> "Document":
        """Tokens `begin` to `end`."""
        return Document(self.ids[begin:end], self.supervised[begin:end])


@dataclass(frozen=True)
class Batch:
    """Sequences, padded on the right, on the CPU.

    ids: [B, L] int64
    next_supervised: [B, L] bool; True where the token after a position is supervised
    tokens: their number without the padding
    """

    ids: Tensor
    next_supervised: Tensor
    tokens: int

    def slots(self, ahead: int) -> tuple[Tensor, Tensor]:
        """The slots whose draft of step `ahead` (from 0) is a supervised token, and the positions of their teachers.

        A slot t pairs the state at position t with the token at t + 1; a row has L - 1 of them. In step `ahead` it
        drafts the token that follows position t + 1 + ahead, where the target's prediction is its teacher.

        Returns (slots, teachers), two int64 [R], ascending: indices into B * (L - 1) slots and B * L positions. A row
        of L = 4 tokens, all supervised, gives slots [0, 1] and teachers [1, 2] for ahead = 0 (slot 0 has read tokens 0
        and 1, and drafts token 2, which position 1 predicts), and slots [0] and teachers [2] for ahead = 1.
        """
        first = 1 + ahead
        width = self.next_supervised.shape[1]
        row, slot = self.next_supervised[:, first:].nonzero(as_tuple=True)
        return row * (width - 1) + slot, row * width + slot + first

    def rollout(self, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `slots` of all steps, in the order of their teachers.

        Returns (slots, step_of, teachers), each int64 [R]: indices into steps * B * (L - 1) slots, the step of each,
        and indices into B * L positions. A row of L = 4 tokens, all supervised, gives for 2 steps slots [0, 1, 3],
        step_of [0, 0, 1] and teachers [1, 2, 2]; slot 3 is slot 0 of step 1.
        """
        rows, width = self.ids.shape
        row, column = self.next_supervised.nonzero(as_tuple=True)
        # In step i the slot 1 + i before a teacher learns from it, [n, steps], unless that is before the text.
        step_of = torch.arange(steps)
        slots = (row * (width - 1) + column - 1)[:, None] + step_of * (rows * (width - 1) - 1)
        teachers, real = (row * width + column)[:, None], column[:, None] > step_of
        return slots.masked_select(real), step_of.masked_select(real), teachers.masked_select(real)


def split(documents: list[Document], fraction: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Documents in two parts: (for training, held out).

    `fraction` of the documents is held out at random, or the end of a single document that has supervised tokens.
    """
    if len(documents) == 1:
        if not documents[0].supervised.any():
            return documents, []
        cut = round(len(documents[0].ids) * (1 - fraction))
        return [documents[0].piece(0, cut)], [documents[0].piece(cut, len(documents[0].ids))]
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(1, round(len(documents) * fraction))
    return [documents[n] for n in sorted(order[count:])], [documents[n] for n in sorted(order[:count])]


def cut(documents: list[Document], length: int, shortest: int) -> list[Document]:
    """The documents in pieces of up to `length` tokens.

    Pieces with fewer than `shortest` tokens are left out, and so are those with nothing to learn: a first draft is a
    token from the third on, because a slot reads a state and the token after it.
    """
    pieces = (
        document.piece(begin, begin + length) for document in documents for begin in range(0, len(document.ids), length)
    )
    return [piece for piece in pieces if len(piece.ids) >= shortest and piece.supervised[2:].any()]


class Batches:
    """Batches of pieces, in an order that only depends on the seed and the step.

    So an interrupted training goes on with the batches that it would have had.
    """

    def __init__(self, pieces: list[Document], batch_size: int, seed: int):
        self.pieces, self.batch_size, self.seed = pieces, batch_size, seed
        self._epoch, self._order = -1, []

    def __len__(self) -> int:
        """Batches of an epoch, in which every piece comes once."""
        return -(-len(self.pieces) // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        epoch, number = divmod(step, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffle(epoch)
        return collate([self.pieces[n] for n in self._order[number]])

    def _shuffle(self, epoch: int) -> list[list[int]]:
        """The pieces of each batch of an epoch, by index."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.pieces), generator=generator).tolist()
        # Pieces meet at random in a window, are sorted by length within it, and the batches are shuffled again.
        batches = []
        for begin in range(0, len(order), WINDOW * self.batch_size):
            window = sorted(order[begin : begin + WINDOW * self.batch_size], key=lambda n: len(self.pieces[n].ids))
            batches += [window[i : i + self.batch_size] for i in range(0, len(window), self.batch_size)]
        return [batches[n] for n in torch.randperm(len(batches), generator=generator).tolist()]


def move(values: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, made without waiting for a GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def collate(pieces: list[Document]) -> Batch:
    """A batch of pieces.

    A batch wider than `WIDTH` is padded to a multiple of it, because kernels and plans are cached by shape.
    """
    ids = pad_sequence([piece.ids.long() for piece in pieces], batch_first=True)
    if ids.shape[1] > WIDTH:
        ids = F.pad(ids, (0, -ids.shape[1] % WIDTH))
    next_supervised = torch.zeros(ids.shape, dtype=torch.bool)
    for row, piece in zip(next_supervised, pieces):
        row[: len(piece.ids) - 1] = piece.supervised[1:]
    return Batch(ids, next_supervised, sum(len(piece.ids) for piece in pieces))


def sample(pieces: list[Document], batch_size: int, tokens: int) -> list[Batch]:
    """Batches of random pieces, the same in every call, with at least `tokens` tokens if there are so many."""
    picked, total = [], 0
    for n in torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist():
        if total < tokens:
            picked.append(pieces[n])
            total += len(pieces[n].ids)
    picked.sort(key=lambda piece: len(piece.ids))
    return [collate(picked[i : i + batch_size]) for i in range(0, len(picked), batch_size)]


def count_tokens(documents: list[Document], vocab_size: int) -> Tensor:
    """How often each token of the vocabulary is supervised, int64 [V]."""
    ids = torch.cat([document.ids[document.supervised] for document in documents])
    return torch.bincount(ids, minlength=vocab_size)[:vocab_size]


def fingerprint(documents: list[Document]) -> str:
    """16 hexadecimal digits that are the same for the same documents."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document.ids).to_bytes(8, "little"))
        digest.update(document.ids.numpy().tobytes())
        digest.update(document.supervised.numpy().tobytes())
    return digest.hexdigest()[:16]
