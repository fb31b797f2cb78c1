"""The benchmark of kept prefixes, in a tiny run."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import common, prefixes
from benchmarks.rounds import shapes

SIZES = dict(hidden_size=64, intermediate_size=96, head_dim=16, vocab_size=512, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip


def test_both_tables(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(shapes.SHAPES, "llama-1b", ("llama", SIZES))
    monkeypatch.setattr(common, "pin", lambda threads: None)
    path = tmp_path / "rows.json"
    command = "--shape llama-1b --no-compile --tokens 300 600 --repeats 1 --in-flight 2 --requests 4 --new-tokens 8"
    prefixes.main([*command.split(), "--prompt-tokens", "80", "--json", str(path)])
    saved = json.loads(path.read_text())
    (turn,) = saved["turns"]  # 600 tokens are more than the model allows
    assert turn["tokens"] == 300 and turn["reused"] == 256 and turn["token_bytes"] == 2 * 2 * 2 * 16 * 2
    assert turn["second over cold"] == pytest.approx(turn["second_s"] / turn["cold_s"])
    off, on = saved["serving"]
    assert (off["prefixes"], on["prefixes"], off["over off"]) == ("off", "on", 1.0)
    assert on["over off"] == pytest.approx(on["tokens_per_s"] / off["tokens_per_s"])
    assert "serving" in capsys.readouterr().out
