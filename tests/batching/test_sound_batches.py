"""Prompts with pictures and sounds of all classes that have them, in requests: what their own generate() gives."""

import pytest
from batch_requests import collect, running
from media_models import NAMES, fast, has_sounds, inputs, model

NEW = 16
OFTEN = {"Qwen2Audio", "Voxtral", "Idefics3", "Qwen3_5"}
CASES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def expected(name, arguments, **options):
    options = dict(max_new_tokens=NEW, do_sample=False) | options
    return model(name).generate(**arguments, **options)[0, arguments["input_ids"].shape[1] :].tolist()


def other(name, arguments):
    """The same ids with other pictures or sounds."""
    key = "input_features" if has_sounds(name) else "pixel_values"
    return arguments | {key: 2 * arguments[key].flip(-1) + 1}


@pytest.mark.sweep("Qwen2Audio Qwen3_5")
@pytest.mark.parametrize("name", CASES)
def test_rows_with_and_without(name):
    requests = [inputs(name, (count,), seed) for seed, count in enumerate((1, 0, 2))]
    requests.append(other(name, requests[2]))
    with running(fast(name), max_requests_per_batch=2) as manager:
        for number, arguments in enumerate(requests):
            manager.add_request(**arguments, request_id=f"{number}", max_new_tokens=NEW)
        outputs = collect(manager, len(requests))
    answers = [outputs[f"{number}"] for number in range(len(requests))]
    assert [each.error for each in answers] == [None] * len(requests)
    assert [each.generated_tokens for each in answers] == [expected(name, arguments) for arguments in requests]
