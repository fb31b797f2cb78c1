"""Training text: from strings, token ids, files and conversations to `Document`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..cli import numbered_lines, parse_json
from .data import Document

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
    vocab_size: of the target; an id that is not below it is an error
    name: of the argument, for errors
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
            # Every part of the group, with True if it gets special tokens, which only a document's first part does.
            parts = [
                (text, content.special and not number)
                for content in group
                if isinstance(content, _Text)
                for number, (text, _) in enumerate(content.parts)
            ]
            # Two calls of the tokenizer serve the group. The results are then dealt out in the order of the parts.
            encoded = {special: iter(self._tokenize(parts, special)) for special in (True, False)}
            parts = iter(parts)
            for content in group:
                if isinstance(content, Document):
                    yield content
                else:
                    yield self._join(content, [next(encoded[special]) for _, (_, special) in zip(content.parts, parts)])

    def _tokenize(self, parts: list[tuple[str, bool]], special: bool) -> list[list[int]]:
        """Token ids of the parts that get special tokens, or of those that do not."""
        texts = [text for text, gets_special in parts if gets_special == special]
        return self.tokenizer(texts, add_special_tokens=special, verbose=False).input_ids if texts else []

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
                return [self._answered(item["prompt"], item["completion"], label)]
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

    def _answered(self, prompt, completion, label: str) -> Document:
        """A document of the token ids of a prompt and its completion, of which only the latter is supervised."""
        parts = [self._ids(ids, label).ids for ids in (prompt, completion)]
        supervised = torch.arange(sum(map(len, parts))) >= len(parts[0])
        return Document(torch.cat(parts), supervised)

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
