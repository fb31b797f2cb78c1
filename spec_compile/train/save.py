"""The folder that a training writes (head, card, state to go on from), and the hub's repository that it is sent to.

Files are written aside and renamed, so that the earlier ones stay usable if the process or the disk fails.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters.checkpoints.files import load_pickled

HTTP_ERROR = HfHubHTTPError.__bases__[0]  # without a connection: httpx's, or httpx2's from huggingface_hub 2 on
STATE = "training.pt"
"""File of the state."""
TEXTS = "continuations.pt"
"""File of the target's answers, if it trains on them."""
CURVE = "curve.csv"
"""File of losses and acceptance."""
DOOR = "custom_generate"
"""Folder with the function that transformers' ``custom_generate`` runs."""
SENT = ["README.md", "config.json", "model.safetensors", CURVE, f"{DOOR}/*"]
"""Files of a training that are sent to the model hub; its state and its texts are not."""
VERSION = 2
"""The version of the state's format; a state of another version is refused."""


@dataclass
class TrainingState:
    """The progress of a training, from which it can go on.

    identity: by name, the values that must be the same to go on
    seconds: time of training
    tokens: trained on
    losses: one a step
    evaluations: (step, share of first drafts accepted on held-out text)
    weights: the head's trained parameters in their training dtype
    optimizer: the state_dict of each optimizer
    """

    identity: dict
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    weights: dict[str, Tensor] | None = None
    optimizer: list[dict] | None = None


def open_folder(output: str | Path, identity: dict, resume: bool) -> TrainingState:
    """The state in folder `output`; or a new one, and the folder is made.

    Raises ValueError if the folder has other files or the training of another head, or a training without `resume`.
    """
    folder = Path(output).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"output: {folder} is a file; expected a folder to be made, or the folder of an earlier training"
        )
    path = folder / STATE
    if not path.is_file():
        # A training that stops before its first checkpoint leaves the answers, and perhaps a partial file.
        own = TEXTS, CURVE
        names = sorted(each.name for each in folder.glob("*") if each.name not in own and each.suffix != ".partial")
        if names:
            raise ValueError(f"output: {folder} exists and holds {', '.join(names[:4])}; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        return TrainingState(identity)
    if not resume:
        raise ValueError(f"output: {folder} holds a training; pass resume=True to go on with it, or another folder")
    stored = load_pickled(path)
    if not isinstance(stored, dict) or stored.get("version") != VERSION:
        raise ValueError(f"output: {path} is no training state that this version of spec_compile can read")
    del stored["version"]
    for name, value in identity.items():
        if stored["identity"].get(name) != value:
            raise ValueError(
                f"output: {folder} holds the training of another head, with {name} {stored['identity'].get(name)!r} "
                f"where this one has {value!r}; choose another folder"
            )
    return TrainingState(**stored)


def save_state(folder: Path, state: TrainingState) -> None:
    """Write the state from which `open_folder` goes on."""
    replace(folder / STATE, lambda path: torch.save({"version": VERSION, **vars(state)}, path))


def save_curve(folder: Path, state: TrainingState) -> None:
    """Write a row for each step: its loss, and the share of first drafts accepted where that was measured after it."""
    accepted = dict(state.evaluations)
    rows = [(step, f"{loss:.6g}", accepted.get(step, "")) for step, loss in enumerate(state.losses, 1)]
    lines = ["step,loss,acceptance", *(",".join(map(str, row)) for row in rows)]
    replace(folder / CURVE, lambda path: path.write_text("\n".join(lines) + "\n"))


def save_head(
    folder: Path, config: dict, tensors: dict[str, Tensor], dtype: torch.dtype, texts: dict[str, str]
) -> None:
    """Write the head in its published format, floating-point tensors in `dtype`. texts: other files, by their names."""
    tensors = {
        name: value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype).contiguous()
        for name, value in tensors.items()
    }
    replace(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    for name, text in {"config.json": json.dumps(config, indent=2, default=str) + "\n", **texts}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        replace(folder / name, lambda path, text=text: path.write_text(text))


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Replace file `path` by the one that `write` writes, once that is on the disk."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        write(partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def fingerprint(model: PreTrainedModel) -> str:
    """16 hexadecimal digits that are the same for the same weights, in whatever dtype they are loaded.

    64 values of each parameter are read, rounded to bfloat16.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        sample = values[:: max(1, values.numel() // 64)][:64]
        digest.update(name.encode() + sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def write_door(algorithm: str, draft: str) -> dict[str, str]:
    """The files, by their names, with which transformers' ``custom_generate`` uses a draft. draft: a path or a name."""
    code = f'''"""generate() with this draft; the README tells how."""

from functools import partial

from spec_compile import custom_generate

generate = partial(custom_generate.generate, algo="{algorithm}", draft={json.dumps(draft)})
'''
    return {f"{DOOR}/generate.py": code, f"{DOOR}/requirements.txt": "spec_compile\n"}


def write_card(
    target: PreTrainedModel, algorithm: str, facts: dict, acceptance: list[float], draft: str, license: str | None
) -> str:
    """The README of a draft: its target, how it was trained, and how many of its tokens are accepted.

    facts: lines of the table. acceptance: shares by depth, empty if not measured. draft: its path or name. license: for
    the model hub; None leaves it out.
    """
    name = target.config.name_or_path or type(target).__name__
    is_on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", target.config.name_or_path or "") and not Path(name).exists()
    head = [f"base_model: {name}"] * bool(is_on_hub) + [f"license: {license}"] * bool(license)
    lines = "".join(f"{line}\n" for line in head)
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return f"""---
library_name: spec_compile
{lines}tags:
  - {DOOR}
  - speculative-decoding
---

# {algorithm} draft for {name}

Drafts for `{name}` in speculative decoding; it gives no text of its own. With spec_compile, as a model of its own or
through transformers' `generate()`:

```python
fast = spec_compile.speculate(model, algo="{algorithm}", draft="{draft}")
output = model.generate(**inputs, custom_generate="{draft}", trust_remote_code=True)
```

| | |
|---|---|
{table}
| first drafts accepted on held-out text | {f"{acceptance[0]:.1%}" if acceptance else "not measured"} |
| accepted down to depth 1, 2, ... | {" ".join(f"{share:.3f}" for share in acceptance) or "not measured"} |
| accept length of a chain as deep | {f"{1 + sum(acceptance):.2f}" if acceptance else "not measured"} |

Accepted means: the draft is the token that the target finds likeliest. The accept length is the number of tokens that a
round gains. Trained by `spec_compile.train_draft`; `{CURVE}` has the loss of every step.
"""


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
        except (HTTP_ERROR, OSError) as error:
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
        except (HTTP_ERROR, OSError) as error:
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
