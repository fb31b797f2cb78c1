"""Prompts with more or fewer places than their sounds need, for classes of which transformers does not count them."""

import pytest
import torch
from media_models import SOUND, fast, inputs, model

from spec_compile.contrib import sounds

CLASSES = ("Qwen2Audio", "Qwen2_5OmniThinker", "Qwen3OmniMoeThinker")


def changed(ids, change):
    """Prompts with other places for sounds."""
    if change == "none":
        return ids.masked_fill(ids == SOUND, 5)
    row, column = ((ids == SOUND) if change == "one fewer" else (ids != SOUND)).nonzero()[-1].tolist()
    ids = ids.clone()
    ids[row, column] = 5 if change == "one fewer" else SOUND
    return ids


@pytest.mark.parametrize("name", CLASSES)
def test_places_are_counted_before_the_model_runs(name):
    arguments = inputs(name, (2, 1)) | dict(max_new_tokens=6)
    expected = model(name).generate(**arguments)
    needed = int((arguments["input_ids"] == SOUND).sum())
    assert int(sounds.places_of(model(name), arguments["feature_attention_mask"].sum(dim=-1)).sum()) == needed
    for change, given in (("none", 0), ("one fewer", needed - 1), ("one more", needed + 1)):
        wrong = arguments | dict(input_ids=changed(arguments["input_ids"], change))
        message = f"^input_ids: the prompts have {given} places for audio, 3 sounds in input_features need {needed}"
        with pytest.raises(ValueError, match=message):
            fast(name).generate(**wrong)
    assert torch.equal(expected, fast(name).generate(**arguments))


def test_one_place_for_each_sound():
    """Processors of old checkpoints of Qwen2Audio leave the rest to the model."""
    arguments = inputs("Qwen2Audio", (2,))
    ids = arguments["input_ids"][0].tolist()
    kept = [token for token, before in zip(ids, [0, *ids]) if token != SOUND or before != SOUND]
    arguments |= dict(input_ids=torch.tensor([kept]), attention_mask=torch.ones(1, len(kept), dtype=torch.int64))
    sounds.check_places(model("Qwen2Audio"), arguments["input_ids"], arguments)
    with pytest.raises(ValueError, match="have 1 places for audio, 2 sounds in input_features need 2;"):
        sounds.check_places(model("Qwen2Audio"), changed(arguments["input_ids"], "one fewer"), arguments)
