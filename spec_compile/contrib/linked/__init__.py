"""The kin of DFlash: DSpark, Domino and DFlash 2, whose drafts depend on those before them in a block, and JetSpec.

`transitions` says how drafts depend on each other, and `draft` has the module, makes chains and trees of its output and
reads the files. JetSpec is a DFlash draft whose layers are all causal.
"""

from ...drafters import ALIASES
from ...drafters.checkpoints import draft_files
from ...drafters.modules import dflash
from .draft import NAMES, LinkedConfig

ALIASES |= dict.fromkeys(("jetspec", *NAMES), "dflash")
dflash.NAMES |= NAMES
dflash.KIN.append(LinkedConfig)
draft_files.RENAMES += [
    (r"^(?:markov_head|candidate_selector)\.", "transition."),
    (r"^(prefix_gru|embed_proj)\.", r"transition.\1."),
    (r"^confidence_head\.", "confidence."),
]
draft_files.PUBLISHED |= {
    **{f"transition.{name}": f"markov_head.{name}" for name in ("markov_w1.weight", "markov_w2.weight")},
    "transition.hidden_projection.weight": "candidate_selector.hidden_projection.weight",
    **{f"confidence.proj.{name}": f"confidence_head.proj.{name}" for name in ("weight", "bias")},
}
