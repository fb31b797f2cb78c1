"""Three prompts, answered by transformers and by spec_compile with three kinds of drafts: one text, in fewer steps.

python examples/demo.py [--model PATH] [--heads FOLDER] [--device cuda] [--new-tokens 160] [--eager]
                        [--report page.html]
"""

import argparse
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

START = time.perf_counter()
INTRODUCTION = (
    "[bold]spec_compile[/bold] makes a model of transformers generate faster with the same answer: it drafts several "
    "tokens at once and lets the model verify them in one step. Three prompts are answered here by transformers, then "
    "with n-grams, then with two trained heads. It needs no network. The first run compiles: on two cores of an AMD "
    "EPYC it took 137 seconds, and a second run, which found what was compiled, 20.\n"
)
WHEN_A_HEAD_PAYS = (
    "N-grams cost almost nothing and win where text repeats. A trained head pays on new text where a step of the model "
    "takes much longer than one of the head: for a large model on a GPU.\n"
)

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
"""Name -> algorithm, which is also the name of the head's folder, and options: a chain, and a tree from one block."""
PLAIN, LOOKUP, NGRAM = "transformers", "its prompt lookup", "n-gram"
BARS = "▁▂▃▄▅▆▇█"
SHOWN = 600
"""The number of a prompt's last characters that are printed."""


@dataclass
class Answer:
    """The tokens and seconds of an answer, and the tokens of each round (transformers: the number of rounds)."""

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
    """The text of `ids`; accepted drafts are coloured, in turn green and cyan by round."""
    text, place = Text(), 0
    for number, gained in enumerate(rounds):
        drafted, bonus = ids[place : place + gained - 1], ids[place + gained - 1 : place + gained]
        text.append(tokenizer.decode(drafted), style=("bold green", "bold cyan")[number % 2])
        text.append(tokenizer.decode(bonus))
        place += gained
    return text


def bars(rounds: list[int], most: int = 14) -> str:
    """A bar for each of the first rounds, as high as its tokens."""
    return "".join(BARS[min(gained, len(BARS)) - 1] for gained in rounds[:most]) + "…" * (len(rounds) > most)


def ask_transformers(model, inputs, options: dict) -> Answer:
    """An answer of transformers' own generate(), with its forwards counted."""
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
    """An answer of ours; n-grams know only the prompt."""
    if fast.speculation.engine.name == "ngram":
        fast.speculation.ngram.reset()
    begin = time.perf_counter()
    ids = fast.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :].tolist()
    seconds = time.perf_counter() - begin
    return Answer(ids, seconds, [gained for (gained,) in fast.speculation.stats.trace])


def figures(answers: dict[str, dict[str, Answer]], title: str) -> Table:
    """A section for each prompt and one for all of them, a row for each system; at most 80 columns wide."""
    table = Table(title=title, title_justify="left", box=box.SQUARE)
    table.add_column(no_wrap=True)
    for column in ("tokens/s", "speed-up", "accept\nlength", "same\ntext"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tokens by round", no_wrap=True)
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "tiny_coder"))
    parser.add_argument("--heads", type=Path, help="folder of draft heads (default: heads, in the model's folder)")
    parser.add_argument("--device", help="default: cuda if there is a GPU")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, help="default: what PyTorch takes")
    parser.add_argument("--report", type=Path, help="write a page about one answer, with every tree of drafts")
    parser.add_argument("--eager", action="store_true", help="do not compile, which starts sooner and runs slower")
    options = parser.parse_args()
    options.heads = options.heads or Path(options.model) / "heads"
    return options


def waiting(console: Console, doing: str, work: Callable) -> object:
    """The result of `work`. `doing` is printed at once; the lines that `work` reports are shown while it runs."""
    begin = time.perf_counter()
    console.print(f"[bold]•[/bold] {doing} …", highlight=False)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)
        result = work(lambda line: progress.update(task, description=line))
    console.print(f"  done in {time.perf_counter() - begin:.1f} s", style="dim", highlight=False)
    return result


def load(options: argparse.Namespace) -> tuple:
    """The tokenizer and the model. The imports are here because they take seconds, which the user should see."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import spec_compile  # noqa: F401  (its import takes part of these seconds)

    logging.disable_progress_bar()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    return tokenizer, AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device)


def speculate(model, options: argparse.Namespace, algo: str, settings: dict, report: Callable[[str], None]):
    """The model with drafts by `algo`. Its rounds run uncompiled until `compile_rounds`."""
    import spec_compile

    report("capturing the model as a graph, and checking the graph")
    return spec_compile.speculate(model, algo=algo, compile=not options.eager and "background", **settings)


def compile_rounds(fast, report: Callable[[str], None]) -> None:
    """Compile the rounds, and run one."""
    fast.speculation.warmup(progress=report)
    fast.generate(fast.dummy_inputs["input_ids"][:1], do_sample=False, max_new_tokens=1, pad_token_id=0)


def show_first_words(console: Console, tokenizer, fast, inputs, options: dict) -> None:
    """An answer as it comes, and the seconds since the start of Python until its first word."""
    from transformers import TextStreamer

    class FirstWords(TextStreamer):
        seconds = 0.0

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.seconds = self.seconds or time.perf_counter() - START
            super().on_finalized_text(text, stream_end)

    streamer = FirstWords(tokenizer, skip_prompt=True)
    fast.generate(**inputs, **options, streamer=streamer)
    console.print(f"  the first word came {streamer.seconds:.0f} s after the start\n", style="dim", highlight=False)


def read_prompts(tokenizer, device: str) -> dict:
    """The prompts: title -> inputs."""
    from spec_compile.runtime.draft_budget import RoundCosts

    method = inspect.cleandoc("    " + inspect.getsource(RoundCosts.expected)) + "\n"
    texts = {"edit a method": EDIT.format(source=method), "complete a class": COMPLETE, "write more tests": TESTS}
    return {title: tokenizer(text, return_tensors="pt").to(device) for title, text in texts.items()}


def show(console: Console, tokenizer, title: str, inputs, answers: dict[str, Answer]) -> None:
    """A prompt and the answer of n-grams, coloured."""
    text, ours = tokenizer.decode(inputs.input_ids[0]), answers[NGRAM]
    shown = text if len(text) <= SHOWN else "…\n" + text[-SHOWN:].split("\n", 1)[-1]
    heading = f"{title}: prompt of {inputs.input_ids.shape[1]} tokens"
    console.print(Panel(Text(shown), title=heading, border_style="dim"))
    console.print(coloured(tokenizer, ours.ids, ours.rounds))
    rates = ", ".join(f"{name} {one.rate:.0f} tokens/s" for name, one in answers.items())
    console.print(f"[dim]{rates}\ncoloured: drafted and accepted, a colour a round[/dim]\n", highlight=False)


def main() -> None:
    options, console = parse(), Console()
    console.print(INTRODUCTION)
    doing = "importing PyTorch and transformers, and loading the model"
    tokenizer, model = waiting(console, doing, lambda report: load(options))
    prompts = read_prompts(tokenizer, options.device)
    fixed = dict(do_sample=False, max_new_tokens=options.new_tokens, pad_token_id=tokenizer.pad_token_id)
    doing = "n-grams, drafts from the text itself: capturing the model"
    ngram = waiting(console, doing, partial(speculate, model, options, "ngram", {}))
    console.print("[bold]•[/bold] an answer in rounds that are not compiled yet:\n", highlight=False)
    show_first_words(console, tokenizer, ngram, prompts["complete a class"], fixed)
    waiting(console, "compiling the rounds", partial(compile_rounds, ngram))
    console.print(f"ready after {time.perf_counter() - START:.0f} s\n", highlight=False)
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
        show(console, tokenizer, title, inputs, answers[title])

    console.print(WHEN_A_HEAD_PAYS)
    for name, (algo, settings) in HEADS.items():
        folder = options.heads / algo
        if not (folder / "config.json").is_file():
            console.print(f"{name}: left out, there is no head in {folder}")
            continue
        settings = {"draft": str(folder), **settings}
        doing = f"{name}, a head that was trained for this model: capturing"
        fast = waiting(console, doing, partial(speculate, model, options, algo, settings))
        waiting(console, "compiling its rounds", partial(compile_rounds, fast))
        for title, inputs in prompts.items():
            answers[title][name] = ask(fast, inputs, fixed)

    console.print()
    console.print(figures(answers, f"speed-up: over the best of transformers; {options.device}, float32"))
    console.print("accept length: tokens a round gains; same text: as transformers' own", style="dim")
    if options.report:
        with ngram.speculation.recording():
            ask(ngram, prompts["complete a class"], fixed)
        console.print(f"every tree of one answer: {ngram.speculation.report(options.report, tokenizer)}")


if __name__ == "__main__":
    main()
