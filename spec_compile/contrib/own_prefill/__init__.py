"""Prompts of requests that the model's own forward processes: with pictures, with sounds, or over a source.

`prefill` has what a request brings, `rows` where it is processed, `pictures` the prompts with pictures and sounds.
"""

from ...batching.intake import Intake
from ...batching.prefill import PrefillRows
from .pictures import PicturePrefill
from .rows import OwnRows

Intake.of_pictures = PicturePrefill
PrefillRows.own_rows = OwnRows
