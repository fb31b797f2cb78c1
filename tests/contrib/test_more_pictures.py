"""Prompts with pictures or sounds for the classes of `media_models`: the same tokens as transformers' generate()."""

import inspect
import itertools
import warnings

import media_models
import pytest
import torch
from media_models import COLUMNS, NAMES, PICTURE, SOUND, fast, features, has_sounds, inputs, model
from models import speculate_captured
from picture_models import START, VIDEO

from spec_compile.capture.admit import reads_pictures
from spec_compile.compat import CACHE
from spec_compile.contrib.pictures import READERS

OFTEN = {"Qwen3_5", "Idefics3", "Exaone4_5_", "Voxtral"}
CASES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
COUNTS = {"nothing": (0,), "one": (1,), "two": (2,), "padding on the left": (2, 1), "some rows": (1, 0, 2)}
MARKED = {"Qwen3_5", "Qwen3_5Moe", "Cosmos3Omni", "CohereCompass"}
VIDEOS = sorted(MARKED | {"MiniMaxM3Sparse", "Lfm3Vl", "Exaone4_5_", "HyperCLOVAXVisionV2"})
NEW = 32


def both(name, arguments, new=NEW):
    """The tokens of transformers and ours; the latter must come without a warning."""
    arguments = arguments | dict(max_new_tokens=new, do_sample=False)
    want = model(name).generate(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return want, fast(name).generate(**arguments)


@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens_in_fewer_rounds(name):
    answers = []
    for counts in list(COUNTS.values())[: 3 if name in COLUMNS else None]:
        want, got = both(name, inputs(name, counts))
        assert torch.equal(want, got), counts
        answers.append(got[0, -NEW:].tolist())
        fast(name).speculation.stats.reset()
        assert torch.equal(both(name, inputs(name, counts))[1], got)
        assert fast(name).speculation.stats.accept_length > 1.1, counts
    assert answers[0] != answers[1]


@pytest.mark.parametrize("name", CASES)
def test_another_picture_another_answer_and_one_too_many(name):
    """The model's own error or ours, and the next call is as if there had been none."""
    arguments = inputs(name)
    want, first = both(name, arguments)
    key = features(name)
    other = arguments | {key: 2 * arguments[key].flip(-1) + 1}
    assert not torch.equal(first, both(name, other)[1])
    ids = arguments["input_ids"]
    lacking = ids.masked_fill(ids == (SOUND if has_sounds(name) else PICTURE), 5)
    with pytest.raises(ValueError, match=r"(?i)image|audio|multimodal"):
        fast(name).generate(**arguments | {"input_ids": lacking}, max_new_tokens=4)
    assert torch.equal(both(name, arguments)[1], want)


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in sorted(COLUMNS)]
)
def test_padding_that_counts_is_left_to_transformers(name):
    """Pictures in rows with padding, and caches of such rows: rounds would count from a row's first token."""
    fast = speculate_captured(model(name), compile=False)  # warns once
    with pytest.warns(UserWarning, match="own positions do not follow"):
        for counts in ((2, 1), (1, 0, 2)):
            arguments = inputs(name, counts) | dict(max_new_tokens=NEW, do_sample=False)
            assert torch.equal(fast.generate(**arguments), model(name).generate(**arguments))
    arguments = inputs(name, (0, 0)) | dict(do_sample=False)
    first = [model(name).generate(**arguments, max_new_tokens=8, return_dict_in_generate=True) for _ in range(2)]
    added = torch.cat([first[0].sequences, torch.arange(3, 13).view(2, 5)], dim=1)
    mask = torch.nn.functional.pad(
        arguments["attention_mask"], (0, added.shape[1] - len(arguments["input_ids"][0])), value=1
    )
    second = dict(input_ids=added, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    want = model(name).generate(**second, **{CACHE: first[0][CACHE]})
    assert torch.equal(fast.generate(**second, **{CACHE: first[1][CACHE]}), want)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name != "Lfm3Vl" else name for name in VIDEOS]
)
def test_videos(name):
    frames = [[VIDEO] * 4, [5] if name in MARKED else [], [VIDEO] * 4]  # a mark of the time of each frame
    ids = torch.tensor([[5, 6, 7, START, *itertools.chain(*frames), 8, 9, 10]])
    arguments = dict(input_ids=ids, attention_mask=torch.ones_like(ids), video_grid_thw=torch.tensor([[2, 4, 4]]))
    arguments["pixel_values_videos"] = torch.randn(32, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    if "mm_token_type_ids" in inspect.signature(model(name).forward).parameters:
        arguments["mm_token_type_ids"] = 2 * (ids == VIDEO).long()
    want, got = both(name, arguments)
    assert torch.equal(want, got)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen2_5OmniThinker", "Qwen3OmniMoeThinker"])
@pytest.mark.parametrize("rows", [1, 2])
def test_pictures_of_models_that_hear(name, rows):
    """The second row has two tokens of padding."""
    ids = torch.tensor([[5, 6, 7, START, *[PICTURE] * 4, 8, 9], [0, 0, 7, START, *[PICTURE] * 4, 8, 11]][:rows])
    pixels = torch.randn(16 * rows, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    grids = torch.tensor([[1, 4, 4]] * rows)
    arguments = dict(input_ids=ids, attention_mask=(ids > 0).long(), pixel_values=pixels, image_grid_thw=grids)
    want, got = both(name, arguments)
    assert torch.equal(want, got)


@pytest.mark.slow
def test_a_cache_whose_layers_share_keys_goes_in_and_out():
    """Of four layers of Gemma 4 the last two read the keys and values of the first two."""
    arguments, sequences = inputs("Gemma4", (1, 2)), []
    mask, asked = arguments["attention_mask"], dict(max_new_tokens=12, do_sample=False)
    for each in (model("Gemma4"), fast("Gemma4")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first = each.generate(**arguments, **asked, return_dict_in_generate=True)
            assert [layer.keys is not None for layer in first[CACHE].layers][:2] == [True, True]
            added = torch.cat([first.sequences, torch.arange(3, 13).view(2, 5)], dim=1)
            seen = torch.nn.functional.pad(mask, (0, added.shape[1] - mask.shape[1]), value=1)
            second = each.generate(input_ids=added, attention_mask=seen, **{CACHE: first[CACHE]}, **asked)
        sequences.append((first.sequences, second))
    assert torch.equal(sequences[0][0], sequences[1][0]) and torch.equal(sequences[0][1], sequences[1][1])


def test_every_class_that_reads_pictures_is_tried():
    import picture_models

    assert READERS == {*media_models._MODELS, *picture_models.NAMES}


def test_a_model_of_sounds_reads_no_pictures():
    assert reads_pictures(model("Voxtral")) and not reads_pictures(model("Voxtral"), "image")
