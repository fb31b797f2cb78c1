"""Chats that a model has with itself, to train its draft heads on.

    python benchmarks/chats.py --model FOLDER --out chats.jsonl [--count 10000] [--prompts train.jsonl] [--answers 3]
                               [--new-tokens 256] [--device cuda] [--dtype bfloat16]

A model that was tuned on chats writes a user's turn, too, if its template is cut off where that turn begins (Magpie: Xu
et al., arXiv:2406.08464). --count such turns are drawn, and answered greedily, as the measured prompts are. --prompts
adds the prompts of a file of chats without answers, such as hold_out.py writes; each is answered greedily once, and
drawn for the other --answers. hold_out.py has left the prompts that heads are measured with out of its file.

The file has a JSON line with `messages` for each chat, for `python -m spec_compile train --data chats.jsonl`.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from spec_compile.training.data import Document
from spec_compile.training.on_policy import continue_documents

DRAWN = dict(do_sample=True, temperature=1.0, top_p=0.95, top_k=0)
AGAIN = dict(do_sample=True, temperature=0.7, top_p=0.95, top_k=0)
TURN, LEAST, LONGEST = 160, 12, 1024
"""Tokens of a user's turn at most, characters of one at least, tokens of a prompt that is answered at most."""


class Chats:
    """Writes turns of chats with one model."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int):
        self.model, self.tokenizer, self.new_tokens = model, tokenizer, new_tokens

    def user_turns(self, count: int, seed: int = 0) -> list[str]:
        """Up to `count` turns of a user, no two alike, without those that did not end."""
        text = self.tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
        begin = self._document(text[: text.index("\0")])
        written = self._continue([begin] * count, DRAWN | {"max_new_tokens": TURN}, seed)
        return list(dict.fromkeys(text for text, ended in written if ended and len(text) >= LEAST))

    def answers(self, prompts: list[str], drawn: int = 0) -> list[list[dict]]:
        """The chats of all prompts with a greedy answer each, and behind these with `drawn` others each."""
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        asked = [self._document(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
                 for chat in chats]  # fmt: skip
        pairs = [(chat, document) for chat, document in zip(chats, asked) if len(document.ids) <= LONGEST]
        answered = []
        for repeat in range(1 + drawn):
            options = (AGAIN if repeat else dict(do_sample=False)) | {"max_new_tokens": self.new_tokens}
            written = self._continue([document for _, document in pairs], options, repeat)
            texts = [text for text, _ in written]
            answered += [
                [*chat, {"role": "assistant", "content": text}] for (chat, _), text in zip(pairs, texts) if text
            ]
        return answered

    def _document(self, text: str) -> Document:
        """What the model shall continue."""
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.int32)
        return Document(ids, torch.zeros(len(ids), dtype=torch.bool))

    def _continue(self, documents: list[Document], options: dict, seed: int) -> list[tuple[str, bool]]:
        """What the model writes behind each, and whether that has an end."""
        length = LONGEST + options["max_new_tokens"]
        written = continue_documents(self.model, documents, length, seed, options, print)
        end = self.tokenizer.eos_token_id
        answers = [document.ids[document.supervised].tolist() for document in written]
        texts = self.tokenizer.batch_decode(answers, skip_special_tokens=True)
        return [(text.strip(), answer[-1] == end) for text, answer in zip(texts, answers)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub; its tokenizer has a template")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=10000, help="user's turns that the model writes")
    parser.add_argument("--prompts", type=Path, help="chats without answers, one a line")
    parser.add_argument("--answers", type=int, default=3, help="of each of these prompts")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(options.device).eval()
    writer, chats = Chats(model, tokenizer, options.new_tokens), []
    if options.prompts:
        lines = options.prompts.read_text().splitlines()
        chats += writer.answers([json.loads(line)["messages"][-1]["content"] for line in lines], options.answers - 1)
    if options.count:
        chats += writer.answers(writer.user_turns(options.count))
    options.out.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    print(f"{options.out}: {len(chats)} chats")


if __name__ == "__main__":
    main()
