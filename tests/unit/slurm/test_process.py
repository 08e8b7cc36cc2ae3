"""Running Slurm's commands: what they get of our environment, and that nothing of them is left."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.daemon.slurm import process
from ckptless.daemon.slurm.adapter import Job
from ckptless.daemon.slurm.commands import AT_ONCE, Commands, name_of
from ckptless.daemon.slurm.errors import SlurmRefusedError, SlurmUnreachableError
from ckptless.daemon.slurm.process import Account, Done, run

Script = Callable[..., str]
# Over soon, though not before a shell has begun its script; and less than what that would take.
BRIEF_S, LONG_S = 1.5, 30.0


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a command of that name, and returns its path."""

    def write(body: str, name: str = "scontrol") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def start(*argv: str, deadline_s: float = 10.0, grace_s: float = 0.0) -> Done:
    return asyncio.run(run(argv, deadline_s=deadline_s, grace_s=grace_s))


def gone(pid: int) -> bool:
    """It has ended; whoever adopted it may not have noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_it_prints_and_how_it_ends(script: Script) -> None:
    done = start(script('echo "out $1"; echo err >&2; exit 3'), "a b; $(echo c) '\"")
    assert done == Done(3, "out a b; $(echo c) '\"\n", "err\n")
    assert start(script(r"printf 'caf\351'")).out == "caf\ufffd"


def test_a_clean_environment(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SQUEUE_FORMAT",
        "SLURM_CLUSTERS",
        "SALLOC_NO_KILL",
        "LD_PRELOAD",
        "LANG",
        "SLURM_TIME_FORMAT",
    ):
        monkeypatch.setenv(name, "x" if name != "LD_PRELOAD" else "")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/other.conf")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    env = dict(line.split("=", 1) for line in start(script("/usr/bin/env; pwd >&2")).out.splitlines())
    assert env.pop("PATH")
    own = {name: value for name, value in env.items() if name not in ("PWD", "_", "SHLVL", "OLDPWD")}
    assert own == {"LC_ALL": "C", "TZ": "UTC", "SLURM_CONF": "/etc/slurm/other.conf"}


def test_its_input_is_empty_and_no_descriptor_of_ours_is_open(script: Script) -> None:
    assert start(script("cat; ls /proc/self/fd | wc -l")).out.strip() == "4"


def test_a_deadline_ends_it(script: Script, tmp_path: Path) -> None:
    path = script(f"echo $$ > {tmp_path}/pid; exec sleep 60")
    began = time.monotonic()
    with pytest.raises(SlurmUnreachableError, match=rf"scontrol within {BRIEF_S} s"):
        start(path, deadline_s=BRIEF_S)
    assert time.monotonic() - began < LONG_S
    assert gone(int((tmp_path / "pid").read_text()))


def test_one_that_tidies_up_is_asked_first(script: Script, tmp_path: Path) -> None:
    tidy = f"trap 'echo done > {tmp_path}/tidy; exit' TERM; echo $$ > {tmp_path}/pid; sleep 60 & wait"
    with pytest.raises(SlurmUnreachableError):
        start(script(tidy), deadline_s=BRIEF_S, grace_s=5.0)
    assert (tmp_path / "tidy").exists()
    stubborn = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done"
    with pytest.raises(SlurmUnreachableError):
        start(script(stubborn), deadline_s=BRIEF_S, grace_s=0.2)
    assert gone(int((tmp_path / "pid").read_text()))


def test_what_it_has_started_ends_too(script: Script, tmp_path: Path) -> None:
    path = script(f"sleep 60 & echo $! > {tmp_path}/pid; wait")
    began = time.monotonic()
    with pytest.raises(SlurmUnreachableError):
        start(path, deadline_s=BRIEF_S)
    assert time.monotonic() - began < LONG_S
    assert gone(int((tmp_path / "pid").read_text()))


def test_cancelling_ends_it(script: Script, tmp_path: Path) -> None:
    path = script(f"echo $$ > {tmp_path}/pid; exec sleep 60")

    async def body() -> None:
        task = asyncio.create_task(run((path,), deadline_s=60.0))
        limit = time.monotonic() + 10.0
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < limit
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_flood_is_not_kept(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_OUTPUT", 100_000)
    began = time.monotonic()
    with pytest.raises(ProtocolError, match="more than 100000 bytes"):
        start(script("exec yes"))
    assert time.monotonic() - began < LONG_S
    done = start(script("head -c 1000000 /dev/zero >&2; echo end"))
    assert done.out == "end\n"
    assert len(done.err) <= process.MAX_ERRORS + 2**16


def test_commands_that_are_not_there(tmp_path: Path, script: Script) -> None:
    with pytest.raises(SlurmUnreachableError, match=r"scontrol is not in /.*: install"):
        asyncio.run(Commands(tmp_path).nodes())
    with pytest.raises(SlurmUnreachableError, match="could not be started"):
        start(str(tmp_path / "nothing"))
    Path(script("")).write_bytes(b"\x7fELF nonsense")
    with pytest.raises(SlurmUnreachableError, match="could not be started"):
        start(str(tmp_path / "scontrol"))


def test_whom_it_runs_as() -> None:
    assert Account.of(os.geteuid()) is None
    if os.geteuid() == 0:
        nobody = Account.of(65534)
        assert nobody is not None
        assert nobody.uid == 65534
        assert 0 not in (nobody.gid, *nobody.groups)
        with pytest.raises(SlurmRefusedError, match="no account with uid 4000000000"):
            Account.of(4_000_000_000)
    else:
        with pytest.raises(SlurmRefusedError, match="takes root"):
            Account.of(0)


def test_a_few_at_a_time_and_each_has_its_deadline(script: Script, tmp_path: Path) -> None:
    script(f"touch {tmp_path}/run.$$; sleep 1")

    async def body() -> list[object]:
        commands = Commands(tmp_path)
        calls = (commands.nodes(deadline_s=0.5) for _ in range(AT_ONCE + 3))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    found = asyncio.run(body())
    assert all(isinstance(error, SlurmUnreachableError) for error in found)
    assert len(list(tmp_path.glob("run.*"))) == AT_ONCE


def test_noise_for_an_answer(script: Script, tmp_path: Path) -> None:
    for name in ("scontrol", "squeue"):
        script("echo 'NodeName=a b;c State=?? <html>'", name)
    commands = Commands(tmp_path)
    for call in (commands.nodes, commands.jobs):
        with pytest.raises(ProtocolError):
            asyncio.run(call())


def test_what_scontrol_never_gets_to_see(script: Script, tmp_path: Path) -> None:
    script(f"touch {tmp_path}/ran")
    commands = Commands(tmp_path)
    for name in ("", "a b", "n[1-2]", "ALL,x", "--help", "n state=down", "n\n"):
        with pytest.raises(UsageError):
            asyncio.run(commands.drain(name, "fine"))
    for reason in ("", " ", "a\nb", "it's", '"', "x" * 201, "\x00", "a\u202eb"):
        with pytest.raises(UsageError):
            asyncio.run(commands.drain("n1", reason))
    for job_id in (0, -5, 2**32):
        with pytest.raises(UsageError):
            asyncio.run(commands.cancel(job_id))
    assert not (tmp_path / "ran").exists()


def test_a_task_of_an_array_is_never_called_by_its_number() -> None:
    fields = {"job_id": 7, "user_id": 1, "state": "RUNNING"}
    assert name_of(Job(**fields)) == "7"  # type: ignore[arg-type]
    assert name_of(Job(**fields, array="7_3")) == "7_3"  # type: ignore[arg-type]
    with pytest.raises(SlurmRefusedError, match="waiting"):
        name_of(Job(**fields, array="7_[4-9]"))  # type: ignore[arg-type]
