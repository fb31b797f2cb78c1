"""The command line: ``python -m spec_compile audit | train | serve | tune | tune-kernels | cache``.

A command is a function whose parameters are its arguments and options. `main` runs one of them.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from . import audit, speculate, train_draft, tune, tune_kernels
from .artefacts.store import Store, table_of
from .audit import check_samples
from .commands.inputs import load_model, read_prompts
from .commands.output import one_line, print_table
from .commands.server_flags import read_door, with_server_flags
from .commands.values import Device, Dtype, Model, at_least, int_list, json_object, parsed, share_or_file
from .report.audit import LOSSLESS, NOT_LOSSLESS, NOT_TESTED
from .serving import GRACE, MAX_QUEUE, require_packages
from .training import TRAINERS
from .training import train_while_serving as learn
from .training.progress import bars_on_terminals, tell
from .training.save import STATE

PROGRAM = "python -m spec_compile"
THIS_GPU = torch.device("cuda")
UsageError: Any = typer.BadParameter.__base__
"""The base class of typer's errors about arguments. typer does not export it."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns its exit status, which is 2 after an error and 130 after Ctrl-C.

    Raises SystemExit with status 2 for arguments that the command does not take. Each error is a line on stderr.
    """
    commands, context = typer.main.get_command(application), None
    try:
        with commands.make_context(PROGRAM, sys.argv[1:] if arguments is None else [*arguments]) as context:
            return commands.invoke(context) or 0
    except typer.Exit as end:
        return end.exit_code
    except UsageError as error:
        _print_end(context, f"error: {one_line(error.format_message())}")
        raise SystemExit(2) from None
    except (ValueError, TypeError, OSError, ImportError, KeyboardInterrupt) as error:
        if context.params["traceback"]:
            raise
        if isinstance(error, KeyboardInterrupt):
            _print_end(context, error.args[0] if error.args else "stopped")
            return 130
        _print_end(context, f"error: {one_line(error)}")
        return 2


def _print_end(context: typer.Context | None, reason: str) -> None:
    """Print why a command ended. context: None if the options before the command could not be read."""
    command = context.invoked_subcommand if context else None
    print(f"{PROGRAM} {command}: {reason}" if command else f"{PROGRAM}: {reason}", file=sys.stderr)


class _Commands(typer.core.TyperGroup):
    def get_command(self, context: Any, name: str) -> Any:
        if name not in self.commands:
            raise UsageError(f"invalid choice: {name!r}; expected one of {', '.join(self.commands)}")
        return self.commands[name]


application = typer.Typer(
    cls=_Commands,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@application.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
) -> None:
    """Lossless speculative decoding for models of transformers."""
    if context.invoked_subcommand is None:
        raise UsageError("the following arguments are required: command")


@application.command("audit")
def _audit(
    model: Model,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    algo: Annotated[str, typer.Option(help="How drafts are made.")] = "ngram",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be repeated.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='JSON lines with "prompt", or one prompt a line.')] = None,
    limit: Annotated[int, parsed(at_least(1), "INT", "Prompts read from the file at most.")] = 10,
    max_new_tokens: Annotated[int, parsed(at_least(1), "INT", "Tokens of an answer at most.")] = 64,
    samples: Annotated[int, parsed(at_least(0), "INT", "Draws a prompt for the test of sampling.")] = 0,
    requests: Annotated[bool, typer.Option("--requests", help="Ask for the same answers in many ways.")] = False,
    generate: Annotated[dict, parsed(json_object, "JSON", "Such as '{\"temperature\": 0.7}'.")] = "{}",
    options: Annotated[dict, parsed(json_object, "JSON", "Such as '{\"num_draft_tokens\": 8}'.")] = "{}",
) -> int:
    """Compare speculative with plain decoding, token for token and draw for draw.

    Prints the tables; exits with 0 if nothing but near-ties differs, with 1 if something else does, with 2 if an
    argument is wrong, and with 3 if too little was generated to tell. With `weights` in the options, the model is
    loaded twice, and also compared with itself before its weights were rounded.
    """
    check_samples(samples)
    texts = [*(prompt or []), *(read_prompts(prompts, limit) if prompts is not None else [])]
    if not texts:
        raise UsageError("give at least one --prompt, or --prompts")
    loaded, tokenizer = load_model(model, dtype, device)
    fast = speculate(loaded, algo, **options)
    counts = {"max_new_tokens": max_new_tokens, "samples": samples}
    unrounded = load_model(model, dtype, device)[0] if options.get("weights") is not None else None
    report = audit(fast, texts, tokenizer, requests=requests, unrounded=unrounded, **counts, **generate)
    print(report)
    return {LOSSLESS: 0, NOT_LOSSLESS: 1, NOT_TESTED: 3}[report.verdict]


@application.command("train")
def _train(
    model: Model,
    data: Annotated[str, typer.Option(help="A .txt or .jsonl file.")],
    output: Annotated[str, typer.Option(help="The folder to write.")],
    dtype: Dtype = "auto",
    device: Device = "cpu",
    algo: Annotated[str, typer.Option(help=f"One of {', '.join(TRAINERS)}.")] = "eagle3",
    validation: Annotated[str, typer.Option(help="The held-out share, a file, or a folder of sets.")] = "0.05",
    on_policy: Annotated[bool, typer.Option("--on-policy", help="Train on answers that the model writes.")] = False,
    steps: Annotated[int | None, typer.Option(help="Updates of the weights.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Give this or --steps. Without either it is 30.")] = None,
    push: Annotated[str | None, typer.Option(help="A repository of the model hub for the head: USER/NAME.")] = None,
    private: Annotated[bool | None, typer.Option("--private", help="Make that repository private.")] = None,
    license: Annotated[str | None, typer.Option(help="Of the head, for its card, such as apache-2.0.")] = None,
    options: Annotated[dict, parsed(json_object, "JSON", "Such as '{\"batch_size\": 16}'.")] = "{}",
) -> None:
    """Train a draft head for a model.

    Writes the head, its card and a state to go on from; the same command goes on after a stop.
    """
    tell(f"loading {model}")
    try:
        with bars_on_terminals():
            loaded, tokenizer = load_model(model, dtype, device)
        result = train_draft(
            loaded, algo, data=data, output=output, tokenizer=tokenizer, validation=share_or_file(validation),
            on_policy=on_policy, steps=steps, minutes=minutes, push=push, private=private, license=license, **options,
        )  # fmt: skip
    except KeyboardInterrupt as stop:
        folder = Path(output).expanduser()
        is_kept = (folder / STATE).is_file()
        how = stop.args[0] if stop.args else f"stopped; {folder} keeps {'a' if is_kept else 'no'} checkpoint"
        raise KeyboardInterrupt(
            f"{how}; the same command {'goes on from there' if is_kept else 'begins anew'}"
        ) from None
    print(result)


@application.command("serve")
@with_server_flags
def _serve(
    model: Annotated[str, typer.Argument(help="A directory, or a name on the model hub.")],
    algo: Annotated[str, typer.Option(help="How drafts are made.")] = "ngram",
    draft: Annotated[str | None, typer.Option(help="The draft: a directory, or a name on the model hub.")] = None,
    options: Annotated[dict, parsed(json_object, "JSON", "Options of speculate().")] = "{}",
    slots: Annotated[int | None, typer.Option(help="Requests that are answered at once.", min=1)] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; others get 429.", min=1)] = MAX_QUEUE,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share the model.", min=1)] = 1,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default as it is called here.")
    ] = None,
    lora_modules: Annotated[
        list[str] | None, typer.Option(help="A LoRA adapter that requests may choose: NAME=PATH; may be repeated.")
    ] = None,
    max_loras: Annotated[int | None, typer.Option(help="Adapters of rows in use; by default all.", min=1)] = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="By default that of the adapters.", min=1)] = None,
    train_while_serving: Annotated[
        bool, typer.Option("--train-while-serving", help="Let the draft learn from answers; texts stay in memory.")
    ] = False,
    online_training: Annotated[dict, parsed(json_object, "JSON", "Such as '{\"share\": 0.05}'; trains, too.")] = "{}",
    grace: Annotated[float, typer.Option(help="Seconds that requests have to end after SIGTERM.", min=0)] = GRACE,
    **flags: Any,
) -> int:
    """Run an HTTP server with OpenAI's API: transformers' own, around speculative models and continuous batching.

    POST /v1/chat/completions, /v1/completions, /v1/responses; GET /v1/models, /health, /metrics.
    """
    require_packages()
    from .serving.drain import Runner
    from .serving.server import build

    options |= {} if draft is None else {"draft": draft}
    options |= {} if max_loras is None else {"max_loras": max_loras}
    options |= {} if max_lora_rank is None else {"max_lora_rank": max_lora_rank}
    sizes = {"slots": slots, "max_queue": max_queue, "tensor_parallel": tensor_parallel}
    names = {"served_model_name": served_model_name, "lora_modules": lora_modules}
    policy, door = read_door(flags)
    server = build(model, algo, options, **sizes, **names, **policy, **flags)
    if train_while_serving or online_training:
        learn(server.models.the_one.model, **online_training)
    runner = Runner(server, grace, **door)
    runner.run()
    return int(runner.has_failed)


@application.command("tune")
def _tune(
    model: Model,
    prompts: Annotated[Path, typer.Option(help='JSON lines with "prompt", or one prompt a line.')],
    dtype: Dtype = "auto",
    device: Device = "cpu",
    algo: Annotated[str, typer.Option(help="How drafts are made.")] = "ngram",
    draft: Annotated[str | None, typer.Option(help="The draft: a directory, or a name on the model hub.")] = None,
    limit: Annotated[int, parsed(at_least(1), "INT", "Prompts read from the file at most.")] = 8,
    max_new_tokens: Annotated[int, parsed(at_least(1), "INT", "Tokens of an answer at most.")] = 128,
    steps: Annotated[list, parsed(int_list, "INTS", "Depths of drafts to try.")] = "1,3,5",
    topk: Annotated[list, parsed(int_list, "INTS", "Children of a node to try.")] = "1,4",
    nodes: Annotated[list, parsed(int_list, "INTS", "Nodes of a tree to try.")] = "4,8,16,32",
    options: Annotated[dict, parsed(json_object, "JSON", "Further options of speculate().")] = "{}",
) -> None:
    """Find the settings of a draft that are fastest on your prompts.

    Answers the prompts with plain steps and with each setting. Prints tokens a second over plain steps, if each round
    chooses by cost ("adaptive") and if every round drafts ("fixed"), how many of the rounds that chose have drafted and
    with how many nodes, the accept length, and the one that would pay.
    """
    if not (texts := read_prompts(prompts, limit)):
        raise ValueError(f"--prompts: {prompts} has no prompts")
    options |= {} if draft is None else {"draft": draft}
    settings, refused = tune.sort_out(algo, tune.combinations(algo, steps, topk, nodes), options)
    for line in refused:
        tell(line)
    loaded, tokenizer = load_model(model, dtype, device)
    ids = [tokenizer(text, return_tensors="pt").input_ids.to(device) for text in texts]
    found = []
    for setting in tune.search(loaded, algo, settings, ids, max_new_tokens, **options):
        found.append(setting)
        tell(f"{setting.name}: {setting.chosen:.0f} tokens/s")
    print_table(tune.table(found))
    print(tune.verdict(found))


@application.command("tune-kernels")
def _tune_kernels(
    model: Model, dtype: Dtype = "auto", device: Device = THIS_GPU,
    seconds: Annotated[float, typer.Option(help="Of the search, without the time to load the model.")] = 90,
) -> None:  # fmt: skip
    """Search for faster plans of a model's matrix products on this GPU.

    Times plans for each shape and format of the model's weights, checks that every row has the same bits with any
    number of rows, and keeps the plans that are faster in a file that later processes read.
    """
    tune_kernels.check(device, seconds)
    tune_kernels.run(load_model(model, dtype, device)[0], seconds)


@application.command("cache")
def _cache(
    folder: Annotated[
        Path | None, typer.Option(help="By default $SPEC_COMPILE_CACHE, and without it ~/.cache/spec_compile.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete what is kept; later starts are slow once.")] = False,
) -> None:
    """List what is kept of earlier starts of models, or delete it.

    An artefact holds everything that speculate() found out about one model, with one set of options, on one machine.
    """
    store = Store(folder)
    if folder is not None and not (store.folder and store.folder.is_dir()):
        raise ValueError(f"--folder: there is no folder {folder}")
    if clear:
        print(f"{store.folder}: {store.clear()} artefacts deleted")
    elif entries := store.entries():
        print_table(table_of(entries, str(store.folder)))
    else:
        print(f"{store.folder}: no artefacts")


if __name__ == "__main__":
    sys.exit(main())
