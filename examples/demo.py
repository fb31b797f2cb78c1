"""Three prompts, answered by transformers and by spec_compile with three kinds of drafts: one text, in fewer rounds.

python examples/demo.py [--model PATH] [--heads FOLDER] [--device cuda] [--new-tokens 160] [--report page.html]
"""

import argparse
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

START = time.perf_counter()

EDIT = """Rename the variable `known` to `previous` in this method.

```python
{source}```

```python
"""
COMPLETE = '''import json
from pathlib import Path


class Settings:
    """Settings of the application, kept in a JSON file."""

    def __init__(self, path):
        self.path = Path(path)
        self.values = {}

    def load(self):
        """Read the file, if there is one."""
'''
TESTS = """import unittest

from stack import Stack


class TestStack(unittest.TestCase):
    def test_push(self):
        stack = Stack()
        stack.push(1)
        self.assertEqual(stack.pop(), 1)

    def test_push_twice(self):
        stack = Stack()
        stack.push(1)
        stack.push(2)
        self.assertEqual(stack.pop(), 2)
        self.assertEqual(stack.pop(), 1)

    def test_pop_empty(self):
"""
HEADS = {"EAGLE-3": ("eagle3", {"num_steps": 5}), "DFlash": ("dflash", {"topk": 4, "num_draft_tokens": 16})}
"""Name -> algorithm, which is also the name of its folder, and options: a chain, and a tree out of one block."""
PLAIN, LOOKUP, NGRAM = "transformers", "its prompt lookup", "n-gram"
BARS = "▁▂▃▄▅▆▇█"
SHOWN = 600
"""Characters of a prompt that are printed, the last ones."""


@dataclass
class Answer:
    """The tokens of an answer, the seconds it took, and the tokens of each round (transformers: how many rounds)."""

    ids: list[int]
    seconds: float
    rounds: list[int] | int

    @property
    def rate(self) -> float:
        return len(self.ids) / self.seconds

    @property
    def accept_length(self) -> float:
        return len(self.ids) / (self.rounds if isinstance(self.rounds, int) else len(self.rounds))


def coloured(tokenizer, ids: list[int], rounds: list[int]) -> Text:
    """The text of `ids`; what a round accepted from its draft is coloured, rounds in turn green and cyan."""
    text, place = Text(), 0
    for number, gained in enumerate(rounds):
        drafted, bonus = ids[place : place + gained - 1], ids[place + gained - 1 : place + gained]
        text.append(tokenizer.decode(drafted), style=("bold green", "bold cyan")[number % 2])
        text.append(tokenizer.decode(bonus))
        place += gained
    return text


def bars(rounds: list[int], most: int = 22) -> str:
    """A bar a round, as high as the tokens it gained, of the first rounds."""
    return "".join(BARS[min(gained, len(BARS)) - 1] for gained in rounds[:most]) + "…" * (len(rounds) > most)


def ask_transformers(model, inputs, options: dict) -> Answer:
    """An answer of its own generate(), with its forwards counted."""
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    counting = model.register_forward_pre_hook(count)
    begin = time.perf_counter()
    ids = model.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :].tolist()
    seconds = time.perf_counter() - begin
    counting.remove()
    return Answer(ids, seconds, calls)


def ask(fast, inputs, options: dict) -> Answer:
    """An answer of ours, with nothing known but the prompt."""
    if fast.speculation.algorithm == "ngram":
        fast.speculation.ngram.reset()
    begin = time.perf_counter()
    ids = fast.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :].tolist()
    seconds = time.perf_counter() - begin
    return Answer(ids, seconds, [gained for (gained,) in fast.speculation.stats.trace])


def figures(answers: dict[str, dict[str, Answer]], title: str) -> Table:
    """A section for each prompt and one for all of them, a row for each system."""
    table = Table(title=title, title_justify="left")
    table.add_column(no_wrap=True)
    for column in ("tokens/s", "speed-up", "accept\nlength", "same"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tokens by round", overflow="ellipsis")
    names = list(next(iter(answers.values())))
    everything = {name: _together([some[name] for some in answers.values()]) for name in names}
    for heading, some in (answers | {"all together": everything}).items():
        table.add_row(heading, style="italic")
        best = max(some[name].rate for name in (PLAIN, LOOKUP))
        for name, one in some.items():
            ours = name not in (PLAIN, LOOKUP)
            table.add_row(
                f"  {name}", f"{one.rate:.0f}", f"{one.rate / best:.2f}×" if ours else "", f"{one.accept_length:.2f}",
                "yes" if one.ids == some[PLAIN].ids else "[red]no[/red]",
                bars(one.rounds) if ours and some is not everything else "", style="bold" if ours else None,
            )  # fmt: skip
        table.add_section()
    return table


def _together(answers: list[Answer]) -> Answer:
    ids, seconds = [token for one in answers for token in one.ids], sum(one.seconds for one in answers)
    return Answer(ids, seconds, sum((one.rounds for one in answers[1:]), start=answers[0].rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "tiny_coder"))
    parser.add_argument("--heads", type=Path, help="folder of draft heads (default: heads, in the model's folder)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--report", type=Path, help="write a page about one answer, with every tree of drafts")
    options = parser.parse_args()
    heads = options.heads or Path(options.model) / "heads"
    console = Console()
    torch.set_num_threads(options.threads)

    def waiting(work: Callable) -> object:
        """What `work` returns; the lines that it reports are shown while it runs."""
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("loading", total=None)
            return work(lambda line: progress.update(task, description=line))

    def load(report):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device)
        return tokenizer, model, prepare(model, NGRAM, "ngram", {}, report)

    def prepare(model, name, algo, settings, report):
        import spec_compile

        report(f"{name}: capturing")
        fast = spec_compile.speculate(model, algo=algo, **settings)
        fast.speculation.warmup(progress=lambda line: report(f"{name}: {line}"))
        fast.generate(torch.tensor([[1]], device=model.device), do_sample=False, max_new_tokens=1, pad_token_id=0)
        return fast

    tokenizer, model, ngram = waiting(load)
    first = time.perf_counter() - START
    console.print(f"first token after {first:.1f} s (loading, capture, compilation; later runs find a warm cache)\n")

    from spec_compile.runtime.draft_length import SizePolicy

    method = inspect.cleandoc("    " + inspect.getsource(SizePolicy.learn)) + "\n"
    prompts = {"edit a method": EDIT.format(source=method), "complete a class": COMPLETE, "write more tests": TESTS}
    prompts = {title: tokenizer(text, return_tensors="pt").to(options.device) for title, text in prompts.items()}
    fixed = dict(do_sample=False, max_new_tokens=options.new_tokens, pad_token_id=tokenizer.pad_token_id)
    lookup = {**fixed, "prompt_lookup_num_tokens": 10}
    for way in (fixed, lookup):
        ask_transformers(model, next(iter(prompts.values())), {**way, "max_new_tokens": 8})
    answers: dict[str, dict[str, Answer]] = {}
    for title, inputs in prompts.items():
        answers[title] = {
            PLAIN: ask_transformers(model, inputs, fixed),
            LOOKUP: ask_transformers(model, inputs, lookup),
            NGRAM: ask(ngram, inputs, fixed),
        }
        text, ours = tokenizer.decode(inputs.input_ids[0]), answers[title][NGRAM]
        shown = text if len(text) <= SHOWN else "…\n" + text[-SHOWN:].split("\n", 1)[-1]
        heading = f"prompt: {title}, {inputs.input_ids.shape[1]} tokens"
        console.print(Panel(Text(shown), title=heading, border_style="dim"))
        console.print(coloured(tokenizer, ours.ids, ours.rounds))
        rates = ", ".join(f"{name} {one.rate:.0f} tokens/s" for name, one in answers[title].items())
        console.print(f"[dim]{rates}; coloured: what was drafted and accepted, a colour a round\n", highlight=False)

    ready = {NGRAM: ngram}
    for name, (algo, settings) in HEADS.items():
        folder = heads / algo
        if not (folder / "config.json").is_file():
            console.print(f"{name}: left out, there is no head in {folder}")
            continue
        settings = {"draft": str(folder), **settings}
        ready[name] = waiting(lambda report, made=(name, algo, settings): prepare(model, *made, report))
        console.print(f"{name} is ready after {time.perf_counter() - START:.0f} s")
        for title, inputs in prompts.items():
            answers[title][name] = ask(ready[name], inputs, fixed)

    console.print(figures(answers, f"speed-up: over the best of transformers; {options.device}, float32"))
    for name, fast in ready.items():
        console.print(f"{name}: " + fast.speculation.explain().splitlines()[1], highlight=False)
    console.print("fast.speculation.explain() says what each pass has changed.")
    if options.report:
        with ngram.speculation.recording():
            ask(ngram, prompts["complete a class"], fixed)
        console.print(f"every tree of one answer: {ngram.speculation.report(options.report, tokenizer)}")


if __name__ == "__main__":
    main()
