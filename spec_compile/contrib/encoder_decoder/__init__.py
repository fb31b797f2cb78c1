"""Encoder-decoders: Whisper, BART, Marian, mBART, NLLB and their relatives.

A decoder is captured, rewritten and checked as a causal language model over an example source. Its layers attend to the
source by a recurrence whose state never changes: `kind` has its meaning. `decoder` has the model that is captured, and
the states of a call's sources.
"""

from ...capture import admit, modules, recurrences
from ...kernels.recurrence import KINDS
from . import kind
from .decoder import FAMILIES, Decoder, attend_to_states, causal
from .intake import SourceIntake

KINDS["source"] = kind.SOURCE
Decoder.intake = SourceIntake
for family, name in FAMILIES.items():
    path = f"transformers.models.{family}.modeling_{family}.{name}"
    admit.DECODERS[path] = causal
    modules.MODULES[path] = recurrences.MODULES[path] = attend_to_states
    recurrences.OF_FAMILY[family.replace("_small", "-small")] = {"linear_attention": ({"attention", "recurrence"},)}
