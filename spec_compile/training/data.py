"""Training text: from strings, token ids, files and conversations to `Document`, and from those to batches."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

WINDOW = 32
"""Batches among which sequences are sorted by length, so that little is padded."""
WIDTH = 64
"""Wider batches are padded to a multiple of it."""
TOKENIZED = 1024
"""Texts that are tokenized at a time."""


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
    """Sequences, padded on the right: ids [B, L] int64, and wanted [B, L] bool: whether the token after each place is
    supervised."""

    ids: Tensor
    wanted: Tensor
    tokens: int
    """Without the padding."""

    def slots(self, ahead: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The slots that draft a supervised token `ahead` steps after their first one, and the place of its teacher.

        Slot t, of the B * (L - 1) that pair a state with the token after it, drafts what follows place t + 1 + ahead,
        of the B * L. Both are flat indices [R].
        """
        first = 1 + ahead
        width = self.wanted.shape[1]
        row, slot = self.wanted[:, first:].nonzero(as_tuple=True)
        return move(row * (width - 1) + slot, device), move(row * width + slot + first, device)


def read(
    data, tokenizer=None, vocab_size: int | None = None, name: str = "data", on_policy: bool = False
) -> list[Document]:
    """The documents in `data`: a .txt or .jsonl file, or an iterable of texts, token ids and mappings.

    A mapping, or a line of a .jsonl file, has "text", or "prompt" and "completion", or "messages" (roles and contents,
    for the tokenizer's chat template). In the latter two, only what the model is to say is supervised. Text ends with
    the tokenizer's end of sequence. on_policy: the target will write the answers, so that "prompt" may stand alone and
    messages may end with the user; nothing behind such an end is supervised.
    TypeError or ValueError, called by `name`, if anything is none of this.
    """
    reader = _Reader(tokenizer, vocab_size, on_policy)
    found = [piece for place, item in _items(data, name) for piece in reader.read(item, place)]
    documents = [document for document in reader.encode(found) if len(document.ids)]
    if documents:
        return documents
    raise ValueError(f"{name}: it holds no text")


def _items(data, name: str) -> Iterable[tuple[str, object]]:
    """Each item, and what to call it in messages."""
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
        return [(f"{path}:{number}", _parse(line, path, number)) for number, line in _lines(text)]
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise TypeError(f"{name}: expected a file or an iterable of texts or token ids, got {type(data).__name__}")
    return ((f"{name}[{number}]", item) for number, item in enumerate(data))


def _lines(text: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _parse(line: str, path: Path, number: int):
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not JSON: {error}") from error


@dataclass(frozen=True)
class _Text:
    """Texts of a document, one after the other, and whether each is supervised. special: with the tokens around it."""

    place: str
    parts: list[tuple[str, bool]]
    special: bool = True


class _Reader:
    """Makes documents of items with one tokenizer, the texts of many at a time."""

    def __init__(self, tokenizer, vocab_size: int | None, on_policy: bool):
        self.tokenizer, self.vocab_size, self.on_policy = tokenizer, vocab_size, on_policy

    def read(self, item, place: str) -> list[_Text | Document]:
        """What one item of the data holds."""
        if isinstance(item, str):
            return [self._text(place, [(item, True)])] if item.strip() else []
        if isinstance(item, Mapping):
            return self._read_mapping(item, place)
        if isinstance(item, (Tensor, Sequence)):
            return [self._ids(item, place)]
        raise TypeError(f"{place}: expected a text, token ids or a mapping, got {type(item).__name__}")

    def encode(self, found: list[_Text | Document]) -> Iterable[Document]:
        """The same, all as token ids."""
        for begin in range(0, len(found), TOKENIZED):
            group = found[begin : begin + TOKENIZED]
            parts = [
                (text, piece.special and not number)
                for piece in group
                if isinstance(piece, _Text)
                for number, (text, _) in enumerate(piece.parts)
            ]
            encoded = {special: iter(self._tokenize(parts, special)) for special in (True, False)}
            parts = iter(parts)
            for piece in group:
                if isinstance(piece, Document):
                    yield piece
                else:
                    yield self._join(piece, [next(encoded[special]) for _, (_, special) in zip(piece.parts, parts)])

    def _tokenize(self, parts: list[tuple[str, bool]], special: bool) -> list[list[int]]:
        chosen = [text for text, wanted in parts if wanted == special]
        return self.tokenizer(chosen, add_special_tokens=special, verbose=False).input_ids if chosen else []

    def _join(self, text: _Text, encoded: list[list[int]]) -> Document:
        ids = [token for part in encoded for token in part]
        supervised = [wanted for part, (_, wanted) in zip(encoded, text.parts) for _ in part]
        end = self.tokenizer.eos_token_id
        answered = text.parts[-1][1]
        if text.special and answered and end is not None and ids and ids[-1] != end:
            ids.append(end)
            supervised.append(True)
        return Document(self._ids(ids, text.place).ids, torch.tensor(supervised, dtype=torch.bool))

    def _text(self, place: str, parts: list[tuple[str, bool]], special: bool = True) -> _Text:
        if self.tokenizer is None:
            raise TypeError(f"{place} is text: pass its tokenizer, train_draft(..., tokenizer=tokenizer)")
        for text, _ in parts:
            if not isinstance(text, str):
                raise TypeError(f"{place}: expected text, got {type(text).__name__}")
        return _Text(place, parts, special)

    def _read_mapping(self, item: Mapping, place: str) -> list[_Text | Document]:
        if "messages" in item:
            return self._converse(item["messages"], place)
        if "prompt" in item and "completion" in item:
            return [self._text(place, [(item["prompt"], False), (item["completion"], True)])]
        if "text" in item:
            return self.read(item["text"], place)
        if "prompt" in item:
            if not self.on_policy:
                raise ValueError(f'{place}: there is no "completion"; pass on_policy=True to let the model write it')
            return [self._text(place, [(item["prompt"], False)])]
        raise ValueError(f'{place}: expected "text", "prompt" and "completion", or "messages"; got {list(item)}')

    def _ids(self, item, place: str) -> Document:
        try:
            ids = torch.as_tensor(item)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{place}: expected a text, token ids or a mapping ({error})") from error
        if ids.dim() != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)):
            raise TypeError(f"{place}: expected token ids of one sequence, got {ids.dtype} {tuple(ids.shape)}")
        if self.vocab_size and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(
                f"{place}: expected token ids below {self.vocab_size}, got {int(ids.min())} to {int(ids.max())}; use "
                "the model's own tokenizer"
            )
        return Document(ids.to("cpu", torch.int32), torch.ones(len(ids), dtype=torch.bool))

    def _converse(self, messages, place: str) -> list[_Text]:
        """A conversation as the chat template renders it: one document, or where the template renders earlier answers
        otherwise once more follows (as those that drop earlier reasoning do), one for each answer. What the user says
        last is left out, unless the target will answer it."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ValueError(f"{place}: messages need a tokenizer with a chat template")
        if not self.on_policy and not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"{place}: the conversation has no answer; pass on_policy=True to let the model write it")
        asked = []
        if self.on_policy and messages and messages[-1]["role"] != "assistant":
            asked = [self._render(messages, add_generation_prompt=True)]
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant" and n]
        spans = [
            (self._render(messages[:n], add_generation_prompt=True), self._render(messages[: n + 1])) for n in answers
        ]
        spans = [(before, after) for before, after in spans if after.startswith(before)]
        if not spans and not asked:
            raise ValueError(
                f"{place}: no answer of the assistant follows its own generation prompt in this chat template; give "
                '"prompt" and "completion" instead'
            )
        end = asked[0] if asked else spans[-1][1]
        if not all(end.startswith(after) for _, after in spans):
            turns = [[(before, False), (after[len(before) :], True)] for before, after in spans]
            turns += [[(prompt, False)] for prompt in asked]
            return [self._text(place, turn, special=False) for turn in turns]
        parts, done = [], 0
        for before, after in spans:
            parts += [(before[done:], False), (after[len(before) :], True)]
            done = len(after)
        parts += [(prompt[done:], False) for prompt in asked]
        return [self._text(place, parts, special=False)]

    def _render(self, messages, **options) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)


def split(documents: list[Document], fraction: float, seed: int) -> tuple[list[Document], list[Document]]:
    """(for training, held out): whole documents by chance, or the end of the only one, if it has an answer."""
    if len(documents) == 1:
        if not documents[0].supervised.any():
            return documents, []
        cut = round(len(documents[0].ids) * (1 - fraction))
        return [documents[0].piece(0, cut)], [documents[0].piece(cut, len(documents[0].ids))]
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    count = max(1, round(len(documents) * fraction))
    return [documents[n] for n in sorted(order[count:])], [documents[n] for n in sorted(order[:count])]


def cut(documents: list[Document], length: int, shortest: int) -> list[Document]:
    """Pieces of up to `length` tokens, of those that have at least `shortest` and a supervised one to draft."""
    pieces = (
        document.piece(begin, begin + length) for document in documents for begin in range(0, len(document.ids), length)
    )
    return [piece for piece in pieces if len(piece.ids) >= shortest and piece.supervised[2:].any()]


class Batches:
    """Batches of pieces, in an order that depends on the seed and the step alone."""

    def __init__(self, pieces: list[Document], batch_size: int, seed: int):
        self.pieces, self.batch_size, self.seed = pieces, batch_size, seed
        self._epoch, self._order = -1, []

    def __len__(self) -> int:
        """Batches in which every piece comes once."""
        return -(-len(self.pieces) // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        epoch, place = divmod(step, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffle(epoch)
        return collate([self.pieces[n] for n in self._order[place]])

    def _shuffle(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.pieces), generator=generator).tolist()
        batches = []
        for begin in range(0, len(order), WINDOW * self.batch_size):
            window = sorted(order[begin : begin + WINDOW * self.batch_size], key=lambda n: len(self.pieces[n].ids))
            batches += [window[i : i + self.batch_size] for i in range(0, len(window), self.batch_size)]
        return [batches[n] for n in torch.randperm(len(batches), generator=generator).tolist()]


def move(values: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, without waiting for what a GPU is doing."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def collate(pieces: list[Document]) -> Batch:
    """A batch of these. Long ones are as wide as few other batches, for the sake of what is cached by shape."""
    ids = pad_sequence([piece.ids.long() for piece in pieces], batch_first=True)
    if ids.shape[1] > WIDTH:
        ids = F.pad(ids, (0, -ids.shape[1] % WIDTH))
    wanted = torch.zeros(ids.shape, dtype=torch.bool)
    for row, piece in zip(wanted, pieces):
        row[: len(piece.ids) - 1] = piece.supervised[1:]
    return Batch(ids, wanted, sum(len(piece.ids) for piece in pieces))


def sample(pieces: list[Document], batch_size: int, tokens: int) -> list[Batch]:
    """Batches of pieces chosen by chance, always the same ones, with at least `tokens` tokens; or of all."""
    chosen, held = [], 0
    for n in torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist():
        if held < tokens:
            chosen.append(pieces[n])
            held += len(pieces[n].ids)
    chosen.sort(key=lambda piece: len(piece.ids))
    return [collate(chosen[i : i + batch_size]) for i in range(0, len(chosen), batch_size)]


def count_tokens(documents: list[Document], vocab_size: int) -> Tensor:
    """How often each token is supervised [V]."""
    ids = torch.cat([document.ids[document.supervised] for document in documents])
    return torch.bincount(ids, minlength=vocab_size)


def fingerprint(documents: list[Document]) -> str:
    """The same for the same documents."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document.ids).to_bytes(8, "little"))
        digest.update(document.ids.numpy().tobytes())
        digest.update(document.supervised.numpy().tobytes())
    return digest.hexdigest()[:16]
