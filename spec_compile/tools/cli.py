"""The commands of this folder: ``python -m spec_compile audit | tune | tune-kernels``."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from ..api import speculate
from ..cli import (
    Device,
    Dtype,
    Model,
    UsageError,
    at_least,
    int_list,
    json_object,
    load_model,
    parsed,
    print_table,
    read_prompts,
    tell,
)
from . import tune, tune_kernels
from .audit import LOSSLESS, NOT_LOSSLESS, NOT_TESTED, audit, check_samples

application = typer.Typer()

THIS_GPU = torch.device("cuda")


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
