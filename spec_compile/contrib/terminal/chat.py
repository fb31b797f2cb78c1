"""``python -m spec_compile chat``: a conversation, line by line."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console

from .demo import check_length
from .streamed import SourcedStreamer, TokenSources, coloured

HELP = "Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D or /quit ends"


@contextmanager
def interrupts() -> Iterator[list]:
    """Inside, the first Ctrl-C only makes the list longer, so that a round ends; the second one raises."""
    seen: list = []

    def note(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


class TerminalChat:
    """A conversation with a result of `speculate`.

    messages: all so far, for a chat template.
    ids: the text so far, of a model without one.
    """

    def __init__(self, console: Console, fast: Any, tokenizer: Any, new_tokens: int, temperature: float = 0.0):
        self.console, self.fast, self.tokenizer, self.new_tokens = console, fast, tokenizer, new_tokens
        self.sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        self.messages: list[dict[str, str]] = []
        self.ids: list[int] = []

    def run(self) -> None:
        """Read lines and answer them, until /quit or the end of the input."""
        self.console.print(f"• {HELP}", style="dim")
        if not self.tokenizer.chat_template:
            self.console.print("• this model has no chat template: it goes on with your text", style="dim")
        while True:
            try:
                line = self.console.input("\n> ").strip()
            except EOFError:
                return self.console.print()
            except KeyboardInterrupt:
                self.console.print(f"\n• {HELP}", style="dim")
                continue
            if line == "/quit":
                return None
            if line == "/clear":
                self.clear()
            elif line:
                self.answer(line)

    def clear(self) -> None:
        """Forget the conversation, and what drafts know from it."""
        self.messages, self.ids = [], []
        if self.fast.speculation.engine.runtime.algorithm.store is not None:
            self.fast.speculation.ngram.reset()

    def answer(self, line: str) -> None:
        """Answer a line. The conversation keeps both, also if the answer is stopped."""
        messages = [*self.messages, {"role": "user", "content": line}]
        if self.tokenizer.chat_template:
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.ids + self.tokenizer(line, add_special_tokens=not self.ids)["input_ids"]
        try:
            check_length(self.fast, len(ids), self.new_tokens, "/clear forgets the conversation")
        except ValueError as error:
            return self.console.print(f"• {error}", style="dim")
        stats = self.fast.speculation.stats
        with interrupts() as seen:
            streamer = SourcedStreamer(
                self.tokenizer, lambda pieces: self.console.print(coloured(pieces), end=""),
                TokenSources.of(self.fast, ids), lambda: stats.trace, lambda: bool(seen),
            )  # fmt: skip
            rows = torch.tensor([ids], device=self.fast.device)
            inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
            pad, rounds = self.tokenizer.pad_token_id or 0, stats.rounds
            try:
                self.fast.generate(
                    **inputs, **self.sampling, max_new_tokens=self.new_tokens, pad_token_id=pad, streamer=streamer
                )
            except KeyboardInterrupt:
                self.console.print(" … stopped", end="", style="dim")
        gained, rounds = len(streamer.ids), stats.rounds - rounds
        text = self.tokenizer.decode(streamer.ids, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self.ids = ids + streamer.ids
        speed, accepted = gained / streamer.seconds, gained / max(rounds, 1)
        told = f"{gained} tokens, {speed:.0f} tokens/s, {accepted:.1f} tokens a round"
        return self.console.print(f"\n{told}", style="dim")
