"""The tokens with which a model for code fills in the middle of a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("[PREFIX]", "[SUFFIX]", ""),
)  # fmt: skip
"""The tokens before the prefix, before the suffix and before the middle: of Qwen and Gemma, StarCoder, SantaCoder and
Granite, GLM, DeepSeek, Llama, and Mistral, whose models take the suffix first."""
FILES = ("<|file_sep|>", "<file_sep>", "<|repo_name|>", "<|fim_pad|>", "<fim_pad>", "<EOT>", "▁<EOT>", "<|cursor|>")
"""Tokens that end a middle, because another file would begin."""
NO_MARKS = "the model's tokenizer has no tokens to fill in the middle of a text; use a model for code that has"


@dataclass(frozen=True)
class InfillTokens:
    """The tokens of one tokenizer with which a model fills in the middle.

    middle: None if the suffix comes first
    file: begins a file before the text, or None
    ends: end a middle
    """

    prefix: int
    suffix: int
    middle: int | None
    file: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> "InfillTokens | None":
        """The tokens, or None if there are none."""
        vocabulary = tokenizer.get_vocab()
        for prefix, suffix, middle in MARKS:
            if all(mark in vocabulary for mark in (prefix, suffix, middle) if mark):
                marks = [vocabulary[mark] for mark in (prefix, suffix, middle) if mark]
                ends = [vocabulary[mark] for mark in FILES if mark in vocabulary]
                file = next((vocabulary[mark] for mark in FILES[:2] if mark in vocabulary), None)
                return cls(marks[0], marks[1], marks[2] if middle else None, file, (*marks, *ends))
        return None

    def prompt(self, tokenizer: Any, prefix: str, suffix: str, files: Sequence[dict] = ()) -> list[int]:
        """The ids of a prompt. files: others of the project, each with `text`, and perhaps with `filename`

        For example "a", "c" become [prefix, ids of "a", suffix, ids of "c", middle], or with the suffix first
        [suffix, ids of "c", prefix, ids of "a"].
        """
        ids = tokenizer("")["input_ids"][:1]  # the token that begins every text, if there is one
        for file in files:
            mark = plain_ids(tokenizer, "\n\n--- snippet ---\n\n") if self.file is None else [self.file]
            name = "" if self.file is None else f"{file.get('filename', 'tmp')}\n"
            ids += [*mark, *plain_ids(tokenizer, name + file["text"])]
        # The two texts, in the order in which the model has learned them.
        before, after = [self.prefix, *plain_ids(tokenizer, prefix)], [self.suffix, *plain_ids(tokenizer, suffix)]
        return [*ids, *after, *before] if self.middle is None else [*ids, *before, *after, self.middle]


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, in which special tokens are text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
