"""Folders of this user, to which nobody else but the administrator can write: for caches, and temporary ones."""

import atexit
import errno
import functools
import grp
import os
import pwd
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .errors import log

MOST_LINKS = 40
"""Links on the way to a folder, as in Linux."""
_substitutes: dict[tuple[int, str], Path] = {}
"""Temporary folders by process and by the folder that could not be used."""


def cache_folder() -> Path:
    """The package's folder among the caches of this user. RuntimeError if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spec_compile"


def foreign(folder: Path) -> Path | None:
    """The first folder or link on the way to `folder` that another user owns or may write to; None if there is none.

    Such a user could put a file of theirs in the place of ours. In a folder with the sticky bit, as /tmp, nobody can
    rename what belongs to others. OSError if there is no such folder.
    """
    *above, last = _steps(folder)
    for path, found in above:
        if is_foreign(found) and not (found.st_uid in (os.getuid(), 0) and found.st_mode & stat.S_ISVTX):
            return path
    return last[0] if is_foreign(last[1]) else None


def is_foreign(found: os.stat_result) -> bool:
    """True if another user owns a file, folder or link, or may write to it; the administrator does not count."""
    if found.st_uid not in (os.getuid(), 0):
        return True
    if stat.S_ISLNK(found.st_mode):  # has no mode that counts
        return False
    by_group = found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid)
    return bool(found.st_mode & stat.S_IWOTH or by_group)  # guard: other-users


def make_folder(folder: Path) -> None:
    """Make a folder and those above it for this user only, whatever the umask, as far as they are not there."""
    for path in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        path.mkdir(mode=0o700, exist_ok=True)


def make_own(folder: Path) -> None:
    """Make a folder for this user only, unless it is there. OSError if it cannot be made or written to, if another user
    owns it or may write to it or to one above it, or if it is a link."""
    make_folder(folder)
    if folder.is_symlink():
        raise PermissionError(f"{folder} is a link")
    if (other := foreign(folder)) is not None:
        raise PermissionError(f"another user owns {other} or may write to it")
    if folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{folder} is not this user's, or cannot be written to")


def own_folder(name: str, given: str | None = None) -> Path:
    """A folder for what one compiler keeps: the one that the user has given, or `name` below `cache_folder`.

    If it is not safe (see `make_own`), it is a temporary one, and one line of the log says so. OSError if that is not
    safe either.
    """
    try:
        folder = Path(given) if given else cache_folder() / name
        make_own(folder)
        return folder.absolute()
    except (OSError, RuntimeError) as error:
        folder = _substitute(given or "", f"{error}") / name
        make_folder(folder)
        return folder


def temporary_folder() -> Path:
    """A new folder for this user only. OSError if other users can rename it, or if there is no place for it."""
    folder = Path(tempfile.mkdtemp(prefix="spec_compile_"))
    if (other := foreign(folder)) is not None:
        folder.rmdir()
        raise PermissionError(
            f"another user may replace temporary files in {other}; set its sticky bit, or name a folder in TMPDIR"
        )
    return folder


@functools.cache
def user_secret(folder: Path | None) -> bytes:
    """32 random bytes that only this user knows, kept in the file "secret" of a folder; without a safe folder, only
    this process knows them. They sign what only this user's processes may have written."""
    try:
        if folder is None:
            raise RuntimeError("this user has no home")
        make_own(folder)
        file = folder / "secret"
        if not os.path.lexists(file):
            new = folder / f".secret-{os.getpid()}-{secrets.token_hex(4)}"
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(secrets.token_bytes(32))
            with suppress(FileExistsError):  # another process was faster
                os.link(new, file)
            new.unlink()
        found = file.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"another user may read or write {file}; delete it")
        if len(data := file.read_bytes()) != 32:
            raise ValueError(f"{file} is damaged; delete it")
        return data
    except (OSError, RuntimeError, ValueError) as error:
        log.warning("compiled code is not read by later processes: %s", error)
        return secrets.token_bytes(32)


def _substitute(place: str, reason: str) -> Path:
    """The temporary folder of this process in the place of another, which goes when the process ends."""
    key = os.getpid(), place
    if key not in _substitutes or not _substitutes[key].is_dir():
        _substitutes[key] = temporary_folder()
        log.warning("what is compiled is not kept for later processes: %s", reason)
        atexit.register(_delete, os.getpid(), _substitutes[key])
    return _substitutes[key]


def _delete(process: int, folder: Path) -> None:
    if process == os.getpid():  # a forked process does not remove its parent's folders
        shutil.rmtree(folder, ignore_errors=True)


def _steps(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All folders and links on the way to a folder, from the root on, and what they are."""
    here, rest, links = Path("/"), [*reversed(folder.absolute().parts[1:])], 0
    yield here, here.lstat()
    while rest:
        name = rest.pop()
        path = here.parent if name == ".." else here / name
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = path.readlink()
            here = Path("/") if target.is_absolute() else here
            rest += reversed(target.parts[target.is_absolute() :])
        else:
            here = path
        yield path, found


def _is_private(group: int) -> bool:
    """True for the group that a system makes for each user, in which nobody else is."""
    with suppress(KeyError):
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
        return group == user.pw_gid != 0 and found.gr_name == user.pw_name and not {*found.gr_mem} - {user.pw_name}
    return False
