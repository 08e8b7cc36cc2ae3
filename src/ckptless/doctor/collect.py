"""Reads what the findings are made of; every part that cannot be read is left out, none raises."""

import contextlib
import ctypes
import importlib.metadata
import os
import resource
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ckptless.daemon.agent.kvstore import sock_owner
from ckptless.daemon.launch.allocation import inside_slurm
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.peercred import unix_address
from ckptless.daemon.settings.bind import interfaces
from ckptless.daemon.settings.options import DaemonSettings
from ckptless.daemon.settings.site import load_settings
from ckptless.doctor.facts import Daemon, Facts, Nccl, ProcessLimits, Torch
from ckptless.torch_versions import Version, parse

CONNECT_DEADLINE_S = 2.0
_NO_LIMIT = resource.RLIM_INFINITY


def collect(env: Mapping[str, str], torch: Version | None = None, nccl: Version | None = None) -> Facts:
    """Return the facts of this machine; `torch`, `nccl`: versions to ask about in place of the installed."""
    error, settings = "", DaemonSettings()
    try:
        settings = load_settings().daemon
    except UsageError as mistake:
        error = str(mistake)
    found = Torch(torch) if torch is not None else installed_torch()
    bundled = installed_nccl() if torch is None else None
    return Facts(
        torch=found,
        nccl=Nccl(nccl, "asked for") if nccl is not None else bundled,
        env=dict(env),
        interfaces=_interfaces(),
        ephemeral=_ephemeral(),
        limits=_limits(),
        slurm=inside_slurm(env),
        srun=shutil.which("srun", path=env.get("PATH")),
        daemon=_daemon(settings),
        guard=_guard(),
        settings_error=error,
    )


# --------------------------------------------------------------------------------- torch and NCCL


def installed_torch() -> Torch | None:
    """The torch of this environment, which is loaded to ask its guards; None for none."""
    try:
        version = parse(importlib.metadata.version("torch"))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    moved = _moved()
    return Torch(version, moved, None if moved is None or "recovery in place" in moved else _tried())


def _tried() -> str:
    from ckptless.pytorch_hooks import self_test

    return self_test.tried()


def _moved() -> dict[str, str] | None:
    """Return what the guards refuse, by part; None where torch cannot even be loaded."""
    try:
        from ckptless.pytorch_hooks.errors import TorchMismatch
        from ckptless.pytorch_hooks.torch_private import calls as torch_private
        from ckptless.pytorch_hooks.torch_private import dcp as torch_dcp
        from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp
    except ImportError:
        return None
    found: dict[str, str] = {}
    guards = {
        "recovery in place": torch_private.check,
        "FSDP2": torch_fsdp.check,
        "saving": torch_dcp.check,
    }
    for part, guard in guards.items():
        try:
            guard()
        except TorchMismatch as mismatch:
            found[part] = str(mismatch)
    return found


def installed_nccl() -> Nccl | None:
    """Return the NCCL of torch, else the wheel's, else what the dynamic linker finds; None for none."""
    for ask in (_nccl_of_torch, _nccl_of_wheel, _nccl_of_linker):
        found = ask()
        if found is not None:
            return found
    return None


def _nccl_of_torch() -> Nccl | None:
    try:
        from torch.cuda import nccl

        version = nccl.version()  # type: ignore[no-untyped-call]
    except (ImportError, AttributeError, RuntimeError):
        return None  # built without it
    return Nccl(tuple(version[:3]), "torch's") if isinstance(version, tuple) else None


def _nccl_of_wheel() -> Nccl | None:
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError):
            return Nccl(parse(importlib.metadata.version(name)), name)
    return None


def _nccl_of_linker() -> Nccl | None:
    try:
        library = ctypes.CDLL("libnccl.so.2")
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return Nccl(of_number(number.value), "libnccl.so.2")


def of_number(number: int) -> Version:
    """NCCL's own: 22907 is 2.29.7; before 2.9 it had a digit less."""
    if number < 10000:
        return number // 1000, number % 1000 // 100, number % 100
    return number // 10000, number % 10000 // 100, number % 100


# -------------------------------------------------------------------------------------- the machine


def _interfaces() -> tuple[tuple[str, str], ...]:
    try:
        return tuple((one.name, str(one.address)) for one in interfaces())
    except OSError:
        return ()


def _ephemeral() -> tuple[int, int] | tuple[()]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return ()


def _limits() -> ProcessLimits:
    return ProcessLimits(
        memfd=_memfd_error(),
        shm_free_nbytes=_shm_free(),
        memlock_nbytes=_soft(resource.RLIMIT_MEMLOCK),
        address_space_nbytes=_soft(resource.RLIMIT_AS),
        files=_soft(resource.RLIMIT_NOFILE),
        available_nbytes=_available(),
    )


def _memfd_error() -> str:
    try:
        fd = os.memfd_create("ckptless-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return error.strerror or str(error)
    os.close(fd)
    return ""


def _shm_free() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _soft(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == _NO_LIMIT else soft


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _guard() -> Literal["netlink", "proc", "none"]:
    ask = sock_owner.best_asker()
    if ask is None:
        return "none"
    return "netlink" if ask is sock_owner.from_netlink else "proc"


def _daemon(settings: DaemonSettings) -> Daemon:
    error = ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_DEADLINE_S)
        try:
            probe.connect(unix_address(settings.socket))
        except OSError as refused:
            error = refused.strerror or str(refused)
    return Daemon(settings.socket, settings.port, error)
