"""Mistral's own format of heads: windows and the order of rows. test_draft_block.py has its formula."""

import torch

from spec_compile.contrib.mistral import as_config, by_halves


def test_a_window_of_all_layers():
    assert as_config({"sliding_window": 8, "n_layers": 2})["use_sliding_window"]


def test_rope_turns_other_rows_than_in_transformers():
    assert by_halves(torch.arange(8.0)[:, None], 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
