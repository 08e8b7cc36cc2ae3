"""The site's commands and the mounts: real processes, of which none is left behind."""

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd.health import commands
from ckptless.daemon.ckptlessd.health.commands import MOST_NBYTES, SHOWN, CommandProbe, MountProbe
from ckptless.daemon.ckptlessd.health.probe import Finding, Probe
from ckptless.daemon.ckptlessd.health.process import Process

DEADLINE_S = 60.0
SH = "/bin/sh"


def descriptors() -> set[str]:
    """Those that are open: the folder's own is closed by then."""
    folder = Path("/proc/self/fd")
    return {f"{one.name} {one.readlink()}" for one in folder.iterdir() if one.is_symlink()}


def children() -> set[str]:
    return {
        pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    }


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = descriptors(), children()
    yield
    assert (descriptors(), children()) == before


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Quick(CommandProbe):
    LIMIT_S = 0.5


def shell(script: str, kind: type[CommandProbe] = CommandProbe) -> CommandProbe:
    return kind(f"{SH} -c {shlex.quote(script)}")


def looks(script: str) -> list[Finding]:
    probe = shell(script)
    found = probe.look()
    probe.close()
    return list(found)


def failed(evidence: str) -> list[Finding]:
    return [Finding(code="command-failed", where=SH, evidence=evidence)]


# ---------------------------------------------------------------------------------- what it says


def test_they_are_probes() -> None:
    command: Probe = CommandProbe("/bin/true")
    mount: Probe = MountProbe(["/"])
    assert (command.interval_s, command.deadline_s) == (60.0, 45.0)
    assert (mount.interval_s, mount.deadline_s) == (30.0, 20.0)
    # They come to an end before they count as hung.
    assert command.deadline_s > CommandProbe.LIMIT_S + commands._KILL_S
    assert mount.deadline_s > MountProbe.LIMIT_S


@pytest.mark.parametrize(
    ("script", "evidence"),
    [
        ("exit 0", None),
        ("echo all is well", None),
        ("echo not well >&2; exit 1", "exit code 1: not well"),
        ("exit 255", "exit code 255: it says nothing"),
        ("echo first; echo last; exit 2", "exit code 2: last"),
        ("echo out; echo err >&2; exit 2", "exit code 2: err"),
        ("printf 'no newline'; exit 3", "exit code 3: no newline"),
        ("printf 'said\\n\\n  \\n'; exit 3", "exit code 3: said"),
        ("printf ' \\n\\n'; exit 3", "exit code 3: it says nothing"),
        ("printf 'a\\033[31mb\\007c\\td\\r\\n'; exit 3", "exit code 3: a [31mb c d"),
        ("printf '\\377\\376x\\000y'; exit 3", "exit code 3: \ufffd\ufffdx y"),
        ("printf 'na\\303\\257ve'; exit 3", "exit code 3: na\u00efve"),
        ("echo before; kill -TERM $$", "signal 15: before"),
        ("kill -KILL $$", "signal 9: it says nothing"),
        # Nobody is there to answer it.
        ("read answer || exit 5", "exit code 5: it says nothing"),
        ("exec >&- 2>&-; sleep 0.3; exit 4", "exit code 4: it says nothing"),
        ("pwd; exit 6", "exit code 6: /"),
    ],
)
def test_how_a_command_ends(script: str, evidence: str | None) -> None:
    assert looks(script) == ([] if evidence is None else failed(evidence))


def test_a_long_line_is_cut() -> None:
    assert looks("printf '%05000d' 7; exit 1") == failed("exit code 1: " + "0" * SHOWN)
    [found] = looks("printf '%0100000d\\n' 7; echo end; exit 1")
    assert found.evidence == "exit code 1: end"


def test_it_runs_in_a_session_of_its_own() -> None:
    [found] = looks("cut -d' ' -f6 /proc/self/stat; exit 1")
    assert int(found.evidence.rpartition(" ")[2]) != os.getsid(0)


def test_it_is_run_in_every_look(tmp_path: Path) -> None:
    probe = shell(f"echo x >> {tmp_path}/log; exit $(wc -l < {tmp_path}/log)")
    assert [probe.look()[0].evidence[:11] for _ in range(3)] == [f"exit code {code}" for code in (1, 2, 3)]
    probe.close()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    probe = CommandProbe(f"{tmp_path}/check -a")
    assert probe.missing() == f"there is no {tmp_path}/check"
    with pytest.raises(FileNotFoundError):
        probe.look()
    (tmp_path / "check").write_text("#!/bin/sh\nexit 0\n")
    assert probe.missing() == ""
    with pytest.raises(PermissionError):
        probe.look()
    (tmp_path / "check").chmod(0o755)
    assert probe.look() == []
    probe.close()


# ------------------------------------------------------------------------------- what it prints


def test_gigabytes_of_output_are_an_end_of_it() -> None:
    begun_s = time.monotonic()
    assert looks("exec yes") == failed("signal 9: y")
    assert time.monotonic() - begun_s < CommandProbe.LIMIT_S


def test_what_is_just_not_too_much() -> None:
    assert looks(f"head -c {MOST_NBYTES} /dev/zero") == []
    assert looks(f"head -c {MOST_NBYTES - 5} /dev/zero; echo; echo end; exit 1") == failed("exit code 1: end")


def test_a_command_may_write_long_files(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(bytes(2 * MOST_NBYTES))
    assert (
        looks(f"echo more >> {tmp_path}/log && head -c {3 * MOST_NBYTES} /dev/zero > {tmp_path}/data") == []
    )


@pytest.mark.parametrize("code", [0, 3])
def test_what_a_command_leaves_behind_is_ended_with_it(code: int, tmp_path: Path) -> None:
    """It holds up nothing, and a check that leaves a process every minute fills no node."""
    begun_s = time.monotonic()
    found = looks(f"sleep 1000 & echo $! > {tmp_path}/pid; echo end; exit {code}")
    assert time.monotonic() - begun_s < CommandProbe.LIMIT_S
    assert found == ([] if code == 0 else failed("exit code 3: end"))
    until(lambda: not lives(int((tmp_path / "pid").read_text())))


def test_a_command_may_start_a_service_in_a_session_of_its_own(tmp_path: Path) -> None:
    service = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000'"
    assert looks(f"{service} & while ! [ -s {tmp_path}/pid ]; do sleep 0.01; done") == []
    pid = int((tmp_path / "pid").read_text())
    assert lives(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not lives(pid))


# ------------------------------------------------------------------------- one that does not end


def test_a_command_that_does_not_end_is_killed_with_its_children() -> None:
    probe = shell("sleep 1000 & echo $$ $!; wait", Quick)
    pids: list[int] = []

    def looked() -> bool:
        [found] = probe.look()
        words, _, said = found.evidence.partition(": ")
        assert (found.code, found.where, words) == ("command-failed", SH, "it does not end in 0 s")
        pids[:] = map(int, said.split())
        return len(pids) == 2

    until(looked)
    until(lambda: not any(map(lives, pids)))
    probe.close()


def test_after_one_that_did_not_end_it_is_run_anew(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    probe = shell(f"[ -e {tmp_path}/hang ] && sleep 1000; exit 0", Quick)
    assert [len(probe.look()), len(probe.look())] == [1, 1]
    (tmp_path / "hang").unlink()
    until(lambda: probe.look() == [])
    probe.close()


@pytest.fixture
def _unkillable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that waits in the kernel."""
    monkeypatch.setattr(Process, "kill", lambda process: None)
    monkeypatch.setattr(commands, "_KILL_S", 0.1)


@pytest.mark.usefixtures("_unkillable")
def test_one_that_cannot_be_killed_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pids() -> list[int]:
        return [int(pid) for pid in log.read_text().split()]

    log = tmp_path / "pids"
    log.touch()
    probe = shell(f"echo $$ >> {log}; exec sleep 1000", Quick)
    found = [probe.look()[0].evidence for _ in range(3)]
    assert found == ["it does not end in 0 s: ", *["it does not end, not even by SIGKILL"] * 2]
    until(lambda: len(pids()) == 1)
    assert lives(pids()[0])
    monkeypatch.undo()
    os.kill(pids()[0], signal.SIGKILL)
    until(lambda: not lives(pids()[0]))
    # It is gone at last, and the command is run again.
    until(lambda: probe.look()[0].evidence == "it does not end in 0 s: " and len(pids()) > 1)
    probe.close()


@pytest.mark.usefixtures("_unkillable")
def test_close_ends_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "pid"
    log.touch()
    probe = shell(f"echo $$ > {log}; exec sleep 1000", Quick)
    probe.look()
    until(lambda: log.read_text().endswith("\n"))
    pid = int(log.read_text())
    assert lives(pid)
    monkeypatch.undo()
    probe.close()
    assert not lives(pid)


# --------------------------------------------------------------------------------------- mounts


class QuickMounts(MountProbe):
    LIMIT_S = 0.5


# Hangs as long as a file says so, and fails where another one does.
STAT = """#!/bin/sh
[ "$#$1$2" = "3-f--" ] || exit 9
echo "$3 $$" >> "$FAKE/asked"
while [ -e "$FAKE/hang$3" ]; do sleep 0.1; done
if [ -e "$FAKE/fail$3" ]; then cat "$FAKE/fail$3"; exit 1; fi
"""


class Server:
    """A `stat` of our own on PATH, and what it does at each place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def hang(self, place: str) -> Path:
        file = self.folder / f"hang{place}"
        file.parent.mkdir(exist_ok=True)
        file.touch()
        return file

    def fail(self, place: str, words: str) -> None:
        file = self.folder / f"fail{place}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(words)

    @property
    def asked(self) -> list[str]:
        return [line.split()[0] for line in self._lines()]

    def pid(self, place: str) -> int:
        until(lambda: place in self.asked)
        return int(next(line.split()[1] for line in self._lines() if line.split()[0] == place))

    def _lines(self) -> list[str]:
        # The last one may be half there.
        return (self.folder / "asked").read_text().split("\n")[:-1]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    (tmp_path / "bin").mkdir()
    (tmp_path / "asked").touch()
    (tmp_path / "bin/stat").write_text(STAT)
    (tmp_path / "bin/stat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    return Server(tmp_path)


def silent(place: str, words: str = "stat -f has no answer in 0 s") -> Finding:
    return Finding(code="mount-silent", where=place, evidence=words)


def test_mounts_that_answer(server: Server) -> None:
    probe = MountProbe(["/home", "/scratch"])
    assert probe.missing() == ""
    assert [probe.look(), probe.look()] == [[], []]
    assert sorted(server.asked) == ["/home", "/home", "/scratch", "/scratch"]
    probe.close()


def test_a_mount_that_hangs_is_asked_once_until_it_answers(server: Server) -> None:
    hangs = server.hang("/home")
    probe = QuickMounts(["/home", "/scratch"])
    for _ in range(2):
        # The other one answers, as slow as this machine may be.
        until(lambda: probe.look() == [silent("/home")])
    assert server.asked.count("/home") == 1
    assert server.asked.count("/scratch") >= 2
    hangs.unlink()
    until(lambda: not lives(server.pid("/home")))
    assert silent("/home") not in probe.look()
    assert server.asked.count("/home") == 1
    until(lambda: probe.look() == [])
    assert server.asked.count("/home") >= 2
    probe.close()


def test_all_mounts_share_one_limit(server: Server) -> None:
    places = [f"/m{number}" for number in range(60)]
    for place in places:
        server.hang(place)
    probe = QuickMounts(places)
    begun_s = time.monotonic()
    assert probe.look() == [silent(place) for place in places]
    # Not one after the other.
    assert time.monotonic() - begun_s < len(places) * QuickMounts.LIMIT_S
    probe.close()


def test_close_ends_those_that_hang(server: Server) -> None:
    server.hang("/home")
    probe = QuickMounts(["/home"])
    assert probe.look() == [silent("/home")]
    pid = server.pid("/home")
    assert lives(pid)
    probe.close()
    assert not lives(pid)


def test_a_mount_that_answers_with_an_error(server: Server) -> None:
    words = "stat: cannot read file system information for '/home': Stale file handle"
    server.fail("/home", f"{words}\n")
    probe = MountProbe(["/home"])
    assert [probe.look(), probe.look()] == [[silent("/home", words)]] * 2
    assert server.asked == ["/home"] * 2
    probe.close()


def test_the_real_stat(tmp_path: Path) -> None:
    probe = MountProbe(["/proc", str(tmp_path), f"{tmp_path}/-nowhere"])
    [found] = probe.look()
    assert (found.code, found.where) == ("mount-silent", f"{tmp_path}/-nowhere")
    assert "No such file or directory" in found.evidence
    probe.close()


def test_a_mount_that_is_gone(tmp_path: Path) -> None:
    def mounted(*places: str) -> None:
        lines = [f"27 1 0:40 / {place} rw,relatime - nfs4 nfs01:/x rw\n" for place in ("/", *places)]
        (tmp_path / "self/mountinfo").write_text("".join(lines))

    (tmp_path / "self").mkdir()
    probe = MountProbe(["/tmp", "/proc", "/var"], tmp_path)
    mounted("/tmp", "/proc", "/sys")
    assert probe.look() == []  # /var never was
    mounted("/proc")
    gone = [Finding(code="mount-gone", where="/tmp", evidence="it is not in mountinfo")]
    assert [probe.look(), probe.look()] == [gone, gone]
    mounted("/tmp", "/proc")
    assert probe.look() == []
    probe.close()


def test_no_mounts_are_missing() -> None:
    assert MountProbe([]).missing() == "health.mounts names none"
