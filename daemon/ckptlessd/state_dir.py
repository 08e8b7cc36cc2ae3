"""A state directory: made, or checked to be one of this format that nobody else may change."""

import errno
import os
import stat
from pathlib import Path

from ckptless.daemon.protocol.errors import LedgerError, StateDirError

# A directory of another format is refused, not guessed at.
STATE_FORMAT = 1
FORMAT_FILE = "FORMAT"
# What a disk may be over later.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def open_state_dir(path: Path) -> None:
    """Make a state directory, or check that it is one of this format, and that nobody else may change it.

    Raises StateDirError; LedgerError where the disk is full or read-only, which may pass.
    """
    try:
        _check_way(path.absolute())
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_access(path)
        marker = path / FORMAT_FILE
        # An empty one is of a disk that was full.
        if not marker.exists() or not marker.stat().st_size:
            if any(entry != marker for entry in path.iterdir()):
                raise StateDirError(f"{path} is not empty and no state directory of ckptless: choose another")
            # On the disk before all else, or a power failure leaves a ledger in what is no state directory.
            with marker.open("w") as file:
                file.write(f"{STATE_FORMAT}\n")
                file.flush()
                os.fsync(file.fileno())
        found = marker.read_text(errors="replace").strip()
    except OSError as error:
        kind = LedgerError if error.errno in _DISK else StateDirError
        raise kind(f"cannot use the state directory {path}: {error.strerror}") from error
    if found != str(STATE_FORMAT):
        raise StateDirError(
            f"{path} is a state directory of format {found}, this ckptless writes {STATE_FORMAT}: "
            "choose another, or remove it"
        )


def _check_way(path: Path) -> None:
    """Refuse folders on the way that others may rename, and their links: they could swap them."""
    for one in (path, *path.parents):
        if one.is_symlink() and (uid := one.lstat().st_uid) not in (0, os.geteuid()):
            raise StateDirError(
                f"{one} on the way to the state directory is a link of uid {uid}: choose another"
            )
    for one in (*path.parents, *path.resolve().parents):
        mode = stat.S_IMODE(one.stat().st_mode) if one.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise StateDirError(
                f"{one}, above the state directory, can be changed by everybody (mode {mode:04o}): "
                "chmod o-w or +t it, or choose another"
            )


def _check_access(path: Path) -> None:
    found, me = path.stat(), os.geteuid()
    if found.st_uid not in (0, me):
        raise StateDirError(
            f"the state directory {path} belongs to uid {found.st_uid}, and this is uid {me}: "
            f"chown it, or choose another"
        )
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise StateDirError(
            f"the state directory {path} can be changed by other users (mode {mode:04o}): chmod 700 it"
        )
