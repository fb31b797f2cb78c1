"""Draft models with another tokenizer than the target: their tokens as tokens of the target.

Token-Level Intersection (TLI; Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms
for Heterogeneous Vocabularies", arXiv:2502.05202): the draft drafts only tokens that are in both vocabularies. So the
probabilities that it draws from are its own, restricted to them and renormalised, and verification stays as it is. vLLM
does the same (`vllm/v1/spec_decode/vocab_mapping.py`), and so does transformers (`AssistantToTargetTranslator`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..capture.admit import Inventory
from ..capture.quantised import output_matrix
from ..drafters import ALGORITHMS, draft_model
from ..drafters.options import DraftOptions

SPACE, BYTE_SPACE = "▁", "Ġ"
"""A space in the vocabularies of SentencePiece, and in those over bytes (GPT-2)."""
ROLES = "eos_token_id", "bos_token_id"
"""Special tokens that stand for each other in vocabularies with different names for them."""

Content = bytes | str
"""The bytes of a token, or the name of a special one."""


class CommonTokens(draft_model.SameTokens):
    """The mapping of two tokenizers: the tokens that are in both vocabularies.

    draft_to_target: [Vc] int64; see `SameTokens`.
    columns: [Vc] int64; the draft's ids of the same tokens.
    target_to_draft: [V] int64; the id that the draft reads for each of the target's.
    sizes: tokens of the target and of the draft, without padding.

    The draft reads a token without a counterpart as one of its tokens, the longest end of its bytes: " define" as
    "ine" if "define" and "fine" are no tokens. So slot t of the draft's cache holds token t of the text, as ever.
    """

    def __init__(self, draft_to_target: Tensor, columns: Tensor, target_to_draft: Tensor, sizes: tuple[int, int]):
        self.draft_to_target, self.columns, self.target_to_draft = draft_to_target, columns, target_to_draft
        self.sizes = sizes

    @property
    def share(self) -> float:
        return len(self.columns) / self.sizes[0]

    def read(self, ids: Tensor) -> Tensor:
        return self.target_to_draft[ids.clamp(max=len(self.target_to_draft) - 1)]

    def logits(self, logits: Tensor) -> Tensor:
        return logits.index_select(-1, self.columns)

    def explain(self) -> list[str]:
        count, (size, draft_size) = len(self.columns), self.sizes
        return [
            f"the draft has a tokenizer of its own: {count} tokens are in both vocabularies, {self.share:.0%} of the "
            f"model's {size} and {count / draft_size:.0%} of the draft's {draft_size}; only these are drafted"
        ]


def common_tokens(
    tokenizer: PreTrainedTokenizerBase, assistant_tokenizer: PreTrainedTokenizerBase, size: int, draft_size: int,
    least: int = 1,
) -> CommonTokens:  # fmt: skip
    """The mapping of a target's tokenizer and its draft's, on the default device.

    size, draft_size: rows of both output matrices.

    Tokens are the same if their bytes are, special tokens if their names are. The ends of a text stand for each other
    if they have other names, and so do its beginnings. The first of equal tokens in one vocabulary is taken. ValueError
    if fewer than `least` tokens are in both.
    """
    # The tokens with the same content: the draft's id -> the target's.
    ours, ids = _contents_below(tokenizer, size)
    theirs, draft_ids = _contents_below(assistant_tokenizer, draft_size)
    pairs = {draft_ids[key]: i for key, i in ids.items() if key in draft_ids}
    if len(pairs) < least:
        raise ValueError(
            f"draft: {len(pairs) / len(ours):.0%} of the model's vocabulary, {len(pairs)} of {len(ours)} tokens, are "
            f"also the draft's; expected {least} or more: pass a draft whose tokenizer has more of the same tokens"
        )
    # Ends and beginnings of a text, whatever their names.
    roles = dict[int, int]()
    for role in ROLES:
        i, draft = getattr(tokenizer, role), getattr(assistant_tokenizer, role)
        if i in ours and i not in roles and ours[i] not in draft_ids and draft in theirs:
            roles[i] = draft
            pairs.setdefault(draft, i)
    # The token that the draft reads for each of the target's.
    fallback = next((i for i in (assistant_tokenizer.unk_token_id, assistant_tokenizer.eos_token_id) if i in theirs), 0)
    read = [fallback] * size
    for i, key in ours.items():
        read[i] = roles[i] if i in roles else next((draft_ids[end] for end in _ends(key) if end in draft_ids), fallback)
    # The drafted tokens, in the order of the draft's ids.
    columns = torch.tensor(sorted(pairs))
    to_target = torch.tensor([pairs[i] for i in columns.tolist()])
    return CommonTokens(to_target, columns, torch.tensor(read), (len(ours), len(theirs)))


def _contents_below(tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[dict[int, Content], dict[Content, int]]:
    """The tokens below `size`: content by id, and id by content, the first of equal ones."""
    found = {i: key for i, key in contents(tokenizer) if i < size}
    return found, {key: i for i, key in reversed(found.items())}


def _ends(key: Content) -> Iterator[Content]:
    """The ends of a token from itself down: b"abc", b"bc", b"c"; a special token has only itself."""
    return (key[start:] for start in range(len(key))) if isinstance(key, bytes) else iter([key])


def contents(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, Content]]:
    """(id, content) of each token: bytes of text, or the name of a special token; bytes by themselves come last.

    "Ġa" of a vocabulary over bytes and "▁a" of SentencePiece are both b" a"; "Ċ" and "<0x0A>" are both b"\\n".
    """
    added = tokenizer.added_tokens_decoder
    vocab = {token: i for token, i in tokenizer.get_vocab().items() if i not in added}
    is_sentencepiece = any(SPACE in token for token in vocab)
    over_bytes = dict[str, bytes]()
    if not is_sentencepiece and any(BYTE_SPACE in token for token in vocab):
        over_bytes = {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}
    single = list[tuple[int, bytes]]()
    for token, i in sorted(vocab.items(), key=lambda item: item[1]):
        if is_sentencepiece and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            single.append((i, bytes.fromhex(token[3:5])))
        elif over_bytes:
            yield i, b"".join(over_bytes.get(character) or character.encode() for character in token)
        else:
            yield i, token.replace(SPACE, " ").encode()
    for i, token in added.items():
        yield i, token.content if token.special else token.content.encode()
    yield from single


@dataclass(frozen=True)
class DraftModelOptions(DraftOptions):
    """Options of algo="draft_model".

    use_heterogeneous_vocab: the draft has another tokenizer than the model, so that it drafts the tokens that are in
        both vocabularies. It goes without saying if a tokenizer is given.
    tokenizer: the model's, an object, a folder or a name on the hub (default: the one of the model's checkpoint).
    assistant_tokenizer: the draft's (default: the one of its checkpoint).
    """

    use_heterogeneous_vocab: bool = False
    tokenizer: Any = None
    assistant_tokenizer: Any = None


def load_tokenizer(option: str, given: Any, model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer of `model`: the one that an option gives, as an object, a folder or a name on the hub, or, if it
    gives none, the checkpoint's. ValueError or TypeError, naming the option, if there is none."""
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if not isinstance(given, (str, PathLike, type(None))):
        got = type(given).__name__
        raise TypeError(f"{option}: expected a tokenizer of transformers, a folder or a name on the hub, got {got}")
    source, name = given or model.name_or_path, type(model).__name__
    if not source:
        raise ValueError(f"{option}: {name} is not from a checkpoint whose tokenizer could be loaded; pass {option}=")
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: {source} has no tokenizer of {name} ({error}); pass {option}=") from error


def build(target: Inventory, options: DraftModelOptions) -> draft_model.DraftModel:
    """`draft_model.build`, also for a draft with another tokenizer. ValueError or TypeError if a tokenizer is
    missing, or if the two have too few tokens in common."""
    if not options.use_heterogeneous_vocab and options.tokenizer is None and options.assistant_tokenizer is None:
        return draft_model.build(target, options)
    draft = draft_model.open_draft(target, options)
    ours = load_tokenizer("tokenizer", options.tokenizer, target.model)
    theirs = load_tokenizer("assistant_tokenizer", options.assistant_tokenizer, draft)
    with draft.device:
        pairs = common_tokens(ours, theirs, target.vocab_size, output_matrix(draft).shape[0], options.topk)
    return draft_model.DraftModel(draft, draft_model.capture_draft(target, draft, options), options, pairs)


ALGORITHMS["draft_model"] = ALGORITHMS["draft_model"]._replace(options=DraftModelOptions, build=build)
