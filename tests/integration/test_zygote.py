"""Training processes from the zygote: like a fresh interpreter's, the agent's children, and never astray."""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptless.daemon.agent.ranks import processes
from ckptless.daemon.agent.ranks.prctl import set_child_subreaper
from ckptless.daemon.agent.ranks.processes import SPAWN_DEADLINE_S, Process, SpawnSpec, Zygote
from ckptless.daemon.agent.ranks.zygote import QUIET_S
from ckptless.daemon.protocol.errors import PeerError, UsageError

DEADLINE_S = 60.0  # torch is imported more than once, on a machine that may have much else to do
ENV = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "PROBE": "caf\u00e9 \udcff"}

PROBE = """\
import atexit, gc, json, os, signal, sys, threading
def status(name):
    return [line.split()[1] for line in open("/proc/self/status") if line.startswith(name)][0]
fds = sorted(os.listdir("/proc/self/fd"), key=int)
umask = os.umask(0)
with os.popen("env -0") as env:
    c_environ = sorted(env.buffer.read().split(b"\\0"))
report = {
    "main": sorted(globals()),
    "name": __name__, "file": __file__, "package": __package__, "cached": __cached__,
    "loader": type(__loader__).__name__, "spec": __spec__ and __spec__.name,
    "is main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags),
    "warnoptions": sys.warnoptions, "executable": sys.executable, "prefix": sys.prefix,
    "cwd": os.getcwd(), "umask": umask, "env": repr(sorted(os.environb.items())),
    "c environ": repr(c_environ),
    "fds": fds, "stdin": os.readlink("/proc/self/fd/0"),
    "mask": status("SigBlk"), "ignored": status("SigIgn"), "caught": status("SigCgt"),
    "handlers": [str(signal.getsignal(n)).split(" at ")[0] for n in sorted(signal.valid_signals())],
    "comm": open("/proc/self/comm").read(), "tasks": len(os.listdir("/proc/self/task")),
    "thread": threading.current_thread() is threading.main_thread(),
    "gc": [gc.isenabled(), gc.get_threshold()],
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.encoding, sys.getfilesystemencoding()],
    "errors": [sys.stdin.errors, sys.stdout.errors, sys.stderr.errors],
    "stderr": sys.stderr.line_buffering,
    "hooks": [sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__],
    "oom": open("/proc/self/oom_score_adj").read(),
}
json.dump(report, open(sys.argv[1], "w"))
"""


class Logging(Zygote):
    """What it starts writes into rank.log of its working directory, if nothing else is said."""

    async def spawn(
        self,
        spec: SpawnSpec,
        stdout: int | None = None,
        stderr: int | None = None,
        deadline_s: float = SPAWN_DEADLINE_S,
    ) -> Process:
        if stdout is not None:
            return await super().spawn(spec, stdout, stderr, deadline_s)
        with (spec.cwd / "rank.log").open("ab") as log:
            return await super().spawn(spec, log.fileno(), stderr, deadline_s)


Body = Callable[[Logging], Awaitable[None]]


@pytest.fixture(autouse=True)
def _not_a_subreaper_afterwards() -> Iterator[None]:
    yield
    set_child_subreaper(False)
    # What a test that failed has left would trouble the next.
    for pid in children():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def events() -> list[tuple[str, str]]:
    return []


def as_agent(
    events: list[tuple[str, str]], body: Body, preload: tuple[str, ...] = ("json",), *, ahead: bool = False
) -> None:
    """Run `body` with a zygote, as an agent would; every wait in it ends at DEADLINE_S."""

    async def main() -> None:
        zygote = Logging(lambda kind, text: events.append((kind, text)), ahead=ahead)
        async with asyncio.timeout(DEADLINE_S):
            try:
                await zygote.start(preload, ENV, DEADLINE_S)
                await body(zygote)
            finally:
                await zygote.close()

    asyncio.run(main())


def script(tmp_path: Path, text: str, name: str = "train.py") -> Path:
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return path


def spec(tmp_path: Path, *argv: str | Path, module: bool = False, env: Mapping[str, str] = ENV) -> SpawnSpec:
    return SpawnSpec(argv=tuple(map(str, argv)), env=env, cwd=tmp_path, module=module)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for is outside this loop
        await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie that its adopter has not reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _as_from_a_terminal() -> None:
    """What nohup, or a shell's `&`, ignores for whatever it starts; the zygote never does."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def directly(spec: SpawnSpec) -> tuple[int, str]:
    """Run it with a fresh interpreter: the status and the output."""
    done = subprocess.run(
        [sys.executable, *(["-m"] if spec.module else []), *spec.argv],
        env=dict(spec.env),
        cwd=spec.cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        preexec_fn=_as_from_a_terminal,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("how", ["absolute", "relative", "link", "module", "package", "directory"])
def test_a_rank_looks_like_a_fresh_interpreter(
    tmp_path: Path, events: list[tuple[str, str]], how: str
) -> None:
    for folder in ("code", "code/pack", "app"):
        (tmp_path / folder).mkdir()
    script(tmp_path, PROBE, "code/probe.py")
    script(tmp_path, PROBE, "modprobe.py")
    script(tmp_path, PROBE, "app/__main__.py")
    (tmp_path / "code/pack/__init__.py").touch()
    (tmp_path / "link.py").symlink_to("code/probe.py")
    target = {
        "absolute": str(tmp_path / "code/probe.py"),
        "relative": "./code/../code/probe.py",
        "link": "link.py",
        "module": "modprobe",
        "package": "app",
        "directory": "app",
    }[how]
    forked, fresh = tmp_path / "forked.json", tmp_path / "fresh.json"
    report: dict[str, Any] = {}

    async def body(zygote: Logging) -> None:
        process = await zygote.spawn(
            spec(tmp_path, target, forked, "-x", module=how in ("module", "package"))
        )
        assert await process.wait() == 0, (tmp_path / "rank.log").read_text()
        report.update(json.loads(forked.read_text()))

    as_agent(events, body)
    status, output = directly(spec(tmp_path, target, fresh, "-x", module=how in ("module", "package")))
    assert status == 0, output
    wanted = json.loads(fresh.read_text().replace("fresh.json", "forked.json"))
    assert list(report) == list(wanted)
    for field, value in wanted.items():
        assert report[field] == value, field
    assert events == []


ENDINGS = {
    "ok": "print('done', flush=True)",
    "status": "import sys; sys.exit(7)",
    "message": "raise SystemExit('cannot go on')",
    "exception": "def f():\n    raise ValueError('boom')\ntry:\n    1 / 0\nexcept ArithmeticError:\n    f()",
    "syntax": "def f(:\n    pass",
    "interrupt": "raise KeyboardInterrupt",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "hook": "import sys\nsys.excepthook = lambda _, value, tb: print('hook', value, tb.tb_lineno)\nint('x')",
    "threads and exit handlers": (
        "import atexit, sys, threading, time\n"
        "def late():\n    time.sleep(0.1)\n    print('thread', sys.modules['__main__'].late is late)\n"
        "atexit.register(lambda: print('atexit', late.__module__, file=sys.stderr))\n"
        "threading.Thread(target=late).start()\n"
        "print('end')\nraise RuntimeError('with a thread')\n"
    ),
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(sum([1]))'])",
}


def test_a_rank_ends_like_a_fresh_interpreter(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    got, wanted = {}, {}

    async def body(zygote: Logging) -> None:
        for name, text in ENDINGS.items():
            one = spec(tmp_path, script(tmp_path, text))
            wanted[name] = directly(one)
            status = await (await zygote.spawn(one)).wait()
            got[name] = status, (tmp_path / "rank.log").read_text()
            (tmp_path / "rank.log").unlink()
        for name, target in (("no script", "missing.py"), ("no module", "missing.module")):
            one = spec(tmp_path, target, module=name == "no module")
            wanted[name] = directly(one)
            status = await (await zygote.spawn(one)).wait()
            got[name] = status, (tmp_path / "rank.log").read_text()
            (tmp_path / "rank.log").unlink()

    as_agent(events, body)
    for name in wanted:
        # stdout and stderr go to one file; a fresh process's stdout is buffered until its end.
        assert got[name][0] == wanted[name][0], name
        assert sorted(got[name][1].splitlines()) == sorted(wanted[name][1].splitlines()), name
    assert got["interrupt"][0] == -signal.SIGINT
    assert "raise ValueError('boom')" in got["exception"][1]


def test_a_rank_is_the_agents_child_in_a_session_of_its_own(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    path = script(tmp_path, "import os; print(os.getpid(), os.getppid(), os.getsid(0), os.getpgrp())")

    async def body(zygote: Logging) -> None:
        process = await zygote.spawn(spec(tmp_path, path))
        assert process.returncode is None
        assert await process.wait() == 0
        pid, ppid, session, group = map(int, (tmp_path / "rank.log").read_text().split())
        assert (pid, ppid, session, group) == (process.pid, os.getpid(), process.pid, process.pid)

    as_agent(events, body)


def test_deaths_are_seen_in_their_order_and_kill_after_death_is_nothing(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    path = script(tmp_path, "import time; time.sleep(600)")
    seen: list[int] = []

    async def watch(process: Process) -> None:
        seen.append(await process.wait())

    async def body(zygote: Logging) -> None:
        one, two = [await zygote.spawn(spec(tmp_path, path)) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            group.create_task(watch(one))
            group.create_task(watch(two))
            await asyncio.sleep(0.05)
            assert (one.returncode, seen) == (None, [])
            two.kill(signal.SIGTERM)
            await two.wait()
            assert one.returncode is None
            one.kill()
        assert seen == [-signal.SIGTERM, -signal.SIGKILL]
        one.kill()
        assert children() == {zygote.pid}

    as_agent(events, body)
    assert events == []


@pytest.mark.parametrize("ahead", [False, True])
def test_a_signal_that_comes_before_the_program_begins_is_kept(
    tmp_path: Path, events: list[tuple[str, str]], *, ahead: bool
) -> None:
    """An agent that ends its ranks would wait for such a process as long as for one that handles SIGTERM."""
    path = script(tmp_path, "import time; time.sleep(600)")

    async def body(zygote: Logging) -> None:
        for number in [signal.SIGTERM, signal.SIGHUP] * 5:
            if ahead and number is signal.SIGHUP:
                await asyncio.sleep(2 * QUIET_S)  # in quiet times only there is one
            process = await zygote.spawn(spec(tmp_path, path))
            process.kill(number)
            async with asyncio.timeout(10.0):
                assert await process.wait() == -number

    as_agent(events, body, ahead=ahead)


def test_a_deaf_process_outlives_what_slurm_sends_to_all(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    """As the process that saves the last step at a time limit: also in its first moments."""
    path = script(tmp_path, "import time; time.sleep(0.3); print('done')")

    async def body(zygote: Logging) -> None:
        process = await zygote.spawn(replace(spec(tmp_path, path), deaf=True))
        for _ in range(20):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
                process.kill(number)
            await asyncio.sleep(0.01)
        assert await process.wait() == 0
        assert (tmp_path / "rank.log").read_text() == "done\n"

    as_agent(events, body)


def test_what_a_killed_rank_started_goes_with_it_and_nothing_stays_a_zombie(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    path = script(
        tmp_path,
        """
        import os, subprocess, sys, time
        nap = [sys.executable, "-c", "import time; time.sleep(float(__import__('sys').argv[1]))"]
        worker = subprocess.Popen([*nap, "600"])
        helper = subprocess.Popen([*nap, "0.5"], start_new_session=True)
        print(worker.pid, helper.pid)
        time.sleep(600)
        """,
    )

    async def body(zygote: Logging) -> None:
        process = await zygote.spawn(spec(tmp_path, path))
        log = tmp_path / "rank.log"
        await until(lambda: log.exists() and log.read_text().endswith("\n"))
        worker, helper = map(int, log.read_text().split())
        process.kill()
        assert await process.wait() == -signal.SIGKILL
        await until(lambda: not Path(f"/proc/{worker}").exists())
        await until(lambda: not alive(helper))
        zygote.reap_orphans()
        assert children() == {zygote.pid}

    as_agent(events, body)
    assert events == []


def test_ranks_outlive_the_zygote_and_the_next_spawn_starts_another(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    path = script(tmp_path, "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)")

    async def body(zygote: Logging) -> None:
        one = await zygote.spawn(spec(tmp_path, path))
        old = zygote.pid
        assert old is not None
        os.kill(old, signal.SIGKILL)
        # At once: the agent may not have noticed, or only after the request was sent.
        two = await zygote.spawn(spec(tmp_path, path))
        assert zygote.pid not in (None, old)
        assert alive(one.pid)
        (tmp_path / "go").touch()
        assert [await one.wait(), await two.wait()] == [0, 0]

    as_agent(events, body)
    assert [kind for kind, _ in events] == ["zygote-died", "zygote-restarted"]
    assert "signal 9" in events[0][1]


def test_a_spawn_in_flight_survives_the_zygote_and_runs_once(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    path = script(tmp_path, "print('ran')")

    async def body(zygote: Logging) -> None:
        old = zygote.pid
        assert old is not None
        os.kill(old, signal.SIGSTOP)
        task = asyncio.create_task(zygote.spawn(spec(tmp_path, path)))
        await asyncio.sleep(0.05)
        assert not task.done()
        os.kill(old, signal.SIGKILL)
        assert await (await task).wait() == 0

    as_agent(events, body)
    assert (tmp_path / "rank.log").read_text() == "ran\n"
    assert [kind for kind, _ in events] == ["zygote-died", "zygote-restarted"]


def test_a_spawn_given_up_runs_nothing(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    path = script(tmp_path, "import sys; print(sys.argv[1])")

    async def body(zygote: Logging) -> None:
        zygote_pid = zygote.pid
        assert zygote_pid is not None
        os.kill(zygote_pid, signal.SIGSTOP)
        task = asyncio.create_task(zygote.spawn(spec(tmp_path, path, "cancelled")))
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        os.kill(zygote_pid, signal.SIGCONT)
        assert await (await zygote.spawn(spec(tmp_path, path, "second"))).wait() == 0
        assert zygote.pid == zygote_pid
        await until(lambda: not any(alive(pid) for pid in children() - {zygote_pid}))
        zygote.reap_orphans()
        assert children() == {zygote_pid}

        os.kill(zygote_pid, signal.SIGSTOP)
        with pytest.raises(PeerError, match=r"no process in 0\.05 s"):
            await zygote.spawn(spec(tmp_path, path, "late"), deadline_s=0.05)
        assert await (await zygote.spawn(spec(tmp_path, path, "third"))).wait() == 0
        assert zygote.pid != zygote_pid

    as_agent(events, body)
    assert (tmp_path / "rank.log").read_text() == "second\nthird\n"


AGENT = """
import asyncio, os, pathlib, sys
from ckptless.daemon.agent.ranks.processes import SpawnSpec, Zygote
async def main():
    here = pathlib.Path(sys.argv[1])
    zygote = Zygote(print, ahead=True)
    await zygote.start(["json"], {}, 60)
    spec = SpawnSpec(argv=("-c.py",), env={}, cwd=here)
    with (here / "rank.log").open("ab") as log:
        ranks = [await zygote.spawn(spec, log.fileno()) for _ in range(2)]
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children")
    ahead = False
    while not ahead:
        await asyncio.sleep(0.01)
        pids = children.read_text().split()
        ahead = any(pathlib.Path(f"/proc/{pid}/comm").read_text() == "ckptless-ahead\\n" for pid in pids)
    print(*pids, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_zygote_and_ranks_die_with_the_agent(tmp_path: Path, stopped: bool) -> None:
    script(tmp_path, "import time; print('here'); time.sleep(600)", "-c.py")
    log = tmp_path / "rank.log"
    with subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        pids = [int(pid) for pid in agent.stdout.readline().split()]
        try:
            assert len(pids) == 4
            assert all(map(alive, pids))
            if stopped:
                # None of them does anything by itself now: only the kernel can end them.
                deadline = time.monotonic() + DEADLINE_S
                while not log.exists() or log.read_text().count("here") < 2:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
        finally:
            agent.kill()
    deadline = time.monotonic() + DEADLINE_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.01)


def forked_ahead() -> int | None:
    """The process that waits for what is asked next."""
    for pid in children():
        if Path(f"/proc/{pid}/comm").read_text() == "ckptless-ahead\n":
            return pid
    return None


def test_what_is_asked_next_is_there_already(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    """Every one after a quiet moment, and two at once are two."""
    path = script(tmp_path, "import os, sys; print(os.getpid(), os.environ['WHICH'], *sys.argv[1:])")

    async def body(zygote: Logging) -> None:
        for which in ("a", "b"):
            await until(lambda: forked_ahead() is not None)
            waiting = forked_ahead()
            asked = (spec(tmp_path, path, word, env={**ENV, "WHICH": which}) for word in ("x", "y"))
            both = [await zygote.spawn(one) for one in asked]
            assert [await one.wait() for one in both] == [0, 0]
            told = (tmp_path / "rank.log").read_text().splitlines()[-2:]
            assert sorted(told) == sorted([f"{both[0].pid} {which} x", f"{both[1].pid} {which} y"])
            assert both[0].pid == waiting
            assert both[1].pid != waiting

    as_agent(events, body, ahead=True)
    assert not events
    assert children() == set()


def test_one_that_has_died_ahead_is_not_missed(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    path = script(tmp_path, "print('here')")

    async def body(zygote: Logging) -> None:
        await until(lambda: forked_ahead() is not None)
        dead = forked_ahead()
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        await until(lambda: not alive(dead))
        process = await zygote.spawn(spec(tmp_path, path))
        assert process.pid != dead
        assert await process.wait() == 0
        await until(lambda: forked_ahead() is not None)
        zygote.reap_orphans()
        assert dead not in children()

    as_agent(events, body, ahead=True)
    assert (tmp_path / "rank.log").read_text() == "here\n"
    assert children() == set()


def test_it_ends_with_its_zygote(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    path = script(tmp_path, "print('here')")

    async def body(zygote: Logging) -> None:
        await until(lambda: forked_ahead() is not None)
        waiting, before = forked_ahead(), zygote.pid
        assert waiting is not None
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await until(lambda: not alive(waiting))
        assert await (await zygote.spawn(spec(tmp_path, path))).wait() == 0

    as_agent(events, body, ahead=True)
    assert [kind for kind, _ in events] == ["zygote-died", "zygote-restarted"]


def test_twenty_spawns_leave_no_descriptor_behind(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    path = script(tmp_path, "print('hello')")

    def open_fds() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def body(zygote: Logging) -> None:
        before = open_fds()
        for _ in range(20):
            (stdout, out), (stderr, err) = os.pipe(), os.pipe()
            process = await zygote.spawn(spec(tmp_path, path), out, err)
            os.close(out)
            os.close(err)
            assert await process.wait() == 0
            assert os.read(stdout, 100) == b"hello\n"
            assert os.read(stderr, 100) == b""
            os.close(stdout)
            os.close(stderr)
        for _ in range(3):
            with pytest.raises(UsageError, match="does not exist"):
                await zygote.spawn(SpawnSpec(argv=("x",), env=ENV, cwd=tmp_path / "no"), 1)
        assert open_fds() == before

    as_agent(events, body)


def test_an_environment_of_megabytes_arrives(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    path = script(tmp_path, "import os; print(sum(map(len, os.environ.values())))")
    env = {**ENV, "BIG": "x" * 5_000_000, **{f"VARIABLE_{number}": "y" * 1000 for number in range(1000)}}

    async def body(zygote: Logging) -> None:
        assert await (await zygote.spawn(spec(tmp_path, path, env=env))).wait() == 0

    as_agent(events, body)
    # Its locale may be one more.
    assert int((tmp_path / "rank.log").read_text()) >= sum(map(len, env.values())) > 6_000_000


def test_a_variable_that_comes_too_late_is_told_once(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    path = script(tmp_path, "")

    async def body(zygote: Logging) -> None:
        for _ in range(2):
            await (
                await zygote.spawn(spec(tmp_path, path, env={**ENV, "OMP_NUM_THREADS": "4", "RANK": "0"}))
            ).wait()

    as_agent(events, body)
    assert [kind for kind, _ in events] == ["environment"]
    assert "OMP_NUM_THREADS" in events[0][1]


@pytest.mark.parametrize(
    ("module", "text", "error"),
    [
        ("no_such_module_at_all", None, "cannot preload 'no_such_module_at_all': ModuleNotFoundError"),
        ("broken", "raise RuntimeError('x' * 10**6)", "cannot preload 'broken': RuntimeError: xxx"),
        ("leaving", "import sys; sys.exit(3)", "cannot preload 'leaving': SystemExit: 3"),
        ("dying", "import os; os._exit(4)", r"the zygote is gone \(status 4\)"),
        ("stuck", "import time; time.sleep(600)", r"not ready in 2 s \(imports: json, stuck\)"),
    ],
)
def test_a_preload_that_fails_is_named(tmp_path: Path, module: str, text: str | None, error: str) -> None:
    if text is not None:
        script(tmp_path, text, f"{module}.py")

    async def main() -> None:
        zygote = Logging(lambda kind, text: None)
        with pytest.raises((UsageError, PeerError), match=error):
            await zygote.start(
                ["json", module], {**ENV, "PYTHONPATH": str(tmp_path)}, 2 if module == "stuck" else 60
            )
        assert zygote.pid is None
        with pytest.raises(PeerError, match="not started"):
            await zygote.spawn(spec(tmp_path, "x.py"))

    asyncio.run(main())
    assert children() == set()


@pytest.mark.parametrize("text", ["raise ImportError('none here')", "import os; os._exit(4)"])
def test_an_adapter_that_cannot_be_loaded_ahead_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    script(tmp_path, text, "no_framework.py")
    monkeypatch.setattr(processes, "ADAPTERS", frozenset({"no_framework"}))
    ran = script(tmp_path, "print('ran')")
    events: list[tuple[str, str]] = []

    async def main() -> None:
        zygote = Logging(lambda kind, text: events.append((kind, text)))
        await zygote.start(["json", "no_framework"], {**ENV, "PYTHONPATH": str(tmp_path)}, DEADLINE_S)
        assert zygote.preload == ("json",)
        assert await (await zygote.spawn(spec(tmp_path, ran))).wait() == 0
        await zygote.close()

    asyncio.run(main())
    (told,) = [text for kind, text in events if kind == "zygote-warning"]
    assert told.endswith("now each process imports its framework by itself")


def test_what_does_not_go_with_fork_is_a_warning(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import threading, time
        kept = open("/dev/null")
        threading.Thread(target=time.sleep, args=(600,), name="sleeper", daemon=True).start()
        """,
        "threaded.py",
    )
    events: list[tuple[str, str]] = []

    async def main() -> None:
        zygote = Logging(lambda kind, text: events.append((kind, text)))
        await zygote.start(["threaded"], {**ENV, "PYTHONPATH": str(tmp_path)}, DEADLINE_S)
        await zygote.close()

    asyncio.run(main())
    assert [kind for kind, _ in events] == ["zygote-warning"] * 2
    assert "left 2 threads running (sleeper)" in events[0][1]
    assert "descriptors" in events[1][1]


@pytest.mark.parametrize("module", ["triton", "another"])
def test_what_triton_has_loaded_is_collected_at_the_end(tmp_path: Path, module: str) -> None:
    loaded = """
        import os

        class Kept:
            def __del__(self, write=os.write):
                write(1, b"collected\\n")

        kept = Kept()
        kept.itself = kept
        """
    script(tmp_path, loaded, f"{module}.py")
    train = script(tmp_path, "print('trained')")

    async def main() -> None:
        zygote = Logging(lambda kind, text: None)
        env = {**ENV, "PYTHONPATH": str(tmp_path)}
        await zygote.start([module], env, DEADLINE_S)
        try:
            assert await (await zygote.spawn(spec(tmp_path, train, env=env))).wait() == 0
        finally:
            await zygote.close()

    asyncio.run(main())
    told = (tmp_path / "rank.log").read_text().split()
    assert told == (["trained", "collected"] if module == "triton" else ["trained"])


def test_seeds_with_torch_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    path = script(
        tmp_path,
        """
        import random, sys
        loaded = "torch" in sys.modules
        import numpy, torch
        numpy.random.rand(64, 64) @ numpy.random.rand(64, 64)  # wakes OpenBLAS's threads after the fork
        print(loaded, random.random(), numpy.random.rand(), torch.initial_seed(), torch.rand(1).item())
        """,
    )
    durations: list[float] = []
    quick = script(tmp_path, "", "quick.py")

    async def body(zygote: Logging) -> None:
        for _ in range(2):
            assert await (await zygote.spawn(spec(tmp_path, path))).wait() == 0
        for _ in range(9):
            began = time.perf_counter()
            process = await zygote.spawn(spec(tmp_path, quick))
            durations.append(time.perf_counter() - began)
            await process.wait()

    events: list[tuple[str, str]] = []
    as_agent(events, body, ("torch", "numpy.random"))
    one, two = [line.split() for line in (tmp_path / "rank.log").read_text().splitlines()]
    status, output = directly(spec(tmp_path, path))
    assert status == 0, output
    fresh = output.split()
    assert (one[0], two[0], fresh[0]) == ("True", "True", "False")
    for field, what in ((1, "Python's"), (2, "numpy's"), (3, "torch's seed"), (4, "torch's")):
        assert len({one[field], two[field], fresh[field]}) == 3, (
            f"{what} random numbers are each process's own"
        )
    assert events == []
    median = statistics.median(durations) * 1e3
    with capsys.disabled():
        print(f"\nspawn with torch loaded: median {median:.1f} ms of {len(durations)}")
