"""What `train_draft` refuses before it works, and its command line."""

import math
from unittest import mock

import models
import pytest
import torch
import transformers
from trainings import CODER, TALK, TURNS, chatter, sequences, target, tokenizer, train

from spec_compile.__main__ import main
from spec_compile.errors import UnsupportedModelError
from spec_compile.train import save
from spec_compile.train.data import read


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(algo="eagle4"), ValueError, "algo: expected one of eagle3.*Did you mean 'eagle'"),
        (dict(algo=3), TypeError, "algo: expected a string"),
        (dict(data=[]), ValueError, "data: it holds no text"),
        (dict(data=[[]]), ValueError, "data: it holds no text"),
        (dict(data=["  "]), ValueError, "data: it holds no text"),
        (dict(data=["x"]), TypeError, r"data\[0\] is text: pass its tokenizer"),
        (dict(data=[[1, 2], [3, 96]]), ValueError, r"data\[1\]: expected token ids below 96, got 3 to 96"),
        (dict(data=[[1.5, 2.0]]), TypeError, r"data\[0\]: expected token ids of one sequence"),
        (dict(data=[3]), TypeError, r"data\[0\]: expected a text, token ids or a mapping, got int"),
        (dict(data=[["a", "b"]]), TypeError, r"data\[0\]: expected a text, token ids"),
        (dict(data=[{"body": "x"}]), ValueError, r"data\[0\]: expected \"text\".*got \['body'\]"),
        (dict(data=7), TypeError, "data: expected a file or an iterable"),
        (dict(data={"text": "x"}), TypeError, "data: expected a file or an iterable"),
        (dict(data="nowhere.jsonl"), ValueError, "data: expected a .txt or .jsonl file.*does not exist"),
        (dict(data="def f(): pass"), ValueError, "data: expected a .txt or .jsonl file, or a list of texts"),
        (dict(data=[[5] * 8] * 4), ValueError, "data: no sequence.*has the 9 tokens.*longest has 8"),
        (dict(data=[[5] * 20] * 2 + [[5] * 4] * 9, validation=0.1), ValueError, "no sequence.*or validation=0"),
        (dict(validation=[[5] * 4]), ValueError, "validation: no sequence.*the longest has 4"),
        (dict(on_policy="yes"), TypeError, "on_policy: expected True, False or options for generate"),
        (dict(validation=1.0), ValueError, "validation: expected a share"),
        (dict(validation=[9.5]), TypeError, r"validation\[0\]: expected a text"),
        (dict(sequence_length=8), ValueError, "sequence_length: a draft of this depth needs at least 9 tokens, got 8"),
        (dict(sequence_length=600), ValueError, "sequence_length: LlamaForCausalLM holds 512 tokens, got 600"),
        (dict(per_position_loss_weight="pace"), ValueError, "loss_weight: expected one of fixed-exp-decay"),
        (dict(algo="dspark", markov_head_type="lstm"), ValueError, "markov_head_type: expected one of vanilla, gated"),
        (dict(algo="mtp", per_position_loss_weight="dpace"), ValueError, "per_position_loss_weight: algo='mtp' has no"),
        (dict(algo="domino", markov_rank=8), ValueError, "markov_rank: algo='domino' has no such option"),
        (dict(algo="p_eagle", num_depths=0), ValueError, "num_depths"),
        (dict(sequence_lenght=8), TypeError, "unknown option 'sequence_lenght'. Did you mean 'sequence_length'"),
        (dict(minutes=3), ValueError, "steps and minutes: give one"),
        (dict(steps=0), ValueError, "steps must be from 1"),
        (dict(steps=True), TypeError, "steps must be an int"),
        (dict(steps=None, minutes=0), ValueError, "minutes must be positive"),
        (dict(steps=None, minutes="3"), TypeError, "minutes must be a number, not str"),
        (dict(batch_size=0), ValueError, "batch_size must be from 1"),
        (dict(seed=-1), ValueError, "seed must be from 0"),
        (dict(learning_rate=0.0), ValueError, "learning_rate must be positive"),
        (dict(learning_rate=math.nan), ValueError, "learning_rate must be positive"),
        (dict(warmup=1.0), ValueError, "warmup must be a share"),
        (dict(warmup=-0.1), ValueError, "warmup must be a share"),
        (dict(checkpoint_minutes=-1), ValueError, "checkpoint_minutes must be finite and not negative"),
        (dict(checkpoint_minutes=None), TypeError, "checkpoint_minutes must be a number"),
        (dict(head_dim=12), ValueError, "head_dim: expected a multiple of 8 up to 256, got 12"),
        (dict(num_key_value_heads=3), ValueError, "num_key_value_heads: 4 query heads cannot share 3"),
        (dict(draft_vocab_size=97), ValueError, "draft_vocab_size: expected 2 to 96, the target's vocabulary, got 97"),
        (dict(draft_vocab_size=1), ValueError, "draft_vocab_size: expected 2 to 96"),
        (dict(taps=(1, 2)), ValueError, "taps: expected states from 0 to 2, ascending, the first of them not 1"),
        (dict(taps=(0, 3)), ValueError, "taps: expected states from 0 to 2"),
        (dict(taps=(2, 0)), ValueError, "taps: expected states from 0 to 2, ascending"),
        (dict(taps=()), ValueError, "taps: expected states"),
        (dict(algo="eagle", ttt_steps=3), ValueError, "ttt_steps: algo='eagle' has no such option"),
        (dict(algo="dflash", taps=(0, 3)), ValueError, "taps: expected states from 0 to 2, ascending, got 0, 3"),
        (dict(algo="dflash", block_size=1), ValueError, "block_size must be from 2 to 64"),
        (dict(algo="dflash", draft_vocab_size=9), ValueError, "draft_vocab_size: algo='dflash' has no such option"),
        (dict(algo="nextn", num_layers=2), ValueError, "num_layers: algo='mtp' has no such option"),
    ],
)
def test_errors_come_before_work(tmp_path, options, error, message):
    with (
        mock.patch("spec_compile.train.loop.Loop.run", side_effect=AssertionError),
        pytest.raises(error, match=message),
    ):
        train(tmp_path / "head", **options)
    assert not (tmp_path / "head").exists()


def test_models_without_a_draft(tmp_path):
    with pytest.raises(TypeError, match="model: expected a transformers causal language model"):
        train(tmp_path / "head", model=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="output layer with a bias"):
        train(tmp_path / "head", model=target("phi"))
    with pytest.raises(ValueError, match="training mode"):
        train(tmp_path / "head", model=models.ADMITTED["opt"]().train())
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        train(tmp_path / "head", model=models.REFUSED["switch"]())
    with pytest.raises(UnsupportedModelError, match=r"StableLmForCausalLM.*use algo='eagle3'"):
        train(tmp_path / "head", "mtp", model=target("stablelm"))


def test_folders_that_are_something_else(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output: .*file is a file"):
        train(tmp_path / "file")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"output: .*model exists and holds config.json; choose another folder"):
        train(tmp_path / "model")
    folder = tmp_path / "head"
    train(folder)
    other = models.build("LlamaConfig", "LlamaForCausalLM", models.GQA, {"seed": 5})
    for options, found in (
        (dict(model=other), "target"), (dict(algo="eagle"), "algo 'eagle3' where this one has 'eagle'"),
        (dict(data=sequences(seed=4)), "data"), (dict(batch_size=3), "batch_size 8 where this one has 3"),
        (dict(num_layers=2), "num_layers None where this one has 2"), (dict(on_policy=True), "on_policy"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"output: .*holds the training of another head, with {found}"):
            train(folder, **options)
    with pytest.raises(ValueError, match="holds a training; pass resume=True"):
        train(folder, resume=False)
    torch.save({"version": 0}, folder / save.STATE)
    with pytest.raises(ValueError, match="no training state that this version"):
        train(folder)
    (folder / save.STATE).write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read"):
        train(folder)


def test_conversations_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"data\[0\]: messages need a tokenizer with a chat template"):
        read([{"messages": TALK}], tokenizer())
    with pytest.raises(ValueError, match="no answer of the assistant follows"):
        read([{"messages": TALK}], chatter(TURNS.replace("<assistant>", "<helper>")))
    with pytest.raises(TypeError, match=r"data\[0\]: expected text, got int"):
        read([{"prompt": "a", "completion": 3}], tokenizer())
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nx = 1\n')
    with pytest.raises(ValueError, match=r"a.jsonl:2: not JSON"):
        read(tmp_path / "a.jsonl", tokenizer())


def test_the_command_line(command, tmp_path, capsys):
    transformers.utils.logging.enable_progress_bar()  # scripts that other tests run turn it off
    assert main([*command, "--steps", "2", "--dtype", "float32", "--validation", "0.2"]) == 0
    said = capsys.readouterr()
    assert "2 steps" in said.out and said.err.splitlines()[0] == f"loading {CODER}"
    assert "Loading" not in said.err and len(said.err.splitlines()) == 5  # no bar where there is no terminal
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert (tmp_path / "head" / "model.safetensors").is_file()


@pytest.mark.skipif("deepseek_v32" not in models.INDEXED, reason="this transformers has no such class")
def test_a_block_with_an_indexer_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="layers with an indexer cannot be trained; use algo='eagle3'"):
        train(tmp_path / "head", "mtp", model=models.INDEXED["deepseek_v32"]())
