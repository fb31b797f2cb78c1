"""What the configs of published DFlash drafts and their kin say, in one form."""

from ..modules.layers import LayerKnobs
from .config_keys import VARIANTS, refuse_unknown_keys
from .eagle_config import DraftConfig

SLIDING, FULL = "sliding_attention", "full_attention"


class DFlashConfig(DraftConfig):
    """The ``config.json`` of a draft, whose flags may lie in dflash_config."""

    def __init__(self, raw: dict):
        super().__init__(raw)
        inner = raw.get("dflash_config")
        self.flags = inner if isinstance(inner, dict) else {}
        self.deepspec = not self.speculators and any("DSpark" in name for name in self.architectures)
        self.count = self.layer.get("num_hidden_layers") or 1

    def get(self, name: str, default=None):
        """A flag, from dflash_config, the config itself, or that of its layers."""
        places = (self.flags, self.raw, self.layer)
        return next((place[name] for place in places if place.get(name) is not None), default)

    def whole(self, name: str, least: int) -> int:
        """A flag that must be there; ValueError unless it is a number of at least so much."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"draft: its config must have a {name} of {least} or more, it has {value!r}")
        return value

    @property
    def is_domino(self) -> bool:
        """Whether a GRU reads the tokens drafted before."""
        return self.get("projector_type") == "domino"

    @property
    def sample_from_anchor(self) -> bool:
        """Whether the first slot of a block drafts, too: DSpark's way, and so DeepSpec's."""
        for name in ("sample_from_anchor", "shift_label"):
            if self.get(name) is not None:
                return bool(self.get(name))
        return any("DSpark" in name for name in self.architectures) and not self.get("dspark_bonus_anchor")

    def refuse_variants(self) -> None:
        """ValueError, naming the field, if a block computes what is not built here."""
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
        """Knobs of the layers. Of biases, the tensors there decide, and the config may ask for more."""
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
        taps, group = self.whole("conv_kernel_size", 1), self.whole("conv_group_size", 1)
        if self.layer.get("hidden_size", 0) % group:
            raise ValueError(f"draft: its config has conv_group_size {group}, which does not divide its hidden_size")
        return taps, group

    @property
    def types(self) -> list[str]:
        """What layer_types says of each layer; ValueError unless it says it of each."""
        types = self.get("layer_types")
        if types is None and self.get("use_sliding_window") and not self.get("use_swa"):
            raise ValueError("draft: its config has use_sliding_window, and no layer_types to say which layers slide")
        types = types or [FULL] * self.count
        if len(types) != self.count or not set(types) <= {SLIDING, FULL}:
            raise ValueError(f"draft: its config must name {SLIDING} or {FULL} for each layer, it has {types}")
        return types

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer. Of use_swa alone (MiMo) all have one."""
        sliding = [kind == SLIDING for kind in self.types]
        if self.get("use_swa") and not any(sliding):
            sliding = [True] * self.count
        window = self.get("swa_window_size", self.get("sliding_window"))
        if any(sliding) and not window:
            raise ValueError("draft: its config has sliding layers, and neither sliding_window nor swa_window_size")
        return tuple(window if slides else None for slides in sliding)

    @property
    def causal(self) -> tuple[bool, ...]:
        """Whether each layer sees its block causally. Unless the config says, those that layer_types lets slide do.

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
        return tuple(kind == SLIDING and not self.get("sliding_window_non_causal") for kind in self.types)
