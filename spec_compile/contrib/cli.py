"""The commands of this folder: ``python -m spec_compile demo | chat``."""

from pathlib import Path
from typing import Annotated, Any

import huggingface_hub
import torch
import transformers
import typer
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from ..api import speculate
from ..cli import at_least, dtype_name, json_object, load_model, local_device, parsed
from .terminal import chat, demo
from .terminal.streamed import make_console

application = typer.Typer()

CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_SECONDS = 5.0
"""How long the model hub may take until it counts as out of reach."""

AnyDevice = Annotated[
    torch.device | None, parsed(local_device, "DEVICE", "cpu, cuda or cuda:N. By default cuda if there is a GPU.")
]
AnyDtype = Annotated[str | None, parsed(dtype_name, "DTYPE", "By default float32, for a chat on a GPU the model's.")]
Algo = Annotated[str, typer.Option(help="How drafts are made.")]
Draft = Annotated[str | None, typer.Option(help="The draft: a directory, or a name on the model hub.")]
Speculation = Annotated[dict, parsed(json_object, "JSON", "Further options of speculate().")]


def ask_hub(name: str) -> None:
    """Take models from the hub's cache only, if it is asked for one and cannot be reached. It retries for a minute."""
    if Path(name).expanduser().exists():
        return
    try:
        huggingface_hub.model_info(name, timeout=HUB_SECONDS)
    except (HfHubHTTPError, ValueError):  # the hub answers, or this is no name: what loads the model says so
        pass
    except (HfHubHTTPError.__bases__[0], OSError):  # of httpx, or of httpx2 from huggingface_hub 2 on
        constants.HF_HUB_OFFLINE = True


def _load(console: Any, name: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """The model and its tokenizer. Says what it waits for, and no more."""
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.logging.set_verbosity_error()  # it would report each of its attempts
    console.print(f"• loading {name} on {device}", style="dim")
    ask_hub(name)
    return load_model(name, dtype, device)


def _speculate(console: Any, model: Any, algo: str, draft: str | None, options: dict) -> Any:
    if draft is not None:
        ask_hub(draft)
    console.print("• capturing it as a graph, and checking the graph", style="dim")
    return speculate(model, algo, **({} if draft is None else {"draft": draft}), **options)


def _default_device(device: torch.device | None) -> torch.device:
    return device or torch.device("cuda" if torch.cuda.is_available() else "cpu")


@application.command("demo")
def _demo(
    model: Annotated[str | None, typer.Option(help="A directory, or a name on the model hub.")] = None,
    prompt: Annotated[str | None, typer.Option(help="By default a class to be edited.")] = None,
    new_tokens: Annotated[int, parsed(at_least(1), "INT", "Tokens of an answer at most.")] = 160,
    device: AnyDevice = None,
    dtype: AnyDtype = None,
    algo: Algo = "ngram",
    draft: Draft = None,
    options: Speculation = "{}",
    record: Annotated[Path | None, typer.Option(help="Write both answers, with their times, as JSON.")] = None,
) -> None:
    """Watch one answer come from transformers and from spec_compile: the same tokens, in fewer steps.

    By default a small model that the package has, so it needs no network. Colours show who gave a token. Rounds are not
    compiled, so that it starts at once; `--options '{"compile": true}'` waits for the compilers.
    """
    console, device, dtype = make_console(), _default_device(device), dtype or "float32"
    if prompt is not None and not prompt.strip():
        raise ValueError("--prompt: expected a text, got an empty one")
    if record is not None and not record.parent.is_dir():
        raise ValueError(f"--record: there is no folder {record.parent}")
    name = model or str(demo.demo_model())
    loaded, tokenizer = _load(console, name, dtype, device)
    text = prompt or demo.PROMPT + ("" if tokenizer.chat_template else demo.COMPLETION)
    inputs = demo.encode(tokenizer, text).to(device)
    demo.check_length(loaded, inputs["input_ids"].shape[1], new_tokens, "give a shorter --prompt or fewer --new-tokens")
    fast = _speculate(console, loaded, algo, draft, {"compile": False} | options)
    comparison = demo.show(console, loaded, fast, tokenizer, inputs, new_tokens)
    if record is not None:
        about = {"model": Path(name).name if Path(name).exists() else name, "device": str(device), "dtype": dtype}
        about |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "algo": algo, "prompt": text}
        comparison.save(record, about)


@application.command("chat")
def _chat(
    model: Annotated[str, typer.Argument(help="A directory, or a name on the model hub.")] = CHAT_MODEL,
    new_tokens: Annotated[int, parsed(at_least(1), "INT", "Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Above 0 samples; 0 takes the likeliest token.")] = 0.0,
    device: AnyDevice = None,
    dtype: AnyDtype = None,
    algo: Algo = "ngram",
    draft: Draft = None,
    options: Speculation = "{}",
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D or /quit ends.

    Each answer is followed by its speed. Colours show who gave a token. A model without a chat template goes on with
    the text.
    """
    console, device = make_console(), _default_device(device)
    dtype = dtype or ("float32" if device.type == "cpu" else "auto")
    try:
        loaded, tokenizer = _load(console, model, dtype, device)
    except ValueError as error:
        raise ValueError(str(error).replace("--model:", "MODEL:", 1)) from error
    fast = _speculate(console, loaded, algo, draft, options)
    chat.TerminalChat(console, fast, tokenizer, new_tokens, temperature).run()
