"""The flags of transformers' server among the options of a command."""

import inspect
from collections.abc import Callable

from transformers.cli.serve import Serve

from ..serving import FLAGS


def with_server_flags(serve: Callable) -> Callable:
    """A command with its own parameters, and in place of ``**flags`` those of transformers' server in `FLAGS`."""
    parameters = [each for each in inspect.signature(serve).parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters += [each for name, each in inspect.signature(Serve.__init__).parameters.items() if name in FLAGS]
    serve.__signature__ = inspect.Signature(parameters)
    serve.__annotations__ = {each.name: each.annotation for each in parameters}
    return serve
