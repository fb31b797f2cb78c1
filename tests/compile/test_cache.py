"""`ArtefactCache`: what was written is read whole, or not at all; no fault of a disk or of a file is raised."""

import errno
import json
import logging
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_compile.compile import cache as stores
from spec_compile.compile.cache import HEADER, ArtefactCache
from spec_compile.kernels.linear import tuned

KEY, OTHER, THIRD = "a" * 64, "b" * 64, "0123456789abcdef" * 4
DATA = bytes(range(256)) * 3
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(ArtefactCache, "said", set())


@pytest.fixture
def store(tmp_path):
    return ArtefactCache(tmp_path / "cache")


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "spec_compile"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("data", [b"", b"x", DATA, os.urandom(1 << 20)], ids=len)
def test_an_item_is_read_as_it_was_written(store, data):
    assert store.read(KEY, "part") is None
    assert store.write(KEY, "part", data) is True
    assert ArtefactCache(store.folder).read(KEY, "part") == data
    assert store.read(KEY, "other") is store.read(OTHER, "part") is None
    assert store.write(KEY, "part", b"new") and store.read(KEY, "part") == b"new"
    assert names(store.folder) == [KEY] and names(store.folder / KEY) == ["part"]


def test_the_folder_is_that_of_the_argument_the_environment_or_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("SPEC_COMPILE_CACHE", raising=False)
    assert ArtefactCache().folder == tmp_path / ".cache/spec_compile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert ArtefactCache(True).folder == tmp_path / "x/spec_compile"
    assert tuned.file_of("G", "3").is_relative_to(ArtefactCache().folder)
    monkeypatch.setenv("SPEC_COMPILE_CACHE", "~/y")
    assert ArtefactCache(None).folder == tmp_path / "y"
    assert ArtefactCache("~/z").folder == tmp_path / "z"


def test_artefacts_are_dropped_and_files_of_others_in_the_folder_stay(store):
    (store.folder / "plans").mkdir(parents=True)
    (store.folder / "plans/gpu.json").write_text("{}")
    for key in (KEY, OTHER, THIRD):
        store.write(key, "part", DATA)
    assert store.drop(KEY) is True and store.drop(KEY) is False
    assert store.read(KEY, "part") is None and store.read(OTHER, "part") == DATA
    assert store.clear() == 2 and store.clear() == 0
    assert names(store.folder) == ["plans"] and names(store.folder / "plans") == ["gpu.json"]


def test_only_the_user_may_read_it(store):
    before = os.umask(0)
    try:
        store.write(KEY, "part", DATA)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (store.folder, store.folder / KEY)]
    assert modes == [0o700, 0o700] and stat.S_IMODE((store.folder / KEY / "part").stat().st_mode) == 0o600


WRONG_NAMES = [
    ("a", "part"), ("A" * 64, "part"), ("../" + "a" * 61, "part"), ("", "part"),
    (KEY, ""), (KEY, ".."), (KEY, ".new-x"), (KEY, "a/b"), (KEY, "a\n"),
]  # fmt: skip


@pytest.mark.parametrize("key, name", WRONG_NAMES)
def test_keys_and_names_are_checked(store, key, name):
    for call in (lambda: store.read(key, name), lambda: store.write(key, name, b"")):
        with pytest.raises(ValueError, match=r"(key|name): expected"):
            call()


def test_a_store_that_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_COMPILE_CACHE", str(tmp_path / "cache"))
    nothing = ArtefactCache(False)
    assert nothing.write(KEY, "part", DATA) is False and nothing.read(KEY, "part") is None
    assert nothing.entries() == [] and nothing.clear() == 0
    assert nothing.drop(KEY) is nothing.export(KEY, tmp_path) is False
    assert names(tmp_path) == []


def test_artefacts_are_listed_with_what_describes_them(store):
    store.write(KEY, "about", json.dumps({"model": "M"}).encode())
    store.write(KEY, "part", DATA)
    store.write(OTHER, "about", b"not JSON")
    store.write(THIRD, "about", b"[1]")
    for age, key in enumerate((OTHER, KEY, THIRD)):
        os.utime(store.folder / key, (0, 1000 - age))
    found = store.entries()
    assert [(each.key, each.about, each.used) for each in found] == [
        (OTHER, {}, 1000), (KEY, {"model": "M"}, 999), (THIRD, {}, 998)
    ]  # fmt: skip
    assert found[1].items == ["about", "part"] and found[1].bytes == 2 * HEADER.size + len('{"model": "M"}') + len(DATA)
    assert ArtefactCache(store.folder / "none").entries() == []


def test_those_not_used_for_longest_go_beyond_the_limit(tmp_path):
    size = len(DATA) + HEADER.size
    store = ArtefactCache(tmp_path, limit_bytes=3.5 * size)
    keys = [f"{number:064x}" for number in range(5)]
    for age, key in enumerate(keys[:3]):
        store.write(key, "part", DATA)
        os.utime(store.folder / key, (0, 1000 + age))
    assert store.read(keys[0], "part") == DATA  # the oldest is now the one that was used last
    store.write(keys[3], "part", DATA)
    assert {each.key for each in store.entries()} == {keys[0], keys[2], keys[3]}
    os.utime(store.folder / keys[0], (0, 1000))
    store.write(keys[4], "part", DATA)
    assert {each.key for each in store.entries()} == {keys[2], keys[3], keys[4]}
    assert store.write(keys[0], "part", DATA * 5) is False  # more than the limit by itself
    assert keys[0] not in {each.key for each in store.entries()}


def damage(path, change):
    content = path.read_bytes()
    path.write_bytes(change(content))


FAULTS = {
    "emptied": lambda content: b"",
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_logged_put_aside_and_written_anew(fault, store, caplog):
    store.write(KEY, "part", DATA)
    store.write(KEY, "whole", DATA)
    for _ in range(2):
        damage(store.folder / KEY / "part", FAULTS[fault])
        with caplog.at_level(logging.WARNING, "spec_compile"):
            caplog.clear()
            assert store.read(KEY, "part") is None
            assert store.read(KEY, "part") is None
        assert len(lines(caplog)) == 1 and "part: not used, because it" in lines(caplog)[0]
        assert store.read(KEY, "whole") == DATA
        assert store.write(KEY, "part", DATA) and store.read(KEY, "part") == DATA
    assert len([name for name in names(store.folder / KEY) if name.startswith(".damaged-part")]) == 2


def test_files_of_another_format_are_one_line_and_made_anew(store, caplog):
    for name in ("one", "two"):
        store.write(KEY, name, DATA)
        damage(store.folder / KEY / name, lambda content: content[:8] + b"\x01" + content[9:])
        assert store.read(KEY, name) is None and store.write(KEY, name, DATA) and store.read(KEY, name) == DATA
    assert len(lines(caplog)) == 1 and "artefacts of another format are not used; they are made anew" in caplog.text


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return ArtefactCache(tmp_path_factory.mktemp("damaged"))


@given(st.binary(max_size=200), st.data())
def test_no_damage_is_read(shared, data, draw):
    shared.write(KEY, "part", data)
    path = shared.folder / KEY / "part"
    content = bytearray(path.read_bytes())
    if draw.draw(st.booleans()):
        for place in draw.draw(st.sets(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=4)):
            content[place // 8] ^= 1 << place % 8
    else:
        del content[draw.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(content)
    assert shared.read(KEY, "part") is None and not path.exists()


@pytest.mark.parametrize("to", [(OTHER, "part"), (KEY, "other")])
def test_a_file_of_another_key_or_item_is_not_read(store, to, caplog):
    store.write(KEY, "part", DATA)
    store.write(*to, b"")
    (store.folder / KEY / "part").replace(store.folder / to[0] / to[1])
    assert store.read(*to) is None
    assert "another model or item" in lines(caplog)[0]


def test_files_of_another_user_are_not_read(store, monkeypatch, caplog):
    store.write(KEY, "part", DATA)
    uid = os.getuid() or 1000
    for path in (store.folder / KEY / "part", store.folder / KEY, store.folder):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | stat.S_IWOTH)  # others may write to it
        caplog.clear()
        assert store.read(KEY, "part") is None
        assert len(lines(caplog)) == 1 and "another user" in lines(caplog)[0]
        if path.is_dir():
            assert store.write(KEY, "more", DATA) is False
        path.chmod(mode) if path.exists() else store.write(KEY, "part", DATA)
    assert store.read(KEY, "part") == DATA
    monkeypatch.setattr(stores.os, "getuid", lambda: uid)
    if store.folder.stat().st_uid == 0:  # files of the administrator are read
        assert store.read(KEY, "part") == DATA
        os.chown(store.folder / KEY / "part", uid + 1, -1)
    else:
        monkeypatch.setattr(stores.os, "getuid", lambda: uid + 1)
    assert store.read(KEY, "part") is None


def fail(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


def use(store, folder):
    """Call everything that touches the disk, and return what was written and read."""
    written, read = store.write(KEY, "part", DATA), store.read(KEY, "old")
    store.write(OTHER, "part", DATA)
    store.entries(), store.export(KEY, folder), store.drop(OTHER), store.clear()
    return written, read


CALLS = "mkdir", "open", "utime", "stat", "replace", "rename", "unlink", "listdir", "scandir", "fstat", "rmdir"


@pytest.mark.parametrize("call", CALLS)
def test_no_fault_of_the_disk_is_raised(call, store, monkeypatch, caplog, tmp_path):
    store.write(KEY, "old", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        written, read = use(store, tmp_path / "other")
    assert written in (True, False) and read in (None, b"old")
    assert call not in ("open", "replace", "utime", "stat") or written is False
    texts = lines(caplog)
    assert len({*texts}) == len(texts) and sum("nothing is kept" in text for text in texts) <= 1
    assert store.write(KEY, "part", DATA) and store.read(KEY, "part") == DATA


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_logged_once_and_leaves_nothing(store, monkeypatch, caplog):
    store.write(KEY, "part", b"before")
    real = os.open

    def full(path, *arguments, **options):
        os.close(real(path, *arguments, **options))
        return real("/dev/full", os.O_WRONLY)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        assert [store.write(KEY, name, DATA) for name in ("part", "part", "other")] == [False] * 3
    assert len(lines(caplog)) == 1 and "No space left" in lines(caplog)[0]
    assert store.read(KEY, "part") == b"before" and names(store.folder / KEY) == ["part"]


def test_a_read_only_folder_is_read(store, caplog):
    store.write(KEY, "part", DATA)
    for path in (store.folder / KEY, store.folder):
        path.chmod(0o500)
    if os.access(store.folder, os.W_OK):
        pytest.skip("this user may write anywhere")
    assert store.read(KEY, "part") == DATA and store.write(KEY, "other", DATA) is False
    assert store.drop(KEY) is False and len(lines(caplog)) == 2
    for path in (store.folder, store.folder / KEY):
        path.chmod(0o700)


def test_files_and_folders_in_the_place_of_one_another(store, tmp_path, caplog):
    (store.folder / KEY / "part").mkdir(parents=True)
    assert store.read(KEY, "part") is None
    assert store.write(KEY, "part", DATA) and store.read(KEY, "part") == DATA
    assert len(lines(caplog)) == 1
    (tmp_path / "file").write_text("")
    store = ArtefactCache(tmp_path / "file")
    assert store.read(KEY, "part") is None and store.write(KEY, "part", DATA) is False
    assert store.entries() == [] and store.clear() == 0 and store.drop(KEY) is False


def test_links_to_folders_are_followed_and_only_the_link_is_deleted(tmp_path):
    ArtefactCache(tmp_path / "real").write(KEY, "part", DATA)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "others").mkdir(mode=0o700)
    (tmp_path / "others" / KEY).symlink_to(tmp_path / "real" / KEY)
    linked, inside = ArtefactCache(tmp_path / "link"), ArtefactCache(tmp_path / "others")
    assert linked.read(KEY, "part") == inside.read(KEY, "part") == DATA
    assert linked.write(OTHER, "part", DATA) and ArtefactCache(tmp_path / "real").read(OTHER, "part") == DATA
    assert inside.drop(KEY) and names(tmp_path / "others") == []
    assert linked.read(KEY, "part") == DATA
    (tmp_path / "others" / KEY).symlink_to(KEY)  # to itself
    assert inside.read(KEY, "part") is None and inside.write(KEY, "part", DATA) is False
    assert inside.entries() == [] and inside.clear() == 1


def test_an_artefact_is_carried_to_another_folder(store, tmp_path):
    for name in ("about", "graph", "part"):
        store.write(KEY, name, name.encode())
    assert store.export(KEY, tmp_path / "image/artefacts") is True
    store.clear()
    carried = ArtefactCache(tmp_path / "image/artefacts")
    assert [each.items for each in carried.entries()] == [["about", "graph", "part"]]
    assert carried.read(KEY, "graph") == b"graph"
    assert store.export(KEY, tmp_path / "none") is False and not (tmp_path / "none").exists()
    damage(carried.folder / KEY / "part", FAULTS["flipped"])
    assert carried.export(KEY, tmp_path / "more") is False


def write_often(folder, data, count):
    store = ArtefactCache(folder)
    for _ in range(count):
        store.write(KEY, "part", data)


def drop_often(folder, count):
    store = ArtefactCache(folder)
    for _ in range(count):
        store.drop(KEY)
        time.sleep(0.001)


def test_two_processes_write_one_item_while_a_third_deletes_it(store, caplog):
    values = [os.urandom(3000), os.urandom(70_000)]
    processes = [FORK.Process(target=write_often, args=(store.folder, value, 400)) for value in values]
    processes.append(FORK.Process(target=drop_often, args=(store.folder, 100)))
    for process in processes:
        process.start()
    found = []
    while any(process.is_alive() for process in processes):
        found.append(store.read(KEY, "part"))
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert {*found} <= {None, *values} and {*found} & {*values}
    assert lines(caplog) == []
    assert store.write(KEY, "part", DATA) and names(store.folder / KEY) == ["part"]
    assert store.clear() == 1 and names(store.folder) == []


def die_in_replace(folder):
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    ArtefactCache(folder).write(KEY, "part", b"of the dead")


def test_a_killed_writer_leaves_the_item_as_it_was_and_its_file_goes_after_a_day(store):
    store.write(KEY, "part", DATA)
    process = FORK.Process(target=die_in_replace, args=(store.folder,))
    process.start()
    process.join()
    (left,) = (store.folder / KEY).glob(".new-*")
    assert process.exitcode == -signal.SIGKILL and store.read(KEY, "part") == DATA
    (store.folder / f".gone-{OTHER}-1").mkdir()
    for age, is_left in ((stores.DAY / 2, True), (stores.DAY * 2, False)):
        for path in (left, store.folder / f".gone-{OTHER}-1"):
            os.utime(path, (0, time.time() - age))
        assert ArtefactCache(store.folder).write(KEY, "other", DATA)  # the first write of a process looks for leftovers
        assert left.exists() is (store.folder / f".gone-{OTHER}-1").exists() is is_left
    assert names(store.folder / KEY) == ["other", "part"]


def test_an_interrupted_write_leaves_nothing(store, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    store.write(KEY, "part", DATA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.write(KEY, "part", b"new")
    assert names(store.folder / KEY) == ["part"] and store.read(KEY, "part") == DATA
