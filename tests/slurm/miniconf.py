"""A cluster with the SPANK plugin, somebody who submits to it, and a recorder in the daemon's place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .cluster import requirements
from .cluster.api import Cluster

SLURM_EXT = Path(__file__).parents[2] / "slurm_ext"
PLUGIN = "/etc/slurm/ckptless_spank.so"
PLACES = ("usr/lib/*/slurm-wlm", "usr/libexec/ckptless")
PLUGSTACK = "/etc/slurm/plugstack.conf"
# Stands for ckptless-run, which Slurm 23.11 or newer puts in front of what `srun --ckptless` starts.
LAUNCHER = "/etc/slurm/ckptless-run"
LAUNCHER_SCRIPT = '#!/bin/sh\nLAUNCHED="$LAUNCHED+" exec "$@"\n'
LOADED = f"optional {PLUGIN} launcher={LAUNCHER}\n"
DEADLINE_S = 20.0

# A command that prints its environment as JSON.
SHOW = "/usr/bin/python3 -c 'import json, os; print(json.dumps(dict(os.environ)))'"
OURS = re.compile("CKPTLESS.*|[A-Z]+_NO_KILL|SLURM_KILL_BAD_EXIT|SLURM_WAIT")

# Takes the daemon's place on a node: writes down who says what, and hangs up.
RECORDER = """
import os, pathlib, socket, struct
path = pathlib.Path("/run/ckptless/ckptlessd.sock")
path.parent.mkdir(exist_ok=True)
path.unlink(missing_ok=True)
server = socket.socket(socket.AF_UNIX)
server.bind(str(path))
server.listen(16)
print("pid", os.getpid(), flush=True)
while True:
    peer, _ = server.accept()
    with peer:
        pid, uid, gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        said = b""
        while piece := peer.recv(4096):
            said += piece
    print(uid, said.hex(), flush=True)
"""


# Another Slurm in a chroot: make test-slurm-matrix.
ROOTFS = os.environ.get("CKPTLESS_SLURM_ROOTFS", "")
# With our packages installed in it: packaged.py.
PACKAGED = os.environ.get("CKPTLESS_PACKAGED") == "1"


def build(folder: str, product: str, place: Path) -> Path:
    """Make what is written in C, for the Slurm of `ROOTFS` where there is one; or take the package's."""
    if PACKAGED:
        (found,) = (path for at in PLACES for path in Path(ROOTFS).glob(f"{at}/{product}"))
        return found
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command: list[str | Path] = ["make", "-s", "-C", SLURM_EXT / folder, f"BUILD={place}"]
    if ROOTFS:
        # Only Slurm's headers: the others there are for another compiler.
        (place / "include").mkdir(parents=True)
        (place / "include/slurm").symlink_to(f"{ROOTFS}/usr/include/slurm")
        command.append(f"SLURM_CPPFLAGS=-I{place}/include")
    subprocess.run(command, check=True, env=env, timeout=100)
    return place / product


@dataclass
class User:
    """Somebody on the login node."""

    cluster: Cluster

    def run(self, line: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(
            "ctl", *shlex.split(line), user="tester", cwd="/shared", env=env, check=False, timeout_s=60
        )

    def script(self, *lines: str) -> str:
        path = self.cluster.shared / "job.sh"
        path.write_text("\n".join(("#!/bin/bash", *lines, "echo the end", "")))
        path.chmod(0o755)
        return "job.sh"

    def batch(self, line: str, **env: str) -> tuple[subprocess.CompletedProcess[str], str]:
        """Submit a script of `script`, wait for its end; what it printed. (sbatch --wait looks every 2 s.)"""
        output = self.cluster.shared / "out"
        output.unlink(missing_ok=True)
        result = self.run(f"{line.replace('sbatch', 'sbatch -o out', 1)}", **env)
        if result.returncode == 0:
            eventually(lambda: output.exists() and output.read_text().endswith("the end\n"))
        return result, output.read_text() if output.exists() else ""

    def environments(self, line: str, *directives: str, **env: str) -> tuple[dict[str, str], dict[str, str]]:
        """What `line` (sbatch, salloc or srun, and options) gives to the script and to a step within."""
        step = f"srun -N1 -n1 {SHOW}"
        if line.startswith("sbatch"):
            result, text = self.batch(f"{line} {self.script(*directives, SHOW, step)}", **env)
        elif line.startswith("salloc"):
            result = self.run(f"{line} bash {self.script(SHOW, step)}", **env)
            text = result.stdout
        else:
            result = self.run(f"{line} -n1 {SHOW}", **env)
            text = result.stdout * 2
        assert result.returncode == 0, result.stderr
        batch, in_step = (json.loads(row) for row in text.splitlines() if row.startswith("{"))
        return ours(batch), ours(in_step)

    def no_kill(self) -> bool:
        """Whether slurmctld was told so for the newest job."""
        said: list[str] = re.findall(r"kill_on_node_fail=(-?\d+)", self.cluster.log("ctl", "slurmctld"))
        return said[-1] == "0"


def puts_in_front() -> bool:
    """Whether this Slurm can."""
    if requirements.missing(ROOTFS):
        return False
    major, minor = requirements.slurm_version(ROOTFS).split()[-1].split(".")[:2]
    return (int(major), int(minor)) >= (23, 11)


def ours(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if OURS.fullmatch(name)}


def eventually(what: Callable[[], object]) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < limit, f"not within {DEADLINE_S:.0f} s"
        time.sleep(0.05)


@contextlib.contextmanager
def recorder(cluster: Cluster, node: str) -> Iterator[Path]:
    """A recorder in the daemon's place, until the end of the block; gives the file that it writes."""
    heard = cluster.shared / f"heard-{node}"
    heard.write_text("")
    program = cluster.shared / "recorder.py"
    program.write_text(RECORDER)
    process = cluster.popen(
        node, "sh", "-c", f"exec /usr/bin/python3 /shared/recorder.py > /shared/{heard.name}"
    )
    try:
        eventually(heard.read_text)
        yield heard
    finally:
        cluster.kill_group(process)


def notices(heard: Path) -> list[dict[str, object]]:
    found = []
    for row in heard.read_text().splitlines()[1:]:
        uid, frame = row.split()
        assert uid == "0"
        data = bytes.fromhex(frame)
        assert int.from_bytes(data[:4], "little") == len(data) - 4
        found.append(msgspec.msgpack.decode(data[4:]))
    return found
