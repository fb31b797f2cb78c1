"""Chats that a model has with itself, to train its draft heads on.

    python -m benchmarks.training.chats --model FOLDER --out chats.jsonl [--count 10000] [--prompts train.jsonl]
        [--answers 3] [--new-tokens 256] [--device cuda] [--dtype bfloat16]

A model that was tuned on chats also writes a user's turn, if its template is cut off where that turn begins (Magpie: Xu
et al., arXiv:2406.08464). --count such turns are drawn, half of them after one of `OPENINGS`, and answered greedily, as
the measured prompts are. --prompts adds prompts from a file of chats without answers, such as hold_out.py writes; each
gets a greedy answer, and drawn ones up to --answers. hold_out.py leaves measured prompts out of its file.

A model without a chat template continues the prompts of --prompts as they are, and writes no user's turns.

The file has a JSON line for each answer, with the `messages` of a chat, or a `prompt` and its `completion`, for `python
-m spec_compile train --data chats.jsonl`. Lines are written at once, so that a stopped run keeps them.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common import command_line
from benchmarks.quality.bits import read_texts
from spec_compile.train.corpus import continue_documents
from spec_compile.train.data import Document

DRAWN = dict(do_sample=True, temperature=1.0, top_p=0.95, top_k=0)
AGAIN = dict(do_sample=True, temperature=0.7, top_p=0.95, top_k=0)
TURN, LEAST, LONGEST = 160, 12, 1024
"""Most tokens of a user's turn, fewest characters of one, most tokens of a prompt to answer."""
TOGETHER = 2048
"""User's turns that are drawn and then answered at a time."""
OPENINGS = (
    "Write a Python function that", "Change the function so that it", "Fix the error in this code:\n\n```python\n",
    "How many", "Solve this problem step by step: ", "Rewrite this text: ",
)  # fmt: skip
"""Every other turn begins with one of these, in turn, because a small model by itself hardly ever asks for code."""


class Chats:
    """Writes turns of chats with one model."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int):
        self.model, self.tokenizer, self.new_tokens = model, tokenizer, new_tokens

    def user_turns(self, count: int, seed: int = 0) -> list[str]:
        """Up to `count` different turns of a user; turns that did not end are dropped."""
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
        begin = text[: text.index("\0")]
        openings = [OPENINGS[n // 2 % len(OPENINGS)] if n % 2 else "" for n in range(count)]
        asked = [self._document(begin + opening) for opening in openings]
        written = self._continue(asked, DRAWN | {"max_new_tokens": TURN}, seed)
        turns = [(opening + text).strip() for opening, (text, ended) in zip(openings, written) if ended]
        return list(dict.fromkeys(turn for turn in turns if len(turn) >= LEAST))

    def answers(self, prompts: list[str], drawn: int = 0) -> Iterator[dict]:
        """The lines of all prompts with a greedy answer each, followed by `drawn` others of each."""
        pairs = [(prompt, self._asked(prompt)) for prompt in prompts]
        pairs = [(prompt, document) for prompt, document in pairs if len(document.ids) <= LONGEST]
        for repeat in range(1 + drawn):
            options = (AGAIN if repeat else dict(do_sample=False)) | {"max_new_tokens": self.new_tokens}
            written = self._continue([document for _, document in pairs], options, repeat)
            for (prompt, _), (text, _) in zip(pairs, written):
                if not text.strip():
                    continue
                if self.tokenizer.chat_template is None:
                    yield {"prompt": prompt, "completion": text}
                else:
                    answer = {"role": "assistant", "content": text.strip()}
                    yield {"messages": [{"role": "user", "content": prompt}, answer]}

    def _asked(self, prompt: str) -> Document:
        """The document in which the model answers or continues a prompt."""
        if self.tokenizer.chat_template is None:
            return self._document(prompt, special=True)
        chat = [{"role": "user", "content": prompt}]
        return self._document(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    def _document(self, text: str, special: bool = False) -> Document:
        """A document for the model to continue. special: True to add the tokenizer's special tokens."""
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=special).input_ids, dtype=torch.int32)
        return Document(ids, torch.zeros(len(ids), dtype=torch.bool))

    def _continue(self, documents: list[Document], options: dict, seed: int) -> list[tuple[str, bool]]:
        """The continuation of each document, and True if it ended."""
        length = LONGEST + options["max_new_tokens"]
        written = continue_documents(self.model, documents, length, seed, options, print)
        end = self.tokenizer.eos_token_id
        answers = [document.ids[document.supervised].tolist() for document in written]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [(text, answer[-1] == end) for text, answer in zip(texts, answers)]


def all_lines(writer: Chats, options: argparse.Namespace) -> Iterator[dict]:
    """The lines of all answers, one after another."""
    if options.prompts:
        yield from writer.answers([chat[-1]["content"] for chat in read_texts(options.prompts)], options.answers - 1)
    for first in range(0, options.count, TOGETHER):
        yield from writer.answers(writer.user_turns(min(TOGETHER, options.count - first), seed=first))


def main(arguments: list[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10000, help="user's turns that the model writes")
    parser.add_argument("--prompts", type=Path, help="prompts or chats without answers, one a line")
    parser.add_argument("--answers", type=int, default=3, help="answers of each of these prompts")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.count and tokenizer.chat_template is None:
        parser.error(f"--count: {options.model} has no chat template to write user's turns with; pass 0, and --prompts")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(options.device).eval()
    with options.out.open("w", buffering=1) as file:
        for line in all_lines(Chats(model, tokenizer, options.new_tokens), options):
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
