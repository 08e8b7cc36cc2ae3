"""Which probes look at this node: those that come along, the site's commands, and installed ones."""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ckptless.daemon.ckptlessd.health.answers import ProbeError
from ckptless.daemon.ckptlessd.health.commands import CommandProbe, MountProbe
from ckptless.daemon.ckptlessd.health.host import DiskProbe, HostProbe
from ckptless.daemon.ckptlessd.health.installed import InstalledProbe
from ckptless.daemon.ckptlessd.health.installed_main import GROUP
from ckptless.daemon.ckptlessd.health.kernel_log import KernelLogProbe
from ckptless.daemon.ckptlessd.health.links import LinkProbe
from ckptless.daemon.ckptlessd.health.nvml import NvmlProbe
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe
from ckptless.daemon.ckptlessd.health.shared_memory import SharedMemoryProbe
from ckptless.daemon.ckptlessd.health.slurm_view import SlurmProbe
from ckptless.daemon.protocol.limits import one_line
from ckptless.daemon.settings.options import HealthSettings
from ckptless.daemon.slurm.adapter import Node

logger = logging.getLogger(__name__)

# A name stands in the reasons of drained nodes.
MAX_NAME = 32
_NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{MAX_NAME - 1}}}")
# Folders that need room, beside those of the settings.
_NEED_ROOM = ("/", "/tmp", "/var")


class _Absent(Probe):
    """A probe that cannot be had, and why."""

    interval_s = deadline_s = 60.0

    def __init__(self, why: str) -> None:
        self._why = why

    def missing(self) -> str:
        return self._why

    def look(self) -> Sequence[Finding]:
        raise ProbeError(self._why)


def probes(
    settings: HealthSettings,
    state_dir: str,
    is_idle: Callable[[], bool],
    ask_slurm: Callable[[], Awaitable[Node]],
) -> dict[str, Probe]:
    """Return the probes by their names. `is_idle`: whether it is known that no job is on this node.

    `ask_slurm` gives this node as Slurm has it, in the event loop that this is called in.
    """
    rooms = dict.fromkeys((*_NEED_ROOM, state_dir, *settings.disks))
    found: dict[str, Probe] = {
        "kernel-log": KernelLogProbe(),
        "disk": DiskProbe([Path(room) for room in rooms]),
        "host": HostProbe(),
        "shared-memory": SharedMemoryProbe(lambda: not is_idle()),
        "link": LinkProbe(),
        "nvml": NvmlProbe(lambda: not is_idle()),
        "slurm": SlurmProbe(ask_slurm),
    }
    if settings.mounts:
        found["mount"] = MountProbe(settings.mounts)
    for name, line in (settings.commands or {}).items():
        found[f"command-{name}"] = CommandProbe(line)
    for entry in entry_points(group=GROUP):
        name = one_line(entry.name[:MAX_NAME])
        if name in found:
            logger.warning(
                "health: %s, of %s, does not look: there is a probe of its name", name, entry.value
            )
        elif name not in settings.without:
            found[name] = _installed(entry.name, entry.value)
    return {name: probe for name, probe in found.items() if name not in settings.without}


def _installed(name: str, value: str) -> Probe:
    """Return the probe of an entry point, which is a class or a function without arguments."""
    if not _NAME.fullmatch(name):
        return _Absent(f"its name must be of small letters, digits and hyphens, {MAX_NAME} at most")
    return InstalledProbe(value)
