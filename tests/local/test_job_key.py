"""A job's keys are where only its user can read them: in no command line, environment, or file for others."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

from ckptless.daemon.transport.handshake import new_key

from .localrun import toy, wait_until


def spellings(key: bytes) -> set[bytes]:
    """Ways in which a key may be written down."""
    return {
        key,
        key.hex().encode(),
        base64.b64encode(key).rstrip(b"="),
        base64.urlsafe_b64encode(key).rstrip(b"="),
    }


def open_to_all(words: set[bytes]) -> list[str]:
    """Return where any process of the machine has the key in its command line or environment."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                data = (entry / name).read_bytes()
            except OSError:
                continue
            if any(word in data for word in words):
                found.append(f"{entry}/{name}: {data[:200]!r}")
    return found


# In every interpreter of the run, before anything else: the keys that are made are written down for the test.
RECORDER = """
import os, secrets
from pathlib import Path
make = secrets.token_bytes
def token_bytes(nbytes=None):
    data = make(nbytes)
    if nbytes == {nbytes}:
        (Path({folder!r}) / f"{{os.getpid()}}-{{data[:4].hex()}}").write_bytes(data)
    return data
secrets.token_bytes = token_bytes
"""


def recorder(folder: Path) -> dict[str, str]:
    """The environment of a run whose keys go into a folder."""
    (folder / "keys").mkdir(parents=True)
    text = RECORDER.format(nbytes=len(new_key()), folder=str(folder / "keys"))
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_nobody_else_can_read_the_keys(tmp_path: Path) -> None:
    env = {"TOY_SLEEP_S": "0.05", **recorder(tmp_path / "made")}
    with toy(tmp_path, nodes=2, steps=4000, env=env) as job:
        wait_until(lambda: len(list((tmp_path / "out").glob("loss-*.txt"))) == 2, 90.0, job)
        keys = {path.read_bytes() for path in (tmp_path / "made/keys").iterdir()}
        file_key = (job.state_dir / "key").read_bytes()
        # That of the daemons, and that of the job, which a daemon has made.
        assert file_key in keys
        assert len(keys) >= 2
        words = {word for key in keys for word in spellings(key)}
        assert not open_to_all(words)
        holding = [
            path
            for path in job.state_dir.rglob("*")
            if path.is_file() and any(word in path.read_bytes() for word in words)
        ]
        assert holding == [job.state_dir / "key"]
        assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
        # Sockets lie in a folder of their own, which only their user can enter.
        assert not [path for path in job.state_dir.rglob("*") if path.is_socket()]
        job.launcher.terminate()
        job.wait(60.0)
