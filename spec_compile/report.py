"""What one generate() did, tree by tree: `Recording`, and `write`, which makes a page of it."""

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

TEMPLATE = Path(__file__).with_name("report.html")
"""The page, with a placeholder for its data; it holds all its styles and scripts, and loads nothing."""
UTF8_BYTES = 4
"""Bytes of a character at most, so tokens that it can be cut into."""


@dataclass
class Verified:
    """One row's part in a round: the tree that was verified and what came of it.

    tokens, parents: the tree's real nodes, parents first; node 0 is the root, the last token of the text before, with
    parent -1. path: the accepted nodes from the root down. gained: the tokens that the row gained: those of
    ``path[1:]``, and the target's own token after them.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    gained: list[int]


@dataclass
class RecordedRound:
    """nodes: the size that was verified, N. seconds: the host's time for it. rows: None where a row had finished."""

    nodes: int
    seconds: float
    rows: list[Verified | None]


@dataclass
class Recording:
    """One generate(), round by round. A row's text is its prompt and what its rounds gained, also where a stopping
    criterion cuts the answer in the middle of a round. seconds: as in `Stats`, of this call."""

    prompts: list[list[int]]
    rounds: list[RecordedRound] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, nodes: int, seconds: float, counts: dict[int, int], outcome: list[list[int]]) -> None:
        """A round over `nodes` nodes. counts: real nodes of unfinished rows; outcome: see `Round.forward`."""
        rows: list[Verified | None] = [None] * len(self.prompts)
        for row, count in counts.items():
            gained, columns = outcome[row][0], outcome[row][5:]
            chosen, path, tokens, parents = (columns[part * nodes : (part + 1) * nodes] for part in range(4))
            rows[row] = Verified(tokens[:count], parents[:count], path[:gained], chosen[:gained])
        self.rounds.append(RecordedRound(nodes, seconds, rows))

    def output(self, row: int) -> list[int]:
        """The tokens that a row gained."""
        return [token for one in self.rounds if one.rows[row] for token in one.rows[row].gained]


def write(recording: Recording, path, tokenizer=None, model: str = "", algorithm: str = "") -> Path:
    """Write the page; returns its path. TypeError if `tokenizer` cannot decode.

    Its data is the JSON in the element "data": `model`, `algorithm`, the recording as a dictionary, and `texts`: null
    without a tokenizer, otherwise each row's prompt, the text that each token it gained adds, and the text of every
    token id drafted.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer: expected a tokenizer of transformers or None, got {type(tokenizer).__name__}")
    texts = None if tokenizer is None else _texts(recording, tokenizer)
    data = {"model": model, "algorithm": algorithm, "recording": asdict(recording), "texts": texts}
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # no "</script>", no "<!--"
    path = Path(path)
    path.write_text(TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", embedded), encoding="utf-8")
    return path


def _texts(recording: Recording, tokenizer) -> dict:
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    drafted = {token for one in recording.rounds for row in one.rows if row for token in (*row.tokens, *row.gained)}
    return {
        "prompts": [decode(prompt) for prompt in recording.prompts],
        "pieces": [_pieces(decode, p, recording.output(row)) for row, p in enumerate(recording.prompts)],
        "words": {token: _word(decode, token) for token in sorted(drafted)},
    }


def _pieces(decode, prompt: list[int], output: list[int]) -> list[str]:
    """The text that each token of `output` adds behind `prompt`. What ends inside a character adds nothing; the token
    that completes it adds it."""
    ids, pieces = prompt + output, []
    start, shown = max(len(prompt) - UTF8_BYTES, 0), len(prompt)
    for end in range(len(prompt) + 1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith("\ufffd") and end < min(len(ids), shown + UTF8_BYTES):
            pieces.append("")
            continue
        pieces.append(text[len(decode(ids[start:shown])) :])
        start, shown = shown, end
    return pieces


def _word(decode, token: int) -> str:
    """The text of a token inside a sentence (some tokenizers drop the space before a first word)."""
    once, twice = decode([token]), decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once
