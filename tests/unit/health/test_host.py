"""The host itself: room on its disks, disks that became read-only, pressure, the clock and heat."""

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.ckptlessd.health import host
from ckptless.daemon.ckptlessd.health.host import DiskProbe, HostProbe, Mount, mounts_of
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe

DEADLINE_S = 30
MIB = 1 << 20


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path / "proc"


def mounted(proc: Path, *lines: str) -> None:
    (proc / "self/mountinfo").write_bytes(os.fsencode("".join(f"{line}\n" for line in lines)))


def disks(proc: Path, *paths: Path) -> DiskProbe:
    return DiskProbe(paths, proc)


# ------------------------------------------------------------------------------------ mountinfo

ROOT = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard"
SCRATCH = "36 27 259:1 / /scratch rw,noatime shared:7 - xfs /dev/nvme0n1p1 {},attr2,inode64"
TMPFS = "30 25 0:27 / /dev/shm rw,relatime - tmpfs tmpfs {},size=24684096k"
NFS = "44 27 0:41 / /home rw,relatime shared:9 master:2 - nfs4 nfs01:/home {},vers=4.2"


def test_mountinfo_is_read(proc: Path) -> None:
    mounted(
        proc,
        ROOT,
        NFS.format("rw"),
        r"50 27 8:1 /a /with\040space\011tab\012line\134back\043hash ro - ext4 /dev/sda1 rw",
        r"51 27 8:1 / /not\134040a\134space rw propagate_from:1 unbindable - ext4 /dev/sda1 rw",
        "52 27 0:60 / /empty rw -  none rw",
        "53 27 0:61 / /nothing rw - tmpfs  rw",
        "54 27 0:62 / /user/\x0b\x0c\x1c\x85\u2028\r\udcff rw - fuse.x x rw,user_id=1000",
    )
    assert mounts_of(proc) == [
        Mount("/", "ext4", "/dev/vda", ["rw", "discard"]),
        Mount("/home", "nfs4", "nfs01:/home", ["rw", "vers=4.2"]),
        Mount("/with space\ttab\nline\\back#hash", "ext4", "/dev/sda1", ["rw"]),
        Mount(r"/not\040a\space", "ext4", "/dev/sda1", ["rw"]),
        Mount("/empty", "", "none", ["rw"]),
        Mount("/nothing", "tmpfs", "", ["rw"]),
        Mount("/user/\x0b\x0c\x1c\x85\u2028\r\udcff", "fuse.x", "x", ["rw", "user_id=1000"]),
    ]


def test_the_mountinfo_of_this_machine() -> None:
    found = {one.place: one for one in mounts_of(Path("/proc"))}
    assert found["/proc"].kind == "proc"
    assert "/" in found


@given(st.text(min_size=1, max_size=40).filter(lambda name: "\0" not in name))
def test_no_name_of_a_place_hides_the_others(name: str) -> None:
    """As the kernel writes it: it escapes a blank, a tab, a newline and a backslash."""
    place = "/" + name
    raw = place.encode(errors="surrogateescape" if name.isascii() else "replace")
    escaped = (
        raw.replace(b"\\", rb"\134").replace(b" ", rb"\040").replace(b"\t", rb"\011").replace(b"\n", rb"\012")
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "self").mkdir()
        (Path(folder) / "self/mountinfo").write_bytes(
            b"9 1 0:9 / " + escaped + b" rw - fuse.x x rw\n" + ROOT.encode() + b"\n"
        )
        assert [one.place for one in mounts_of(Path(folder))] == [os.fsdecode(raw), "/"]


# ------------------------------------------------------------------------------------- read-only


def test_it_is_a_probe(proc: Path) -> None:
    for probe in (disks(proc), HostProbe()):
        one: Probe = probe
        assert (one.interval_s, one.deadline_s, one.missing()) == (60.0, 10.0, "")
        one.close()


def test_a_disk_that_becomes_read_only(proc: Path) -> None:
    probe = disks(proc)
    mounted(proc, ROOT, SCRATCH.format("rw"))
    assert probe.look() == []
    mounted(proc, ROOT, SCRATCH.format("ro"))
    found = [Finding(code="disk-read-only", where="/scratch", evidence="ro,attr2,inode64")]
    assert probe.look() == found
    assert probe.look() == found
    mounted(proc, ROOT, SCRATCH.format("rw"))
    assert probe.look() == []


def test_a_disk_that_is_mounted_later_counts_too(proc: Path) -> None:
    probe = disks(proc)
    for lines, count in (
        ((ROOT,), 0),
        ((ROOT, SCRATCH.format("rw")), 0),
        ((ROOT,), 0),
        ((SCRATCH.format("ro"),), 1),
    ):
        mounted(proc, *lines)
        assert len(probe.look()) == count


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (SCRATCH.format("ro"), SCRATCH.format("ro")),
        # Only this mount of it is.
        (SCRATCH.format("rw"), SCRATCH.replace("rw,noatime", "ro,noatime").format("rw")),
        # Another disk at the same place, as an ISO image.
        (SCRATCH.format("rw"), "36 27 7:0 / /scratch ro - iso9660 /dev/loop0 ro"),
        # An option that only looks like it.
        (SCRATCH.format("rw"), SCRATCH.format("rw,errors=remount-ro")),
        # No disk.
        (TMPFS.format("rw"), TMPFS.format("ro")),
        (NFS.format("rw"), NFS.format("ro")),
        # What FUSE says is its user's choice.
        (
            "60 27 0:60 / /u rw - fuse.sshfs /dev/sda1 rw,user_id=1000",
            "60 27 0:60 / /u ro - fuse.sshfs /dev/sda1 ro,user_id=1000",
        ),
        ("60 27 0:60 / /u rw - fuse /dev/sda1 rw", "60 27 0:60 / /u ro - fuse /dev/sda1 ro"),
        ("53 27 0:61 / /nothing rw - tmpfs  rw", "53 27 0:61 / /nothing rw - tmpfs  ro"),
    ],
)
def test_what_is_not_read_only_by_an_error(proc: Path, before: str, now: str) -> None:
    probe = disks(proc)
    for lines in ((ROOT, before), (ROOT, now)):
        mounted(proc, *lines)
        assert probe.look() == []


def test_a_mountinfo_that_cannot_be_read_raises(proc: Path) -> None:
    with pytest.raises(FileNotFoundError):
        disks(proc).look()


# ------------------------------------------------------------------------------------------ room


class Room:
    """In place of os.statvfs."""

    def __init__(self, **worlds: dict[str, int]) -> None:
        self.worlds = worlds

    def __call__(self, path: Path) -> SimpleNamespace:
        if path.name not in self.worlds:
            raise FileNotFoundError(path)
        plenty = {"f_frsize": 4096, "f_blocks": 1 << 30, "f_bavail": 1 << 29, "f_files": 9, "f_favail": 9}
        return SimpleNamespace(**(plenty | self.worlds[path.name]))


GIB = 1 << 18  # in blocks of 4096 bytes


@pytest.mark.parametrize(
    ("world", "words"),
    [
        ({}, ""),
        ({"f_bavail": 0}, "0 MiB of 4194304 MiB are free"),
        ({"f_bavail": 25600 - 1}, "100 MiB of 4194304 MiB are free"),
        ({"f_bavail": 25600}, ""),
        # Of a small one a hundredth is enough.
        ({"f_blocks": GIB, "f_bavail": GIB // 100}, "10 MiB of 1024 MiB are free"),
        ({"f_blocks": GIB, "f_bavail": GIB // 100 + 1}, ""),
        # What is for root alone is no room.
        ({"f_bavail": 0, "f_bfree": GIB}, "0 MiB of 4194304 MiB are free"),
        ({"f_favail": 0, "f_files": 65536}, "none of 65536 inodes is free"),
        ({"f_favail": 1, "f_files": 65536}, ""),
        # Of file systems that do not count them: btrfs, and proc.
        ({"f_favail": 0, "f_files": 0}, ""),
        ({"f_blocks": 0, "f_bavail": 0, "f_files": 0, "f_favail": 0}, ""),
    ],
)
def test_room(proc: Path, monkeypatch: pytest.MonkeyPatch, world: dict[str, int], words: str) -> None:
    mounted(proc, ROOT)
    monkeypatch.setattr(os, "statvfs", Room(scratch=world))
    probe = disks(proc, Path("/scratch"), Path("/not-there"))
    expected = [Finding(code="disk-full", where="/scratch", evidence=words)] if words else []
    assert [probe.look(), probe.look()] == [expected, expected]


def test_a_disk_that_fails_raises(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    mounted(proc, ROOT)
    monkeypatch.setattr(os, "statvfs", fail)
    with pytest.raises(OSError, match="Input/output error"):
        disks(proc, Path("/scratch")).look()


def run(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=DEADLINE_S)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "ckptless-test", str(place)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, timeout=DEADLINE_S).returncode
    ):
        pytest.skip("nothing can be mounted here")
    yield place
    assert run("umount", "-l", str(place)).returncode == 0


def test_a_real_file_system_that_is_full(proc: Path, small: Path) -> None:
    mounted(proc, ROOT)
    probe = disks(proc, small)
    assert probe.look() == []
    with pytest.raises(OSError, match="No space left"):
        (small / "a").write_bytes(bytes(2 * MIB))
    assert probe.look() == [Finding(code="disk-full", where=str(small), evidence="0 MiB of 1 MiB are free")]
    (small / "a").unlink()
    assert probe.look() == []


def test_a_real_file_system_without_an_inode(proc: Path, small: Path) -> None:
    mounted(proc, ROOT)
    probe = disks(proc, small)
    while os.statvfs(small).f_favail:
        Path(tempfile.mkdtemp(dir=small))
    assert probe.look() == [Finding(code="disk-full", where=str(small), evidence="none of 20 inodes is free")]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place, image = tmp_path / "disk", tmp_path / "image"
    place.mkdir()
    with image.open("wb") as made:
        made.truncate(16 * MIB)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(place)]):
        if shutil.which(command[0]) is None or run(*command).returncode:
            pytest.skip("no disk can be made here")
    yield place
    assert run("umount", "-l", str(place)).returncode == 0


def test_a_real_disk_that_becomes_read_only(disk: Path) -> None:
    def found() -> list[Finding]:
        return [one for one in probe.look() if one.where == str(disk)]

    probe = DiskProbe([])
    assert found() == []
    assert run("mount", "-o", "bind,remount,ro", str(disk)).returncode == 0  # only this mount of it
    assert found() == []
    assert run("mount", "-o", "remount,ro", str(disk)).returncode == 0
    [one] = found()
    assert one.code == "disk-read-only"
    assert one.evidence.split(",")[0] == "ro"


def test_this_machine_can_be_looked_at() -> None:
    for probe in (DiskProbe([Path("/"), Path("/tmp")]), HostProbe()):
        assert {one.code for one in probe.look()} <= {
            *("disk-full", "clock", "memory-pressure", "cpu-throttled")
        }


# ------------------------------------------------------------------------------------ memory


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The clock is well there."""
    monkeypatch.setattr(host, "_clock", list)
    (tmp_path / "proc/pressure").mkdir(parents=True)
    return tmp_path


def hosts(tree: Path) -> HostProbe:
    return HostProbe(tree / "proc", tree / "sys")


PRESSURE = """\
some avg10=99.00 avg60=98.00 avg300=97.00 total=1052492
full avg10={} avg60={} avg300={} total=515406
"""


@pytest.mark.parametrize(
    ("averages", "found"),
    [
        (("0.00", "0.00", "0.00"), False),
        (("99.99", "19.99", "99.99"), False),
        (("0.00", "20.00", "0.00"), True),
        (("0.00", "100.00", "0.00"), True),
    ],
)
def test_pressure_on_memory(tree: Path, averages: tuple[str, str, str], found: bool) -> None:
    (tree / "proc/pressure/memory").write_text(PRESSURE.format(*averages))
    words = f"all processes waited for memory in {averages[1]} % of the last minute"
    expected = [Finding(code="memory-pressure", evidence=words)] if found else []
    assert hosts(tree).look() == expected


@pytest.mark.parametrize("text", ["", "some avg10=99.00 avg60=99.00 avg300=0.00 total=1\n", "full of it\n"])
def test_a_pressure_of_another_format_is_none(tree: Path, text: str) -> None:
    (tree / "proc/pressure/memory").write_text(text)
    assert hosts(tree).look() == []


def test_a_kernel_that_does_not_measure_pressure(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = hosts(tree)
    assert probe.look() == []  # no CONFIG_PSI
    number = errno.EOPNOTSUPP  # psi=0

    def fail(path: Path) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_text", fail)
    assert probe.look() == []
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        probe.look()


# ------------------------------------------------------------------------------------- clock


class Libc:
    """In place of the C library: fills struct timex of a 64-bit machine."""

    def __init__(self, status: int, result: int = 0) -> None:
        self.status, self.result = status, result

    def adjtimex(self, buffer: ctypes.Array[ctypes.c_char]) -> int:
        assert buffer.raw == bytes(len(buffer))  # it changes nothing
        ctypes.c_int.from_buffer(buffer, 5 * 8).value = self.status
        return self.result


@pytest.mark.parametrize(
    ("status", "found"), [(0x0, False), (0x2001, False), (0x40, True), (0x2041, True), (0xFFBF, False)]
)
def test_a_clock_that_nobody_holds(
    tree: Path, monkeypatch: pytest.MonkeyPatch, status: int, found: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Libc(status, 5 if found else 0))
    words = f"adjtimex says that nobody holds it (status {status:#06x})"
    assert hosts(tree).look() == ([Finding(code="clock", evidence=words)] if found else [])


def test_a_clock_that_cannot_be_asked_raises(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: Libc(0, -1))
    with pytest.raises(OSError):
        hosts(tree).look()


class Timex(ctypes.Structure):
    """By adjtimex(2), and not by an offset."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def test_the_clock_of_this_machine() -> None:
    timex = Timex()
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    if state < 0:
        pytest.skip("adjtimex is not allowed here")
    status = timex.status
    # TIME_ERROR is what it returns of a clock that nobody holds.
    assert (state == 5) == bool(status & 0x40)
    words = [f"adjtimex says that nobody holds it (status {status:#06x})"] if status & 0x40 else []
    assert [one.evidence for one in host._clock()] == words


# -------------------------------------------------------------------------------------- heat


def cpus(tree: Path, *counts: tuple[int, int, int]) -> None:
    """Each with its number, its package and how often that was throttled."""
    for number, package, count in counts:
        cpu = tree / f"sys/devices/system/cpu/cpu{number}"
        for name, text in (
            ("topology/physical_package_id", package),
            ("thermal_throttle/package_throttle_count", count),
            ("thermal_throttle/core_throttle_count", 999),
        ):
            (cpu / name).parent.mkdir(parents=True, exist_ok=True)
            (cpu / name).write_text(f"{text}\n")


def test_processors_that_are_too_hot(tree: Path) -> None:
    probe = hosts(tree)
    (tree / "sys/devices/system/cpu/cpufreq").mkdir(parents=True)
    cpus(tree, (0, 0, 7), (1, 0, 7), (2, 1, 0), (3, 1, 0))
    assert probe.look() == []  # since the boot
    assert probe.look() == []
    cpus(tree, (2, 1, 3), (3, 1, 3))
    assert probe.look() == [
        Finding(code="cpu-throttled", where="package 1", evidence="3 times since the boot")
    ]
    assert probe.look() == []
    cpus(tree, (0, 0, 8), (1, 0, 8), (2, 1, 4), (3, 1, 4))
    assert [one.where for one in sorted(probe.look(), key=lambda one: one.where)] == [
        "package 0",
        "package 1",
    ]


@pytest.mark.parametrize("hot", range(4))
def test_each_processor_counts_for_its_package(tree: Path, hot: int) -> None:
    probe = hosts(tree)
    cpus(tree, *((number, 0, 5) for number in range(4)))
    probe.look()
    cpus(tree, (hot, 0, 6))
    assert [one.evidence for one in probe.look()] == ["6 times since the boot"]


def test_a_package_that_comes_later_is_its_own_base(tree: Path) -> None:
    probe = hosts(tree)
    cpus(tree, (0, 0, 0))
    probe.look()
    cpus(tree, (1, 1, 40))
    assert probe.look() == []
    cpus(tree, (1, 1, 41))
    assert [one.where for one in probe.look()] == ["package 1"]


def test_a_machine_without_such_counters(tree: Path) -> None:
    assert hosts(tree).look() == []
