"""The text of a training and its held-out sets: read, checked, answered by the target, and cut into pieces."""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..drafters.checkpoints.files import load_pickled
from ..drafters.checkpoints.target import Target
from . import data as texts
from .data import Document
from .on_policy import continue_documents, prompts
from .options import TrainingOptions
from .read import read
from .save import TEXTS, replace

LONGEST = 2048
"""Tokens of a sequence by default, at most."""
UNNAMED = "held-out text"
"""The name of the held-out set, if there is only one."""
Sets = dict[str, list[Document]]
"""Held-out documents by the name of their set."""


def read_all(data, validation, tokenizer, target: Target, seed: int, on_policy: bool) -> tuple[list[Document], Sets]:
    """The documents of `data` and `validation`: (for training, held out)."""
    share = 0.0 if validation is None else validation
    vocab_size = len(target.embedding)
    if isinstance(share, int | float) and not isinstance(share, bool):
        if not 0 <= share < 1:
            raise ValueError(f"validation: expected a share of the data, from 0 to below 1, got {share}")
        documents = read(data, tokenizer, vocab_size, on_policy=on_policy)
        documents, held_out = texts.split(documents, share, seed) if share else (documents, [])
        return documents, {UNNAMED: held_out} if held_out else {}
    return (
        read(data, tokenizer, vocab_size, on_policy=on_policy),
        {
            name: read(part, tokenizer, vocab_size, name=_argument(name), on_policy=on_policy)
            for name, part in _named(validation).items()
        },
    )


def _named(validation) -> dict[str, object]:
    """The held-out sets by name. A folder has one in each .jsonl or .txt file, named as the file."""
    if isinstance(validation, Mapping):
        return dict(validation)
    if isinstance(validation, str | Path) and (folder := Path(validation).expanduser()).is_dir():
        files = sorted(path for path in folder.iterdir() if path.suffix in (".jsonl", ".txt"))
        if not files:
            raise ValueError(f"validation: {folder} has no .jsonl or .txt file")
        return {path.stem: path for path in files}
    return {UNNAMED: validation}


def together(sets: dict[str, list]) -> list:
    """The items of all sets."""
    return [item for part in sets.values() for item in part]


def longest_sequence(options: TrainingOptions, target: Target) -> int:
    """Tokens of a sequence at most. ValueError if the target cannot hold so many as the option asks for."""
    longest = getattr(target.config, "max_position_embeddings", None) or LONGEST
    # Wide batches are padded to a multiple of WIDTH, and the padding must have positions, too.
    longest -= longest % texts.WIDTH if longest > texts.WIDTH else 0
    if options.sequence_length is None:
        return min(LONGEST, longest)
    if options.sequence_length > longest:
        raise ValueError(
            f"sequence_length: {type(target.model).__name__} holds {longest} tokens, got {options.sequence_length}"
        )
    return options.sequence_length


def cut_all(documents: list[Document], held_out: Sets, length: int, shortest: int) -> tuple[list[Document], Sets]:
    """Documents and sets cut into pieces. ValueError if one of them has documents but no piece to learn from."""
    _check_length(length, shortest)
    return (
        _cut("data", documents, length, shortest),
        {name: _cut(_argument(name), part, length, shortest) for name, part in held_out.items()},
    )


def _cut(name: str, documents: list[Document], length: int, shortest: int) -> list[Document]:
    pieces = texts.cut(documents, length, shortest)
    if documents and not pieces:
        longest = max(len(document.ids) for document in documents)
        raise ValueError(
            f"{name}: no sequence with a supervised token has the {shortest} tokens that a draft of this depth "
            f"needs; the longest has {longest}. Give more text" + ("" if name == "data" else ", or validation=0")
        )
    return pieces


def _argument(name: str) -> str:
    """The argument that names a set, for errors."""
    return "validation" if name == UNNAMED else f"validation[{name!r}]"


def _check_length(length: int, shortest: int) -> None:
    if length < shortest:
        raise ValueError(f"sequence_length: a draft of this depth needs at least {shortest} tokens, got {length}")


def check_prompts(documents: list[Document], held_out: Sets, length: int, shortest: int) -> None:
    """ValueError if the data or a held-out set has no prompt that leaves room for an answer."""
    _check_length(length, shortest)
    for name, part in (("data", documents), *((_argument(name), part) for name, part in held_out.items())):
        if part and not any(prompts(document, length) for document in part):
            least = min(len(document.ids) for document in part)
            raise ValueError(
                f"{name}: no prompt leaves room for an answer in the {length} tokens of a sequence; the shortest has "
                f"{least}. Give shorter ones, or raise sequence_length"
            )


def continued(
    folder: Path, identity: dict, model: PreTrainedModel, documents: list[Document], held_out: Sets, length: int,
    on_policy: bool | dict, line: Callable[[str], None],
) -> tuple[list[Document], Sets]:  # fmt: skip
    """Documents and sets as the model continues them.

    The answers are kept in `folder` and read again when the training of this identity goes on.
    """
    path = folder / TEXTS
    stored = load_pickled(path) if path.is_file() else {}
    if stored.get("identity") != identity:
        options = on_policy if isinstance(on_policy, dict) else {}
        parts = [documents, *held_out.values()]
        asked = [document for part in parts for document in part]
        answers = iter(continue_documents(model, asked, length, identity["seed"], options, line))
        counts = [sum(len(prompts(document, length)) for document in part) for part in parts]
        stored = {
            "identity": identity,
            "texts": [
                [(answer.ids, answer.supervised) for answer in itertools.islice(answers, count)] for count in counts
            ],
        }
        replace(path, lambda partial: torch.save(stored, partial))
    documents, *sets = ([Document(*pair) for pair in part] for part in stored["texts"])
    return documents, dict(zip(held_out, sets))
