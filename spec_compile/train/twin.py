"""The float32 twin of a draft in service, and the trainer of each kind of draft that can learn while it serves."""

import copy

import torch
from torch import Tensor, nn

from ..capture.quantised import packed_layers
from ..drafters.checkpoints.target import Target
from ..drafters.modules.dflash import DFlashDraft
from ..drafters.modules.eagle import Eagle3Head, EagleHead
from ..drafters.modules.mtp import MtpHead
from ..drafting import Algorithm
from ..errors import UnsupportedModelError
from .dflash import DFlashTrainer
from .eagle import EagleTrainer
from .eagle3 import Eagle3Trainer
from .mtp import MtpTrainer
from .trainer import Trainer, as_master

TRAINED: dict[type[nn.Module], type[Trainer]] = {
    EagleHead: EagleTrainer, Eagle3Head: Eagle3Trainer, MtpHead: MtpTrainer, DFlashDraft: DFlashTrainer,
}  # fmt: skip
"""The trainer of each class of drafts."""
NAME = "train_while_serving"


def draft_of(algorithm: Algorithm) -> tuple[nn.Module, int]:
    """The draft that `algorithm` runs, and the tokens that it drafts one after the other.

    UnsupportedModelError, naming the kind, unless the draft can learn while it serves.
    """
    draft = getattr(algorithm, "head", None) or getattr(algorithm, "draft", None)
    if isinstance(draft, Algorithm):  # joined with n-grams
        return draft_of(draft)
    if type(draft) not in TRAINED:
        kind = type(algorithm).__name__ if draft is None else getattr(draft, "flavour", "") or type(draft).__name__
        raise UnsupportedModelError(
            f"{NAME}: drafts of EAGLE, EAGLE-2, EAGLE-3, MTP and DFlash learn while they serve, not those of {kind}"
        )
    if algorithm.plan.draws:
        raise UnsupportedModelError(
            f"{NAME}: with draft_sample_method='probabilistic' sampled answers depend on the drafts, and would "
            "change with each swap; use 'greedy'"
        )
    if packed_layers(draft) or not all(each.is_floating_point() for each in draft.parameters()):
        raise UnsupportedModelError(f"{NAME}: this draft has quantised weights; use the draft in 16 or 32 bits")
    if getattr(draft, "further", ()):
        raise UnsupportedModelError(f"{NAME}: this MTP draft has several modules, of which only one could be trained")
    if isinstance(draft, DFlashDraft) and not _is_plain(draft):
        raise UnsupportedModelError(f"{NAME}: this draft of blocks has parts that DFlash does not have")
    return draft, draft.block_size - 1 if isinstance(draft, DFlashDraft) else algorithm.plan.levels


def _is_plain(draft: DFlashDraft) -> bool:
    """True if `DFlashTrainer` computes what the draft does."""
    parts = draft.transition, draft.confidence, draft.softcap, draft.mask_embedding, draft.draft_to_target
    is_scaled = draft.embedding_scale != 1 or draft.output_scale != 1
    return not (is_scaled or draft.sample_from_anchor) and all(part is None for part in parts)


def make_twin(draft: nn.Module, target: Target) -> nn.Module:
    """A copy of a draft whose parameters are in float32 and get gradients.

    It shares the target's tensors and the draft's embedding, which are not trained and no parameters of the twin; nor
    is an output matrix of rows of the target's.
    """
    shared = {id(tensor): tensor for tensor in (*target.model.parameters(), *target.model.buffers())}
    addresses = {tensor.data_ptr() for tensor in shared.values()}
    frozen = [draft.embedding, *([draft.head_weight] if getattr(draft, "all_rows", ()) else [])]
    shared |= {id(tensor): tensor for tensor in frozen}
    addresses |= {tensor.data_ptr() for tensor in frozen}
    twin = copy.deepcopy(draft, memo=dict(shared))
    for module in twin.modules():
        for name, parameter in [*module._parameters.items()]:
            if parameter is not None and parameter.data_ptr() in addresses:
                del module._parameters[name]  # or moving the twin to float32 would cast the target
                setattr(module, name, parameter.detach())
    twin = as_master(twin, draft.embedding.detach())
    return twin.requires_grad_(True).eval()


@torch.no_grad()
def copy_weights(source: dict[str, Tensor], to: nn.Module) -> None:
    """Copy tensors in place to the parameters of these names, in their dtypes."""
    parameters = dict(to.named_parameters())
    for name, value in source.items():
        parameters[name].copy_(value)
