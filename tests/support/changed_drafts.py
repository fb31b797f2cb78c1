"""Checkpoints of `draft_checkpoints` with something changed, the drafts that are read from them, and drafts by name."""

import re

import assistants
import draft_checkpoints as drafts
import draft_rounds as rounds
import pytest
from mtp_rounds import with_further

from spec_compile.drafters.checkpoints.load import load_head

EVERY = drafts.FLAVOURS | drafts.PARALLEL | drafts.DFLASH | drafts.LINKED
OPTIONAL = "embed_tokens.weight", "lm_head.weight", "shared_head.head.weight", "d2t", "t2d"
"""Ends of the names of tensors without which the target's are taken."""


def write(folder, name, tensors=(), files=None, **config):
    """Write a flavour with some keys of its config and tensors changed: a function changes a tensor, None removes it.

    Where both are dicts, a key's value is joined with the flavour's own.
    """
    for path in folder.glob("*.*"):
        path.unlink()
    written = drafts.write(name, folder)
    if tensors or files or config:
        for path in folder.glob("*.*"):
            path.unlink()
        for key, value in config.items():
            own = written.config.get(key)
            written.config[key] = {**own, **value} if isinstance(own, dict) and isinstance(value, dict) else value
        for key, change in dict(tensors).items():
            own = written.tensors.pop(key, None)
            value = change(own) if callable(change) else change
            if value is not None:
                written.tensors[key] = value
        drafts.save(folder, written.config, written.tensors, files or EVERY[name].files)
    return written


def read(folder, name, tensors=(), *, algorithm=None, target=None, overrides=(), **changes):
    """Load a flavour that is written with changes. target: a function that builds another one."""
    written = write(folder, name, tensors, **changes)
    model = target() if target else written.target
    return load_head(folder, model, algorithm or EVERY[name].algorithm, **dict(overrides))


def assert_each_is_needed(folder, name, pattern, signs=()):
    """Assert that loading stops, and says which, without one of the tensors, and with one in another shape.

    pattern: finds the tensors in question. signs: those without which the format is not recognised.
    """
    written, flavour = write(folder, name), EVERY[name]
    complete = dict(written.tensors)
    for tensor, value in complete.items():
        if re.search(pattern, tensor) and not tensor.endswith(OPTIONAL) and "layers.1." not in tensor:
            without = {key: own for key, own in complete.items() if key != tensor}
            for kept in (without, complete | {tensor: value[:-1]}):
                drafts.save(folder, written.config, kept, flavour.files)
                is_sign = kept is without and tensor.removesuffix(".weight") in signs
                message = None if is_sign else re.escape(tensor)
                with pytest.raises(ValueError, match=message):
                    load_head(folder, written.target, flavour.algorithm)


def named(folder, name):
    """A target, an algorithm and a draft.

    name: "draft_model", a head that `draft_rounds` teaches, "modules" or "modules with own outputs" of multi-token
    prediction, the size of a target with an assistant, or a flavour, which is written in the folder.
    """
    if name in assistants.SIZES:
        return assistants.target(name), "assistant", assistants.assistant(name)
    if name.startswith("modules"):
        return rounds.target("llama"), "mtp", with_further(rounds.head("mtp", "llama"), own_output="own" in name)
    if name in ("eagle", "eagle3", "mtp", "draft_model"):
        return rounds.target("llama"), name, rounds.draft_of(name, "llama")
    written, algorithm = write(folder, name), EVERY[name].algorithm
    return written.target, algorithm, load_head(folder, written.target, algorithm)
