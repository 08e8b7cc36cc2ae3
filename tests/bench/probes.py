"""What the probes of a daemon take: processor time as a share of one core, and memory, of all together.

`python -m tests.bench.probes [LOOKS]`: each probe that comes along looks so often, in a process that has
loaded what the daemon has; its time is divided by the interval that it would wait. `nvml` is over the tests'
library, with 8 GPUs: it reads a file at each call, where the real one asks the driver.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ckptless.daemon.ckptlessd.main  # noqa: F401  # what the daemon has loaded is not of the probes
from ckptless.daemon.ckptlessd.health.probe import Probe
from ckptless.daemon.ckptlessd.health.probes import probes
from ckptless.daemon.settings.options import HealthSettings
from ckptless.daemon.slurm.adapter import Node

LOOKS = 200


def main() -> None:
    """Measure, and print a line for each probe."""
    looks = int(sys.argv[1]) if len(sys.argv) > 1 else LOOKS
    if "FAKE_NVML" not in os.environ:
        sys.exit(_with_nvml())
    made = asyncio.run(_made())
    before = _resident_nbytes()
    shares = [_share(name, probe, looks) for name, probe in made.items()]
    print(f"all: {100 * sum(shares):.4f} % of a core, {(_resident_nbytes() - before) / 1e6:.1f} MB")
    for probe in made.values():
        probe.close()


def _with_nvml() -> int:
    """Measure in a process where the loader finds the library; return its exit code."""
    from tests.unit.health.test_nvml import compiled

    with tempfile.TemporaryDirectory(prefix="probes") as scratch:
        world = Path(scratch, "world")
        world.write_text("count 8\n")
        library = compiled(Path(scratch))
        environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(world)}
        command = [sys.executable, "-m", "tests.bench.probes", *sys.argv[1:]]
        # no deadline: it ends with Ctrl-C, as this does
        return subprocess.run(command, env=environment, check=False).returncode


async def _made() -> dict[str, Probe]:
    """Return all but that of Slurm, which asks by a process of Slurm's own."""
    return probes(HealthSettings(mounts=("/",), without=("slurm",)), "/tmp", lambda: False, _no_slurm)


async def _no_slurm() -> Node:
    raise AssertionError("nobody asks")


def _share(name: str, probe: Probe, looks: int) -> float:
    if why := probe.missing():
        print(f"{name}: {why}")
        return 0.0
    probe.look()  # the first one finds out what the others compare with
    used_s = -_used_s()
    for _ in range(looks):
        probe.look()
    used_s = (used_s + _used_s()) / looks
    print(
        f"{name}: {1e3 * used_s:.3f} ms every {probe.interval_s:g} s: {100 * used_s / probe.interval_s:.4f} %"
    )
    return used_s / probe.interval_s


def _used_s() -> float:
    """Return what this process and those that it has waited for have used."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
