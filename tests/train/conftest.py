"""Fixtures of trainings. It imports nothing of torch by itself: pytest loads it before the plugin `worker`."""

import pytest


@pytest.fixture(autouse=True)
def captured_once(monkeypatch):
    """A target whose weights stay as they are is captured once."""
    import models

    monkeypatch.setattr("spec_compile.api.capture", models.captured)


@pytest.fixture
def command(tmp_path, two_layers):
    """The words that train a small head of the demo model, without its steps."""
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 40)
    data, output = str(tmp_path / "text.txt"), str(tmp_path / "head")
    words = ["train", "--model", "examples/tiny_coder", "--data", data, "--output", output, "--validation", "0"]
    return [*words, "--options", '{"batch_size": 1, "sequence_length": 64}']
