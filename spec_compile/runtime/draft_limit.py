"""The limit of a request's drafts, by its own argument ``speculation``."""

from typing import Any

from ..errors import check_int, did_you_mean

NAME = "num_draft_tokens"


def read_limit(speculation: Any, most: int) -> int:
    """Nodes that rounds verify of each tree of a request, the root included.

    speculation: None leaves it to the engine; False verifies no drafts; {"num_draft_tokens": n} at most n nodes.
    most: nodes that the engine's rounds are built for.

    Raises TypeError for values of other types and other names, ValueError for more nodes than were built.
    """
    if speculation is None:
        return most
    if speculation is False:
        return 1
    if not isinstance(speculation, dict):
        raise TypeError(f"speculation: expected None, False or a dictionary with {NAME}, got {speculation!r:.80}")
    for name in speculation:
        if name != NAME:
            raise TypeError(f"speculation: unknown setting {name!r:.80}.{did_you_mean(str(name)[:80], [NAME])}")
    limit = speculation.get(NAME, most)
    check_int(f"speculation: {NAME}", limit, 1, most, "nodes verified, the root included; speculate() built the most")
    return limit
