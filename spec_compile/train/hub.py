"""The repository on the model hub to which a training sends its head."""

from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from .save import CURVE, DOOR

SENT = ["README.md", "config.json", "model.safetensors", CURVE, f"{DOOR}/*"]
"""Files of a training that are sent; its state and its texts are not."""


@dataclass(frozen=True)
class Repository:
    """A repository of the model hub.

    name: USER/NAME.
    private: True to make it private; None as the user's account says.
    """

    name: str
    private: bool | None = None

    def __post_init__(self):
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise ValueError(f"push: {error}") from error
        if "/" not in self.name:
            raise ValueError(f"push: expected the name of a repository, USER/NAME, got {self.name!r}")

    def make(self) -> None:
        """Make the repository, if it does not exist, and check that the user may write to it.

        Raises PermissionError without a token or the right to write, ValueError if the repository is public and
        `private` is True, and ConnectionError if the hub cannot be asked.
        """
        api = self._api()
        try:
            api.create_repo(self.name, private=self.private, exist_ok=True)
            api.auth_check(self.name, write=True)
            is_private = api.repo_info(self.name).private
        except (httpx.HTTPError, OSError) as error:
            raise self._explained(error) from error
        if self.private and not is_private:  # guard: private-heads
            raise ValueError(
                f"private: {self.name} exists and is public; make it private in its settings, or push to another"
            )

    def send(self, folder: Path, message: str) -> str:
        """Send a head and its card in one commit; returns the repository's address.

        Raises PermissionError or ConnectionError. The folder stays as it is.
        """
        try:
            commit = self._api().upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=message, allow_patterns=SENT
            )
        except (httpx.HTTPError, OSError) as error:
            explained = self._explained(error)
            raise type(explained)(f"{explained}. {folder} has the head; the same command sends it again") from error
        return str(commit.repo_url)

    def _api(self) -> HfApi:
        token = get_token()
        if token is None:
            raise PermissionError("push: there is no token for the model hub; run `hf auth login`, or set HF_TOKEN")
        return HfApi(token=token)

    def _explained(self, error: Exception) -> OSError:
        """The error of the hub, with the argument and the remedy."""
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status == 401:
            return PermissionError("push: the model hub refuses the token; run `hf auth login` again")
        if status in (403, 404):
            return PermissionError(
                f"push: the token may not write to {self.name}; pass another repository, or log in with another token"
            )
        return ConnectionError(f"push: the model hub cannot be asked about {self.name}: {error}")
