"""`DraftGuard`: an error of a draft ends its drafts, not the answer."""

import logging
from collections.abc import Callable
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode

log = logging.getLogger("spec_compile")


class DraftGuard:
    """Runs a draft's parts. After an error in one of them it runs none any more, and rounds are plain steps.

    raises: True: errors are not caught, because other ranks would go on drafting.
    error: the error; None if there was none.
    """

    def __init__(self, raises: bool = False) -> None:
        self.raises = raises
        self.error: Exception | None = None

    def __call__(self, part: Callable[..., None], *arguments: Any) -> None:
        """Run a part of the draft, unless an earlier one has failed. A trace gets the error, because its caller may run
        the part as it is."""
        if self.error is not None:
            return
        try:
            part(*arguments)
        except Exception as error:
            if self.raises or get_proxy_mode() is not None:
                raise
            self.error = error
            log.warning(
                "the draft has failed (%s: %s) and is left out from now on; answers go on with plain steps",
                type(error).__name__, error, exc_info=error,
            )  # fmt: skip
