"""The cost of a call of generate() before its first round: milliseconds of the host, part by part.

    python -m benchmarks.call --device cuda --model qwen3-0.6b
    python -m benchmarks.call --no-compile

For each width of the prompt: a call for one token, ours and transformers' own, and ours prepared by transformers, which
prepares the first of several similar calls. The parts are times of the host only, which on a GPU runs ahead. The
operations and the waits for the GPU are counted until the first round is launched. The look for changes of the model
("watch") comes before that on a CPU, and on a GPU while it computes.
"""

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import spec_compile
from benchmarks.common import DEMO_MODEL, command_line, elapsed, pin, stamp, synchronize, write_json
from benchmarks.rounds.shapes import SHAPES, build, text_tokens
from spec_compile.capture.changes import Watch
from spec_compile.runtime import generate
from spec_compile.runtime.pipeline import Call
from spec_compile.runtime.session import Session
from spec_compile.runtime.state import State

DEMO = "demo"
PARTS = {
    "watch": (Watch, "changes"),
    "preparation": (generate, "make_key"),
    "prompt": (generate, "read_prompt"),
    "reset": (State, "enter"),
    "prefill": (Session, "prefill"),
    "first trees": (Session, "propose"),
    "first round": (Call, "launch"),
}
"""Part -> the function that is timed."""


class Launched(Exception):
    """Raised at the launch of a call's first round, or on a CPU before that round. `at`: the time."""

    def __init__(self):
        super().__init__()
        self.at = time.perf_counter()


class Operations(TorchDispatchMode):
    """Counts operations of torch."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def timed_parts(spent: dict[str, float]) -> Iterator[None]:
    """A context that adds the seconds of each part to `spent`."""

    def timed(name: str, function: Callable) -> Callable:
        def run(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin

        return run

    patches = [patch.object(owner, name, timed(part, getattr(owner, name))) for part, (owner, name) in PARTS.items()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def time_of_launch(call: Callable) -> float:
    """Make a call that ends at the launch of its first round, and return the time of the launch."""
    launch = Call.launch

    def launched(self: Call) -> None:
        if self.runtime.on_gpu:
            launch(self)
        raise Launched

    try:
        with patch.object(Call, "launch", launched):
            call()
    except Launched as end:
        return end.at
    raise RuntimeError("the call has launched no round")


def operations(call: Callable) -> tuple[int, int]:
    """The operations of torch before a call's first round, without the prefill's, and the waits for a GPU."""
    on_gpu = torch.cuda.is_available()
    prefill = patch.object(Session, "prefill", lambda *_: None)
    with prefill, Operations() as counted, warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            time_of_launch(call)
        finally:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
    return counted.count, sum("synchroniz" in str(wait.message) for wait in waits)


def milliseconds(call: Callable, device: torch.device, repeats: int) -> float:
    """The median milliseconds of a call until its answer is ready."""
    return statistics.median(elapsed(call, device)[1] for _ in range(repeats)) * 1e3


def breakdown(call: Callable, device: torch.device, repeats: int) -> dict[str, float]:
    """The median milliseconds of the host in each part, and until the launch of the first round."""
    rows: list[dict[str, float]] = []
    for _ in range(repeats):
        spent: dict[str, float] = {}
        synchronize(device)
        with timed_parts(spent):
            begin = time.perf_counter()
            spent["until launched"] = time_of_launch(call) - begin
        rows.append(spent)
    return {name: statistics.median(row.get(name, 0.0) for row in rows) * 1e3 for name in (*PARTS, "until launched")}


def measure(model, fast, width: int, options) -> dict:
    """The row for one width of the prompt."""
    ids = text_tokens(width, model.config.vocab_size - 1)[None].to(model.device) + 1
    asked = dict(do_sample=False, max_new_tokens=1, eos_token_id=None, pad_token_id=0)
    calls = {"ours": lambda: fast.generate(ids, **asked), "HF": lambda: model.generate(ids, **asked)}

    def prepared() -> None:
        with patch.object(fast.speculation.engine.remembered, "find", lambda key: None):
            fast.generate(ids, **asked)

    calls["ours, prepared by transformers"] = prepared
    for call in calls.values():
        for _ in range(5):
            call()
    row = {"width": width, **{name: milliseconds(call, model.device, options.repeats) for name, call in calls.items()}}
    row["parts"] = breakdown(calls["ours"], model.device, options.repeats)
    row["operations"], row["waits"] = operations(calls["ours"])
    row["unprepared operations"], row["unprepared waits"] = operations(prepared)
    return row


def main() -> None:
    parser = command_line(__doc__, results="call.json", threads=1)
    parser.add_argument("--model", default=DEMO, choices=[DEMO, *SHAPES])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 512, 2048])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do not compile the rounds of a CPU")
    options = parser.parse_args()
    if options.device == "cpu":
        pin(options.threads)
    if options.model == DEMO:
        model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).to(options.device).eval()
    else:
        model = build(options.model, options.device)
    fast = spec_compile.speculate(model, max_cache_len=max(options.widths) + 64, compile=options.compile)
    rows = []
    for width in options.widths:
        rows.append({"model": options.model, **measure(model, fast, width, options), "stamp": stamp(model.device)})
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in rows[-1]["parts"].items())
        figures = ", ".join(f"{name} {value:.6g}" for name, value in rows[-1].items() if isinstance(value, int | float))
        print(f"{figures}\n  {parts}", flush=True)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
