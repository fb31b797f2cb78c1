"""``python -m spec_compile demo``: one answer by transformers and by us, side by side, with both speeds."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .streamed import OWN, Fragment, SourcedStreamer, TokenSources, coloured

PACKAGE = Path(__file__).parents[2]
TRANSFORMERS, OURS = "transformers' generate()", "spec_compile, the same call"
SIDE_BY_SIDE = 88
"""Least columns of a screen with two panes in a row."""
MOST_LINES = 24
"""Lines of the panes while text comes, at most."""
WARM = 16
"""Tokens of the answers before the ones that count: a first call prepares much."""
PROMPT = """Rename the variable `total` to `price` in this class.

```python
class Basket:
    def __init__(self, items):
        self.items = items

    def sum(self):
        total = 0
        for item in self.items:
            total += item.price * item.count
        return total

    def names(self):
        return [item.name for item in self.items]

    def find(self, name):
        for item in self.items:
            if item.name == name:
                return item
        return None
```
"""
COMPLETION = "\n```python\n"
"""Follows the prompt for a model without a chat template."""


def demo_model() -> Path:
    """The folder of the model that a wheel has, or a clone of the repository; ValueError if there is neither."""
    for folder in (PACKAGE / "demo_model", PACKAGE.parent / "examples" / "tiny_coder"):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(f"--model: the demo's own model is not in {PACKAGE / 'demo_model'}; name another one")


def encode(tokenizer: Any, text: str) -> Any:
    """The input of generate() for a request, by the chat template if there is one."""
    if not tokenizer.chat_template:
        return tokenizer(text, return_tensors="pt")
    request = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(request, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def check_length(model: Any, tokens: int, new_tokens: int, way_out: str) -> None:
    """ValueError if a model has too few positions for a prompt and its answer."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and tokens + new_tokens > most:
        raise ValueError(f"{tokens} tokens and {new_tokens} new ones exceed the model's {most} positions; {way_out}")


@dataclass
class Run:
    """An answer of `title`. seconds: None until it is over."""

    title: str
    seconds: float | None = None
    ids: list[int] = field(default_factory=list)
    pieces: list[Fragment] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.ids) / self.seconds if self.seconds else 0.0

    @property
    def status(self) -> str:
        if self.seconds is not None:
            return f"{len(self.ids)} tokens in {self.seconds:.2f} s: {self.rate:.0f} tokens/s"
        return f"{len(self.pieces)} tokens" if self.pieces else "waits"

    def ask(self, model: Any, tokenizer: Any, inputs: Any, options: dict, sources: TokenSources | None) -> None:
        """Let a model answer."""
        trace = list if sources is None else lambda: model.speculation.stats.trace
        streamer = SourcedStreamer(tokenizer, self.pieces.extend, sources, trace)
        model.generate(**inputs, **options, streamer=streamer)
        self.seconds, self.ids = streamer.seconds, streamer.ids


@dataclass
class Comparison:
    """Both answers."""

    runs: tuple[Run, Run] = field(default_factory=lambda: (Run(TRANSFORMERS), Run(OURS)))

    @property
    def verdict(self) -> str:
        """The ratio of the speeds, and whether the tokens are the same."""
        plain, ours = self.runs
        same = [a == b for a, b in zip(plain.ids, ours.ids)]
        place = next((number for number, equal in enumerate(same) if not equal), len(same))
        is_same = plain.ids == ours.ids
        told = "yes" if is_same else f"no, from token {place + 1} on (in 16 bits nearly equal logits may swap)"
        return f"{ours.rate / plain.rate:.2f}× · same tokens: {told}"

    @property
    def shares(self) -> Text:
        """How many tokens each source gave us, in its colour."""
        counts = Counter(piece.source for piece in self.runs[1].pieces)
        order = sorted(counts, key=lambda source: (source == OWN, source))
        parts = [coloured([Fragment(0.0, f"{counts[source]} by {source}", source)]) for source in order]
        return Text.assemble("tokens given: ", Text(", ").join(parts))

    def screen(self, console: Console, lines: int | None) -> RenderableType:
        """Both panes, with the last `lines` lines of each; None: all of them."""
        wide = console.width >= SIDE_BY_SIDE
        lines = lines if wide or lines is None else lines // 2 - 1
        grid = Table.grid(expand=True)
        panes = []
        for run in self.runs:
            shown = coloured(run.pieces).wrap(console, (console.width // 2 if wide else console.width) - 4)
            text = Text("\n").join(shown[-lines:] if lines else shown)
            rest = "\n" * (lines - 1 - text.plain.count("\n")) if lines else ""
            body, title = Text.assemble(text, rest), f"[bold]{run.title}[/bold]"
            panes.append(Panel(body, title=title, subtitle=run.status, border_style="dim"))
        if not wide:
            return Group(*panes)
        for _ in panes:
            grid.add_column(ratio=1)
        grid.add_row(*panes)
        return grid

    def save(self, file: Path, about: dict) -> None:
        """Write a recording, from which docs/picture.py draws."""
        told = {"ratio": self.runs[1].rate / self.runs[0].rate, "verdict": self.verdict, "shares": self.shares.plain}
        data = about | told | {"runs": [asdict(run) for run in self.runs]}
        for run in data["runs"]:
            run["pieces"] = [[round(seconds, 4), text, source] for seconds, text, source in run["pieces"]]
            run["rate"] = len(run.pop("ids")) / run["seconds"]
        file.write_text(json.dumps(data, ensure_ascii=False, indent=0) + "\n")


def show(console: Console, model: Any, fast: Any, tokenizer: Any, inputs: Any, new_tokens: int) -> Comparison:
    """Let both answer, first transformers, and show it while they do."""
    options = dict(do_sample=False, max_new_tokens=new_tokens, pad_token_id=tokenizer.pad_token_id or 0)
    comparison = Comparison()
    for each in (model, fast):
        each.generate(**inputs, **options | {"max_new_tokens": min(WARM, new_tokens)})
    if fast.speculation.engine.runtime.algorithm.store is not None:
        fast.speculation.ngram.reset()  # drafts know only the prompt
    lines = min(max(console.height - 4, 4), MOST_LINES)
    live = Live(
        get_renderable=lambda: comparison.screen(console, lines), console=console, transient=True, refresh_per_second=12
    )
    with live:
        comparison.runs[0].ask(model, tokenizer, inputs, options, None)
        comparison.runs[1].ask(fast, tokenizer, inputs, options, TokenSources.of(fast, inputs["input_ids"][0].tolist()))
    if console.is_terminal:
        console.print(comparison.screen(console, None), soft_wrap=False)
    else:
        for run in comparison.runs:
            console.print(f"\n--- {run.title}: {run.status}", coloured(run.pieces), sep="\n")
        console.print()
    console.print(comparison.shares)
    console.print(Text(comparison.verdict, style="bold"))
    return comparison
