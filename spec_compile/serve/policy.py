"""`Policy`, the permissions of a server's clients."""

from dataclasses import dataclass, field
from pathlib import Path

from .door import Keys
from .media import Media


@dataclass
class Policy:
    """The permissions of a server's clients. The fields are arguments of `server.build` and options of the command.

    keys: one of which every request but to /health needs; no keys: none
    allowed_media_domains, allowed_local_media_path, limit_mm_per_prompt: the arguments of `Media`, in this order
    share_texts: True if n-grams are drafted from the texts of all clients, whatever their keys
    isolate_prefixes: True if prompts of different keys share no keys and values
    allow_runtime_lora_updating: True if clients may load and unload adapters
    lora_root: the folder that has the adapters that clients may load, which they need
    enable_cors: True if web pages of other origins may read answers

    Raises ValueError as `Media` does, and if one of the two options of adapters is there without the other.
    """

    keys: Keys = field(default_factory=lambda: Keys(()))
    allowed_media_domains: list[str] | None = None
    allowed_local_media_path: str | Path | None = None
    limit_mm_per_prompt: dict[str, int] | None = None
    share_texts: bool = False
    isolate_prefixes: bool = False
    allow_runtime_lora_updating: bool = False
    lora_root: str | Path | None = None
    enable_cors: bool = False

    def __post_init__(self):
        self.media = Media(self.allowed_media_domains or [], self.allowed_local_media_path, self.limit_mm_per_prompt)
        root = self.lora_root
        if (root is None) == self.allow_runtime_lora_updating or not Path(root or ".").is_dir():
            raise ValueError(
                "lora_root: with allow_runtime_lora_updating, and only with it, expected the folder with the adapters "
                f"that clients may load, got {root}"
            )
        self.lora_root = None if root is None else Path(root).resolve()
