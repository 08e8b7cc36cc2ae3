"""What torch and NCCL are told so that a process outlives the abort of its collectives; imports neither."""

from collections.abc import Mapping
from dataclasses import dataclass

from ckptless.torch_versions import Version, shown

# The first and the last release whose ncclCommAbort crashes (nvidia-resiliency-ext, "Known issues").
BROKEN_ABORT = ((2, 28, 3), (2, 28, 8))


@dataclass(frozen=True)
class Setting:
    """A variable of the environment of ranks that call `ckptless.run`, read when a backend is made.

    `fixed`: another value of the user's is replaced, since survivors would not survive with it.
    """

    name: str
    value: str
    why: str
    source: str
    fixed: bool


_TORCH = "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"

SETTINGS = (
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "torch's watchdog would end the process, or abort by itself, where a collective fails",
        _TORCH,
        fixed=True,
    ),
    Setting(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "the heartbeat monitor would end the process where an abort holds the watchdog up",
        _TORCH,
        fixed=True,
    ),
    Setting(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "the watchdog would end the process over an error that the abort has caused",
        "docs of nvidia-resiliency-ext, in-process restart",
        fixed=True,
    ),
    Setting(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        "a wait would block the main thread until the group's timeout, and no abort would end it",
        _TORCH,
        fixed=True,
    ),
    Setting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "flight records would be written in the middle of a recovery, on all ranks",
        _TORCH,
        fixed=False,
    ),
    Setting(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "1",
        "the watchdog of a survivor would sleep four times as long, a minute by default, once a peer is gone",
        "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, Watchdog::runLoop",
        fixed=False,
    ),
    Setting(
        "NCCL_NVLS_ENABLE",
        "0",
        "memory shared through NVLink switches is not let go of where a peer has died",
        "docs of nvidia-resiliency-ext, in-process restart",
        fixed=False,
    ),
)


def settle(env: Mapping[str, str]) -> tuple[dict[str, str], list[Setting]]:
    """Return what to set, and which settings replace another value of the user's."""
    wanted = {one.name: one.value for one in SETTINGS if one.fixed or one.name not in env}
    replaced = [one for one in SETTINGS if one.fixed and env.get(one.name, one.value) != one.value]
    return wanted, replaced


def why_not(nccl: Version) -> str | None:
    """Say why no process survives with this NCCL, or None where that is not known."""
    first, last = BROKEN_ABORT
    if first <= nccl <= last:
        return (
            f"NCCL {shown(nccl)} crashes where communicators are aborted, as all from {shown(first)} to "
            f"{shown(last)}: install another one"
        )
    return None
