"""Encoder-decoders: Whisper, BART, Marian, mBART, NLLB, T5 and their relatives.

A decoder is captured, rewritten and checked as a causal language model over an example source. Its layers attend to the
source by a recurrence whose state never changes: `kind` has its meaning. `decoder` has the model that is captured, and
the states of a call's sources; `t5` has what differs in T5.
"""

from ...capture import admit, modules, recurrences
from ...kernels.recurrence import KINDS
from . import decoder, kind, t5

KINDS["source"] = kind.SOURCE
CHANGES = dict.fromkeys(decoder.FAMILIES, decoder.attend_to_states) | dict.fromkeys(t5.FAMILIES, t5.attend_by_distance)
for family, name in (decoder.FAMILIES | t5.FAMILIES).items():
    path = f"transformers.models.{family}.modeling_{family}.{name}"
    admit.DECODERS[path] = decoder.causal
    modules.MODULES[path] = recurrences.MODULES[path] = CHANGES[family]
    recurrences.OF_FAMILY[family.replace("_small", "-small")] = {"linear_attention": ({"attention", "recurrence"},)}
