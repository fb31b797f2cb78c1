"""Whole trainings of draft heads: heads load as they were trained, a training that was interrupted gives the head of
one that was not, and other programs can read what is written."""

import functools
import itertools
import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from position_weights import slow_weights
from safetensors.torch import load_file
from trainings import ALGORITHMS, HEADS, NEEDS_GPU, SMALL, made, sequences, target, train

from spec_compile import speculate
from spec_compile.drafters.checkpoints.files import Target
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.errors import UnsupportedModelError
from spec_compile.train import TRAINERS, save
from spec_compile.train import data as texts
from spec_compile.train.attention import Rollout
from spec_compile.train.blocks import Blocks
from spec_compile.train.blocks import default_taps as block_taps
from spec_compile.train.corpus import cut_all, read_all
from spec_compile.train.data import read
from spec_compile.train.features import TargetFeatures
from spec_compile.train.heads import default_taps, published_layer_ids
from spec_compile.train.loop import Printer, Progress, clock
from spec_compile.train.loss import likeliest
from spec_compile.train.options import TrainingOptions

# Whole trainings


OWN = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
"""Greedy decoding that does not end by itself."""


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


@functools.cache
def overfitted(algo):
    """A head trained on three answers of the target, each of 20 tokens after 10, and evaluated on the same."""
    folder = Path(tempfile.mkdtemp(), algo)
    options = {"eagle": {"steps": 280}, "eagle3": {"steps": 80, "ttt_steps": 3}}.get(algo, {"steps": 100})
    return train(
        folder, algo, data=sequences(3), validation=sequences(3), sequence_length=30, learning_rate=5e-3,
        optimizer="adamw", on_policy=OWN, **options,
    )  # fmt: skip


@pytest.mark.sweep("eagle3")
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_one_batch_is_learned(algo):
    before = {name: value.clone() for name, value in target().state_dict().items()}
    result = overfitted(algo)
    assert result.acceptance >= 0.99
    assert result.acceptance_by_depth[0] == result.acceptance == result.evaluations[-1][1]
    assert result.acceptance_by_depth == sorted(result.acceptance_by_depth, reverse=True)
    assert len(result.losses) == result.steps and result.losses[-1] < 0.7 * result.losses[0]
    assert result.tokens == result.steps * 3 * 30
    assert len(result.evaluations) == 10
    assert all(torch.equal(value, before[name]) for name, value in target().state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in target().parameters())


@pytest.mark.sweep("eagle3 mtp")
@pytest.mark.parametrize("algo", HEADS)
def test_a_head_loads_as_it_was_trained(algo):
    result = overfitted(algo)
    head = load_head(result.path, target(), algo)
    saved = torch.load(result.path / save.STATE, weights_only=True)["weights"]
    assert len(saved) == len([name for name, _ in head.named_parameters() if name not in ("embedding",)]) - (
        0 if algo == "eagle3" else 1
    )
    trainer = TRAINERS[algo](Target.of(target()), TrainingOptions(ttt_steps=None), torch.ones(models.VOCAB).long())
    trainer.module.load_state_dict(saved)
    ids, positions = torch.tensor(sequences())[:, 1:], torch.arange(19).expand(6, -1)
    features = TargetFeatures(target(), head.taps)(torch.tensor(sequences()))
    state = [state[:, :-1] for state in features.states]
    assert head.taps == trainer.taps and torch.equal(head.project(state), trainer.module.project(state))
    outputs = zip(head(ids, positions, head.project(state)), trainer.module(ids, positions, head.project(state)))
    assert all(torch.equal(mine, theirs) for mine, theirs in outputs)
    assert torch.equal(head.head_weight, trainer.module.head_weight)


@pytest.mark.slow
def test_a_dflash_draft_loads_as_it_was_trained():
    result = overfitted("dflash")
    draft = load_head(result.path, target(), "dflash")
    saved, loaded = torch.load(result.path / save.STATE, weights_only=True)["weights"], dict(draft.named_parameters())
    assert saved.keys() == loaded.keys() - {"embedding", "head_weight"}
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
    assert (draft.block_size, draft.taps, draft.sample_from_anchor) == (4, (1, 2), False)
    config = config_of(result.path)
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 4
    texts_seen = torch.load(result.path / save.TEXTS, weights_only=True)["texts"][0]
    said = torch.cat([ids[supervised] for ids, supervised in texts_seen])
    unsaid = max({*range(models.VOCAB)} - set(said.tolist()))
    assert config["dflash_config"] == {"target_layer_ids": [0, 1], "mask_token_id": unsaid}


def drafted_tokens(trainer, text):
    """Of each depth the tokens [B, T] that are drafted from each slot of text [B, T + 1]."""
    features_of, weight = TargetFeatures(target(), trainer.taps), trainer.module.head_weight
    if trainer.name not in SMALL:
        unrolled = trainer.unroll(text, trainer.project(features_of(text).states), Rollout(3), 3)
        return [(normed @ weight.T).argmax(-1) for _, normed in unrolled]
    batch = texts.collate(read(text.tolist(), None, models.VOCAB))
    features = features_of(batch.ids)
    anchors = torch.arange(1, text.shape[1]).expand(len(text), -1)
    shape = (*anchors.shape, trainer.block_size)
    outputs = trainer.outputs(batch, features, Blocks(anchors, torch.ones(shape), torch.zeros(shape)))
    drafts = likeliest([(states.flatten(0, 2), matrix) for states, matrix in zip(outputs, trainer.matrices)])
    return drafts.view(shape).unbind(2)[trainer.first :]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "steps", "options"),
    [
        ("eagle3", 40, {"ttt_steps": 3}), ("eagle", 80, {}), ("mtp", 40, {"ttt_steps": 3}), ("dflash", 60, {}),
        ("jetspec", 55, {}), ("dspark", 45, {"block_size": 3}), ("domino", 30, {"block_size": 3}),
        ("p_eagle", 30, {"num_depths": 3}),
    ],
)  # fmt: skip
@torch.no_grad()
def test_rounds_accept_what_training_unrolls(tmp_path, algo, steps, options):
    """A half-trained head in whole rounds, against what its training unrolls from the slots they start at."""
    prompts, options = torch.tensor(sequences(4))[:, :10], SMALL.get(algo, {}) | options
    schedule = {} if algo in SMALL and algo != "p_eagle" else {"num_steps": 3}
    with torch.enable_grad():
        result = train(
            tmp_path / algo, algo, data=sequences(4), validation=sequences(4), on_policy=OWN, sequence_length=74,
            steps=steps, learning_rate=5e-3, optimizer="adamw", **options,
        )  # fmt: skip
    assert 0.6 < result.acceptance < 0.99
    fast = speculate(
        target(), algo, draft=result.path, adaptive=False, compile=False, check=False, max_cache_len=200, **schedule
    )  # fmt: skip
    text = target().generate(prompts, max_new_tokens=64, **OWN)
    assert torch.equal(fast.generate(prompts, max_new_tokens=64, **OWN), text)

    trainer = TRAINERS[algo](Target.of(target()), TrainingOptions(**options), torch.ones(models.VOCAB).long())
    trainer.module.load_state_dict(torch.load(result.path / save.STATE, weights_only=True)["weights"])
    if algo in SMALL:
        config = config_of(result.path)
        flags = config.get("dflash_config", {})
        trainer.mask = trainer.module.mask_token_id = flags.get("mask_token_id", config.get("ptd_token_id"))
        assert flags.get("causal_head", False) == (algo == "jetspec")
    tokens = drafted_tokens(trainer, text)  # each is kept
    rounds, right = 0, [0] * 3
    for row in range(4):
        root = 10
        while root < 74 - 4:
            gained = 0
            while gained < 3 and tokens[gained][row, root - 1] == text[row, root + 1 + gained]:
                right[gained] += 1
                gained += 1
            rounds, root = rounds + 1, root + 1 + gained
    shares = [count / rounds for count in right]
    assert fast.speculation.stats.acceptance_by_depth == pytest.approx(shares, abs=0.06)  # at the end rounds are cut


@pytest.mark.sweep(2)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_interrupted_training_goes_on_bit_for_bit(tmp_path, algo):
    options = dict(data=sequences(13), validation=0.2, steps=12, batch_size=4, checkpoint_minutes=0)
    whole = train(tmp_path / "whole", algo, **options)
    torch.manual_seed(99)
    with mock.patch("spec_compile.train.loop.REPORT_SECONDS", 0.0):
        for stop in (5, 6, 11):

            def interrupt(progress, stop=stop):
                if progress.step == stop:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                train(tmp_path / "parts", algo, progress=interrupt, **options)
    parts = train(tmp_path / "parts", algo, **options)
    assert parts.losses == whole.losses and parts.evaluations == whole.evaluations
    assert parts.acceptance_by_depth == whole.acceptance_by_depth
    assert (parts.steps, parts.tokens) == (whole.steps, whole.tokens) == (12, whole.tokens)
    mine, theirs = tensors_of(tmp_path / "parts"), tensors_of(tmp_path / "whole")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert len({(tmp_path / name / save.CURVE).read_text() for name in ("parts", "whole")}) == 1
    again = train(tmp_path / "parts", algo, **options)
    assert again.losses == whole.losses and again.acceptance_by_depth == whole.acceptance_by_depth
    longer = train(tmp_path / "parts", algo, **options | {"steps": 14})
    assert longer.losses[:12] == whole.losses and longer.steps == 14


@pytest.mark.slow
def test_text_of_the_targets_own_is_written_once(tmp_path):
    options = dict(on_policy=dict(do_sample=True, temperature=1.5), steps=3, sequence_length=16, seed=3)
    state = torch.get_rng_state()
    first = train(tmp_path / "a", **options)
    assert torch.equal(torch.get_rng_state(), state)
    second = train(tmp_path / "b", **options)
    assert first.losses == second.losses
    with mock.patch("spec_compile.train.corpus.continue_documents", side_effect=AssertionError):
        assert train(tmp_path / "a", **options | {"steps": 4}).losses[:3] == first.losses
    (tmp_path / "b" / save.STATE).unlink()  # as if it had been interrupted before the first checkpoint
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "b" / name).unlink()
    shutil.rmtree(tmp_path / "b" / save.DOOR)
    other = train(tmp_path / "b", **options | {"data": sequences(seed=1)})
    assert other.losses == train(tmp_path / "c", **options | {"data": sequences(seed=1)}).losses


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    folder, options = tmp_path / "head", dict(steps=6, checkpoint_minutes=0)
    whole = train(tmp_path / "whole", **options)
    real, calls = torch.save, []

    def full(content, path):
        calls.append(path)
        real(content, path)
        if len(calls) == 3:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(28, "No space left on device")

    with mock.patch("torch.save", full), pytest.raises(OSError, match="No space"):
        train(folder, **options)
    assert torch.load(folder / save.STATE, weights_only=True)["step"] == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", save.CURVE, save.DOOR, "model.safetensors", save.STATE,
    ]  # fmt: skip
    assert load_head(folder, target(), "eagle3").hidden_size == 64
    assert train(folder, **options).losses == whole.losses


def test_a_process_killed_while_it_writes(tmp_path):
    """Half a file beside the last good one is no file; nor is it in the way of a first training."""
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / f"{save.STATE}.partial").write_bytes(b"half")
    train(folder)
    (folder / f"{save.STATE}.partial").write_bytes(b"half")
    assert train(folder, steps=5).steps == 5


def test_training_by_the_clock(tmp_path):
    result = train(tmp_path / "head", steps=None, minutes=0.02, resume=False)
    assert 1.2 <= result.seconds < 5 and result.steps == len(result.losses) > 3
    assert train(tmp_path / "head", steps=None, minutes=0.02).steps == result.steps


def test_it_says_how_it_goes(tmp_path, capsys):
    seen = []
    with mock.patch("spec_compile.train.loop.REPORT_SECONDS", 0.0):
        train(tmp_path / "a", steps=5, progress=seen.append)
    assert [p.step for p in seen] == [1, 2, 3, 4, 5] and [p.share for p in seen] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert seen[0].acceptance is not None and all(p.loss > 0 and p.tokens_per_second > 0 for p in seen)
    assert seen[-1].seconds_left == 0 < seen[0].seconds_left
    train(tmp_path / "b", steps=5, validation=0, progress=None)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "reading the text for LlamaForCausalLM" and told[1].startswith("training on ")
    assert told[2].startswith(" 20%  step 1  loss ") and told[-1].startswith("100%  step 5  loss ")
    assert "first drafts accepted -  " in told[-1] and "0:00 left" in told[-1]
    with Printer() as printer:
        for step in range(1, 1001):
            printer(Progress(step, step / 1000, 1.0, None, 1.0, 1.0, 1.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line[:4] for line in lines] == ["  0%", *(f"{10 * n:3}%" for n in range(1, 11))]
    assert clock(59.6) == "1:00" and clock(3661) == "1:01:01"
    assert "17.0%" in str(Progress(3, 0.5, 1.0, 0.17, 1e6, 60.0, 60.0))


def test_a_loss_that_overflows(tmp_path):
    options = dict(steps=8, checkpoint_minutes=0)
    with pytest.raises(FloatingPointError, match=r"nan.*learning_rate below 1e\+30"):
        train(tmp_path / "head", learning_rate=1e30, clip=1e30, warmup=0.0, **options)


def test_inside_inference_mode(tmp_path):
    with torch.inference_mode():
        assert train(tmp_path / "head").steps == 4


def test_a_model_in_bfloat16(tmp_path):
    model = models.ADMITTED["llama"]().bfloat16()
    result = train(tmp_path / "head", model=model, steps=30, learning_rate=5e-3, ttt_steps=2)
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert {value.dtype for value in tensors_of(tmp_path / "head").values()} == {
        torch.bfloat16,
        torch.int64,
        torch.bool,
    }
    weights = torch.load(tmp_path / "head" / save.STATE, weights_only=True)["weights"]
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert load_head(tmp_path / "head", model, "eagle3").head_weight.dtype == torch.bfloat16


ARCHITECTURES = ("qwen3", "gpt2", "gemma2", "mixtral", "deepseek_v3", "gpt_oss")
PAIRS = [("mtp", name) for name in ARCHITECTURES]  # it has the target's own layers
PAIRS += [("eagle3", "gpt2"), ("eagle3", "gpt_oss"), ("eagle", "gemma2"), ("eagle", "deepseek_v3"), ("dflash", "qwen3")]
PAIRS += [("dflash", "mixtral")]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("algo", "name"),
    [
        pytest.param(*pair, marks=[] if pair in PAIRS else pytest.mark.slow)
        for pair in itertools.product(ALGORITHMS, ARCHITECTURES)
    ],
)
def test_other_architectures(tmp_path, algo, name):
    model = target(name)
    if algo == "mtp" and name == "gpt2":
        with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*use algo='eagle3'"):
            train(tmp_path / "head", algo, model=model)
        return
    result = train(tmp_path / "head", algo, model=model, steps=8, learning_rate=5e-3)
    assert result.losses[-1] < result.losses[0]
    assert load_head(tmp_path / "head", model, algo).hidden_size == 64


# What is written

LAYER = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
LAYER = {f"{part}.weight" for part in [*LAYER, "mlp.down_proj", "post_attention_layernorm"]}


def test_published_eagle3(tmp_path):
    train(tmp_path / "head", draft_vocab_size=30, taps=[0, 2], num_key_value_heads=1, intermediate_size=40)
    tensors = tensors_of(tmp_path / "head")
    middle = {f"midlayer.{name}" for name in {*LAYER, "hidden_norm.weight", "input_layernorm.weight"}}
    assert set(tensors) == {*middle, "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    kept = torch.arange(30) + tensors["d2t"]
    assert torch.equal(kept, tensors["t2d"].nonzero()[:, 0]) and len(tensors["t2d"]) == models.VOCAB
    counts = torch.bincount(torch.tensor(sequences()).flatten(), minlength=models.VOCAB)
    left = torch.ones(models.VOCAB, dtype=torch.bool).index_fill(0, kept, False)
    assert 2 in kept and counts[left].max() <= sorted(counts[kept].tolist())[1]  # the end of sequence is kept anyway
    assert tensors["lm_head.weight"].shape == (30, 64) and tensors["midlayer.mlp.up_proj.weight"].shape == (40, 64)
    assert tensors["fc.weight"].shape == (64, 128) and tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 128)
    config = config_of(tmp_path / "head")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 30
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "float32"
    head = load_head(tmp_path / "head", target(), "eagle3")
    assert head.taps == (0, 2) and torch.equal(head.draft_to_target, kept)


BEFORE = "input_layernorm.weight"
MOE = [*(f"self_attn.{part}_proj" for part in "qkvo"), "self_attn.q_norm", "self_attn.k_norm", "mlp.gate"]
MOE += [f"mlp.experts.{i}.{part}_proj" for i in range(4) for part in ("gate", "up", "down")]
OUTER = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
WRITTEN = {
    "eagle3": (
        dict(num_layers=2),
        {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "layers.0.hidden_norm.weight"}
        | {f"layers.{n}.{name}" for n in (0, 1) for name in {*LAYER, BEFORE}},
        {"num_hidden_layers": 2},
    ),
    "eagle": (
        dict(num_layers=2),
        {"fc.weight"} | {f"layers.0.{name}" for name in LAYER} | {f"layers.1.{name}" for name in {*LAYER, BEFORE}},
        {"bias": False, "num_hidden_layers": 2},
    ),
    "dflash": (
        dict(num_layers=1, taps=[0, 1]),
        {"fc.weight", "hidden_norm.weight", "norm.weight"}
        | {f"layers.0.{name}" for name in {*LAYER, BEFORE, "self_attn.q_norm.weight", "self_attn.k_norm.weight"}},
        {"model_type": "qwen3", "num_target_layers": 2},
    ),
    "mtp": (
        {},  # of Qwen3's mixture of experts
        {f"mtp.{name}.weight" for name in OUTER}
        | {f"mtp.layers.0.{part}.weight" for part in [*MOE, "input_layernorm", "post_attention_layernorm"]},
        {"num_nextn_predict_layers": 1},
    ),
}
"""Of each algorithm: options, the tensors of the draft, and entries of its config."""


@pytest.mark.parametrize("algo", WRITTEN)
def test_published_names(tmp_path, algo):
    options, tensors, entries = WRITTEN[algo]
    model = target("qwen3_moe" if algo == "mtp" else "llama")
    train(tmp_path / "head", algo, model=model, **options)
    assert set(tensors_of(tmp_path / "head")) == tensors
    config = config_of(tmp_path / "head")
    assert entries.items() <= config.items()
    if algo == "dflash":
        assert config["dflash_config"]["target_layer_ids"] == [-1, 0]
    elif algo != "mtp":
        assert load_head(tmp_path / "head", model, algo).layers == 2


NEW = {
    "dspark": (
        {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight",
         "confidence_head.proj.bias"},
        {"projector_type": "dspark", "sample_from_anchor": True, "markov_rank": 16, "markov_head_type": "vanilla",
         "enable_confidence_head": True, "confidence_head_with_markov": True},
    ),
    "domino": (
        {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"},
        {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, "emb_dim": 16,
         "gru_hidden_dim": 32},
    ),
}  # fmt: skip
"""Further tensors and flags of published drafts that DFlash's do not have."""


@pytest.mark.parametrize("algo", NEW)
def test_published_linked_drafts(tmp_path, algo):
    """They learn, and the files are those of SpecForge."""
    result = train(tmp_path / "head", algo, steps=20, learning_rate=5e-3, validation=sequences(6), taps=[0, 1])
    assert result.losses[-1] < 0.8 * result.losses[0] and result.acceptance > 0.2
    tensors, config = NEW[algo]
    names = set(tensors_of(tmp_path / "head"))
    assert {name for name in names if not name.startswith("layers.")} - tensors == {
        "fc.weight", "hidden_norm.weight", "norm.weight",
    }  # fmt: skip
    assert tensors < names
    flags = config_of(tmp_path / "head")["dflash_config"]
    assert flags == config | {"target_layer_ids": [-1, 0], "mask_token_id": flags["mask_token_id"]}
    draft = load_head(tmp_path / "head", target(), "dflash")
    assert draft.transition.flavour == {"dspark": "DSpark", "domino": "Domino"}[algo] and draft.sample_from_anchor
    assert (draft.confidence is None) == (algo == "domino")


@pytest.mark.parametrize("kind", [pytest.param("gated", marks=pytest.mark.slow), "rnn"])
def test_other_heads_of_dspark(tmp_path, kind):
    result = train(tmp_path / "head", "dspark", steps=10, learning_rate=5e-3, markov_head_type=kind)
    assert result.losses[-1] < result.losses[0]
    draft = load_head(tmp_path / "head", target(), "dflash")
    assert type(draft.transition).__name__ == {"gated": "GatedMarkov", "rnn": "RecurrentMarkov"}[kind]


def test_published_p_eagle(tmp_path):
    """It learns, and a part of the vocabulary is kept as in EAGLE-3."""
    options = dict(steps=20, learning_rate=5e-3, draft_vocab_size=60)
    result = train(tmp_path / "head", "p_eagle", **options)
    assert result.losses[-1] < 0.8 * result.losses[0] and result.acceptance > 0.2
    config, tensors = config_of(tmp_path / "head"), tensors_of(tmp_path / "head")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_depths"] == 4
    assert config["parallel_drafting"] is True and config["draft_vocab_size"] == 60
    assert tensors["mask_hidden"].shape == (1, 1, 3 * 64) and tensors["lm_head.weight"].shape == (60, 64)
    head = load_head(tmp_path / "head", target(), "p_eagle")
    assert head.mask_token_id == config["ptd_token_id"] and head.layers == 2 and len(head.draft_to_target) == 60


@pytest.mark.parametrize("name", ["dpace", pytest.param("first-error", marks=pytest.mark.slow),
                                  pytest.param("chain", marks=pytest.mark.slow)])  # fmt: skip
def test_steps_of_eagle3_are_chains(name):
    """The weighted mean over the steps from each slot, with the weights of the positions in a chain."""
    _, _, trainer, batch, features = made("eagle3", ttt_steps=3, per_position_loss_weight=name)
    got = trainer.loss(batch, features, torch.Generator())
    slots, step_of, teachers = batch.rollout(3)
    outputs = (trainer.rolled_out(batch, features, slots) @ trainer.module.head_weight.T).detach()
    teacher = features.logits(teachers)
    shares = outputs.softmax(-1)
    chains = {}
    for row, (slot, step) in enumerate(zip(slots.tolist(), step_of.tolist())):
        choice = int(teacher[row].argmax())
        fixed = 0.8**step / (len(batch.ids) * (batch.ids.shape[1] - 1))
        right = int(outputs[row].argmax()) == choice
        lost = float(-teacher[row].softmax(-1) @ shares[row].log())
        chain = chains.setdefault(slot - step * len(batch.ids) * (batch.ids.shape[1] - 1), {})
        chain[step] = (fixed, float(shares[row, choice]), right, lost)
    extra = sum(fixed for chain in chains.values() for fixed, *_ in chain.values()) / len(chains)
    pairs = []
    for chain in chains.values():
        weights = slow_weights(name, {step: row[:3] for step, row in chain.items()}, extra)
        pairs += [(weights[step], chain[step][3]) for step in chain]
    wanted = sum(weight * lost for weight, lost in pairs) / sum(weight for weight, _ in pairs)
    assert got.item() == pytest.approx(wanted, rel=1e-5)


def test_held_out_sets_are_measured_one_by_one(tmp_path):
    """In the result and in the card, which is written without a hub; together they are one set."""
    sets, options = {"seen": sequences(), "unseen": sequences(seed=9)}, dict(steps=12, learning_rate=5e-3, ttt_steps=2)
    result = train(tmp_path / "head", validation=sets, **options)
    together = train(tmp_path / "other", validation=sequences() + sequences(seed=9), **options)
    assert list(result.acceptance_by_set) == ["seen", "unseen"] and together.acceptance_by_set == {}
    assert result.acceptance_by_depth == together.acceptance_by_depth and result.losses == together.losses
    seen, unseen = result.acceptance_by_set.values()
    assert seen[0] > unseen[0] and 2 * result.acceptance == pytest.approx(seen[0] + unseen[0])
    card = (tmp_path / "head" / "README.md").read_text()
    assert f"| accept length on seen | {1 + sum(seen):.2f} |" in card and "| accept length on unseen | " in card
    assert "| data | texts of the caller |" in card and "| training speed | " in card
    assert "| tokens seen | " in card and "accept length on" not in (tmp_path / "other" / "README.md").read_text()


def test_sets_in_a_folder(tmp_path):
    (tmp_path / "sets").mkdir()
    with pytest.raises(ValueError, match=r"validation: .*sets has no .jsonl or .txt file"):
        read_all(sequences(), tmp_path / "sets", None, Target.of(target()), 0, False)
    rows = [{"prompt": ids[:5], "completion": ids[5:]} for ids in sequences(2)]
    (tmp_path / "sets" / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sets" / "a.jsonl").write_text(json.dumps({"prompt": [1], "completion": [2, 3]}))
    _, sets = read_all(sequences(), str(tmp_path / "sets"), None, Target.of(target()), 0, False)
    assert list(sets) == ["a", "b"] and sets["a"][0].ids.tolist() == [1, 2, 3]
    assert sets["a"][0].supervised.tolist() == [False, True, True]
    assert [document.ids.tolist() for document in sets["b"]] == sequences(2)
    with pytest.raises(ValueError, match=r"validation\['a'\]: no sequence with a supervised token"):
        cut_all(read(sequences()), sets, 64, 9)


@given(st.integers(1, 200))
def test_default_taps_can_be_published(layers):
    taps = default_taps(layers)
    ids = published_layer_ids(taps, layers)
    if layers >= 7:
        assert taps == (2, layers // 2, layers - 3) and ids == [1, layers // 2 - 1, layers - 4]
    read = tuple(i + 1 for i in ids) if ids[0] == 1 else tuple(ids)
    assert read == taps and len(set(taps)) == len(taps) and taps[-1] <= layers
    taps = block_taps(layers)
    assert taps == tuple(sorted(set(taps))) and taps[-1] <= layers and len(taps) == min(5, layers)
    if layers == 36:
        assert taps == (2, 10, 18, 26, 34)  # z-lab's Qwen3-8B: outputs of layers 1, 9, 17, 25, 33


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("algo", [*ALGORITHMS, "jetspec", "dspark", "domino", "p_eagle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_on_a_gpu(tmp_path, algo, dtype):
    """It learns, is interrupted, goes on, and the draft loads on the same device."""
    model = models.ADMITTED["llama"]().to("cuda", dtype)
    options = dict(steps={"eagle": 600}.get(algo, 250), learning_rate=5e-3, checkpoint_minutes=0.01)
    assert train(tmp_path / "head", algo, model=model, **options | {"steps": 50}).steps == 50
    result = train(tmp_path / "head", algo, model=model, **options)
    assert result.acceptance > 0.9 and result.steps == options["steps"]
    kind = "dflash" if algo in SMALL and algo != "p_eagle" else algo
    assert load_head(tmp_path / "head", model, kind).embedding.device.type == "cuda"
