"""`write`: an HTML page about one generate()."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ..outcome import Recording

TEMPLATE = Path(__file__).with_name("page.html")
"""The page, with a placeholder for its data. It has its styles and scripts inside and loads nothing."""
UTF8_BYTES = 4
"""Most bytes of a character, and so the most tokens of one."""


def write(recording: Recording, path, tokenizer=None, model: str = "", algorithm: str = "") -> Path:
    """Write the page and return its path.

    The page reads the JSON in its element "data": `model`, `algorithm`, the recording as a dictionary, and `texts`,
    which is null without a tokenizer. Otherwise `texts` has each row's prompt, the text that each token of its answer
    adds, and the text of every drafted token.

    Raises TypeError if `tokenizer` cannot decode.
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
    """The texts that the page shows in place of token ids."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    drafted = {token for one in recording.rounds for row in one.rows if row for token in (*row.tokens, *row.gained)}
    return {
        "prompts": [decode(prompt) for prompt in recording.prompts],
        "pieces": [_pieces(decode, p, recording.output(row)) for row, p in enumerate(recording.prompts)],
        "words": {token: _word(decode, token) for token in sorted(drafted)},
    }


def _pieces(decode, prompt: list[int], output: list[int]) -> list[str]:
    """The text that each token of `output` adds after `prompt`.

    A token that ends inside a character adds nothing, and the token that completes the character adds it.
    """
    # `shown` counts the ids whose text is out already, and `start` begins the context of the next ones.
    ids, pieces = prompt + output, []
    start, shown = max(len(prompt) - UTF8_BYTES, 0), len(prompt)
    for end in range(len(prompt) + 1, len(ids) + 1):
        # Decode a short context too, because the text of a token depends on its neighbours.
        text = decode(ids[start:end])
        if text.endswith("\ufffd") and end < min(len(ids), shown + UTF8_BYTES):
            pieces.append("")
            continue
        pieces.append(text[len(decode(ids[start:shown])) :])
        start, shown = shown, end
    return pieces


def _word(decode, token: int) -> str:
    """The text of a token inside a sentence: some tokenizers drop the space before a first word."""
    once, twice = decode([token]), decode([token, token])
    return twice[len(once) :] if twice.startswith(once) else once
