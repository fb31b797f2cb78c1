"""The captured graph of a draft: traced in the first process, read from its artefact and bound in later ones."""

import json
import logging
from collections.abc import Callable

from torch import nn

from .. import passes
from ..config import Options
from ..graph import ModelGraph
from ..passes.tidy import tidy
from .bind import bound, data_of
from .start import StartArtefact

ITEM = "draft"
log = logging.getLogger("spec_compile")


def draft_graph(draft: nn.Module, options: Options, trace: Callable[[], ModelGraph]) -> ModelGraph:
    """The graph of a head or a draft model, over its tensors.

    options: name the folder.
    trace: captures the draft, if there is no artefact of one like it. A stored graph that is wrong in spite of its key
        would cost accepted drafts, never an answer.

    The graph is tidied before it is stored, because a stored graph lacks values of weights, strides and devices, at
    which `tidy` looks. So the passes make the same of it in every process, and later ones find its compiled parts.
    """
    artefact, name = StartArtefact(draft, None, options, ITEM, {}), type(draft).__name__
    data = artefact.recall(ITEM)
    if data is not None:
        try:
            return bound(json.loads(data), draft)
        except Exception as error:
            log.warning("the graph of %s in its artefact does not fit (%r); the draft is captured anew", name, error)
    graph = passes.run(trace(), passes.Settings(), [tidy])
    if artefact.key is not None:
        try:
            artefact.keep(ITEM, json.dumps(data_of(graph, draft), separators=(",", ":")).encode())
        except Exception as error:
            log.debug("the graph of %s cannot be stored (%r)", name, error)
    return graph
