"""The text of a training and its held-out sets: read, checked, continued by the target, and cut into pieces."""

import gc
import itertools
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ..api import speculate
from ..drafters.checkpoints.files import Target, load_pickled
from ..errors import UnsupportedModelError
from ..runtime.round import PREFILL_SIZES
from ..tree import MAX_NODES
from . import data as texts
from .data import Document, read
from .options import TrainingOptions
from .save import TEXTS, replace

LONGEST = 2048
"""Tokens of a sequence by default, at most."""
UNNAMED = "held-out text"
"""The name of the held-out set, if there is only one."""
Sets = dict[str, list[Document]]
"""Held-out documents by the name of their set."""


def read_all(data, validation, tokenizer, target: Target, seed: int, on_policy: bool) -> tuple[list[Document], Sets]:
    """The documents of `data` and `validation`: (for training, held out)."""
    share = 0.0 if validation is None else validation
    has_share = isinstance(share, int | float) and not isinstance(share, bool)
    if has_share and not 0 <= share < 1:
        raise ValueError(f"validation: expected a share of the data, from 0 to below 1, got {share}")
    given = {"tokenizer": tokenizer, "vocab_size": len(target.embedding), "on_policy": on_policy}
    documents = read(data, **given)
    if not has_share:
        return documents, {name: read(part, name=_argument(name), **given) for name, part in _named(share).items()}
    documents, held_out = texts.split(documents, share, seed) if share else (documents, [])
    return documents, {UNNAMED: held_out} if held_out else {}


def _named(validation) -> dict[str, object]:
    """The held-out sets by name. A folder has one in each .jsonl or .txt file, named as the file."""
    if isinstance(validation, Mapping):
        return dict(validation)
    if isinstance(validation, str | Path) and (folder := Path(validation).expanduser()).is_dir():
        files = sorted(path for path in folder.iterdir() if path.suffix in (".jsonl", ".txt"))
        if not files:
            raise ValueError(f"validation: {folder} has no .jsonl or .txt file")
        return {path.stem: path for path in files}
    return {UNNAMED: validation}


def together(sets: dict[str, list]) -> list:
    """The items of all sets."""
    return [item for part in sets.values() for item in part]


def longest_sequence(options: TrainingOptions, target: Target) -> int:
    """Tokens of a sequence at most. ValueError if the option asks for more than the target holds."""
    longest = getattr(target.config, "max_position_embeddings", None) or LONGEST
    # Wide batches are padded to a multiple of WIDTH, and the padding must have positions, too.
    longest -= longest % texts.WIDTH if longest > texts.WIDTH else 0
    if options.sequence_length is None:
        return min(LONGEST, longest)
    if options.sequence_length > longest:
        raise ValueError(
            f"sequence_length: {type(target.model).__name__} holds {longest} tokens, got {options.sequence_length}"
        )
    return options.sequence_length


def cut_all(documents: list[Document], held_out: Sets, length: int, shortest: int) -> tuple[list[Document], Sets]:
    """Documents and sets cut into pieces. ValueError if one of them has documents but no piece to learn from."""
    pieces = []
    for name, part in _arguments(documents, held_out, length, shortest):
        pieces.append(texts.cut(part, length, shortest))
        if part and not pieces[-1]:
            longest = max(len(document.ids) for document in part)
            raise ValueError(
                f"{name}: no sequence with a supervised token has the {shortest} tokens that a draft of this depth "
                f"needs; the longest has {longest}. Give more text" + ("" if name == "data" else ", or validation=0")
            )
    return pieces[0], dict(zip(held_out, pieces[1:]))


def check_prompts(documents: list[Document], held_out: Sets, length: int, shortest: int) -> None:
    """ValueError if the data or a held-out set has no prompt that leaves room for an answer."""
    for name, part in _arguments(documents, held_out, length, shortest):
        if part and not any(prompts(document, length) for document in part):
            least = min(len(document.ids) for document in part)
            raise ValueError(
                f"{name}: no prompt leaves room for an answer in the {length} tokens of a sequence; the shortest has "
                f"{least}. Give shorter ones, or raise sequence_length"
            )


def _arguments(
    documents: list[Document], held_out: Sets, length: int, shortest: int
) -> list[tuple[str, list[Document]]]:
    """The documents and each set, after the argument that names them. ValueError if `length` is below `shortest`."""
    if length < shortest:
        raise ValueError(f"sequence_length: a draft of this depth needs at least {shortest} tokens, got {length}")
    return [("data", documents), *((_argument(name), part) for name, part in held_out.items())]


def _argument(name: str) -> str:
    """The argument that names a set, for errors."""
    return "validation" if name == UNNAMED else f"validation[{name!r}]"


def continued(
    folder: Path, identity: dict, model: PreTrainedModel, documents: list[Document], held_out: Sets, length: int,
    on_policy: bool | dict, line: Callable[[str], None],
) -> tuple[list[Document], Sets]:  # fmt: skip
    """Documents and sets as the model continues them.

    The answers are kept in `folder` and read again when the training of this identity goes on.
    """
    path = folder / TEXTS
    stored = load_pickled(path) if path.is_file() else {}
    if stored.get("identity") != identity:
        options = on_policy if isinstance(on_policy, dict) else {}
        parts = [documents, *held_out.values()]
        answers = iter(continue_documents(model, [*itertools.chain(*parts)], length, identity["seed"], options, line))
        # The answers come in the order of the prompts, of which a document may have several.
        counts = [sum(len(prompts(document, length)) for document in part) for part in parts]
        pairs = [[(each.ids, each.supervised) for each in itertools.islice(answers, count)] for count in counts]
        stored = {"identity": identity, "texts": pairs}
        replace(path, lambda partial: torch.save(stored, partial))
    documents, *sets = ([Document(*pair) for pair in part] for part in stored["texts"])
    return documents, dict(zip(held_out, sets))


# On-policy text: the target continues prompts, so that a draft learns from texts like those that it will draft.

ROWS = {"cpu": 32, "cuda": 128}
"""Prompts in a batch at most. A small model's step takes a GPU as long as the launches of its kernels, whatever the
number of rows; with more rows than this most of the time goes into reading their keys and values."""
NODES = {"cpu": 1, "cuda": 8}
"""Most nodes of a round, if tokens are not drawn. With this many rows a CPU is bound by arithmetic, so that drafts cost
more than they save; on a GPU each round takes the number that pays."""
TOKENS = 1 << 17
"""Tokens of all prompts of a batch at most, because one prefill processes them all."""
CACHE, SHARE = 1 << 32, 0.25
"""Bytes that the keys and values of a batch may take on a CPU, and the share of a GPU's free memory."""
CORPUS = 1 << 17
"""Tokens of earlier texts from which n-grams are drafted on a GPU. They are few because each round searches all."""


@torch.no_grad()
def continue_documents(
    model: PreTrainedModel, documents: list[Document], length: int, seed: int, options: dict,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Document]:  # fmt: skip
    """The documents' `prompts`, each followed by the target's answer. Only the answers are supervised.

    model: in eval mode; it does not change
    length: tokens of a prompt and its answer at most
    seed: seeds the draws; the global random state does not change
    options: for ``model.generate()``
    tell: called with a line before the first answer and after the last

    `speculate` accelerates the model. If it refuses, transformers' own loop runs, with one warning.
    """
    asked = [prompt for document in documents for prompt in prompts(document, length)]
    if not asked:
        return []
    longest = max(map(len, asked))
    tokens = longest + (options.get("max_new_tokens") or length - longest)
    batches = -(-len(asked) // most_rows(model, longest, tokens))
    # All batches have one size, because each size is captured by itself: the longest prompt fills the last batch.
    rows = -(-len(asked) // batches)
    order = sorted(range(len(asked)), key=lambda n: len(asked[n]))
    order += order[-1:] * (batches * rows - len(order))
    tell(f"{type(model).__name__} writes {len(asked):,} answers, {rows} at a time")
    begin, answers = time.perf_counter(), {}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        fast = accelerate(model, rows, tokens, options)
        torch.manual_seed(seed)
        for first in range(0, len(order), rows):
            batch = order[first : first + rows]
            answers |= zip(batch, _continue(fast, [asked[n] for n in batch], length, options))
    del fast
    gc.collect()  # graphs and caches hold each other in cycles, and their memory is needed now
    if devices:
        torch.cuda.empty_cache()
    written = sum(int(document.supervised.sum()) for document in answers.values())
    tell(f"{len(asked):,} answers of {written:,} tokens in {time.perf_counter() - begin:.0f} s")
    return [answers[n] for n in range(len(asked))]


def prompts(document: Document, length: int) -> list[list[int]]:
    """The parts of a document that the target shall continue, each as token ids.

    This is the text before the last supervised part, if it is shorter than `length`. A text that is fully supervised is
    cut into pieces of `length` tokens, and the first half of each is a prompt.
    """
    ids, supervised = document.ids, document.supervised
    if bool(supervised.all()):
        pieces = [ids[begin : begin + length] for begin in range(0, len(ids), length)]
        return [piece[: (len(piece) + 1) // 2].tolist() for piece in pieces]
    unsupervised = (~supervised).nonzero()[:, 0]
    prompt = ids[: int(unsupervised[-1]) + 1]
    return [prompt.tolist()] if len(prompt) < length else []


def most_rows(model: PreTrainedModel, longest: int, tokens: int) -> int:
    """Prompts in a batch at most. longest: tokens of a prompt. tokens: of a prompt with its answer."""
    config, device = model.config.get_text_config(decoder=True), model.device
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slots = tokens + MAX_NODES + PREFILL_SIZES[device.type][0]  # rounds and prefill write past the end of the text
    row_bytes = 2 * config.num_hidden_layers * heads * head_dim * slots * model.dtype.itemsize
    memory = int(SHARE * torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else CACHE
    return max(1, min(ROWS[device.type], memory // row_bytes, TOKENS // longest))


def accelerate(model: PreTrainedModel, rows: int, tokens: int, options: dict) -> PreTrainedModel:
    """A speculative model for batches of `rows` texts of up to `tokens` tokens, or `model` if `speculate` refuses.

    Linear layers are not merged, because that would move the model's weights. Nothing is compiled by Inductor, because
    that would take longer than the answers; on a GPU, rounds are captured as CUDA graphs.
    """
    drawn = options.get("do_sample", model.generation_config.do_sample)
    nodes = 1 if drawn else NODES[model.device.type]
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    try:
        fast = speculate(
            model, "ngram", num_draft_tokens=nodes, max_cache_len=min(tokens, positions or tokens), compile=False,
            merge_linears=False, capacity=CORPUS,
        )  # fmt: skip
        fast.speculation.warmup(rows)
    except (UnsupportedModelError, RuntimeError) as error:  # a RuntimeError means that a round cannot be captured
        warnings.warn(
            f"on_policy: transformers' own generate() writes the answers, without speculation, because speculate() "
            f"cannot serve this model: {error}",
            stacklevel=2,
        )
        return model
    return fast


def _continue(model: PreTrainedModel, asked: list[list[int]], length: int, options: dict) -> list[Document]:
    """One batch of prompts, each with its answer up to the first end of sequence."""
    config = model.generation_config
    ends = options.get("eos_token_id", config.eos_token_id)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    width = max(map(len, asked))
    pad = next((token for token in (config.pad_token_id, *ends) if token is not None), 0)
    # Prompts are padded on the left, so that all answers begin at the same column.
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in asked])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked])
    out = model.generate(
        ids.to(model.device), attention_mask=mask.to(model.device),
        **{"max_new_tokens": length - width, "pad_token_id": pad, **options},
    )  # fmt: skip
    documents = []
    for prompt, row in zip(asked, out[:, width:].tolist()):
        end = next((count for count, token in enumerate(row, 1) if token in ends), len(row))
        supervised = torch.zeros(len(prompt) + end, dtype=torch.bool)
        supervised[len(prompt) :] = True  # guard: supervised-tokens
        documents.append(Document(torch.tensor(prompt + row[:end], dtype=torch.int32), supervised))
    return documents
