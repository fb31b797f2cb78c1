"""Mistral's own format of heads: refusals by name, and the order of rows. test_draft_block.py has its formula."""

import draft_checkpoints as drafts
import pytest
import torch

from spec_compile.contrib.mistral import as_config, by_halves
from spec_compile.drafters.checkpoints.load import load_head


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama_4_scaling", {"beta": 0.1}, "its config has llama_4_scaling .*not known here"),
        ("moe", {"num_experts": 4}, "its config has moe .*not known here"),
        ("yarn", {"factor": 2.0, "gamma": 1}, "params.json has yarn.gamma"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, key, value, message):
    written = drafts.write("eagle_mistral", tmp_path, **{key: value})
    with pytest.raises(ValueError, match=message):
        load_head(written.folder, written.target)


def test_weights_in_fp8_are_refused_by_name(tmp_path):
    written = drafts.write("eagle_mistral", tmp_path)
    tensors = {**written.tensors, "eagle_linear.qscale_weight": torch.ones(1)}
    drafts.save(tmp_path, written.config, tensors, "mistral")
    with pytest.raises(ValueError, match=r"eagle_linear.qscale_weight; quantised weights are read only as"):
        load_head(tmp_path, written.target)


def test_a_window_of_all_layers():
    assert as_config({"sliding_window": 8, "n_layers": 2})["use_sliding_window"]


def test_rope_turns_other_rows_than_in_transformers():
    assert by_halves(torch.arange(8.0)[:, None], 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
