"""Pure: what findings mean: the one table from a code to what is done about it."""

import math
from collections.abc import Mapping
from typing import NamedTuple, get_args

from ckptless.daemon.protocol.health import Action

# From the mildest to the strongest. Each does what the one before does, and more.
ACTIONS: tuple[Action, ...] = get_args(Action)

_MINUTE_S, _HOUR_S = 60.0, 3600.0
# Until the node boots again.
FOR_GOOD_S = math.inf


class Meaning(NamedTuple):
    """What one kind of finding means.

    `note`: it is told of. `drain`: Slurm starts no more jobs on the node. `move`: jobs leave it for a spare,
    where they have one. `evict`: also where they go on with fewer nodes. It counts from the `strikes`-th time
    that it is seen within `window_s`, and until it was not seen for so long.
    """

    action: Action
    strikes: int
    window_s: float
    text: str


# A state is told of in every look: one that has passed by the next look was none.
_STATE_S = 5 * _MINUTE_S


def _event(action: Action, text: str, strikes: int = 1, window_s: float = _HOUR_S) -> Meaning:
    return Meaning(action, strikes, window_s, text)


def _state(action: Action, text: str) -> Meaning:
    return Meaning(action, 2, _STATE_S, text)


# NVIDIA's "Xid Errors" (docs.nvidia.com/deploy/xid-errors, catalogue of October 2025): the immediate action.
_RESTART_APP = (8, 11, 13, 25, 31, 32, *range(39, 42), 60, *range(68, 73), *range(75, 78), 80)
_RESTART_APP += (*range(82, 87), 88, 89, 94, *range(96, 106), *range(126, 136), 139)
_RESET_GPU = (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
_INSPECT = (54, 78, 142, 151, 159)
_NVLINK = (74, *range(144, 151))

XIDS: dict[int, Meaning] = {
    # The process has failed, and the job mends that; most of these are a program's own mistakes.
    **dict.fromkeys(_RESTART_APP, _event("note", "a process failed on the GPU")),
    **dict.fromkeys(_RESET_GPU, _event("evict", "the GPU must be reset", window_s=FOR_GOOD_S)),
    **dict.fromkeys(_INSPECT, _event("drain", "somebody must look at the GPU", window_s=FOR_GOOD_S)),
    **dict.fromkeys(_NVLINK, _event("move", "an NVLink of the GPU fails")),
    48: _event("evict", "the GPU's memory has an error of two bits", window_s=FOR_GOOD_S),
    63: _event("note", "a row of the GPU's memory is to be remapped at its next reset"),
    79: _event("evict", "the GPU has fallen off the bus", window_s=FOR_GOOD_S),
    154: _event("move", "the GPU asks for a recovery"),
}
_OTHER_XID = _event("note", "the GPU's driver reports an error")
_OTHER = _event("note", "a probe of this site's own reports it")

TABLE: dict[str, Meaning] = {
    # Of any probe.
    "probe-failed": _state("note", "the probe itself fails"),
    "probe-hangs": Meaning("note", 1, _STATE_S, "the probe does not come to an end"),
    "command-failed": _state("drain", "a command of the site's says that the node is not well"),
    # Of the GPUs, by NVML.
    "gpu-lost": _state("evict", "a GPU does not answer"),
    "gpu-reset": _state("evict", "the GPU must be reset"),
    "gpu-error": _state("note", "NVML cannot say how a GPU is"),
    "gpu-fewer": _state("evict", "there are fewer GPUs than when the node booted"),
    "gpu-ecc-uncorrected": _event("move", "errors of the GPU's memory were not corrected"),
    # No action of NVIDIA's goes by this count, but by the two flags of what could not be mended.
    "gpu-ecc-aggregate": _state(
        "note", "errors of the GPU's memory were not corrected, some time in its life"
    ),
    "gpu-sram-failed": _state("drain", "the GPU's caches have had too many errors: NVIDIA may replace it"),
    "gpu-remap-pending": _state("note", "rows of the GPU's memory are remapped at its next reset"),
    "gpu-remap-failed": _state("evict", "rows of the GPU's memory cannot be remapped"),
    "gpu-nvlink-down": _state("move", "an NVLink that was up is down"),
    "gpu-nvlink-errors": _event("note", "an NVLink has errors", strikes=3),
    "gpu-throttled": _state("note", "the GPU's clock is held down by its hardware"),
    "gpu-hot": _state("note", "the GPU is as hot as it may be"),
    "gpu-pcie-slow": _state("note", "the GPU's PCIe link is narrower or slower than it could be"),
    "gpu-left-over": _state("note", "a process is on the GPU, and no job is on the node"),
    # Of the kernel log.
    "nvswitch": _event("note", "an NVSwitch reports an error"),
    "nvswitch-fatal": _event("move", "an NVSwitch reports a fatal error"),
    "machine-check": _event("move", "the processor reports an error that it could not correct"),
    "hardware-error": _event("note", "the firmware reports an error that can be recovered from"),
    "machine-check-corrected": _event("note", "the processor has corrected an error"),
    "memory-uncorrected": _event("move", "the memory has an error that could not be corrected"),
    "memory-corrected": _event("note", "the memory has corrected an error"),
    "pcie-fatal": _event("move", "a PCIe device reports a fatal error"),
    "pcie-uncorrected": _event("note", "a PCIe device reports an error that was not corrected"),
    "nvme": _event("drain", "an NVMe drive does not answer", strikes=3),
    "disk-error": _event("drain", "a disk cannot be read or written", strikes=3),
    "file-system-error": _event("drain", "a file system is damaged"),
    "nfs-silent": _event("note", "an NFS server does not answer"),
    "task-hung": _event("note", "a process waits in the kernel for minutes"),
    "cpu-stuck": _event("move", "a processor is stuck in the kernel", strikes=3),
    "out-of-memory": _event("note", "the node was out of memory, and a process was killed"),
    "cgroup-out-of-memory": _event("note", "a job was out of its memory, and a process was killed"),
    "link-flap": _event("move", "a network link goes down again and again", strikes=3),
    "nic-failed": _event("move", "the firmware of a network adapter has failed"),
    "nic-stuck": _event("move", "a network adapter sends nothing", strikes=2),
    # Of the host.
    "disk-full": _state("drain", "a file system is full"),
    "disk-read-only": _state("drain", "a file system that was written has become read-only"),
    "mount-silent": _state("drain", "a mounted file system does not answer"),
    "mount-gone": _state("drain", "a file system that was mounted is mounted no more"),
    "memory-pressure": _state("note", "processes wait for memory"),
    "clock": _state("note", "the clock is not synchronised"),
    "cpu-throttled": _event("note", "processors are too hot", strikes=3),
    # Of shared memory.
    "shared-memory": _state("drain", "there is no room in shared memory"),
    "shared-memory-small": _state("note", "there is little shared memory for NCCL and for loaders"),
    "shared-memory-left-over": _state("note", "shared memory is used, and no job is on the node"),
    "memfd": _state("note", "there is no memory to be had that ranks and agents share"),
    # By Slurm's word, which is acted upon elsewhere: jobs lose such a node, or leave it.
    "slurm-down": Meaning("note", 1, _STATE_S, "the node is down in Slurm"),
    "slurm-fail": Meaning("note", 1, _STATE_S, "the node is about to fail, by Slurm's word"),
    "slurm-drained": Meaning("note", 1, _STATE_S, "somebody has drained the node in Slurm"),
    "slurm-not-responding": _state("note", "the node's slurmd does not answer Slurm"),
    # Of the network.
    "link-down": _state("move", "a network link that was up is down"),
    "link-slow": _state("move", "a network link is slower than it was"),
    "link-errors": _event("note", "a network link has errors", strikes=3),
}


def meaning(code: str, own: Mapping[str, Action]) -> Meaning:
    """Return what a code means; the site's `own` actions count more than the table's."""
    found = TABLE.get(code)
    if found is None and (number := xid_of(code)) is not None:
        found = XIDS.get(number, _OTHER_XID)
    found = found or _OTHER
    return found._replace(action=own[code]) if code in own else found


def concerns_jobs(code: str, action: Action) -> bool:
    """Whether the jobs on the node should have it in their story: what may be why something fails there."""
    if code == "gpu-ecc-aggregate":  # it may be years old
        return action != "note"
    memory = code.endswith("out-of-memory") or code.startswith(("shared-memory", "memfd"))
    return action != "note" or code.startswith(("xid-", "gpu-")) or memory


def xid_of(code: str) -> int | None:
    """Return the number of an Xid, of which the code is "xid-79"."""
    number = code.removeprefix("xid-")
    fine = number != code and number.isascii() and number.isdecimal() and len(number) <= 4
    return int(number) if fine else None


def is_code(code: str) -> bool:
    """Whether a probe that comes along may find this, or it is an Xid."""
    return code in TABLE or xid_of(code) is not None
