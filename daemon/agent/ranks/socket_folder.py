"""A folder of Unix sockets that no other user can connect to, and whose name nobody can take before.

What else is short-lived lies in it, too, so that all goes with it.

Not in the abstract namespace, which is everybody's, and not in a state directory: a socket's path has room
for 107 bytes. Not in XDG_RUNTIME_DIR either: that goes with its user's last login session, a job does not.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/tmp")  # the folder itself is 0700, and has a random name
RANKS = "ranks"
_SCRATCH = "tmp"
# With a uid of ten digits there is room left for what multiprocessing makes in here.
_LABEL_CHARACTERS = 20
# A Unix socket's path has 107 bytes; Python's names in a scratch folder are shorter than this.
NAME_NBYTES, MOST_NBYTES = 40, 107


class SocketFolder:
    """A new folder of mode 0700; `close` removes it.

    Its lock (flock(2)) lives as long as the process: so it is known whether a folder that is found is used,
    and systemd-tmpfiles leaves it alone.
    """

    def __init__(self, label: str) -> None:
        _sweep()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(label), dir=ROOT))
            # Another start may take it for one that is not used, before it is open or is locked; and
            # somebody else may then take its name.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
                fcntl.flock(self._fd, fcntl.LOCK_EX)
                if _is_at(self._fd, self.path) and _is_ours(os.fstat(self._fd)):
                    return
                os.close(self._fd)

    def socket(self, name: str) -> str:
        """The path of a socket in it."""
        return str(self.path / name)

    def close(self) -> None:
        """Remove it, and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)


class Scratch:
    """Folders for the sockets of multiprocessing: one for each training process, removed when that is dead.

    Python makes them where they are first needed (`/tmp/pymp-...`), in loader workers too, and removes them
    at a process's regular end only, which few of ours come to. These lie beside the agent's `rank_socket`:
    that folder goes after a SIGKILL, too.
    """

    def __init__(self, rank_socket: str) -> None:
        self.root = Path(rank_socket).with_name(Path(rank_socket).name.removesuffix(RANKS) + _SCRATCH)
        self._count = 0

    def make(self) -> Path | None:
        """A new one; None where there is no place for it, and Python's own way has to do."""
        try:
            folder = self.root / str(self._count)
            if len(bytes(folder)) + NAME_NBYTES > MOST_NBYTES:
                return None
            self._count += 1
            folder.mkdir(mode=0o700, parents=True)
        except OSError:
            return None
        return folder

    @staticmethod
    def remove(folder: Path | None) -> None:
        """Remove one."""
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all."""
        self.remove(self.root)


def rank_sockets(job: str) -> list[str]:
    """Return where an agent of this user may listen for ranks of a job on this node."""
    return [str(path / RANKS) for path in _ours(_prefix(job))]


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open folder is still there under its name: whoever finds that free may make another one."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _prefix(label: str) -> str:
    word = re.sub(r"[^a-zA-Z0-9_.-]", "_", label)[:_LABEL_CHARACTERS]
    return f"ckptless-{os.getuid()}-{word}-"


def _ours(prefix: str) -> Iterator[Path]:
    """Folders of this user that begin so; whoever may have made others of that name."""
    for path in ROOT.iterdir():
        if not path.name.startswith(prefix):
            continue
        with contextlib.suppress(OSError):
            if _is_ours(path.lstat()):
                yield path


def _is_ours(found: os.stat_result) -> bool:
    """Whether it is a folder of this user's, which nobody else can open."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _sweep() -> None:
    """Remove those of processes that were killed."""
    for path in _ours(f"ckptless-{os.getuid()}-"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, path):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
