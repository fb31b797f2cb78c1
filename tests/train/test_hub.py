"""A trained head on the model hub, and through transformers' `custom_generate`."""

import shutil
import sys

import models
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects
from trainings import target, train
from transformers import dynamic_module_utils

from spec_compile.__main__ import main
from spec_compile.capture.changes import KEPT
from spec_compile.train import save as hub

NAME = "user/head"
httpx = sys.modules[hub.HTTP_ERROR.__module__.partition(".")[0]]
"""The package by which the hub is asked: httpx, or httpx2."""


class Hub:
    """A hub with one repository in a folder. fails: the status of its answer, by the name of a method."""

    def __init__(self, folder):
        self.folder, self.is_private, self.asked, self.fails = folder, None, [], {}

    def __call__(self, token):
        assert token == "secret"
        return self

    def _ask(self, method):
        self.asked.append(method)
        if self.fails.get(method) == "offline":
            raise httpx.ConnectError("no network")
        if method in self.fails:
            response = httpx.Response(self.fails[method], request=httpx.Request("GET", "https://huggingface.co"))
            raise HfHubHTTPError("refused", response=response)

    def create_repo(self, repo_id, private, exist_ok):
        self._ask("create_repo")
        assert repo_id == NAME and exist_ok
        self.is_private = bool(private) if self.is_private is None else self.is_private

    def auth_check(self, repo_id, write):
        self._ask("auth_check")
        assert write

    def repo_info(self, repo_id):
        return type("Info", (), {"private": self.is_private})

    def upload_folder(self, repo_id, folder_path, commit_message, allow_patterns):
        self._ask("upload_folder")
        names = [str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder_path / name, self.folder / name)
        return type("Commit", (), {"repo_url": f"https://huggingface.co/{repo_id}", "message": commit_message})


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(hub, "HfApi", made)
    monkeypatch.setattr(hub, "get_token", lambda: "secret")
    return made


def test_the_command_sends_the_head_and_its_card(command, fake, tmp_path, capsys):
    assert main([*command, "--steps", "1", "--push", NAME, "--private", "--license", "apache-2.0"]) == 0
    assert fake.asked == ["create_repo", "auth_check", "upload_folder"] and fake.is_private
    sent = sorted(str(path.relative_to(fake.folder)) for path in fake.folder.rglob("*") if path.is_file())
    assert sent == [
        "README.md", "config.json", "curve.csv", "custom_generate/generate.py", "custom_generate/requirements.txt",
        "model.safetensors",
    ]  # fmt: skip
    assert "sent to https://huggingface.co/user/head" in capsys.readouterr().err
    card = (fake.folder / "README.md").read_text()
    assert "\nlicense: apache-2.0\n" in card and "\ntags:\n  - custom_generate\n" in card and "base_model" not in card
    assert 'draft="user/head"' in card and 'custom_generate="user/head"' in card and "| data | text.txt |" in card
    assert 'algo="eagle3", draft="user/head"' in (fake.folder / "custom_generate/generate.py").read_text()


def test_a_card_names_a_base_model_of_the_hub_and_no_license_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(target().config, "name_or_path", "org/base-1.5")
    result = train(tmp_path / "head", steps=1)
    card = (tmp_path / "head/README.md").read_text()
    assert "\nbase_model: org/base-1.5\n" in card and "license" not in card
    assert f"| accept length of a chain as deep | {1 + sum(result.acceptance_by_depth):.2f} |" in card
    accepted = " ".join(f"{share:.3f}" for share in result.acceptance_by_depth)
    for part in ("eagle3 draft for org/base-1.5", "| steps | 1 |", "| seed | 0 |", "| tokens seen | 120 |", accepted):
        assert part in card
    assert f"{result.acceptance:.1%}" in card and "| settings | warmup 0.04, clip 0.5 |" in card


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("create_repo", 401, "the model hub refuses the token"),
        ("create_repo", 403, "the token may not write to user/head"),
        ("auth_check", 403, "the token may not write to user/head"),
        ("create_repo", "offline", "the model hub cannot be asked about user/head: no network"),
    ],
)
def test_no_right_to_write_is_an_error_before_training(tmp_path, fake, monkeypatch, method, answer, message):
    fake.fails[method] = answer
    monkeypatch.setattr("spec_compile.train.train.Loop", None)
    with pytest.raises(OSError, match=f"push: {message}"):
        train(tmp_path / "head", push=NAME)


def test_no_token_and_wrong_names_are_errors_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("spec_compile.train.train.Loop", None)
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(PermissionError, match="push: there is no token for the model hub; run `hf auth login`"):
        train(tmp_path / "head", push=NAME)
    for wrong, message in ({"push": "head"}, "USER/NAME"), ({"push": "a/b/c"}, "push: "), ({"private": True}, "push"):
        with pytest.raises(ValueError, match=message):
            train(tmp_path / "other", **wrong)
    with pytest.raises(TypeError, match="push: expected the name of a repository"):
        train(tmp_path / "other", push=3)
    assert not (tmp_path / "other").exists()


def test_private_does_not_send_to_a_public_repository(tmp_path, fake, monkeypatch):
    fake.is_private = False
    monkeypatch.setattr("spec_compile.train.train.Loop", None)
    with pytest.raises(ValueError, match="private: user/head exists and is public"):
        train(tmp_path / "head", push=NAME, private=True)


def test_after_a_failed_upload_the_same_call_sends_again(tmp_path, fake):
    fake.fails["upload_folder"] = "offline"
    with pytest.raises(ConnectionError, match="has the head; the same command sends it again"):
        train(tmp_path / "head", push=NAME, steps=1)
    fake.fails.clear()
    assert train(tmp_path / "head", push=NAME, steps=1).steps == 1
    assert (fake.folder / "model.safetensors").is_file()


def test_transformers_generates_with_the_head(tmp_path, monkeypatch):
    """By the folder's name only; options of the call count, too."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    model = models.ADMITTED["llama"]()
    train(tmp_path / "head", model=model, steps=1)
    asked = {"input_ids": models.prompts()[0][0], "max_new_tokens": 12}
    expected = model.generate(**asked)
    door = {"custom_generate": str(tmp_path / "head"), "trust_remote_code": True}
    assert torch.equal(model.generate(**asked, **door, num_steps=2, compile=False, check=False), expected)
    speculation = vars(model)[KEPT].fast.speculation
    assert speculation.engine.name == "eagle3" and speculation.options.num_steps == 2
    assert speculation.options.draft == str(tmp_path / "head")
