"""What the kernel's log says: lines of real kernels and drivers, and what must not be taken for them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.health.kernel_log import KMSG, MOST_RECORDS, KernelLogProbe, finding
from ckptless.daemon.ckptlessd.health.meanings import TABLE, is_code
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe

# line, code, where
XIDS = [
    # 550 and newer
    (
        "NVRM: Xid (PCI:0000:4f:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "xid-79",
        "GPU 0000:4f:00",
    ),
    ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", "xid-79", "GPU 0000:01:00"),
    (
        "NVRM: Xid (PCI:0000:b7:00): 119, pid=2118, name=python3, Timeout after 6s of waiting for RPC"
        " response from GPU0 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20800a6a 0x4).",
        "xid-119",
        "GPU 0000:b7:00",
    ),
    (
        "NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault: ENGINE"
        " GRAPHICS GPC2 GPCCLIENT_T1_7 faulted @ 0x7f0f_a6a00000. Fault is of type FAULT_PDE"
        " ACCESS_TYPE_VIRT_READ",
        "xid-31",
        "GPU 0000:00:06",
    ),
    ("NVRM: Xid (PCI:0000:82:00): 43, pid=3126, Ch 00000008", "xid-43", "GPU 0000:82:00"),
    (
        "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No,"
        " D-RST: No",
        "xid-94",
        "GPU 0000:01:00",
    ),
    (
        "NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000"
        " 0x00000000 0x00000000 0x00000000 0x00000000)",
        "xid-149",
        "GPU 0018:01:00",
    ),
    (
        "NVRM: Xid (PCI:0000:5f:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset"
        " Required)",
        "xid-154",
        "GPU 0000:5f:00",
    ),
    # 390, 340 and 304
    (
        "NVRM: Xid (PCI:0000:05:00): 31, Ch 0000001e, engmask 00000101, intr 10000000",
        "xid-31",
        "GPU 0000:05:00",
    ),
    (
        "NVRM: Xid (PCI:0000:03:00): 48, An uncorrectable double bit error (DBE) has been detected on GPU in"
        " the framebuffer at partition 6, subpartition 0.",
        "xid-48",
        "GPU 0000:03:00",
    ),
    (
        "NVRM: Xid (0000:03:00): 13, 0003 00000000 00008297 00001098 00000000 00000044",
        "xid-13",
        "GPU 0000:03:00",
    ),
    (
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
        "nvswitch",
        "0000:c1:00.0",
    ),
    (
        "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up",
        "nvswitch-fatal",
        "0000:06:00.0",
    ),
]
PROCESSORS = [
    (
        "mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 3: be00000000800400",
        "machine-check",
        "CPU 12",
    ),
    (
        "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: 8c00004000010090",
        "machine-check-corrected",
        "CPU 3",
    ),
    ("mce: [Hardware Error]: Machine check events logged", "machine-check-corrected", ""),
    ("{1}[Hardware Error]: event severity: fatal", "machine-check", ""),
    ("{12}[Hardware Error]: event severity: recoverable", "hardware-error", ""),
    ("[Hardware Error]: event severity: fatal", "machine-check", ""),
    ("{2}[Hardware Error]: event severity: corrected", "machine-check-corrected", ""),
    # AMD, by edac_mce_amd
    ("[Hardware Error]: Uncorrected, software restartable error.", "machine-check", ""),
    ("[Hardware Error]: Uncorrected, software containable error.", "machine-check", ""),
    ("[Hardware Error]: System Fatal error.", "machine-check", ""),
    ("[Hardware Error]: Corrected error, no action required.", "machine-check-corrected", ""),
    ("[Hardware Error]: Deferred error, no action required.", "machine-check-corrected", ""),
    (
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x3f1c2b"
        " offset:0x4c0 grain:32 syndrome:0x0 -  err_code:0x0101:0x0090)",
        "memory-corrected",
        "MC0",
    ),
    (
        "EDAC MC11: 1 UE Error overflow on any memory (csrow:7 page:0x0 offset:0x0 grain:1)",
        "memory-uncorrected",
        "MC11",
    ),
    ("mce: Uncorrected hardware memory error in user-access at 79d6c8440", "memory-uncorrected", ""),
    ("Memory failure: 0x79d6c8: recovery action for unsplit thp: Ignored", "memory-uncorrected", ""),
    ("Memory failure: 0x3a5b6c: recovery action for dirty LRU page: Failed", "memory-uncorrected", ""),
    ("watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python:1234]", "cpu-stuck", "CPU#12"),
    ("NMI watchdog: BUG: soft lockup - CPU#3 stuck for 23s! [kworker/3:1:77]", "cpu-stuck", "CPU#3"),
    ("BUG: soft lockup - CPU#0 stuck for 67s! [rsync:1]", "cpu-stuck", "CPU#0"),
    ("NMI watchdog: Watchdog detected hard LOCKUP on cpu 27", "cpu-stuck", "cpu 27"),
    ("watchdog: CPU5: Watchdog detected hard LOCKUP on cpu 5", "cpu-stuck", "cpu 5"),
    # 4.x to 6.15, 6.16 and newer, and names with spaces and colons
    ("INFO: task python:4711 blocked for more than 120 seconds.", "task-hung", ""),
    ("INFO: task startplasma-way:1473 blocked in I/O wait for more than 122 seconds.", "task-hung", ""),
    ("INFO: task kworker/u64:3:1234 blocked for more than 491 seconds.", "task-hung", ""),
    ("INFO: task Web Content:99 blocked for more than 120 seconds.", "task-hung", ""),
]
PCIE = [
    (
        "pcieport 0000:c0:01.1: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer,"
        " (Requester ID)",
        "pcie-fatal",
        "0000:c0:01.1",
    ),
    (
        "pcieport 0000:00:1c.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible,"
        " (Unregistered Agent ID)",
        "pcie-fatal",
        "0000:00:1c.0",
    ),
    (
        "igb 0000:09:00.0: AER: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer,"
        " (Requester ID)",
        "pcie-uncorrected",
        "0000:09:00.0",
    ),
    (
        "pcieport 0000:00:03.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer,"
        " id=0018(Requester ID)",
        "pcie-uncorrected",
        "0000:00:03.0",
    ),
    # behind a VMD
    (
        "nvme 10000:01:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Data Link Layer,"
        " (Receiver ID)",
        "pcie-fatal",
        "10000:01:00.0",
    ),
]
DISKS = [
    ("nvme nvme0: I/O 123 QID 4 timeout, aborting", "nvme", "nvme0"),
    ("nvme nvme3: I/O 0 QID 0 timeout, disable controller", "nvme", "nvme3"),
    ("nvme nvme10: I/O 24 QID 0 timeout, reset controller", "nvme", "nvme10"),
    ("nvme nvme0: I/O tag 12 (100c) QID 3 timeout, completion polled", "nvme", "nvme0"),
    ("nvme nvme0: I/O tag 12 (400c) opcode 0x9 (Admin Cmd) QID 0 timeout, reset controller", "nvme", "nvme0"),
    (
        "nvme nvme1: I/O tag 123 (107b) opcode 0x2 (I/O Cmd) QID 3 timeout, aborting req_op:READ(0)"
        " size:4096",
        "nvme",
        "nvme1",
    ),
    ("nvme nvme2: I/O 1 QID 2 timeout", "nvme", "nvme2"),
    ("nvme nvme0: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10", "nvme", "nvme0"),
    ("nvme nvme1: Device not ready; aborting reset, CSTS=0x1", "nvme", "nvme1"),
    ("nvme nvme0: Removing after probe failure status: -19", "nvme", "nvme0"),
    ("nvme nvme2: Disabling device after reset failure: -19", "nvme", "nvme2"),
    # 3.10, 4.12, 4.18, 5.10, 5.16 and newer
    ("end_request: I/O error, dev sda, sector 15003776", "disk-error", "sda"),
    ("blk_update_request: I/O error, dev sdb, sector 1234", "disk-error", "sdb"),
    ("print_req_error: critical medium error, dev sdc, sector 84 flags 80700", "disk-error", "sdc"),
    (
        "blk_update_request: critical target error, dev nvme0n1, sector 1875240 op 0x1:(WRITE) flags 0x800"
        " phys_seg 2 prio class 0",
        "disk-error",
        "nvme0n1",
    ),
    (
        "I/O error, dev nvme1n1, sector 499204104 op 0x1:(WRITE) flags 0x0 phys_seg 1 prio class 2",
        "disk-error",
        "nvme1n1",
    ),
    (
        "critical medium error, dev dm-3, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
        "disk-error",
        "dm-3",
    ),
    ("timeout error, dev sda, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0", "disk-error", "sda"),
    (
        "device offline error, dev sdb, sector 2048 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2",
        "disk-error",
        "sdb",
    ),
    (
        "recoverable transport error, dev sdb, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
        "disk-error",
        "sdb",
    ),
    (
        "protection error, dev nvme0n1, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
        "disk-error",
        "nvme0n1",
    ),
    ("Buffer I/O error on dev sdc71, logical block 0, lost async page write", "disk-error", "sdc71"),
    ("Buffer I/O error on device md127p1, logical block 8", "disk-error", "md127p1"),
    (
        "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm ls: reading directory lblock 0",
        "file-system-error",
        "sda1",
    ),
    (
        "EXT4-fs error (device nvme0n1p2) in ext4_reserve_inode_write:5810: IO failure",
        "file-system-error",
        "nvme0n1p2",
    ),
    ("EXT4-fs (dm-0): Remounting filesystem read-only", "file-system-error", "dm-0"),
    (
        "XFS (sda1): Metadata corruption detected at xfs_agf_verify+0x70/0x110 [xfs], xfs_agf block 0x1",
        "file-system-error",
        "sda1",
    ),
    (
        "XFS (sda1): Metadata CRC error detected at xfs_agfl_read_verify+0x5e/0x110 [xfs], xfs_agfl block"
        " 0x3",
        "file-system-error",
        "sda1",
    ),
    (
        'XFS (dm-2): metadata I/O error in "xfs_trans_read_buf_map" at daddr 0x1 len 1 error 5',
        "file-system-error",
        "dm-2",
    ),
    (
        "XFS (dm-2): Corruption of in-memory data detected.  Shutting down filesystem",
        "file-system-error",
        "dm-2",
    ),
    ("XFS (dm-2): Corruption detected. Unmount and run xfs_repair", "file-system-error", "dm-2"),
    (
        "XFS (nvme0n1): xfs_do_force_shutdown(0x2) called from line 1211 of file fs/xfs/xfs_log.c.",
        "file-system-error",
        "nvme0n1",
    ),
    ("XFS (sdb): Log I/O Error Detected.  Shutting down filesystem", "file-system-error", "sdb"),
    ("XFS (sdb): log I/O error -5", "file-system-error", "sdb"),
    ("XFS (sdb): Filesystem has been shut down due to log error (0x2).", "file-system-error", "sdb"),
    (
        "XFS (sdb): Internal error xfs_trans_cancel at line 955 of file fs/xfs/xfs_trans.c.",
        "file-system-error",
        "sdb",
    ),
    (
        "BTRFS error (device dm-4): bdev /dev/mapper/scratch errs: wr 0, rd 0, flush 0, corrupt 1, gen 0",
        "file-system-error",
        "dm-4",
    ),
    (
        "BTRFS critical (device sda3): corrupt leaf: root=2 block=1651991592960 slot=105",
        "file-system-error",
        "sda3",
    ),
    ("BTRFS error (device sdb1 state EA): commit super ret -5", "file-system-error", "sdb1"),
    # with which it goes read-only: 5.x, and 6.x
    (
        "BTRFS: error (device sdc) in btrfs_run_delayed_refs:2156: errno=-5 IO failure",
        "file-system-error",
        "sdc",
    ),
    (
        "BTRFS: error (device sdc: state A) in btrfs_run_delayed_refs:2156: errno=-5 IO failure",
        "file-system-error",
        "sdc",
    ),
    (
        "BTRFS: error (device nvme0n1p3 state A) in btrfs_create_new_inode:6854: errno=-75 unknown",
        "file-system-error",
        "nvme0n1p3",
    ),
    (
        "XFS (sdb1): writeback error on inode 402653314, offset 0, sector 402658312",
        "file-system-error",
        "sdb1",
    ),
    ("nfs: server nfs01.cluster not responding, still trying", "nfs-silent", "nfs01.cluster"),
    ("nfs: server 10.0.0.1 not responding, timed out", "nfs-silent", "10.0.0.1"),
]
MEMORY = [
    (
        "Out of memory: Killed process 1234 (python) total-vm:4784244kB, anon-rss:3801392kB, "
        "file-rss:45704kB, shmem-rss:0kB, UID:0 pgtables:7904kB oom_score_adj:0",
        "out-of-memory",
        "",
    ),
    ("Out of memory: Kill process 1234 (java) score 900 or sacrifice child", "out-of-memory", ""),
    (
        "Out of memory (oom_kill_allocating_task): Killed process 7 (a) total-vm:1kB, anon-rss:1kB",
        "out-of-memory",
        "",
    ),
    # of this machine
    (
        "Memory cgroup out of memory: Killed process 15712 (python) total-vm:4784244kB, anon-rss:3801392kB,"
        " file-rss:45704kB, shmem-rss:0kB, UID:0 pgtables:7904kB oom_score_adj:0",
        "cgroup-out-of-memory",
        "",
    ),
    (
        "Memory cgroup out of memory: Kill process 5 (x) score 1 or sacrifice child",
        "cgroup-out-of-memory",
        "",
    ),
]
NETWORKS = [
    ("mlx5_core 0000:4b:00.0 ens3f0np0: Link down", "link-flap", "ens3f0np0"),
    ("mlx4_en: eth2: Link Down", "link-flap", "eth2"),
    ("ice 0000:3b:00.0 ens1f0: NIC Link is Down", "link-flap", "ens1f0"),
    ("bnxt_en 0000:19:00.1 eno2np1: NIC Link is Down", "link-flap", "eno2np1"),
    ("igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Down", "link-flap", "eno1"),
    ("igc 0000:03:00.0 enp3s0: NIC Link is Down", "link-flap", "enp3s0"),
    ("i40e 0000:a1:00.0 ens44f0np0: NIC Link is Down", "link-flap", "ens44f0np0"),
    ("tg3 0000:01:00.0 eth0: Link is down", "link-flap", "eth0"),
    ("r8169 0000:06:00.0 eth0: link down", "link-flap", "eth0"),
    ("e1000e: enp0s31f6 NIC Link is Down", "link-flap", "enp0s31f6"),
    ("e1000e 0000:00:1f.6 eth0: NIC Link is Down", "link-flap", "eth0"),
    # 4.x, 5.x, and as a vendor's own driver says it
    (
        "mlx5_core 0000:03:00.0: device's health compromised - reached miss count",
        "nic-failed",
        "0000:03:00.0",
    ),
    (
        "mlx5_core 0000:0d:00.0: poll_health:801:(pid 0): device's health compromised - reached miss count",
        "nic-failed",
        "0000:0d:00.0",
    ),
    (
        "mlx5_core 0000:d2:00.0: poll_health:825: device's health compromised - reached miss count.",
        "nic-failed",
        "0000:d2:00.0",
    ),
    ("mlx5_core 0000:82:00.1: poll_health:833:(pid 0): Fatal error 1 detected", "nic-failed", "0000:82:00.1"),
    # 4.4, 5.15, 6.5; 6.7 and newer
    ("NETDEV WATCHDOG: eth0 (stmmaceth): transmit queue 0 timed out", "nic-stuck", "eth0"),
    ("NETDEV WATCHDOG: eth2 (igb): transmit queue 4 timed out", "nic-stuck", "eth2"),
    ("NETDEV WATCHDOG: ens1f0 (ice): transmit queue 12 timed out 5432 ms", "nic-stuck", "ens1f0"),
    (
        "ice 0000:b1:00.0 ens801f0np0: NETDEV WATCHDOG: CPU: 38: transmit queue 14 timed out 80692736 ms",
        "nic-stuck",
        "ens801f0np0",
    ),
    (
        "virtio_net virtio0 eth0: NETDEV WATCHDOG: CPU: 1: transmit queue 0 timed out 5500 ms",
        "nic-stuck",
        "eth0",
    ),
]
LINES = [*XIDS, *PROCESSORS, *PCIE, *DISKS, *MEMORY, *NETWORKS]


@pytest.mark.parametrize(("line", "code", "where"), LINES)
def test_what_the_kernel_says(line: str, code: str | None, where: str) -> None:
    expected = None if code is None else Finding(code=code, where=where, evidence=line[:200])
    assert finding(line) == expected
    assert code is None or is_code(code)


def test_every_code_of_the_log_is_shown() -> None:
    names = list(TABLE)
    of_the_log = names[names.index("nvswitch") : names.index("nic-stuck") + 1]
    assert set(of_the_log) == {code for _, code, _ in LINES if code and not code.startswith("xid-")}


@pytest.mark.parametrize("text", [line for line, code, _ in LINES if code])
def test_a_line_counts_only_from_its_beginning(text: str) -> None:
    for before in ("python: ", "audit: type=1400 comm=", "usb 1-1: Product: ", "Call Trace: "):
        assert finding(before + text) is None


# What a process is called is its user's choice, 15 characters of it, and the kernel goes on behind it.
@pytest.mark.parametrize(
    "behind",
    [
        "[4711]: segfault at 0 ip 00007f97b1d4e0fe sp 00007ffe899c8080 error 4 in libc.so.6[28000+195000]",
        " invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
        ": page allocation failure: order:0, mode:0x40cc0(GFP_KERNEL|__GFP_COMP), nodemask=(null)",
        " (4711): drop_caches: 3",
        "[4711] bad frame in rt_sigreturn frame:00007ffd2a5d0b38 ip:7f0e sp:7ffd orax:ffffffffffffffff",
        "[4711] trap int3 ip:55d0c8c8a1b2 sp:7ffc1c6e6d30 error:0 in a[55d0c8c8a000+1000]",
    ],
)
def test_no_name_of_a_process_is_a_finding(behind: str) -> None:
    for line, _, _ in LINES:
        for size in range(1, 16):
            assert finding(line[:size] + behind) is None


@pytest.mark.parametrize(
    "line",
    [
        "Killed process 123 (NVRM: Xid (PCI:) total-vm:1kB, anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,task=NVRM: Xid (PCI:,pid=1,uid=1000",
        "NVRM: Xid (PCI:[123]: segfault at 0 ip 0000 sp 0000 error 4",
        r"a\x0aNVRM: Xid [123]: segfault at 0 ip 0000 sp 0000 error 4",
        # nothing is to be done any more
        "NVRM: Xid (PCI:0000:5f:00): 154, GPU recovery action changed from 0x1 (PF FLR) to 0x0 (None)",
        "NVRM: Xid (PCI:0000:5f:00): 12345, no such number",
        "NVRM: GPU at PCI:0000:5f:00: GPU-e11dfcca-7c93-959a-b8fd-5cfe0839b163",
        "pcieport 0000:00:1c.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
        "pcieport 0000:00:1c.0: AER: PCIe Bus Error: severity=Correctable, type=Data Link Layer",
        "pcieport 0000:00:1c.0: AER: Corrected error received: 0000:00:1c.0",
        # a user's image, a floppy drive that is not there, the BMC's CD, and TRIM that a drive does not know
        "I/O error, dev loop3, sector 0 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 0",
        "EXT4-fs error (device loop0): __ext4_remount:6785: comm mount: Abort forced by user",
        "EXT4-fs (loop0): Remounting filesystem read-only",
        "XFS (loop1): Metadata corruption detected at xfs_agf_verify+0x70/0x110 [xfs], xfs_agf block 0x1",
        "BTRFS error (device loop7): bdev /dev/loop7 errs: wr 1, rd 0, flush 0, corrupt 0, gen 0",
        "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 0",
        "Buffer I/O error on dev fd0, logical block 0, async page read",
        "blk_update_request: critical medium error, dev sr0, sector 0 op 0x0:(READ) flags 0x80700",
        "critical target error, dev sda, sector 4224 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 0",
        "critical target error, dev sda, sector 0 op 0x9:(WRITE_ZEROES) flags 0x0 phys_seg 0 prio class 0",
        "operation not supported error, dev sda, sector 0 op 0x9:(WRITE_ZEROES) flags 0x0",
        "BTRFS error (device sda2): open_ctree failed",
        "BTRFS info (device sda2): unrecognized rescue option 'ibadroots'",
        "EXT4-fs (sda1): error count since last fsck: 4",
        "EXT4-fs warning (device sda1): ext4_dx_add_entry:2451: Directory (ino: 2) index full",
        "INFO: task (udev-worker):374 is blocked on a mutex likely owned by task (udev-worker):373.",
        "Memory failure: 0x3a5b6c: recovery action for clean LRU page: Recovered",
        "nfs: server nfs01 OK",
        "mlx5_core 0000:4b:00.0 ens3f0np0: Link up",
        "mlx5_core 0000:06:00.0: wait_func_handle_exec_timeout:1128:(pid 1): cmd[-22]: CREATE_UCTX",
        "reservation conflict error, dev sdb, sector 8 op 0x1:(WRITE) flags 0x800 phys_seg 1 prio class 2",
        "nvme nvme0: 8/0/0 default/read/poll queues",
        "",
        " ",
    ],
)
def test_what_is_no_finding(line: str) -> None:
    assert finding(line) is None


# Of servers that are well: x86 of both makers, with GPUs, NVMe drives and fast networks.
HEALTHY = """
Linux version 5.14.0-427.13.1.el9_4.x86_64 (mockbuild@x86-64-01.build.eng.rdu2.redhat.com) (gcc 11.4.1)
Command line: BOOT_IMAGE=(hd0,gpt2)/vmlinuz-5.14.0 root=/dev/mapper/rhel-root ro crashkernel=1G-4G:192M
BIOS-provided physical RAM map:
BIOS-e820: [mem 0x0000000000000000-0x000000000009ffff] usable
NX (Execute Disable) protection: active
DMI: Dell Inc. PowerEdge XE9680/0XXXXX, BIOS 2.1.5 04/19/2024
tsc: Detected 2000.000 MHz processor
ACPI: RSDP 0x00000000000FE320 000024 (v02 DELL  )
ACPI: HEST 0x000000006F6F8000 00013C (v01 DELL   PE_SC3   00000002 DELL 00000001)
NUMA: Node 0 [mem 0x00000000-0x7fffffff] + [mem 0x100000000-0x807fffffff] -> [mem 0x00000000-0x807fffffff]
Memory: 2113536000K/2147041280K available (16384K kernel code, 5582K rwdata, 12140K rodata, 3740K init)
rcu: Hierarchical RCU implementation.
mce: CPU0: Thermal monitoring enabled (TM1)
mce: [Firmware Bug]: Ignoring request to disable invalid MCA bank 9.
MCE: In-kernel MCE decoding enabled.
smp: Bringing up secondary CPUs ...
NMI watchdog: Enabled. Permanently consumes one hw-PMU counter.
watchdog: Delayed init of the lockup detector failed: -95
PCI: Using configuration type 1 for base access
HEST: Table parsing has been initialized.
pci 0000:00:00.0: [8086:09a2] type 00 class 0x088000
pci 0000:4f:00.0: BAR 0: assigned [mem 0x22fff8000000-0x22fff8ffffff 64bit pref]
pci 0000:19:00.0: 252.048 Gb/s available PCIe bandwidth, limited by 16.0 GT/s PCIe x16 link at 0000:17:01.0
pcieport 0000:00:1c.0: AER: enabled with IRQ 124
pcieport 0000:15:01.0: DPC: error containment capabilities: Int Msg #0, RPExt+ PoisonedTLP+ SwTrigger+
pcieport 0000:17:01.0: pciehp: Slot #43 AttnBtn- PwrCtrl- MRL- AttnInd- PwrInd- HotPlug+ Surprise+
ERST: Error Record Serialization Table (ERST) support is initialized.
GHES: APEI firmware first mode is enabled by APEI bit and WHEA _OSC.
EDAC MC: Ver: 3.0.0
EDAC MC0: Giving out device to module i10nm_edac controller Intel_10nm Socket#0 IMC#0: DEV 0000:7e:0c.0
EDAC i10nm: v0.0.6
nvme nvme0: pci function 0000:01:00.0
nvme nvme0: Shutdown timeout set to 10 seconds
nvme nvme0: 64/0/0 default/read/poll queues
nvme0n1: p1 p2 p3
scsi host0: ahci
sd 0:0:0:0: [sda] 937703088 512-byte logical blocks: (480 GB/447 GiB)
sd 0:0:0:0: [sda] Write cache: disabled, read cache: enabled, doesn't support DPO or FUA
ata5: SATA link down (SStatus 0 SControl 300)
EXT4-fs (sda2): mounted filesystem eda300d3-314c-4b5c-89a5-5d45486c7d1c r/w with ordered data mode.
EXT4-fs (sda2): re-mounted eda300d3-314c-4b5c-89a5-5d45486c7d1c.
XFS (dm-0): Mounting V5 Filesystem 0a2b3c4d-5e6f-7081-92a3-b4c5d6e7f809
XFS (dm-0): Ending clean mount
BTRFS info (device sdb1): using crc32c (crc32c-intel) checksum algorithm
systemd[1]: Detected architecture x86-64.
mlx5_core 0000:4b:00.0: firmware version: 28.39.1002
mlx5_core 0000:4b:00.0: 252.048 Gb/s available PCIe bandwidth (16.0 GT/s PCIe x16 link)
mlx5_core 0000:4b:00.0: Port module event: module 0, Cable plugged
mlx5_core 0000:4b:00.0 ens3f0np0: renamed from eth2
mlx5_core 0000:4b:00.0 ens3f0np0: Link up
ice 0000:3b:00.0: The DDP package was successfully loaded: ICE OS Default Package version 1.3.35.0
ice 0000:3b:00.0 ens1f0: NIC Link is up 100 Gbps Full Duplex, Requested FEC: RS-FEC, Negotiated FEC: RS-FEC
igb 0000:01:00.0 eno1: igb: eno1 NIC Link is Up 1000 Mbps Full Duplex, Flow Control: RX/TX
bnxt_en 0000:19:00.0 eno2np0: NIC Link is Up, 25000 Mbps full duplex, Flow control: none
tg3 0000:04:00.0 eth0: Link is up at 1000 Mbps, full duplex
IPv6: ADDRCONF(NETDEV_CHANGE): ens3f0np0: link becomes ready
bond0: (slave ens1f0): Enslaving as a backup interface with an up link
nvidia: loading out-of-tree module taints kernel.
nvidia-nvlink: Nvlink Core is being initialized, major device number 510
nvidia 0000:4f:00.0: enabling device (0000 -> 0002)
nvidia-nvswitch0: open (major=509)
NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build
nvidia-uvm: Loaded the UVM driver, major device number 508.
FS-Cache: Loaded
NFS: Registering the id_resolver key type
Key type dns_resolver registered
nfs: Deprecated parameter 'intr'
Lustre: Lustre: Build Version: 2.15.4
LNet: Added LNI 10.0.0.7@o2ib [8/256/0/180]
hrtimer: interrupt took 9731525 ns
perf: interrupt took too long (2516 > 2500), lowering kernel.perf_event_max_sample_rate to 79000
br0: port 1(p-node01) entered disabled state
loop0: detected capacity change from 0 to 32768
python[6322]: segfault at 7f974ddcf000 ip 00007f97b1d4e0fe sp 00007ffe899c8080 error 4 in libpython3.11.so.1.0
traps: a.out[4711] trap divide error ip:401136 sp:7ffc3f4f3b50 error:0 in a.out[401000+1000]
python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
memory: usage 49152kB, limit 49152kB, failcnt 19
[  15706]     0 15706   298814    67437    55948    11457        32   913408        0             0 python
audit: type=1400 audit(1700000000.123:4): avc:  denied  { read } for  pid=1 comm="NVRM: Xid (PCI:"
perf: Dynamic interrupt throttling disabled, can go over max CPU budget
"""


def test_a_healthy_server_has_no_finding() -> None:
    lines = HEALTHY.strip().splitlines()
    assert len(lines) >= 60
    assert [line for line in lines if finding(line) is not None] == []


# ------------------------------------------------------------------------------------- the probe

XID = "NVRM: Xid (PCI:0000:4f:00): 79, GPU has fallen off the bus."
FOUND = Finding(code="xid-79", where="GPU 0000:4f:00", evidence=XID)


def record(text: str = XID, level: int = 3, number: int = 1, flags: str = "-") -> bytes:
    return f"{level},{number},{number * 1000},{flags};{text}\n".encode()


class Pipe:
    """A FIFO in place of /dev/kmsg."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.probe = KernelLogProbe(path)
        assert self.probe.missing() == ""
        self._fd = os.open(path, os.O_WRONLY)

    def write(self, *records: bytes) -> None:
        os.write(self._fd, b"".join(records))

    def look(self, *records: bytes) -> list[Finding]:
        self.write(*records)
        return self.probe.look()

    def close(self) -> None:
        self.probe.close()
        os.close(self._fd)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    made = Pipe(tmp_path / "kmsg")
    yield made
    made.close()


def test_it_is_a_probe() -> None:
    probe: Probe = KernelLogProbe()
    assert (probe.interval_s, probe.deadline_s) == (5.0, 10.0)


def test_a_record_is_found_once(pipe: Pipe) -> None:
    assert pipe.look(record("Linux version 6.1", 5), record(), record("all is well", 6)) == [FOUND]
    assert pipe.probe.look() == []
    assert pipe.look(record(), record(number=2)) == [FOUND, FOUND]


@pytest.mark.parametrize("flags", ["-", "c", "+", "-,caller=T4711", "-,caller=C12,more=x"])
def test_the_flags_of_records(pipe: Pipe, flags: str) -> None:
    assert pipe.look(record(flags=flags)) == [FOUND]


@pytest.mark.parametrize("level", range(8))
def test_the_kernel_at_every_level(pipe: Pipe, level: int) -> None:
    assert pipe.look(record(level=level)) == [FOUND]


@pytest.mark.parametrize("facility", [1, 3, 10, 23, 127])
def test_what_a_process_writes_counts_nothing(pipe: Pipe, facility: int) -> None:
    assert pipe.look(*(record(level=8 * facility + level) for level in range(8))) == []


def test_what_belongs_to_a_record_is_no_line(pipe: Pipe) -> None:
    of_device = b" SUBSYSTEM=pci\n DEVICE=+pci:0000:4f:00.0\n"
    faked = b" 3,1,1000,-;" + XID.encode() + b"\n"
    assert pipe.look(record() + of_device, record("all is well") + of_device + faked, record()) == [
        FOUND,
        FOUND,
    ]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"\0" * 100 + b"\n",
        bytes(range(256)) + b"\n",
        b";;;;\n",
        b"3,1,1;" + XID.encode() + b"\n",
        b"-3,1,1,-;" + XID.encode() + b"\n",
        b"99999999999999999999,1,1,-;" + XID.encode() + b"\n",
        XID.encode() + b"\n",
    ],
)
def test_garbage_is_nothing_and_what_follows_is_found(pipe: Pipe, garbage: bytes) -> None:
    assert pipe.look(garbage, record()) == [FOUND]


def test_a_long_line_is_cut(pipe: Pipe) -> None:
    [found] = pipe.look(record(XID + "x" * 5000))
    assert (found.code, found.evidence) == ("xid-79", (XID + "x" * 5000)[:200])
    assert pipe.look(record("x" * 30000), record()) == [FOUND]


def test_control_characters_are_not_shown(pipe: Pipe) -> None:
    [found] = pipe.look(record(XID + "\x1b[31m\x07\xff"))
    assert found.evidence == XID + " [31m \xff"


def test_what_was_logged_before_is_not_read(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(record() * 3)
    probe = KernelLogProbe(log)
    assert probe.missing() == ""
    assert probe.look() == []
    with log.open("ab") as end:
        end.write(record(number=4))
    assert probe.look() == [FOUND]
    probe.close()


class Reads:
    """In place of os.read: each answer once, and then nothing more."""

    def __init__(self, *answers: bytes | OSError) -> None:
        self.answers, self.count = list(answers), 0

    def __call__(self, fd: int, size: int) -> bytes:
        self.count += 1
        answer = self.answers.pop(0) if self.answers else BlockingIOError()
        if isinstance(answer, OSError):
            raise answer
        return answer


def test_what_was_overwritten_is_gone_and_the_rest_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(record(), BrokenPipeError(), BrokenPipeError(), record(), BlockingIOError(), record())
    monkeypatch.setattr(os, "read", reads)
    assert KernelLogProbe().look() == [FOUND, FOUND]
    assert KernelLogProbe().look() == [FOUND]


def test_another_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "read", Reads(record(), OSError(22, "Invalid argument")))
    with pytest.raises(OSError, match="Invalid argument"):
        KernelLogProbe().look()


@pytest.mark.parametrize("answer", [record("all is well"), BrokenPipeError()])
def test_a_look_comes_to_an_end(monkeypatch: pytest.MonkeyPatch, answer: bytes | OSError) -> None:
    reads = Reads(*[answer] * (MOST_RECORDS + 2))
    monkeypatch.setattr(os, "read", reads)
    probe = KernelLogProbe()
    assert probe.look() == []
    assert reads.count == MOST_RECORDS
    probe.look()
    assert not reads.answers


def test_a_log_that_is_not_there_is_missing(tmp_path: Path) -> None:
    probe = KernelLogProbe(tmp_path / "kmsg")
    assert probe.missing() == f"{tmp_path}/kmsg cannot be read: No such file or directory"
    probe.close()


def descriptors() -> set[str]:
    return {one.name for one in Path("/proc/self/fd").iterdir()}


def test_close_gives_the_descriptor_back(tmp_path: Path) -> None:
    (tmp_path / "kmsg").touch()
    before = descriptors()
    probe = KernelLogProbe(tmp_path / "kmsg")
    assert probe.missing() == ""
    assert len(descriptors()) == len(before) + 1
    probe.close()
    assert descriptors() == before


def test_the_real_log_does_not_believe_a_process() -> None:
    probe = KernelLogProbe()
    if probe.missing() or not os.access(KMSG, os.W_OK):
        probe.close()
        pytest.skip("/dev/kmsg cannot be read and written here")
    mark = f"0000:{os.getpid() & 0xFF:02x}:1f"
    line = f"NVRM: Xid (PCI:{mark}): 62, ckptless: a test writes this"
    reader = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK)
    os.lseek(reader, 0, os.SEEK_END)
    writer = os.open(KMSG, os.O_WRONLY)
    for level in ("", "<3>", "<0>", "<24>"):
        os.write(writer, f"{level}{line}\n".encode())
    os.close(writer)
    # They are there, and would be findings if the kernel had written them.
    written: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            written.append(os.read(reader, 8192))
    os.close(reader)
    ours = [one for one in written if mark.encode() in one]
    assert len(ours) == 4
    assert finding(line) is not None
    assert [found for found in probe.look() if mark in found.where] == []
    probe.close()


PIECES = st.sampled_from([line for line, _, _ in LINES])
TEXTS = st.one_of(
    st.text(max_size=300),
    st.builds(lambda line, cut, end: line[:cut] + end, PIECES, st.integers(0, 200), st.text(max_size=40)),
)


@given(TEXTS)
def test_no_text_raises(text: str) -> None:
    found = finding(text)
    if found is not None:
        assert is_code(found.code)
        assert found.evidence == text[:200]


RECORDS = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda level, flags, text, end: f"{level},1,2,{flags};{text}".encode(errors="replace") + end,
        st.integers(-1, 2000),
        st.text(max_size=4),
        TEXTS,
        st.binary(max_size=20),
    ),
)


@given(st.lists(RECORDS, max_size=8))
def test_no_bytes_raise(records: list[bytes]) -> None:
    with tempfile.NamedTemporaryFile() as log:
        probe = KernelLogProbe(Path(log.name))
        assert probe.missing() == ""
        log.write(b"\n".join(records))
        log.flush()
        for found in probe.look():
            assert is_code(found.code)
            assert found.evidence.isprintable()
        probe.close()
