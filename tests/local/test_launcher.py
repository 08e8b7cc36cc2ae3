"""However the launcher ends, nothing of its run is left."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
from pathlib import Path

import pytest

from ckptless.daemon.agent.ranks.socket_folder import ROOT, SocketFolder

from .localrun import Job, read_toy, toy, wait_until

DEADLINE_S = 60.0


def trains(job: Job, steps: int = 3) -> None:
    """Until training is under way."""
    wait_until(lambda: len(read_toy(job.home / "out").losses) >= steps, DEADLINE_S, job)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_training(tmp_path: Path, number: signal.Signals) -> None:
    with toy(tmp_path, nodes=2, steps=100_000) as job:
        trains(job)
        job.launcher.send_signal(number)
        job.ended(128 + number, DEADLINE_S)
        (row,) = job.ledger().jobs
        assert (row.state, row.exit_code) == ("stopped", 128 + number)
        assert number.name in str(row.reason)
        assert number.name in job.stderr


def test_the_launcher_is_killed(tmp_path: Path) -> None:
    with toy(tmp_path, nodes=2, steps=100_000) as job:
        trains(job)
        job.launcher.kill()
        job.ended(-signal.SIGKILL, DEADLINE_S)


def test_ctrl_c_while_everything_starts(tmp_path: Path) -> None:
    with toy(tmp_path, nodes=2, steps=100_000) as job:
        wait_until(lambda: job.pid_of(1, "agent"), DEADLINE_S, job)
        job.launcher.send_signal(signal.SIGINT)
        job.ended(128 + signal.SIGINT, DEADLINE_S)


def test_ctrl_c_with_a_rank_that_does_not_listen(tmp_path: Path) -> None:
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        # A grandchild in a session of its own, as a data loader's or a logger's helper may be.
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').close()\n"
        "time.sleep(1000)\n"
    )
    with Job(
        tmp_path / "run", ["--nodes", 1, "--shutdown-timeout", 2], [stubborn, tmp_path / "ready"]
    ) as job:
        wait_until((tmp_path / "ready").exists, DEADLINE_S, job)
        job.launcher.send_signal(signal.SIGINT)
        job.ended(128 + signal.SIGINT, DEADLINE_S)


HANDLER = """\
import os, signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(float(sys.argv[2]))
    Path(sys.argv[1], "saved").touch()
    os._exit(0)

signal.signal(signal.SIGTERM, save)
Path(sys.argv[1], "ready").touch()
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("options", "save_s", "saves"), [([], 5, True), (["--shutdown-timeout", 1], 500, False)]
)
def test_a_rank_that_saves_at_sigterm_gets_its_time(
    tmp_path: Path, options: list[object], save_s: int, *, saves: bool
) -> None:
    script = tmp_path / "handler.py"
    script.write_text(HANDLER)
    with Job(tmp_path / "run", options, [script, tmp_path, save_s]) as job:
        wait_until((tmp_path / "ready").exists, DEADLINE_S, job)
        job.launcher.send_signal(signal.SIGTERM)
        job.ended(128 + signal.SIGTERM, DEADLINE_S)
        assert (tmp_path / "saved").exists() is saves, job.story()


def test_a_second_ctrl_c_waits_for_nobody(tmp_path: Path) -> None:
    script = tmp_path / "handler.py"
    script.write_text(HANDLER)
    with Job(tmp_path / "run", ["--shutdown-timeout", 600], [script, tmp_path, 500]) as job:
        wait_until((tmp_path / "ready").exists, DEADLINE_S, job)
        job.launcher.send_signal(signal.SIGINT)
        wait_until(lambda: "SIGINT: ending the job" in job.stderr, DEADLINE_S, job)
        job.launcher.send_signal(signal.SIGINT)
        job.ended(128 + signal.SIGINT, DEADLINE_S)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("script", "words"), [("ends_script.py", []), ("tier1_script.py", ["exit-well"])])
def test_fifty_ends_in_a_row(tmp_path: Path, script: str, words: list[str]) -> None:
    """A process group that dies with the interpreter may wait for ever for a thread that wants the GIL."""
    for number in range(50):
        out = tmp_path / str(number)
        out.mkdir()
        arguments = [out, *words] if words else []
        with Job(out, ["--nproc-per-node", 4], [Path(__file__).with_name(script), *arguments]) as job:
            job.ended(0, DEADLINE_S)


USR1 = """\
import os, signal, sys, time
from pathlib import Path

rank, count = os.environ["RANK"], 0

def told(*_):
    global count
    count += 1
    Path(sys.argv[1], f"told-{rank}").write_text(str(count))

signal.signal(signal.SIGUSR1, told)
Path(sys.argv[1], f"ready-{rank}").touch()
while not Path(sys.argv[1], "over").exists():
    time.sleep(0.05)
"""


def test_sigusr1_is_the_ranks(tmp_path: Path) -> None:
    script = tmp_path / "usr1.py"
    script.write_text(USR1)

    def all_told(count: int) -> bool:
        return [path.read_text() for path in tmp_path.glob("told-*")] == [str(count)] * 2

    with Job(tmp_path / "run", ["--nodes", 2], [script, tmp_path]) as job:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, DEADLINE_S, job)
        job.launcher.send_signal(signal.SIGUSR1)
        wait_until(lambda: all_told(1), DEADLINE_S, job)
        # All that is not a rank takes no notice of what means nothing to it.
        agents = [pid for node in (0, 1) if (pid := job.pid_of(node, "agent")) is not None]
        zygotes = [
            int(pid) for pid in children(agents[0]) if "zygote" in Path(f"/proc/{pid}/comm").read_text()
        ]
        others = [job.launcher.pid, *agents, *zygotes]
        assert len(others) == 4
        for pid in others:
            for number in (signal.SIGALRM, signal.SIGPROF, signal.SIGIO):
                os.kill(pid, number)
        os.kill(others[-1], signal.SIGUSR1)
        job.launcher.send_signal(signal.SIGUSR1)
        wait_until(lambda: all_told(2), DEADLINE_S, job)
        (tmp_path / "over").touch()
        job.ended(0, DEADLINE_S)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    "end", ["SIGTERM", "agent", pytest.param("launcher", marks=pytest.mark.slow), "launcher and agent"]
)
def test_no_temporary_folder_is_left(tmp_path: Path, end: str) -> None:
    """Workers of a DataLoader make some, and are killed with their rank."""
    name = f"t{secrets.token_hex(4)}"
    words = [Path(__file__).with_name("loader_script.py"), tmp_path]
    with (
        tempfile.TemporaryDirectory() as temporary,
        Job(tmp_path / "run", ["--nodes", 2, "--job", name], words, {"TMPDIR": temporary}) as job,
    ):
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, DEADLINE_S, job)
        (folder,) = ROOT.glob(f"ckptless-{os.getuid()}-{name}-*")
        assert list(folder.rglob("listener-*")), "nothing was made"
        if end == "SIGTERM":
            job.launcher.send_signal(signal.SIGTERM)
        if "agent" in end:
            agent = job.pid_of(1, "agent")
            assert agent is not None
            os.kill(agent, signal.SIGKILL)
        if "launcher" in end:
            job.launcher.kill()
        job.wait(DEADLINE_S)
        job.nothing_left()
        if "launcher" in end:
            # Nobody is left to do it: the next start does, this one if no other test has been faster.
            SocketFolder(name).close()
        assert not folder.exists()
        # torch's cache of compiled code is meant to stay.
        found = [path.name for path in Path(temporary).iterdir()]
        assert [path for path in found if not path.startswith("torchinductor_")] == []
