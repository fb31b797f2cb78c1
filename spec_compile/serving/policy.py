"""`Policy`, the permissions of a server's clients."""

from dataclasses import dataclass, field
from pathlib import Path

from .door import Keys
from .media import Media


@dataclass
class Policy:
    """The permissions of a server's clients. The fields are arguments of `server.build`, and options of the command line.

    keys: one of which every request but to /health needs; no keys: none
    allowed_media_domains, allowed_local_media_path, limit_mm_per_prompt: the arguments of `Media`, in this order
    share_texts: True if n-grams are drafted from the texts of all clients, whatever their keys
    isolate_prefixes: True if prompts of different keys share no keys and values
    enable_cors: True if web pages of other origins may read answers

    Raises ValueError as `Media` does.
    """

    keys: Keys = field(default_factory=lambda: Keys(()))
    allowed_media_domains: list[str] | None = None
    allowed_local_media_path: str | Path | None = None
    limit_mm_per_prompt: dict[str, int] | None = None
    share_texts: bool = False
    isolate_prefixes: bool = False
    enable_cors: bool = False

    def __post_init__(self):
        self.media = Media(self.allowed_media_domains or [], self.allowed_local_media_path, self.limit_mm_per_prompt)
