"""Drafts of blocks in training: loss and acceptance against blocks that are drafted one by one, by the formulas."""

import math
from unittest import mock

import dflash_drafts as dflash_formulas
import pytest
import torch
from torch.nn import functional as F
from trainings import SMALL, made

from spec_compile.kernels import ops
from spec_compile.train import attention as block_attention
from spec_compile.train import blocks
from spec_compile.train.blocks import GAMMA, UNLINKED
from spec_compile.train.heads import KEPT, LEAST
from spec_compile.train.loss import DPACE, FIXED
from spec_compile.train.trainer import trained_parameters


def slow_blocks(model, documents, trainer, features):
    """(document, anchor, logits [T, V], those without a transition, the rest that a loss may need) of each block."""
    tensors = {name: value.detach() for name, value in trainer.publish()[1].items()}
    embedding, output = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    meaning = dflash_formulas.Meaning(causal=(trainer.name == "jetspec",) * 2)
    for row, document in enumerate(documents):
        ids = document.ids.long()
        for anchor in range(1, len(ids) - 1):
            if not document.supervised[anchor + 1]:
                continue
            if trainer.name == "p_eagle":
                logits = masked_logits(trainer.module, ids, [state[row] for state in features.states], anchor)
                yield row, anchor, logits, logits, None
                continue
            context = [state[row, :anchor] for state in features.states[:-1]]
            states = dflash_formulas.block_states(
                tensors, embedding, context, int(ids[anchor]), trainer.block_size, meaning, mask=trainer.mask,
                theta=10000.0,
            )  # fmt: skip
            base, states = torch.tensor(states @ output.numpy().T), torch.tensor(states)
            before = ids[(anchor + torch.arange(trainer.block_size)).clamp(max=len(ids) - 1)]
            logits, predicted = linked(trainer, tensors, embedding, base, states, before)
            yield row, anchor, logits, base, predicted


def masked_logits(head, ids, states, anchor):
    """Logits [T, V] of P-EAGLE: the text up to the anchor and masks after it, as one causal sequence."""
    masks = SMALL["p_eagle"]["num_depths"] - 1
    state = head.project([tapped[None, :anchor] for tapped in states])
    mask = head.project(list(head.mask_hidden.chunk(len(states), -1))).expand(-1, masks, -1)
    tokens = torch.cat([ids[1 : anchor + 1], torch.full((masks,), head.mask_token_id)])[None]
    with mock.patch.object(ops, "attention", differentiable), torch.no_grad():
        _, normed = head(tokens, torch.arange(tokens.shape[1])[None], torch.cat([state, mask], dim=1))
    return normed[0, anchor - 1 :] @ head.head_weight.T.detach()


def differentiable(q, k, v, sinks, scale, window, softcap, layer, chosen=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def linked(trainer, t, embedding, base, states, before):
    """Logits with the transition, and the predictions of acceptance, by the formulas of the papers."""
    if trainer.name == "dspark":
        words, row = t["markov_head.markov_w1.weight"][before], t["confidence_head.proj.weight"][0]
        predicted = torch.cat([states, words], dim=1) @ row + t["confidence_head.proj.bias"]
        return base + words @ t["markov_head.markov_w2.weight"].T, predicted
    if trainer.name == "domino":
        gru = torch.nn.GRU(states.shape[1], trainer.module.transition.state_size, bias=False, dtype=torch.float64)
        gru.load_state_dict({name.removeprefix("prefix_gru."): t[name] for name in t if name.startswith("prefix_gru")})
        wide = torch.cat([states, gru(embedding[before])[0].detach()], dim=1) @ t["embed_proj.0.weight"].T
        bias = (wide * wide.sigmoid()) @ t["embed_proj.2.weight"].T
        return torch.cat([base[:UNLINKED], (base + bias)[UNLINKED:]]), None
    return base, None


def fixed_weight(trainer, depth):
    """The weight of the draft `depth` places after the first."""
    if trainer.name in ("jetspec", "p_eagle"):
        return 1.0 if trainer.name == "jetspec" else max(KEPT**depth, LEAST)
    return math.exp(-depth / (GAMMA if trainer.name == "dspark" else trainer.block_size / 2))


def distance(trainer, logits, base, predicted, teacher):
    """The loss of one draft."""
    p, log_q = teacher.softmax(-1), logits.log_softmax(-1)
    entropy = float(-p @ log_q)
    if trainer.name == "domino":  # at half of the time in which the other part fades
        return 0.5 * entropy + 0.5 * float(-p @ base.log_softmax(-1))
    if trainer.name != "dspark":
        return entropy
    l1 = float((p - log_q.exp()).abs().sum())
    chance = 1 - l1 / 2
    predicted = chance * math.log(predicted.sigmoid()) + (1 - chance) * math.log(1 - predicted.sigmoid())
    return 0.1 * entropy + 0.9 * l1 - predicted


CASES = [("dflash", 1, FIXED), ("dflash", 256, FIXED), ("jetspec", 10, FIXED), ("p_eagle", 7, FIXED)]
CASES += [("dspark", 10, FIXED), ("domino", 256, FIXED), ("dflash", 256, DPACE)]


@pytest.mark.parametrize(("algo", "together", "weights_by"), CASES)
def test_blocks_learn_what_blocks_draft(algo, together, weights_by):
    model, documents, trainer, batch, features = made(algo, **SMALL[algo], per_position_loss_weight=weights_by)
    trainer.share = 0.25
    logits, first = model(batch.ids).logits.detach(), trainer.first
    total = weights = 0.0
    counts = [[0, 0] for _ in range(trainer.steps)]
    for row, anchor, drafted, base, predicted in slow_blocks(model, documents, trainer, features):
        document, alive, reach, rows = documents[row], True, 1.0, []
        for depth, slot in enumerate(range(first, trainer.block_size)):
            place = anchor + 1 + depth
            if place >= len(document.ids) or not document.supervised[place]:
                break
            teacher = logits[row, place - 1]
            told = None if predicted is None else predicted[slot]
            reach *= 0.5 * float(drafted[slot].softmax(-1)[teacher.argmax()]) + 0.5
            rows.append(
                (distance(trainer, drafted[slot], base[slot], told, teacher), fixed_weight(trainer, depth), reach)
            )
            alive = alive and int(drafted[slot].argmax()) == int(teacher.argmax())
            counts[depth][0] += 1
            counts[depth][1] += alive
        for depth, (lost, weight, _) in enumerate(rows):
            weight = sum(reached for *_, reached in rows[depth:]) if weights_by == DPACE else weight
            total, weights = total + weight * lost, weights + weight
    with mock.patch.object(block_attention, "ROWS", together), mock.patch.object(blocks, "POSITIONS", 1):
        got = trainer.loss(batch, features, torch.Generator().manual_seed(1))
        assert list(map(list, trainer.accepted(batch, features, trainer.steps))) == counts
    assert got.item() == pytest.approx(total / weights, rel=1e-5)
    got.backward()
    assert all(p.grad.abs().sum() > 0 for p in trained_parameters(trainer.module).values())


def test_blocks_begin_at_random_places():
    _, documents, trainer, batch, _ = made("dflash", block_size=16)
    draws = [trainer.draw_blocks(batch, 3, torch.Generator().manual_seed(seed)) for seed in range(40)]
    for row, document in enumerate(documents):
        possible = {n for n in range(1, len(document.ids) - 1) if document.supervised[n + 1]}
        real = [draw.anchors[row][draw.counted[row, :, 1]].tolist() for draw in draws]
        assert set().union(*real) == possible
        assert all(len(set(anchors)) == len(anchors) == 3 for anchors in real)
    everything = trainer.draw_blocks(batch, 99, torch.Generator().manual_seed(0))
    assert everything.anchors.shape[1] == 10
    assert everything.counted[1, :, 1].sum() == 7 and not everything.counted[1, 7:].any()


def test_further_blocks_have_no_counted_slots():
    _, _, trainer, batch, _ = made("dflash", block_size=5)
    drawn = trainer.draw_blocks(batch, 3, torch.Generator().manual_seed(0))
    filled = drawn.filled(7)
    assert filled.anchors.shape[1] == 7 and torch.equal(filled.anchors, filled.anchors.sort(dim=1).values)
    assert torch.equal(filled.counted[:, :3], drawn.counted) and not filled.counted[:, 3:].any()
    for mine, theirs in zip(filled.slots()[1], drawn.slots()[1]):
        assert mine == theirs
