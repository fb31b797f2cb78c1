"""Training text: read from strings, token ids, files and conversations to `Document`, and made into batches."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..cli import numbered_lines, parse_json

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

    def rollout(self, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """The slots whose draft of some step is a supervised token, with their teachers, in the order of these.

        A slot t pairs the state at position t with the token at t + 1; a row has L - 1 of them. In step i (from 0) it
        drafts the token that follows position t + 1 + i, where the target's prediction is its teacher.

        Returns (slots, step_of, teachers), each int64 [R]: indices into steps * B * (L - 1) slots, the step of each,
        and indices into B * L positions. A row of L = 4 tokens, all supervised, gives for 2 steps slots [0, 1, 3],
        step_of [0, 0, 1] and teachers [1, 2, 2]: slot 0 has read tokens 0 and 1, and drafts token 2, which position 1
        predicts; slot 3 is slot 0 of step 1.
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
    next_supervised = pad_sequence([F.pad(piece.supervised[1:], (0, 1)) for piece in pieces], batch_first=True)
    padding = -ids.shape[1] % WIDTH if ids.shape[1] > WIDTH else 0
    ids, next_supervised = (F.pad(values, (0, padding)) for values in (ids, next_supervised))
    return Batch(ids, next_supervised, sum(len(piece.ids) for piece in pieces))


def sample(pieces: list[Document], batch_size: int, tokens: int) -> list[Batch]:
    """Batches of random pieces, the same in every call, with at least `tokens` tokens if there are that many."""
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


# Documents from strings, token ids, files and conversations.

TOKENIZED = 1024
"""Texts that are tokenized in one call."""


def read(
    data, tokenizer=None, vocab_size: int | None = None, name: str = "data", on_policy: bool = False
) -> list[Document]:
    """The documents of training data.

    data: a .txt or .jsonl file, or an iterable of texts, token ids and mappings. A mapping, or a line of a .jsonl file,
        has "text", or "prompt" and "completion" (texts, or token ids), or "messages" (roles and contents, for the
        tokenizer's chat template).
        With a prompt or messages only the model's part is supervised. Texts get the tokenizer's end of sequence.
    tokenizer: the target's; not needed for token ids
    vocab_size: the target's; an id that is not below it is an error
    name: the argument's name, for errors
    on_policy: True if the target will write the answers. Then a "prompt" needs no "completion", messages may end with
        the user's, and nothing of such an ending is supervised.

    Raises TypeError or ValueError, with `name`, if an item is none of these or if there is no text at all.
    """
    reader = _Reader(tokenizer, vocab_size, on_policy)
    contents = [content for label, item in _items(data, name) for content in reader.read(item, label)]
    documents = [document for document in reader.encode(contents) if len(document.ids)]
    if documents:
        return documents
    raise ValueError(f"{name}: it holds no text")


def _items(data, name: str) -> Iterable[tuple[str, object]]:
    """Each item, after the label by which errors call it."""
    if isinstance(data, (str, Path)):
        path = Path(data).expanduser()
        if path.suffix not in (".txt", ".jsonl") or not path.is_file():
            raise ValueError(
                f"{name}: expected a .txt or .jsonl file, or a list of texts, got {str(data)[:80]!r}"
                + ("" if path.exists() else ", which does not exist")
            )
        text = path.read_text()
        if path.suffix == ".txt":
            return [(str(path), text)]
        return [(f"{path}:{number}", parse_json(line, f"{path}:{number}")) for number, line in numbered_lines(text)]
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise TypeError(f"{name}: expected a file or an iterable of texts or token ids, got {type(data).__name__}")
    return ((f"{name}[{number}]", item) for number, item in enumerate(data))


@dataclass(frozen=True)
class _Text:
    """A document that is not tokenized yet.

    parts: its texts in order, each with True if it is supervised
    special: True to add the tokenizer's special tokens at the beginning and the end; a chat template has added its own
    """

    label: str
    parts: list[tuple[str, bool]]
    special: bool = True


class _Reader:
    """Makes documents of items with one tokenizer, which gets many texts in a call."""

    def __init__(self, tokenizer, vocab_size: int | None, on_policy: bool):
        self.tokenizer, self.vocab_size, self.on_policy = tokenizer, vocab_size, on_policy

    def read(self, item, label: str) -> list[_Text | Document]:
        """The documents of one item: tokenized already if it is token ids."""
        if isinstance(item, str):
            return [self._text(label, [(item, True)])] if item.strip() else []
        if isinstance(item, Mapping):
            return self._read_mapping(item, label)
        if isinstance(item, (Tensor, Sequence)):
            return [self._ids(item, label)]
        raise TypeError(f"{label}: expected a text, token ids or a mapping, got {type(item).__name__}")

    def encode(self, contents: list[_Text | Document]) -> Iterable[Document]:
        """The documents in the same order, all as token ids."""
        for begin in range(0, len(contents), TOKENIZED):
            group = contents[begin : begin + TOKENIZED]
            # Two calls of the tokenizer serve the group: special tokens are added to a document's first part only.
            places: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
            for number, content in enumerate(group):
                for part in range(len(content.parts)) if isinstance(content, _Text) else ():
                    places[content.special and part == 0].append((number, part))
            encoded: dict[tuple[int, int], list[int]] = {}
            for special, several in filter(itemgetter(1), places.items()):
                parts = [group[number].parts[part][0] for number, part in several]
                encoded |= zip(several, self.tokenizer(parts, add_special_tokens=special, verbose=False).input_ids)
            for number, content in enumerate(group):
                if isinstance(content, Document):
                    yield content
                else:
                    yield self._join(content, [encoded[number, part] for part in range(len(content.parts))])

    def _join(self, text: _Text, encoded: list[list[int]]) -> Document:
        """One document of the token ids of its parts."""
        ids = [token for part in encoded for token in part]
        supervised = [learned for part, (_, learned) in zip(encoded, text.parts) for _ in part]
        end = self.tokenizer.eos_token_id
        # An answer ends with the end of sequence, so that a draft learns to propose it. A prompt has no end.
        answered = text.parts[-1][1]
        if text.special and answered and end is not None and ids and ids[-1] != end:
            ids.append(end)
            supervised.append(True)
        return Document(self._ids(ids, text.label).ids, torch.tensor(supervised, dtype=torch.bool))

    def _text(self, label: str, parts: list[tuple[str, bool]], special: bool = True) -> _Text:
        if self.tokenizer is None:
            raise TypeError(f"{label} is text: pass its tokenizer, train_draft(..., tokenizer=tokenizer)")
        for text, _ in parts:
            if not isinstance(text, str):
                raise TypeError(f"{label}: expected text, got {type(text).__name__}")
        return _Text(label, parts, special)

    def _read_mapping(self, item: Mapping, label: str) -> list[_Text | Document]:
        if "messages" in item:
            return self._converse(item["messages"], label)
        if "prompt" in item and "completion" in item:
            if not isinstance(item["prompt"], str):
                prompt, completion = (self._ids(item[name], label).ids for name in ("prompt", "completion"))
                supervised = torch.arange(len(prompt) + len(completion)) >= len(prompt)
                return [Document(torch.cat([prompt, completion]), supervised)]
            return [self._text(label, [(item["prompt"], False), (item["completion"], True)])]
        if "text" in item:
            return self.read(item["text"], label)
        if "prompt" in item:
            if not self.on_policy:
                raise ValueError(f'{label}: there is no "completion"; pass on_policy=True to let the model write it')
            return [self._text(label, [(item["prompt"], False)])]
        raise ValueError(f'{label}: expected "text", "prompt" and "completion", or "messages"; got {list(item)}')

    def _ids(self, item, label: str) -> Document:
        """A document of token ids, all of them supervised."""
        try:
            ids = torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{label}: expected a text, token ids or a mapping ({error})") from error
        if ids.dim() != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)):
            raise TypeError(f"{label}: expected token ids of one sequence, got {ids.dtype} {tuple(ids.shape)}")
        if self.vocab_size and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(
                f"{label}: expected token ids below {self.vocab_size}, got {int(ids.min())} to {int(ids.max())}; use "
                "the model's own tokenizer"
            )
        return Document(ids.to("cpu", torch.int32), torch.ones(len(ids), dtype=torch.bool))

    def _converse(self, messages, label: str) -> list[_Text]:
        """The documents of a conversation, as the chat template renders it.

        It is one document with every answer supervised. Some templates render an answer differently once more messages
        follow (they drop earlier reasoning); then each answer has its own document. Messages after the last answer are
        left out, unless the target will answer them.
        """
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(f"{label}: messages need a tokenizer with a chat template")
        if not self.on_policy and not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{label}: the conversation has no answer; pass on_policy=True to let the model write it")
        asked = []
        if self.on_policy and messages and messages[-1]["role"] != "assistant":
            asked = [self._render(messages, add_generation_prompt=True)]
        # Each answer as two renderings: the conversation up to its generation prompt, and with the answer.
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n]
        spans = [
            (self._render(messages[:n], add_generation_prompt=True), self._render(messages[: n + 1])) for n in answers
        ]
        spans = [(before, after) for before, after in spans if after.startswith(before)]
        if not spans and not asked:
            raise ValueError(
                f"{label}: no answer of the assistant follows its own generation prompt in this chat template; give "
                '"prompt" and "completion" instead'
            )
        last = asked[0] if asked else spans[-1][1]
        if not all(last.startswith(after) for _, after in spans):
            # An earlier answer is rendered differently later: one document for each answer.
            turns = [[(before, False), (after[len(before) :], True)] for before, after in spans]
            turns += [[(prompt, False)] for prompt in asked]
            return [self._text(label, turn, special=False) for turn in turns]
        # Every rendering begins with the one before it: one document, cut where the answers begin and end.
        parts, done = [], 0
        for before, after in spans:
            parts += [(before[done:], False), (after[len(before) :], True)]
            done = len(after)
        parts += [(prompt[done:], False) for prompt in asked]
        return [self._text(label, parts, special=False)]

    def _render(self, messages, **options) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
