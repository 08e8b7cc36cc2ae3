"""The zygote: a process with torch loaded that forks a training process in milliseconds.

Run by the agent as `python -m ckptless.daemon.agent.ranks.zygote --fd N --preload MODULE ...`; see
`zygote_messages` for what goes over the socket. It never runs anything of the user's but the imports: a
new process unwinds from `serve` to `main` and runs the training script there, as the last thing on the
stack, so that it ends through the interpreter's own way out (threads joined, atexit, traceback, status).
"""

import argparse
import atexit
import builtins
import contextlib
import gc
import importlib
import importlib.machinery
import io
import os
import pkgutil
import random
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple, TypeAlias

from ckptless.daemon.agent.ranks import zygote_messages as wire
from ckptless.daemon.agent.ranks.prctl import set_pdeathsig, set_process_name
from ckptless.daemon.agent.ranks.signals import ENDING, USERS, ignore_others
from ckptless.daemon.protocol.errors import ProtocolError

MIDDLE_DEADLINE_S = 10.0
GATE_DEADLINE_S = 60.0
# Without a request for so long, the next process is forked ahead.
QUIET_S = 0.5
# jemalloc's, which pyarrow brings: it takes its own locks before a fork, and starts it anew after it.
FORKS_WELL = "jemalloc_bg_thd"
# The status of a process that its agent gave up before it ran anything; nobody waits for it.
ABANDONED = 75

# `python -m` has put the working directory here; taken before any import could change it.
_OWN_PATH = sys.path[0]
# In a C locale the interpreter sets it by itself, for its children to inherit (PEP 538).
_LC_CTYPE = os.environ.get("LC_CTYPE")
_PEERCRED = struct.Struct("3i")
_FORKED = struct.Struct("i")


Handler: TypeAlias = Callable[[int, FrameType | None], Any] | signal.Handlers


class SpawnRequest(NamedTuple):
    """A new training process: its program, and the descriptors that came with it."""

    program: wire.Program
    gate: int
    stdout: int
    stderr: int


class Ahead(NamedTuple):
    """A process that was forked ahead, and the socket at which it waits for its program."""

    pid: int
    connection: socket.socket


def serve(connection: socket.socket, agent: int, *, ahead: bool) -> SpawnRequest | None:
    """Answer spawn requests. Returns None when the agent is gone, and in each new process its job.

    `ahead`: in quiet times the next process is forked before anybody asks. To fork all that torch maps takes
    20 ms of a recovery and more; such a process has 2.5 MB of its own.
    """
    waiting: Ahead | None = None
    while True:
        if ahead and waiting is None and not _readable(connection.fileno(), QUIET_S):
            made = _fork_ahead(connection, agent)
            if isinstance(made, SpawnRequest):
                return made
            # Where there is no room for it now, whoever asks for a process is told why.
            waiting, ahead = made, made is not None
        # no deadline: waiting is what a zygote does, and the agent's end is its own (EOF, PDEATHSIG)
        packet, fds, flags, _ = socket.recv_fds(
            connection, wire.MAX_PACKET_BYTES, len(wire.SPAWN_FDS), socket.MSG_CMSG_CLOEXEC
        )
        if not packet:
            if waiting is not None:
                _end(waiting)
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) != len(wire.SPAWN_FDS):
            raise ProtocolError(f"a spawn request with {len(fds)} descriptors, flags {flags:#x}")
        job = _answer(connection, wire.decode_spawn(packet), fds, waiting)
        if job is not None:
            return job
        if waiting is not None:
            # Where its program could not be read nobody has got it: it ends.
            waiting.connection.close()
            waiting = None


def _fork_ahead(connection: socket.socket, agent: int) -> Ahead | SpawnRequest | None:
    """Fork a process for what is asked next; in it, return its job once there is one. None: it cannot be."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pid = fork_orphan()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if pid:
        theirs.close()
        with contextlib.suppress(OSError):  # it has died: so will its first request say
            ours.send(b"\n")
        return Ahead(pid, ours)
    connection.close()
    ours.close()
    with theirs:
        # no deadline: it waits for as long as the zygote lives, whose end is its own (EOF)
        theirs.recv(1)
        # It has been adopted.
        set_pdeathsig(signal.SIGKILL)
        if os.getppid() != agent:
            os._exit(0)
        set_process_name("ckptless-ahead")
        # no deadline: as above
        packet, fds, _, _ = socket.recv_fds(theirs, 1, len(wire.SPAWN_FDS), socket.MSG_CMSG_CLOEXEC)
    if not packet:
        os._exit(0)
    program_fd, gate, stdout, stderr = fds
    program = wire.read_program(program_fd)
    os.close(program_fd)
    return SpawnRequest(program, gate, stdout, stderr)


def _end(waiting: Ahead) -> None:
    """See it end, for which nobody has asked; the agent reaps it."""
    with contextlib.suppress(ProcessLookupError):  # it has ended before, and was reaped
        pidfd = os.pidfd_open(waiting.pid)
        waiting.connection.close()
        _readable(pidfd, MIDDLE_DEADLINE_S)


def _given(waiting: Ahead | None, fds: list[int]) -> int | None:
    """Return the pid of the process that waits, once it has its descriptors; None where there is none."""
    if waiting is None:
        return None
    with waiting.connection as its:
        try:
            socket.send_fds(its, [b"\n"], fds)
        except OSError:
            # It has died meanwhile.
            return None
    return waiting.pid


def _answer(
    connection: socket.socket, spawn: wire.Spawn, fds: list[int], waiting: Ahead | None
) -> SpawnRequest | None:
    program_fd, gate, stdout, stderr = fds
    try:
        program = wire.read_program(program_fd)
        given = _given(waiting, fds)
        pid = fork_orphan() if given is None else given
    except (ProtocolError, OSError) as error:
        reply = wire.Spawned(id=spawn.id, error=wire.shorten(str(error) or type(error).__name__))
    else:
        if pid == 0:
            # Through the object: a socket that outlives its descriptor would one day close someone else's.
            connection.close()
            os.close(program_fd)
            return SpawnRequest(program, gate, stdout, stderr)
        reply = wire.Spawned(id=spawn.id, pid=pid)
    for fd in fds:
        os.close(fd)
    connection.send(wire.encode(reply))
    return None


def fork_orphan() -> int:
    """Fork a process whose parent has ended, so that the subreaper adopts it: its pid here, 0 in it.

    Returns only when it has been adopted. Raises OSError if a fork failed.
    """
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reader)
        _fork_and_exit(writer)
        os.close(writer)
        return 0
    os.close(writer)
    try:
        pid = _reported_pid(reader)
    finally:
        os.close(reader)
        _reap(middle)
    if pid < 0:
        raise OSError(-pid, f"fork: {os.strerror(-pid)}")
    return pid


def _fork_and_exit(writer: int) -> None:
    """Fork in the middle process, report the pid (or -errno) and exit. Returns only in the new process."""
    child = -1
    try:
        child = os.fork()
        if child:
            os.write(writer, _FORKED.pack(child))
    except OSError as error:
        os.write(writer, _FORKED.pack(-(error.errno or 1)))
    finally:
        # Whatever happened: a middle process that went on would be a second zygote.
        if child:
            os._exit(0)


def _reported_pid(reader: int) -> int:
    if not _readable(reader, MIDDLE_DEADLINE_S):
        raise TimeoutError(f"the middle process said nothing in {MIDDLE_DEADLINE_S:g} s")
    report = os.read(reader, _FORKED.size)
    if len(report) != _FORKED.size:
        raise ChildProcessError("the middle process died before it had forked")
    return int(_FORKED.unpack(report)[0])


def _reap(middle: int) -> None:
    pidfd = os.pidfd_open(middle)
    try:
        if not _readable(pidfd, MIDDLE_DEADLINE_S):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # no deadline: it is dead, or was killed just now
        os.waitpid(middle, 0)
    finally:
        os.close(pidfd)


def _readable(fd: int, deadline_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(deadline_s * 1000))


def enter(job: SpawnRequest, agent: int) -> None:
    """Make the caller, fresh from `serve`, the agent's training process; exits if the agent gave it up."""
    os.setsid()
    # The byte comes after the agent has registered us, hence after the adoption: no polling of getppid().
    opened = _readable(job.gate, GATE_DEADLINE_S) and os.read(job.gate, 1) != b""
    set_pdeathsig(signal.SIGKILL)
    if not opened or os.getppid() != agent:
        os._exit(ABANDONED)
    os.close(job.gate)
    os.dup2(job.stdout, 1)
    os.dup2(job.stderr, 2)
    os.close(job.stdout)
    os.close(job.stderr)


def run_program(program: wire.Program) -> None:
    """Run the program in a process that looks like a fresh interpreter's; ends by returning or raising."""
    _restore_signals(deaf=program.deaf)
    _restore_interpreter(program)
    try:
        _run(program)
    except SystemExit:
        raise
    except BaseException as error:
        _leave_our_frames_out(error)
        raise


def _restore_signals(*, deaf: bool) -> None:
    fresh: dict[int, Handler] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGPIPE: signal.SIG_IGN,
        signal.SIGXFSZ: signal.SIG_IGN,
    }
    if deaf:
        fresh.update(dict.fromkeys((*ENDING, *USERS), signal.SIG_IGN))
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted = fresh.get(number, signal.SIG_DFL)
        # None: set by C code, which is faulthandler (PYTHONFAULTHANDLER) and as a fresh process has it.
        if signal.getsignal(number) not in (wanted, None):
            signal.signal(number, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _restore_interpreter(program: wire.Program) -> None:
    """Undo what a process shares with the zygote and a fresh one would have of its own."""
    set_process_name(Path(sys.executable).name)
    os.environb.clear()
    os.environb.update(program.env)
    if _LC_CTYPE is not None and "LC_ALL" not in os.environ:
        os.environ.setdefault("LC_CTYPE", _LC_CTYPE)
    time.tzset()
    os.chdir(program.cwd)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A fresh process would hold back up to 8 KiB here, which a SIGKILL takes along.
        sys.stdout.reconfigure(line_buffering=True, write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        # Drawn from the system's entropy at import: all ranks would have one. A device draws its own later.
        torch.default_generator.seed()
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        # A secret, made at import: every rank of the node would have the same one.
        multiprocessing.current_process().authkey = os.urandom(32)
        if program.scratch:
            # Else `pymp-...`, which a process that is killed leaves behind. Its children inherit it.
            multiprocessing.current_process()._config["tempdir"] = os.fsdecode(program.scratch)
    importlib.invalidate_caches()
    gc.enable()
    if "triton" in sys.modules:
        # At the end of a process nanobind, which triton is bound with, tells of each thing of its own that is
        # still there: 25 lines a rank, where what was loaded before the fork is kept from the collector.
        # Not for all: it takes 0.4 s.
        atexit.register(gc.unfreeze)


def _run(program: wire.Program) -> None:
    """Do what CPython's own start does for `python SCRIPT` and `python -m MODULE`."""
    target, *arguments = map(os.fsdecode, program.argv)
    sys.modules["__main__"] = main_module = ModuleType("__main__")
    main_module.__dict__.update(__builtins__=builtins, __annotations__={})
    if program.module:
        sys.argv = ["-m", *arguments]
        sys.orig_argv = [sys.executable, "-m", target, *arguments]
        _set_first_path(str(Path.cwd()))
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        return
    sys.argv = [target, *arguments]
    sys.orig_argv = [sys.executable, target, *arguments]
    script = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118 - CPython keeps a "./", pathlib does not
    if pkgutil.get_importer(script) is not None:
        # A directory or a zip file with a __main__.py.
        _set_first_path(script)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    # Not runpy.run_path(): it takes its __main__ away again before the exit handlers and threads are done.
    _set_first_path(os.path.dirname(os.path.realpath(script)))  # noqa: PTH120 - "as CPython does it"
    try:
        source = Path(script).read_bytes()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.executable}: can't open file {script!r}: {reason}", file=sys.stderr)
        sys.exit(2)
    loader = importlib.machinery.SourceFileLoader("__main__", script)
    main_module.__dict__.update(__file__=script, __loader__=loader, __cached__=None, __package__=None)
    exec(compile(source, script, "exec", dont_inherit=True), main_module.__dict__)


def _set_first_path(path: str) -> None:
    """Put `path` where the interpreter has the place of the zygote's own program; not in safe-path mode."""
    if sys.flags.safe_path:
        return
    if _OWN_PATH in sys.path:
        sys.path[sys.path.index(_OWN_PATH)] = path
    else:
        sys.path.insert(0, path)


def _leave_our_frames_out(error: BaseException) -> None:
    """Have the traceback of `error`, about to leave the interpreter, begin where a fresh process's would."""
    first = frame = error.__traceback__
    while frame is not None:
        # The last of ours: of a zygote from `local_fork` there are some above others.
        if frame.tb_frame.f_code.co_filename == __file__:
            first = frame.tb_next
        frame = frame.tb_next
    show = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, tb: TracebackType | None) -> None:
        # Only for `error` itself: exit handlers and threads may still raise others.
        show(kind, value.with_traceback(first), first) if value is error else show(kind, value, tb)

    sys.excepthook = hook


def preload(modules: list[str]) -> wire.Ready:
    """Import `modules` in order and get the process ready to fork."""
    open_before = _open_fds()
    # What is loaded stays: to look through it again and again takes a fifth of torch's import, and the
    # collector's writes are to be kept off the pages that every rank shares with us.
    gc.disable()
    for module in modules:
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an import may raise anything; it is reported
            traceback.print_exc()
            text = f"cannot preload {module!r}: {type(error).__name__}: {error}"
            return wire.Ready(version=wire.VERSION, error=wire.shorten(text))
        if (device := _device_in_use()) is not None:
            text = (
                f"cannot preload {module!r}: its import initialises {device}, which no process forked "
                "afterwards can use. Leave it out of --preload, or have it do so later"
            )
            return wire.Ready(version=wire.VERSION, error=wire.shorten(text))
    gc.collect()
    gc.freeze()
    return wire.Ready(version=wire.VERSION, warnings=_fork_hazards(_open_fds() - open_before))


def _device_in_use() -> str | None:
    """Return the type of the accelerator that torch, where it is loaded, has a context of in this process."""
    torch: Any = sys.modules.get("torch")
    # Torch before 2.6 has no word for it.
    device = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if device is None or not torch.get_device_module(device.type).is_initialized():
        return None
    return str(device.type)


def _fork_hazards(fds: set[int]) -> tuple[str, ...]:
    """Say which threads and descriptors the imports have left behind that every fork would trip over."""
    # After a trial fork: OpenBLAS, which numpy brings, stops its threads by itself before a fork.
    _reap(_forked_nothing())
    warnings = []
    threads = sum(path.read_text().strip() != FORKS_WELL for path in Path("/proc/self/task").glob("*/comm"))
    if threads > 1 or threading.active_count() > 1:
        names = ", ".join(sorted(thread.name for thread in threading.enumerate()[1:])) or "none of Python's"
        warnings.append(
            f"the preloaded modules left {threads} threads running ({names}): "
            "ranks are forked without them and may hang on locks they hold"
        )
    if fds:
        warnings.append(f"the preloaded modules left descriptors {sorted(fds)} open: all ranks share them")
    return tuple(map(wire.shorten, warnings))


def _open_fds() -> set[int]:
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208 - the names are all that is wanted
    # The one of the listing itself is among them, and closed by now.
    return {int(fd) for fd in listed if Path("/proc/self/fd", fd).is_symlink()}


def _forked_nothing() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    return pid


def live(connection: socket.socket, agent: int, modules: list[str], *, ahead: bool) -> None:
    """Be the zygote of the process `agent`: load, serve, and in each training process run its program.

    `ahead`: see `serve`.
    """
    set_pdeathsig(signal.SIGKILL)
    if os.getppid() != agent:
        return
    set_process_name("ckptless-zygote")
    # Slurm signals all there is in the step; at a time limit the last step is saved by a process from here.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    ignore_others()
    state = preload(modules)
    connection.send(wire.encode(state))
    if state.error:
        sys.exit(1)
    # Now, not in a fork: what the imports have printed must not be printed again by every rank.
    sys.stdout.flush()
    sys.stderr.flush()
    # A new process ignores them as this one does until it looks like a fresh one. What is sent to it by then
    # is blocked, hence kept, and ends it as it begins: an agent that ends its ranks would wait in vain.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    job = serve(connection, agent, ahead=ahead)
    if job is None:
        # Exit handlers that the imports registered belong to the ranks, which may still run.
        os._exit(0)
    enter(job, agent)
    run_program(job.program)


def main() -> None:
    """Run a zygote that its agent starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--preload", action="append", default=[])
    parser.add_argument("--ahead", action="store_true")
    options = parser.parse_args()
    connection = socket.socket(fileno=options.fd)
    connection.set_inheritable(False)
    agent, _, _ = _PEERCRED.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    )
    live(connection, agent, options.preload, ahead=options.ahead)


if __name__ == "__main__":
    main()
