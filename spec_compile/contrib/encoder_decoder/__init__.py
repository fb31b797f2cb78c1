"""Encoder-decoders: Whisper, BART, Marian, mBART, NLLB, T5 and their relatives.

A decoder is captured, rewritten and checked as a causal language model over an example source. Its layers attend to the
source by a recurrence whose state never changes: `kind` has its meaning. `decoder` has the model that is captured, and
the states of a call's sources; `draft` has drafts over the same source, `t5` what differs in T5.
"""

from ...capture import admit, modules, recurrences
from ...kernels.recurrence import KINDS
from . import decoder, draft, kind, moonshine, t5  # noqa: F401
from .intake import SourceIntake

KINDS["source"] = kind.SOURCE
decoder.Decoder.intake = SourceIntake
CHANGES = dict.fromkeys(decoder.FAMILIES, decoder.attend_to_states) | dict.fromkeys(t5.FAMILIES, t5.attend_by_distance)
for family, name in (decoder.FAMILIES | t5.FAMILIES).items():
    path = f"transformers.models.{family}.modeling_{family}.{name}"
    admit.DECODERS[path] = decoder.causal
    by_itself = f"{draft.__name__}.{name.removesuffix('ForConditionalGeneration').removesuffix('MTModel')}ForCausalLM"
    for each in (path, by_itself):
        modules.MODULES[each] = recurrences.MODULES[each] = CHANGES[family]
    recurrences.OF_FAMILY[family.replace("_small", "-small")] = {"linear_attention": ({"attention", "recurrence"},)}
