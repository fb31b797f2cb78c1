"""The format of P-EAGLE heads: EAGLE-3's, with a state that stands for those of masks (amazon's, speculators')."""

from ..modules.eagle import ParallelEagle3Head
from . import eagle3
from .config_keys import SPECULATORS
from .source import Source
from .target import Target

OVERRIDES = eagle3.OVERRIDES
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of the mask's id in published configs, in the order in which they are looked for."""
TRAINING = {
    "num_depths",
    "para_depths",
    "down_sample_ratio",
    "down_sample_ratio_min",
    "max_seq_len",
    "parallel_drafting",
}
"""Keys of P-EAGLE's training, and one that says what the tensors say."""


def detect(source: Source) -> bool:
    """Whether the config says so, or there is a state for masks."""
    return source.config.get(SPECULATORS) == "peagle" or "mask_hidden" in source.our_names


def read(source: Source, target: Target, overrides: dict) -> ParallelEagle3Head:
    """A P-EAGLE head. overrides: those of EAGLE-3. ValueError if anything does not fit."""
    config, rows = source.config, target.embedding.shape[0]
    inner = config.get("dflash_config") or {}
    named = [inner.get("mask_token_id"), *(config.get(name) for name in MASKS)]
    mask = next((value for value in named if value is not None), None)
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < rows:
        raise ValueError(
            f"draft: its config must have a {' or '.join(MASKS)} below {rows}, the model's embeddings, it has {mask!r}"
        )
    head = eagle3.read(source, target, overrides, ParallelEagle3Head, {*MASKS, *TRAINING})
    head.mask_token_id = mask
    head.report.insert(1, f"drafts in parallel, masked by token {mask}")
    return head
