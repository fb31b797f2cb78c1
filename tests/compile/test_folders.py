"""Folders of compilers are this user's alone; what another user put in their place is neither read nor run."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from spec_compile import folders
from spec_compile.compat import CACHES, use_own_caches
from spec_compile.folders import foreign, make_own, own_folder, temporary_folder

ROOT = Path(__file__).parents[2]
NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for variable in (*CACHES, "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(folders, "_substitutes", {})
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


def others(folder):
    folder.mkdir(parents=True)
    os.chown(folder, NOBODY, NOBODY)


def open_to(mode):
    def make(folder):
        folder.mkdir(parents=True)
        folder.chmod(mode)

    return make


def link(folder):
    folder.parent.mkdir(parents=True)
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


def below_others(folder):
    others(folder.parent)
    folder.mkdir()


def below_open(folder):
    open_to(0o777)(folder.parent)
    folder.mkdir(mode=0o700)


def through_others(folder):
    """A link in a folder that is everybody's, as /tmp, to a folder of this user."""
    open_to(0o1777)(folder.parent.parent / "shared")
    (folder.parent.parent / "own/inductor").mkdir(parents=True)
    (folder.parent.parent / "shared/link").symlink_to("../own")
    os.lchown(folder.parent.parent / "shared/link", NOBODY, NOBODY)
    folder.parent.symlink_to("shared/link")


PLANTED = {
    "another user's": others, "group": open_to(0o770), "everybody": open_to(0o777), "sticky": open_to(0o1777),
    "link": link, "below another user's": below_others, "below everybody's": below_open,
    "through another user's link": through_others, "file": lambda folder: (folder.parent.mkdir(), folder.touch()),
}  # fmt: skip


@as_root
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("kind", PLANTED)
def test_a_folder_that_others_can_change_is_not_used(kind, is_given, home, caplog, monkeypatch):
    (home / ".cache").mkdir(mode=0o700)
    folder = home / ".cache/spec_compile/inductor"
    PLANTED[kind](folder)
    if is_given:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        monkeypatch.setenv("XDG_CACHE_HOME", str(home / "good"))
    use_own_caches()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert used != folder and foreign(used) is None and stat.S_IMODE(used.stat().st_mode) == 0o700
    assert not list(folder.iterdir() if folder.is_dir() else [])
    use_own_caches()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == used
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and "not kept for later processes" in told[0]


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_folders_are_made_for_this_user_only(umask, home):
    before = os.umask(umask)
    try:
        use_own_caches()
    finally:
        os.umask(before)
    for variable, name in CACHES.items():
        folder = Path(os.environ[variable])
        assert folder == home / ".cache/spec_compile" / name
        assert {stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.parents[:2])} == {0o700}


def test_folders_in_the_environment_are_respected(home, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "caches"))
    use_own_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home / "mine")
    assert os.environ["TRITON_CACHE_DIR"] == str(home / "caches/spec_compile/triton")


def test_a_user_without_a_home_has_temporary_folders(home, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    first, second = own_folder("inductor"), own_folder("triton")
    assert first.parent == second.parent and foreign(first.parent) is None and len(caplog.records) == 1


def test_temporary_folders_lie_where_nobody_can_replace_them(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(folders.tempfile, "tempdir", str(shared))
    for mode in (0o1777, 0o700):
        shared.chmod(mode)
        assert stat.S_IMODE(temporary_folder().stat().st_mode) == 0o700
    shared.chmod(0o777)
    with pytest.raises(PermissionError, match="name a folder in TMPDIR"):
        temporary_folder()


def test_links_of_this_user_are_followed(home):
    (home / "real").mkdir(mode=0o700)
    (home / "link").symlink_to("../home/./real")
    make_own(home / "link/inner")
    assert (home / "real/inner").is_dir() and foreign(home / "link/inner") is None
    (home / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        foreign(home / "loop/inner")


COMPILE = """
import sys, torch
sys.addaudithook(lambda name, given: name == "open" and "torchinductor_" in str(given[0]) and print(given[0]))
from spec_compile.compile.part import compile_part, job_of, load_part
from spec_compile.compile.trace import trace
traced = trace(lambda x: (x + 2).relu(), (torch.ones(4),), lambda size: False, torch.device("cpu"))
part = load_part(compile_part(job_of(traced.rows, traced.specs, {}, 1)))
assert part(torch.ones(4))[0].tolist() == [3.0] * 4
"""


def test_inductor_looks_nowhere_else(home):
    """Headers and a table of pickles lie in the folder of temporary files by default, whatever the environment says."""
    from torch._inductor import codecache
    from torch._inductor.fx_passes import pad_mm  # noqa: F401, makes the table
    from torch._inductor.runtime import caching, runtime_utils

    use_own_caches()
    places = [
        runtime_utils.cache_dir(), runtime_utils.default_cache_dir(), codecache.FxGraphCache._get_tmp_dir(),
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR, caching.memoizers.should_pad_memoizer._disk_cache._cache_dir,
        caching.memoizers.should_pad_memoizer._disk_cache._flock.lock_file,
    ]  # fmt: skip
    assert all(Path(place).is_relative_to(home / ".cache/spec_compile/inductor") for place in places)


@pytest.mark.slow
@as_root
def test_what_others_planted_in_the_folder_of_temporary_files_is_not_read(tmp_path, home):
    """torch itself would take the folder there, and unpickle and run what it finds."""
    shared = tmp_path / "shared"
    planted = shared / "torchinductor_somebody"
    others(planted)
    planted.chmod(0o777)
    shared.chmod(0o1777)
    environment = {name: value for name, value in os.environ.items() if name not in (*CACHES, "XDG_CACHE_HOME")}
    environment |= {"TMPDIR": str(shared), "LOGNAME": "somebody", "HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, capture_output=True, text=True)
    assert not done.stdout and not list(planted.iterdir())
    assert list((home / ".cache/spec_compile/inductor").rglob("*.so"))
