"""Rounds with draft heads and draft models at published sizes on a GPU; part of benchmarks/gpu.py (--drafts).

A row "with n-grams" joins the same draft with n-grams and says how much longer its rounds take.

Weights are random, so acceptance means nothing here; the rows are times of rounds. The floor adds the draft's bytes to
the target's, once for each time that the draft's weights must be read: to take in the accepted tokens, and for each
level but the last.
"""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import spec_compile
from benchmarks.common import elapsed, floors
from benchmarks.rounds.shapes import SHAPES
from spec_compile.contrib.parallel import ParallelEagle3Head
from spec_compile.drafters.checkpoints.files import Target
from spec_compile.drafters.modules.dflash import DFlashDraft, spread_layers
from spec_compile.drafters.modules.eagle import Eagle3Head, EagleHead
from spec_compile.drafters.modules.layers import LayerKnobs
from spec_compile.drafters.modules.mtp import MtpHead, block_config
from spec_compile.runtime.session import StepKind
from spec_compile.train.options import TrainingOptions
from spec_compile.train.trainer import draft_config

TREE = dict(num_steps=5, topk=4, num_draft_tokens=16)
LARGE = dict(topk=8, num_draft_tokens=64)
JOINED = ", with n-grams"
SMALL = "llama-1b"
"""The shape of draft models."""
MASK = 151669
"""The id of a mask in a vocabulary of Qwen3; in a smaller one it is the last id."""
DRAFTED = 32000
"""Tokens that an EAGLE-3 head can draft."""
DRAFTS = {
    "llama-8b": {
        "naive EAGLE": ("naive_eagle", "eagle", {}),
        "EAGLE-3, chain of 3": ("eagle3", "eagle3", dict(num_steps=3)),
        "EAGLE-3, tree of 16 in 5 steps": ("eagle3", "eagle3", TREE),
        f"EAGLE-3, tree of 16 in 5 steps{JOINED}": ("eagle3", "eagle3", dict(TREE, ngram=True)),
        "MTP, 1 step": ("mtp", "mtp", {}),
        "draft model of 1B, 5 steps": ("draft_model", "model", dict(num_steps=5)),
    },
    "qwen3-8b": {
        "DFlash, block of 16": ("dflash", "dflash", {}),
        "DFlash, tree of 64": ("dflash", "dflash", LARGE),
        f"DFlash, tree of 64{JOINED}": ("dflash", "dflash", dict(LARGE, ngram=True)),
    },
}
"""Target's shape -> name -> algorithm, form of the draft, options."""


def make(form: str, model: PreTrainedModel, drafted: int = DRAFTED) -> torch.nn.Module:
    """A draft for `model`, with random weights.

    form: "model" or "pard" (of the shape `SMALL`), "eagle", "eagle3", "p_eagle", "dflash", "jetspec" or "mtp"
    drafted: tokens that an EAGLE-3 head can draft
    """
    with model.device:
        if form in ("model", "pard"):
            vocab_size = model.get_output_embeddings().weight.shape[0]
            small = AutoConfig.for_model("llama", **SHAPES[SMALL][1] | {"vocab_size": vocab_size})
            small.pard_token = vocab_size - 1
            return AutoModelForCausalLM.from_config(small, dtype=model.dtype).eval()
        head = _head(form, model, drafted)
    shared = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    for parameter in head.parameters():
        if parameter not in shared:
            parameter.data = parameter.data.to(model.dtype)
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter.data, std=0.02)
    return head.requires_grad_(False).eval()


def _head(form: str, model: PreTrainedModel, drafted: int) -> torch.nn.Module:
    """See `make`. P-EAGLE has four layers, as published, DFlash and JetSpec have five."""
    config, target = model.config, Target.of(model)
    embedding, output, layers = target.embedding, target.head_weight, target.num_layers
    if form == "mtp":
        return MtpHead(model.get_decoder(), block_config(config, sparse=False), embedding, output)
    sizes = draft_config(target, TrainingOptions(), layers=5)
    if form in ("dflash", "jetspec"):
        taps = [layer + 1 for layer in spread_layers(layers, 5)]
        knobs, mask = LayerKnobs(num_layers=5, qk_norm=True), min(MASK, target.vocab_size - 1)
        return DFlashDraft(sizes, embedding, output, taps, 16, mask, knobs, causal=(form == "jetspec",) * 5)
    if form == "eagle":
        return EagleHead(sizes, embedding, output, fc_bias=False)
    taps, drafted = (2, layers // 2, layers - 3), min(drafted, target.vocab_size)
    if form == "p_eagle":
        knobs = LayerKnobs(num_layers=4)
        head = ParallelEagle3Head(sizes, embedding, taps, target.hidden_size, draft_vocab_size=drafted, layer=knobs)
        head.mask_token_id = target.vocab_size - 1
    else:
        head = Eagle3Head(sizes, embedding, taps, target.hidden_size, draft_vocab_size=drafted)
    head.draft_to_target = torch.arange(drafted)
    return head


def draft_bytes(draft: torch.nn.Module, steps: int) -> int:
    """Bytes of the draft's weights that a round of `steps` levels reads."""
    if isinstance(draft, PreTrainedModel):
        weights = sum(p.numel() * p.element_size() for p in draft.parameters())
        return weights * steps if draft.config.tie_word_embeddings else (weights - embedding_bytes(draft)) * steps
    steps = 1 if isinstance(draft, DFlashDraft) else steps
    total, first = 0, 0
    for name, p in draft.named_parameters():
        size = p.numel() * p.element_size()
        if p is draft.head_weight:
            total += size * steps
        elif p is not draft.embedding:
            once = isinstance(draft, Eagle3Head) and name.startswith(("fc", "input_norm"))
            first, total = first + size * once, total + size * (not once) * steps
    return first + total


def embedding_bytes(model: PreTrainedModel) -> int:
    weight = model.get_input_embeddings().weight
    return weight.numel() * weight.element_size()


def separate_ms(fast, nodes: int, repeats: int = 20) -> float:
    """Milliseconds of the same round with the acceptance on the host between two graphs."""
    session = fast.speculation.engine.session(1)
    (look, finish), state = (session.get(half, nodes) for half in (StepKind.LOOK, StepKind.FINISH)), session.state

    def run() -> None:
        logits, *features = look(128)
        choice = logits[0].argmax(-1).tolist()
        path, tokens, parents = [0], state.tree_tokens[0].tolist(), state.tree_parents[0].tolist()
        for node in range(1, nodes):
            if parents[node] == path[-1] and tokens[node] == choice[path[-1]]:
                path.append(node)
        rest = [0] * (nodes - len(path))
        columns = (path + rest, [choice[node] for node in path] + rest)
        accepted = [torch.tensor([column], device="cuda") for column in columns]
        finish(*accepted, torch.tensor([len(path)], device="cuda"), features, 128).tolist()

    times = []
    with torch.no_grad():
        for _ in range(repeats):
            times.append(elapsed(run, fast.device)[1])
            state.lengths.fill_(1000)
    return statistics.median(times) * 1e3


def measure(
    shape: str, names: list[str], model: PreTrainedModel, target_bytes: int, speeds: dict, rounds: Callable
) -> list[dict]:
    """A row for each draft after 1,024 tokens.

    names: drafts to measure; none: all
    target_bytes: bytes that the target reads in a round
    speeds: of `timers.bandwidth`
    rounds: `captured.rounds`
    """
    rows, times = [], {}
    for name, (algorithm, form, options) in DRAFTS[shape].items():
        if names and name not in names:
            continue
        draft = make(form, model)
        begin = time.perf_counter()
        fast = spec_compile.speculate(model, algorithm, draft=draft, max_cache_len=2048, check=False, **options)
        nodes = fast.speculation.engine.runtime.algorithm.plan.nodes
        ms = rounds(fast, 1024, 1, [nodes])[nodes]
        ready = time.perf_counter() - begin
        drafted = draft_bytes(draft, options.get("num_steps", 1))
        row = dict(name=name, nodes=nodes, ms=ms, ready_seconds=ready, **floors(target_bytes + drafted, speeds, ms))
        separate_ms(fast, nodes, 1)  # compiles and captures
        row["separate_ms"] = separate_ms(fast, nodes)
        rows.append(row)
        times[name] = ms
        if (same := name.removesuffix(JOINED)) != name and same in times:
            row["over_alone"] = ms / times[same]
            print(f"  {name}: {row['over_alone']:.3f} times the round of the draft alone")
        print(
            f"  {name}: {ms:.3f} ms, {row['over_copy']:.2f} times the floor of a copy; two graphs and a host "
            f"between them {row['separate_ms']:.3f} ms; ready after {ready:.0f} s", flush=True,
        )  # fmt: skip
        del fast, draft
        torch.cuda.empty_cache()
    return rows
