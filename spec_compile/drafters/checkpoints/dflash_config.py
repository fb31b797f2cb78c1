"""`DFlashConfig`: the config of a published DFlash draft or one of its kin, and the transition that it asks for."""

from transformers import AutoConfig

from ...kernels.top_logits import MAX_K
from ..modules.confidence import Confidence
from ..modules.layers import LayerKnobs
from ..modules.transitions import Domino, GatedMarkov, Markov, RecurrentMarkov, Selector, Transition, table_rank
from .config import INVALID, DraftConfig, invalid
from .config_keys import VARIANTS, refuse_unknown_keys

MUSE = "muse_glimmer_assistant"
"""The ``model_type`` of the drafts that transformers defines: ``MuseGlimmerAssistantModel``."""
SLIDING, FULL = "sliding_attention", "full_attention"
MARKOV = {"vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov}
"""Classes by ``markov_head_type``."""


class DFlashConfig(DraftConfig):
    """The ``config.json`` of a draft, whose flags may lie in dflash_config."""

    partial_rope = False

    def __init__(self, raw: dict):
        raw = of_transformers(raw) if raw.get("model_type") == MUSE else raw
        super().__init__(raw)
        inner = raw.get("dflash_config")
        self.flags = inner if isinstance(inner, dict) else {}
        self.deepspec = not self.speculators and any("DSpark" in name for name in self.architectures)
        self.count = self.layer.get("num_hidden_layers") or 1

    def get(self, name: str, default=None):
        """A flag, from dflash_config, the config itself, or that of its layers."""
        sections = (self.flags, self.raw, self.layer)
        return next((section[name] for section in sections if section.get(name) is not None), default)

    def integer(self, name: str, least: int) -> int:
        """A flag that must be there; ValueError unless it is an integer of at least `least`."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"draft: its config must have a {name} of {least} or more, it has {value!r}")
        return value

    @property
    def is_domino(self) -> bool:
        """True if a GRU reads the tokens drafted before."""
        return self.get("projector_type") == "domino"

    @property
    def sample_from_anchor(self) -> bool:
        """True if the first slot of a block drafts, too, as in DSpark and so in DeepSpec."""
        for name in ("sample_from_anchor", "shift_label"):
            if self.get(name) is not None:
                return bool(self.get(name))
        return any("DSpark" in name for name in self.architectures) and not self.get("dspark_bonus_anchor")

    def refuse_variants(self) -> None:
        """ValueError, naming the field, if a block computes something that is not built here."""
        for name, values in VARIANTS.items():
            value = self.get(name)
            if value is not None and value not in values:
                raise ValueError(f"draft: its config has {name} {value!r}, a variant of DFlash that is not built here")
        if any(name.startswith("Gemma4") for name in self.architectures):
            raise ValueError(
                f"draft: {self.architectures[0]} has layers of Gemma 4, which drafts are not built with here"
            )
        refuse_unknown_keys(self.raw, dflash=True, also={"pure_draft_prefix_len"} if self.is_domino else set())

    def layer_knobs(self, names: dict[str, str]) -> LayerKnobs:
        """Knobs of the layers. The tensors show which biases there are; the config may ask for more."""
        biased = bool(self.get("attention_bias"))
        return LayerKnobs(
            num_layers=self.count,
            qkv_bias=biased or "blocks.0.self_attn.q_proj.bias" in names,
            output_bias=biased or "blocks.0.self_attn.o_proj.bias" in names,
            qk_norm=True,
            windows=self.windows,
            conv_taps=self.convolution[0],
            conv_group=self.convolution[1],
        )

    @property
    def convolution(self) -> tuple[int, int]:
        """The taps of the convolutions of DFlash 2 (0: there are none) and the channels that share a coefficient."""
        if not self.get("conv_kernel_size"):
            return 0, 1
        taps, group = self.integer("conv_kernel_size", 1), self.integer("conv_group_size", 1)
        if self.layer.get("hidden_size", 0) % group:
            raise ValueError(f"draft: its config has conv_group_size {group}, which does not divide its hidden_size")
        return taps, group

    @property
    def types(self) -> list[str]:
        """``layer_types``, an entry a layer; ValueError if it has another length."""
        types = self.get("layer_types")
        if types is None and self.get("use_sliding_window") and not self.get("use_swa"):
            raise ValueError("draft: its config has use_sliding_window, and no layer_types to say which layers slide")
        types = types or [FULL] * self.count
        if len(types) != self.count or not set(types) <= {SLIDING, FULL}:
            raise ValueError(f"draft: its config must name {SLIDING} or {FULL} for each layer, it has {types}")
        return types

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer. With use_swa and no sliding layers (MiMo) all have one."""
        sliding = [layer_type == SLIDING for layer_type in self.types]
        if self.get("use_swa") and not any(sliding):
            sliding = [True] * self.count
        window = self.get("swa_window_size", self.get("sliding_window"))
        if any(sliding) and not window:
            raise ValueError("draft: its config has sliding layers, and neither sliding_window nor swa_window_size")
        return tuple(window if slides else None for slides in sliding)

    @property
    def causal(self) -> tuple[bool, ...]:
        """True for each layer that sees its block causally; if the config is silent, these are its sliding layers.

        JetSpec says so by causal_head. ValueError if two keys contradict each other.
        """
        if self.get("causal_head"):
            for name in ("is_causal", "causal"):
                if self.get(name) is False:
                    raise ValueError(
                        f"draft: its config has causal_head true and {name} false, which exclude each other"
                    )
            return (True,) * self.count
        told = self.raw.get("is_causal")
        told = self.get("causal") if told is None else told
        if told is not None:
            return (bool(told),) * self.count
        return tuple(name == SLIDING and not self.get("sliding_window_non_causal") for name in self.types)

    def transition(self, hidden_size: int, vocab_size: int, rows: int) -> Transition | None:
        """The transition between drafts, without weights; None if the config asks for none.

        hidden_size: of the draft.
        vocab_size: tokens of the target.
        rows: tokens that the draft can draft.

        Raises ValueError, naming the key, if the config asks for two, or for one that is not built here.
        """
        switches = {
            "markov_rank": bool(self.get("markov_rank", self.get("projector_type") == "dspark")),
            "selector_rank": bool(self.get("selector_rank") or self.get("selector_top_k")),
            "projector_type 'domino'": self.is_domino,
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

        hidden_size: of the draft.
        transition: of the draft; a prediction reads the table of a Markov head unless the config says that it does not.

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


def of_transformers(raw: dict) -> dict:
    """The config of a draft of transformers in the keys of the other formats. ValueError if transformers refuses it.

    transformers fills in what `raw` leaves out. Its sliding layers see both sides of a slot, ``sliding_window`` slots
    each (``create_bidirectional_sliding_window_mask``): a window of 8 here is one of 9 that counts the slot itself.
    """
    try:
        config = AutoConfig.for_model(**raw).to_dict()
        return config | {"sliding_window": config["sliding_window"] + 1, "sliding_window_non_causal": True}
    except INVALID as error:
        raise invalid(error) from error
