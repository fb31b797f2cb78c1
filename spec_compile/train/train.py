"""`train_draft`: a draft head for a model of one's own, in one call."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..capture import copies
from ..capture.admit import admit_training
from ..capture.replaced import is_compiled, underlying
from ..cli import tell
from ..config import describe, parse_options
from ..drafters.checkpoints.files import Target
from ..errors import did_you_mean
from ..runtime.generate import SpeculativeMixin
from . import data as texts
from .blocks import DFlashTrainer, DominoTrainer, DSparkTrainer, JetSpecTrainer
from .corpus import Sets, check_prompts, continued, cut_all, longest_sequence, read_all, together
from .data import Batch, Batches, Document
from .features import TargetFeatures
from .heads import Eagle3Trainer, EagleTrainer, MtpTrainer, PEagleTrainer
from .loop import Loop, Printer, Progress
from .options import TrainingOptions
from .save import Repository, TrainingState, fingerprint, open_folder, save_head, write_card, write_door
from .trainer import Trainer

TRAINERS: dict[str, type[Trainer]] = {
    trainer.name: trainer
    for trainer in (
        Eagle3Trainer, EagleTrainer, MtpTrainer, DFlashTrainer, JetSpecTrainer, DSparkTrainer, DominoTrainer,
        PEagleTrainer,
    )
}  # fmt: skip
"""The algorithms whose drafts can be trained. A new one is one file in this folder and one entry."""
ALIASES = {"nextn": "mtp"}
SOME_SUPPORT = frozenset().union(*(trainer.supports for trainer in TRAINERS.values()))
"""Options that only some algorithms have."""
FREE = ("steps", "minutes", "checkpoint_minutes")
"""Options that may have changed when a training goes on."""
IN_CARD = (*FREE, "batch_size", "seed", "learning_rate", "sequence_length")
"""Options that are no part of the card's line of settings: they have another line, or none."""
HELD_OUT_TOKENS, GLANCE_TOKENS = 1 << 16, 1 << 13
"""Held-out tokens on which acceptance is measured: in the end, and during the training."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of `train_draft`.

    path: the folder with the head
    acceptance: the share of first drafts on held-out text that equal the target's choice, or None without such text
    acceptance_by_depth: the share of drafts that equal it down to depth 1, 2, ...
    acceptance_by_set: the same for each held-out set that has a name
    losses: one a step
    evaluations: (step, acceptance) during the training, measured on a part of the held-out text
    steps: updates of the weights
    tokens: trained on, counted again in each epoch
    seconds: time of training, including the time before an interruption
    """

    path: Path
    acceptance: float | None
    acceptance_by_depth: list[float]
    acceptance_by_set: dict[str, list[float]]
    losses: list[float]
    evaluations: list[tuple[int, float]]
    steps: int
    tokens: int
    seconds: float

    def __str__(self) -> str:
        depths = " ".join(f"{share:.2f}" for share in self.acceptance_by_depth) or "not measured"
        return f"{self.path}: {self.steps} steps, {self.tokens:,} tokens, {self.seconds:.0f} s; accepted {depths}"


def train_draft(
    model: PreTrainedModel,
    algo: str = "eagle3",
    *,
    data,
    output: str | Path,
    tokenizer=None,
    validation=0.05,
    on_policy: bool | dict = False,
    resume: bool = True,
    progress: Callable[[Progress], None] | None = None,
    push: str | None = None,
    private: bool | None = None,
    license: str | None = None,
    **options,
) -> TrainingResult:
    """Train a draft head for `model` and write it to folder `output`, for ``speculate(model, algo, draft=output)``.

    model: a causal language model of transformers, or peft's wrapper around one, in eval mode. It does not change. The
        head is trained on its device, in mixed precision on a GPU or if the model has 16 bits.
    algo: "eagle3", "eagle", "mtp", "p_eagle", "dflash", "jetspec", "dspark" or "domino"
    data: texts, lists of token ids, conversations, or a .txt or .jsonl file of them (`read`)
    output: a new folder, or the folder of a training to go on with
    tokenizer: the model's, if the data is text
    validation: the held-out share of documents, 0, or texts as in `data`; a folder or a mapping of names has sets
    on_policy: True, or options for ``generate()``, to train on the model's own answers to prompts, which need no others
    resume: True to go on with the training in `output`, whose head is the same as without the interruption
    progress: called with a `Progress` about every ten seconds, at first more often (default: it is shown on stderr)
    push: a repository of the model hub, USER/NAME, to which the trained head is sent. It is made before the training
    private: True to make that repository private (default: as the account says)
    license: the head's license, for its card (default: the card has none)
    options: the fields of `TrainingOptions`, which are listed below

    Raises TypeError, ValueError or UnsupportedModelError, naming the argument, before any work starts, and
    PermissionError or ConnectionError if the user may not write to `push` or the hub cannot be asked. Keeps a
    checkpoint and raises FloatingPointError if the loss becomes infinite or NaN, or KeyboardInterrupt after Ctrl-C.
    """
    model = _plain(model)
    repository = _check_arguments(output, on_policy, resume, progress, push, private, license)
    trainer_class, parsed = _trainer_and_options(algo, options)
    admit_training(model)
    target, folder, line = Target.of(model), Path(output).expanduser(), (lambda text: None) if progress else tell
    line(f"reading the text for {type(model).__name__}")
    documents, held_out = read_all(data, validation, tokenizer, target, parsed.seed, on_policy is not False)
    with torch.inference_mode(False), torch.enable_grad():
        trainer, pieces, reserve, state = _prepare(
            trainer_class, target, parsed, documents, held_out, folder, on_policy, resume, repository, line
        )
        glance, measured = _held_out_batches(reserve, parsed.batch_size)
        about = _about(data, pieces, measured, target, parsed, on_policy is not False)
        line(f"training on {about['sequences']}, {about['text']}; held out: {about['held-out text']}")
        publish = partial(_publish, model, trainer, about, folder, push or str(folder.resolve()), license)
        inputs = TargetFeatures(model, trainer.taps, trainer.kept), Batches(pieces, parsed.batch_size, parsed.seed)
        with Printer() if progress is None else nullcontext(progress) as report:
            loop = Loop(trainer, *inputs, glance, measured, parsed, state, folder, publish, report)
            acceptance = loop.run()
    if repository is not None:
        line(f"sent to {repository.send(folder, f'{trainer.name} draft after {state.step} steps')}")
    done = state.losses, state.evaluations, state.step, state.tokens, state.seconds
    return TrainingResult(folder, acceptance[0] if acceptance else None, acceptance, loop.by_set, *done)


train_draft.__doc__ = "\n".join(
    [inspect.cleandoc(train_draft.__doc__ or ""), "", "Options:", *describe(TrainingOptions)]
)


def _prepare(
    trainer_class: type[Trainer], target: Target, options: TrainingOptions, documents: list[Document], held_out: Sets,
    folder: Path, on_policy: bool | dict, resume: bool, repository: Repository | None,
    line: Callable[[str], None],
) -> tuple[Trainer, list[Document], Sets, TrainingState]:  # fmt: skip
    """The trainer, documents and sets in pieces, and the state. The folder and the repository are made if need be.

    The head is built and the text is checked before that, and before the model writes answers.
    """
    model, length = target.model, longest_sequence(options, target)
    trainer = trainer_class(target, options, texts.count_tokens(documents, target.vocab_size))
    if on_policy is False:
        pieces, reserve = cut_all(documents, held_out, length, trainer.shortest)
    else:
        check_prompts(documents, held_out, length, trainer.shortest)
    identity = _identity(trainer_class, model, options, documents + together(held_out), on_policy)
    state = open_folder(folder, identity, resume)
    if repository is not None:
        repository.make()
    if on_policy is not False:
        documents, held_out = continued(folder, identity, model, documents, held_out, length, on_policy, line)
        # The answers have other counts of tokens, which decide the tokens that the head can draft.
        trainer = trainer_class(target, options, texts.count_tokens(documents, target.vocab_size))
        pieces, reserve = cut_all(documents, held_out, length, trainer.shortest)
    return trainer, pieces, reserve, state


def _held_out_batches(reserve: Sets, batch_size: int) -> tuple[list[Batch], dict[str, list[Batch]]]:
    """Held-out batches to look at during the training, and each set's batches to measure in the end."""
    each = HELD_OUT_TOKENS // max(1, len(reserve))
    measured = {name: texts.sample(part, batch_size, each) for name, part in reserve.items()}
    return texts.sample(together(reserve), batch_size, GLANCE_TOKENS), measured


def _check_arguments(output, on_policy, resume, progress, push, private, license) -> Repository | None:
    """The repository to push to. TypeError or ValueError names the first argument that is wrong."""
    for name, value, fits, expected in (
        ("on_policy", on_policy, isinstance(on_policy, bool | dict), "True, False or options for generate()"),
        ("output", output, isinstance(output, str | Path), "the path of a folder"),
        ("resume", resume, isinstance(resume, bool), "True or False"),
        ("progress", progress, progress is None or callable(progress), "a function of a `Progress`"),
        ("push", push, isinstance(push, str | None), "the name of a repository, USER/NAME"),
        ("private", private, isinstance(private, bool | None), "True or False"),
        ("license", license, isinstance(license, str | None), "the name of a license, such as 'apache-2.0'"),
    ):
        if not fits:
            raise TypeError(f"{name}: expected {expected}, got {type(value).__name__}")
    if push is None and private is not None:
        raise ValueError("private: without push nothing is sent to the model hub; pass push='USER/NAME', too")
    return None if push is None else Repository(push, private)


def _publish(
    model: PreTrainedModel, trainer: Trainer, about: dict, folder: Path, draft: str, license: str | None, facts: dict,
    acceptance: list[float],
) -> None:  # fmt: skip
    """Write the head as it is now. Its card has `about`, facts of the training, and `facts` of its progress.

    draft: the path or the name under which users find the head.
    """
    card = write_card(model, trainer.name, about | facts, acceptance, draft, license)
    texts = {"README.md": card, **write_door(trainer.name, draft)}
    save_head(folder, *trainer.publish(), model.dtype, texts)


def _about(
    data: Any, pieces: list[Document], held_out: dict[str, list[Batch]], target: Target, options: TrainingOptions,
    on_policy: bool,
) -> dict:  # fmt: skip
    """The facts of a training for the head's card. data: the user's argument."""
    length, device = longest_sequence(options, target), target.model.device
    settings = [(field.name, getattr(options, field.name)) for field in fields(options) if field.name not in IN_CARD]
    return {
        "data": Path(data).name if isinstance(data, str | Path) else "texts of the caller",
        "sequences": f"{len(pieces):,} of up to {length} tokens",
        "text": f"{sum(len(piece.ids) for piece in pieces):,} tokens" + (", the model's own" if on_policy else ""),
        "held-out text": f"{sum(batch.tokens for batch in together(held_out)):,} tokens",
        "batch size": options.batch_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "seed": options.seed,
        "settings": ", ".join(f"{name} {value}" for name, value in settings if value is not None),
    }


def _identity(
    trainer_class: type[Trainer], model, options: TrainingOptions, documents: list[Document], on_policy
) -> dict:
    """The values that must be the same for a training to go on."""
    return {
        "algo": trainer_class.name,
        "target": f"{type(model).__name__} {fingerprint(model)}",
        "data": texts.fingerprint(documents),
        "on_policy": repr(on_policy),
        **{field.name: getattr(options, field.name) for field in fields(options) if field.name not in FREE},
    }


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, without peft's wrapper, `speculate` and ``torch.compile``."""
    model = underlying(model)
    model = copies.base_of(model) if copies.is_wrapped(model) else model
    model = model.speculation.original if isinstance(model, SpeculativeMixin) else model
    return copies.shared_copy(model) if isinstance(model, PreTrainedModel) and is_compiled(model) else model


def _trainer_and_options(algo: str, options: dict) -> tuple[type[Trainer], TrainingOptions]:
    """The algorithm's trainer, and the options checked. ValueError names an option that its heads do not have."""
    if not isinstance(algo, str):
        raise TypeError(f"algo: expected a string, got {type(algo).__name__}")
    name = ALIASES.get(algo.lower(), algo.lower())
    if name not in TRAINERS:
        raise ValueError(f"algo: expected one of {', '.join(TRAINERS)}, got {algo!r}.{did_you_mean(name, TRAINERS)}")
    trainer_class, parsed = TRAINERS[name], parse_options(TrainingOptions, options)
    for option in sorted(SOME_SUPPORT - trainer_class.supports):
        if getattr(parsed, option) is not None:
            raise ValueError(f"{option}: algo={name!r} has no such option")
    return trainer_class, parsed
