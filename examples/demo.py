"""Three prompts, answered by transformers' generate(), by its prompt lookup, and by spec_compile, side by side.

python examples/demo.py [--model PATH] [--new-tokens 160] [--threads N]
"""

import argparse
import inspect
import time
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


def coloured(tokenizer, ids: list[int], rounds: list[int]) -> Text:
    """The text of `ids`; what a round accepted from its draft is coloured, rounds in turn green and cyan."""
    text, place = Text(), 0
    for number, gained in enumerate(rounds):
        drafted, bonus = ids[place : place + gained - 1], ids[place + gained - 1 : place + gained]
        text.append(tokenizer.decode(drafted), style=("bold green", "bold cyan")[number % 2])
        text.append(tokenizer.decode(bonus))
        place += gained
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parent / "tiny_coder"))
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    console = Console()
    torch.set_num_threads(options.threads)

    progress = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console)
    with progress:
        task = progress.add_task("loading", total=None)
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        import spec_compile
        from spec_compile.runtime.sizes import SizePolicy

        logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        progress.update(task, description="capturing")
        fast = spec_compile.speculate(model, algo="ngram")
        fast.speculation.warmup(progress=lambda line: progress.update(task, description=line))
        fast.generate(torch.tensor([[1]]), do_sample=False, max_new_tokens=1, pad_token_id=0)
        first = time.perf_counter() - START
    console.print(
        f"first token after {first:.1f} s (loading, capture, compilation; later processes find a warm cache)\n"
    )

    fast.speculation.stats.reset()
    calls = 0

    def count_call(*_):
        nonlocal calls
        calls += 1

    model.register_forward_pre_hook(count_call)
    fixed = dict(do_sample=False, max_new_tokens=options.new_tokens, pad_token_id=tokenizer.pad_token_id)
    systems = {
        "transformers": lambda inputs: model.generate(**inputs, **fixed),
        "transformers, prompt lookup": lambda inputs: model.generate(**inputs, prompt_lookup_num_tokens=10, **fixed),
        "spec_compile, n-gram": lambda inputs: fast.generate(**inputs, **fixed),
    }
    method = inspect.cleandoc("    " + inspect.getsource(SizePolicy.learn))
    for title, prompt in (
        ("edit a method", EDIT.format(source=method + "\n")),
        ("complete a class", COMPLETE),
        ("continue a test file", TESTS),
    ):
        inputs = tokenizer(prompt, return_tensors="pt")
        width = inputs.input_ids.shape[1]
        console.print(Panel(Text(prompt[-600:]), title=f"prompt: {title}, {width} tokens", border_style="dim"))
        table = Table(show_lines=True, expand=True)
        texts, figures, reference = [], [], None
        for name, generate in systems.items():
            calls = 0
            fast.speculation.ngram.reset()
            begin = time.perf_counter()
            ids = generate(inputs)[0, width:].tolist()
            seconds = time.perf_counter() - begin
            reference = reference or ids
            ours = name.startswith("spec_compile")
            rounds = [gained for (gained,) in fast.speculation.stats.trace] if ours else None
            texts.append(coloured(tokenizer, ids, rounds) if ours else Text(tokenizer.decode(ids)))
            table.add_column(name, ratio=1)
            figures.append(
                f"{len(ids) / seconds:.0f} tokens/s\naccept length {len(ids) / (len(rounds) if ours else calls):.2f}\n"
                f"identical: {'yes' if ids == reference else '[red]no[/red]'}"
            )
        table.add_row(*texts)
        table.add_row(*figures)
        console.print(table)
    console.print(str(fast.speculation.stats), highlight=False)
    console.print("\n" + fast.speculation.explain(), highlight=False)


if __name__ == "__main__":
    main()
