"""Encoder-decoders: Whisper, BART, Marian, mBART, NLLB and their relatives.

A decoder is captured, rewritten and checked as a causal language model over an example source. Its layers attend to the
source by a recurrence whose state never changes: `kind` has its meaning. `decoder` has the model that is captured, and
the states of a call's sources; `draft` has drafts over the same source.
"""

from ...capture import admit, modules, recurrences
from ...kernels.recurrence import KINDS
from . import draft, kind, moonshine  # noqa: F401
from .decoder import FAMILIES, attend_to_states, causal

KINDS["source"] = kind.SOURCE
for family, name in FAMILIES.items():
    path = f"transformers.models.{family}.modeling_{family}.{name}"
    admit.DECODERS[path] = causal
    by_itself = f"{draft.__name__}.{name.removesuffix('ForConditionalGeneration').removesuffix('MTModel')}ForCausalLM"
    for each in (path, by_itself):
        modules.MODULES[each] = recurrences.MODULES[each] = attend_to_states
    recurrences.OF_FAMILY[family.replace("_small", "-small")] = {"linear_attention": ({"attention", "recurrence"},)}
