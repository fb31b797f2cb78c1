"""Many requests at once: rows of one cache that requests enter and leave between rounds."""

from .manager import Manager
from .output import Output, RequestSpeculation

__all__ = ["Manager", "Output", "RequestSpeculation"]
