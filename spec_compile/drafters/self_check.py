"""The choice between readings of a head's flags, by its acceptance on the target's own text.

A head that is read wrongly never breaks the answer, it only drafts tokens that are rejected. So if a checkpoint can be
read in several ways, each is tried on a short text that the target writes itself.
"""

import json

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..capture.admit import Inventory
from ..capture.quantised import with_plain_meaning
from ..compat import CACHE
from ..compile.start import StartArtefact
from ..config import Options
from .modules.eagle import Head
from .shared_draft import tapped_states

TOKENS = 64
"""Length of each text, its two starting tokens included."""
STARTS = 4
"""Texts, each begun by another token."""
STRIDE = 4
"""Second drafts are looked at after every STRIDE-th token."""
SAME = 0.9
"""Least share of tokens that the target chooses again. In 16 bits equal scores are decided one way or the other."""
KEPT = "own_text"


def best_reading(target: Inventory, head: Head, options: Options, drafts: int = 2) -> Head:
    """The head, read as `calibrate` prefers if its checkpoint leaves several readings open and checks are asked for.

    drafts: see `acceptance`; 1 for a head that does not read its own output.
    """
    readings = head.readings() if options.check else []
    return calibrate(target.model, readings, own_text(target, options), drafts) if len(readings) > 1 else head


def calibrate(model: PreTrainedModel, readings: list[Head], ids: Tensor, drafts: int = 2) -> Head:
    """The reading with the most drafts accepted after each token of ids [B, T]; the first of equals.

    drafts: see `acceptance`. The report tells its acceptance, and how the other readings did.
    """
    acceptances = [acceptance(model, head, ids, drafts) for head in readings]
    best = max(range(len(readings)), key=lambda i: sum(acceptances[i]))
    head, shares = readings[best], [" and ".join(f"{share:.0%}" for share in each) for each in acceptances]
    looked_at = " and ".join(("first", "second")[:drafts])
    head.report.append(f"self-check: {shares[best]} of {looked_at} drafts are the target's own tokens")
    others = "; ".join(share for i, share in enumerate(shares) if i != best)
    head.report.append(f"the best of {len(readings)} readings; the others: {others}")
    return head


@torch.no_grad()
def acceptance(model: PreTrainedModel, head: Head, ids: Tensor, drafts: int = 2) -> tuple[float, ...]:
    """The share of the first draft, or of the first and of the second, that are the target's choice.

    ids: [B, T] int64, T at least 3. drafts: 1, or 2, which also looks at the second draft after every STRIDE-th token.
    """
    # The first draft: each slot pairs a state with the token after it, [B, T - 1, H].
    features, choices = tapped_states(model, head.taps, ids)
    (batch, size), device = ids.shape, ids.device
    positions = torch.arange(size - 1, device=device)
    state = head.project([feature[:, :-1] for feature in features])
    recycled, normed = head(ids[:, 1:], positions.expand(batch, -1), state)
    first = _share(head, normed, choices[:, 1:])
    if drafts == 1:
        return (first,)
    # The second draft follows the text, too, but its state is the head's own output. So each slot in which it is looked
    # at needs a separate sequence, with the state of that slot replaced.
    after = torch.arange(1, size - 1, STRIDE, device=device)
    copies = state.repeat_interleave(len(after), dim=0)
    rows, after = torch.arange(len(copies), device=device), after.repeat(batch)
    origin = rows // (len(copies) // batch)
    copies[rows, after] = recycled[origin, after - 1]
    _, normed = head(ids[origin, 1:], positions.expand(len(rows), -1), copies)
    return first, _share(head, normed[rows, after], choices[origin, after + 1])


def _share(head: Head, normed: Tensor, choices: Tensor) -> float:
    drafts = F.linear(normed, head.head_weight).argmax(dim=-1)
    drafts = drafts if head.draft_to_target is None else head.draft_to_target[drafts]
    return float((drafts == choices).float().mean())


@torch.no_grad()
def own_text(target: Inventory, options: Options) -> Tensor:
    """Greedy texts of the target [STARTS, TOKENS], each after its start token and one of the vocabulary.

    They are kept with the artefacts, because a forward of them all takes less than one for each token. Texts that other
    weights wrote are not the target's choices, so they are written anew. `options` name the folder.
    """
    artefact = StartArtefact(target.model, None, options, KEPT, {})
    text = _read(target, artefact.recall(KEPT))
    if text is None:
        text = _write(target)
        artefact.keep(KEPT, json.dumps(text.tolist()).encode())
    return text


def _read(target: Inventory, data: bytes | None) -> Tensor | None:
    """The texts in `data`; None if the target would write others."""
    try:
        text = torch.tensor(json.loads(data or "[]"), device=target.device)
    except (ValueError, TypeError):
        return None
    if text.shape != (STARTS, TOKENS) or text.is_floating_point():
        return None
    if not 0 <= text.min() <= text.max() < target.vocab_size:
        return None
    _, choices = tapped_states(target.model, (), text)
    return text if (choices[:, 1:-1] == text[:, 2:]).float().mean() >= SAME else None


def _write(target: Inventory) -> Tensor:
    start = target.config.bos_token_id
    second = torch.linspace(0, target.vocab_size - 1, STARTS + 2)[1:-1].long()
    first = torch.full_like(second, start if isinstance(start, int) else 0)
    ids = torch.stack([first, second], dim=1).to(target.device)
    text, cache, model = ids, None, with_plain_meaning(target.model)
    while text.shape[1] < TOKENS:
        out = model(input_ids=ids, use_cache=True, **{CACHE: cache})
        ids, cache = out.logits[:, -1:].argmax(dim=-1), getattr(out, CACHE)
        text = torch.cat([text, ids], dim=1)
    return text
