"""`LinkedConfig`: the config of a draft of DFlash's kin, and the parts that it asks for."""

from typing import Any

from ...drafters.checkpoints.config import SPECULATORS
from ...drafters.checkpoints.draft_files import DraftFiles
from ...drafters.checkpoints.files import Target
from ...drafters.modules.dflash import DFLASH, DFlashConfig, DFlashDraft
from ...drafters.modules.layers import LayerKnobs
from ...kernels.top_logits import MAX_K
from .draft import ConvolvedKnobs, LinkedDraft
from .transitions import (
    Confidence,
    Domino,
    GatedMarkov,
    Markov,
    RecurrentMarkov,
    Selector,
    Transition,
    table_rank,
)

NAMES = {"dflash2": "DFlash2", "dspark": "DSpark", "domino": "Domino"}
"""As `drafters.modules.dflash.NAMES`."""
KEYS = {
    "dspark_bonus_anchor", "causal_head", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
    "markov_rank", "markov_head_type", "emb_dim", "gru_hidden_dim", "enable_confidence_head",
    "confidence_head_with_markov", "projector_type",
    # sizes of parts whose switches are not known here
    "dflash2_conv_kernel_size", "dflash2_conv_group_size", "dflash2_selector_rank", "dflash2_selector_top_k",
    "dflash2_selector_search_mode",
}  # fmt: skip
MARKOV = {"vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov}
"""Classes by ``markov_head_type``."""


class LinkedConfig(DFlashConfig):
    """The ``config.json`` of a draft of JetSpec, DSpark, Domino or DFlash 2."""

    only = DFlashConfig.only | {"projector_type": ("dflash", "dspark", "domino")}

    def __init__(self, raw: dict):
        super().__init__(raw, {*DFLASH, *KEYS})
        is_dspark = any("DSpark" in name for name in self.architectures)
        self.deepspec = is_dspark and not self.speculators
        self.drafts_first = is_dspark and not self.get("dspark_bonus_anchor")
        if self.get("projector_type") == "domino":
            self.keys.add("pure_draft_prefix_len")

    @classmethod
    def fits(cls, files: DraftFiles) -> bool:
        """True if a draft is of the kin: if its config or its tensors have more than DFlash has."""
        config = files.config
        sections = config, *(config.get(name) for name in ("dflash_config", "transformer_layer_config", "model"))
        return (
            config.get(SPECULATORS) in NAMES
            or any(name in files.architectures for name in NAMES.values())
            or any(not KEYS.isdisjoint(section) for section in sections if isinstance(section, dict))
            or any(name.startswith(("transition.", "confidence.")) for name in files.names)
        )

    def layer_knobs(self, names: dict[str, str]) -> LayerKnobs:
        knobs = super().layer_knobs(names)
        if not self.get("conv_kernel_size"):
            return knobs
        taps, group = self.integer("conv_kernel_size", 1), self.integer("conv_group_size", 1)
        if self.layer.get("hidden_size", 0) % group:
            raise ValueError(f"draft: its config has conv_group_size {group}, which does not divide its hidden_size")
        return ConvolvedKnobs(**vars(knobs), conv_taps=taps, conv_group=group)

    @property
    def causal(self) -> tuple[bool, ...]:
        """JetSpec says by causal_head that all layers are. ValueError if two keys contradict each other."""
        if not self.get("causal_head"):
            return super().causal
        for name in ("is_causal", "causal"):
            if self.get(name) is False:
                raise ValueError(f"draft: its config has causal_head true and {name} false, which exclude each other")
        return (True,) * self.count

    def make(self, target: Target, rows: int, *arguments: Any, **named: Any) -> DFlashDraft:
        size = self.layer["hidden_size"]
        transition = self.transition(size, target.vocab_size, rows)
        confidence = self.confidence(size, transition)
        if transition is None and confidence is None:
            return super().make(target, rows, *arguments, **named)
        return LinkedDraft(*arguments, **named, transition=transition, confidence=confidence)

    def ignore(self, files: DraftFiles, draft: DFlashDraft) -> None:
        if getattr(draft, "confidence", None) is None:
            for name in files.checkpoint.shapes:
                if name.startswith("confidence_head."):
                    why = "it predicts acceptance, and the config has no enable_confidence_head"
                    files.checkpoint.ignore(name, why)

    def flavour(self, draft: DFlashDraft) -> str:
        transition = getattr(draft, "transition", None)
        name = "JetSpec" if self.get("causal_head") else draft.flavour
        name = name if transition is None else transition.flavour
        return name + (" (speculators)" if self.speculators else " (DeepSpec)" if self.deepspec else "")

    def transition(self, hidden_size: int, vocab_size: int, rows: int) -> Transition | None:
        """The transition between drafts, without weights; None if the config asks for none.

        hidden_size: the draft's.
        vocab_size: tokens of the target.
        rows: tokens that the draft can draft.

        Raises ValueError, naming the key, if the config asks for two, or for one that is not built here.
        """
        switches = {
            "markov_rank": bool(self.get("markov_rank", self.get("projector_type") == "dspark")),
            "selector_rank": bool(self.get("selector_rank") or self.get("selector_top_k")),
            "projector_type 'domino'": self.get("projector_type") == "domino",
        }
        asked = [name for name, is_on in switches.items() if is_on]
        if len(asked) > 1:
            raise ValueError(f"draft: its config has {' and '.join(asked)}, of which a draft can have one")
        sizes = hidden_size, vocab_size, rows
        if asked == ["markov_rank"]:
            name = self.get("markov_head_type", "vanilla")
            if name not in MARKOV:
                expected = ", ".join(MARKOV)
                raise ValueError(f"draft: its config has markov_head_type {name!r}; expected one of {expected}")
            return MARKOV[name](*sizes, self.integer("markov_rank", 1))
        if asked == ["selector_rank"]:
            rank, candidates = self.integer("selector_rank", 1), self.integer("selector_top_k", 2)
            most = min(MAX_K, rows)
            if candidates > most:
                raise ValueError(f"draft: its config has selector_top_k {candidates}, at most {most} are built here")
            return Selector(*sizes, rank, candidates)
        if asked:
            rank, state_size = self.integer("emb_dim", 1), self.integer("gru_hidden_dim", 1)
            return Domino(hidden_size, rows, rank, state_size, self.get("pure_draft_prefix_len", 0))
        return None

    def confidence(self, hidden_size: int, transition: Transition | None) -> Confidence | None:
        """The prediction of acceptance, without weights; None if the config does not enable it.

        hidden_size: the draft's.
        transition: the draft's; a prediction reads the table of a Markov head unless the config says that it does not.

        Raises ValueError if the config has it read a table that `transition` does not have.
        """
        if not self.get("enable_confidence_head"):
            return None
        rank = table_rank(transition)
        reads_table = bool(self.get("confidence_head_with_markov", rank > 0))
        if reads_table and rank == 0:
            raise ValueError(
                "draft: its config has confidence_head_with_markov, and no markov_rank of a table that this could read"
            )
        return Confidence(hidden_size, rank if reads_table else 0)
