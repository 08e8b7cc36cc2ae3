"""Run a scenario in N processes that share a store, and collect what each returns."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
ROOM = "tests.torch"
SCENARIOS = ("exact_scenarios", "fabric_scenarios", "resize_scenarios", "sharded_scenarios")
START_S = 100.0
END = "end"


class Place:
    """What a scenario gets: its number, how many there are, and the store between them."""

    def __init__(self, index: int, size: int, port: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.index = index
        self.size = size
        self.port = port
        self.store = self.connect()
        # What lives until the process is gone, whose destructors are thus never run.
        self.kept: list[Any] = []

    def connect(self) -> Any:
        """A connection to the store of one's own."""
        import torch.distributed as dist

        tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
        return tcp("127.0.0.1", self.port, None, is_master=False, timeout=timedelta(seconds=30))

    def leave(self, *kept: Any) -> None:
        """The end of a scenario with stock process groups, which are not destroyed, nor what holds them.

        Gloo's destructor joins its workers with the GIL held, and a worker may wait for the GIL to let go of
        its last collective (torch 2.13): both wait for ever.
        """
        self.kept += kept
        self.meet("leave", self.size)

    def meet(self, name: str, parties: int, deadline: float = 20.0) -> None:
        """Wait until so many processes have come here."""
        limit = time.monotonic() + deadline
        self.store.add(name, 1)
        while self.store.add(name, 0) < parties:
            if time.monotonic() > limit:
                raise TimeoutError(f"only {self.store.add(name, 0)} of {parties} came to {name}")
            time.sleep(0.002)


class _Server:
    """A process that has torch and the scenarios loaded, which takes seconds; forks a runner for each run."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{ROOM}.world"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment,
            cwd=ROOT,
        )
        self._unread = b""
        atexit.register(self._end)

    def ask(self, request: str, deadline: float) -> str:
        """Return what the runner has printed; whatever it has started is gone then."""
        assert self._process.stdin is not None
        self._process.stdin.write(request.encode() + b"\n")
        self._process.stdin.flush()
        limit = time.monotonic() + START_S
        runner, output = int(self._line(limit)), ""
        try:
            limit = time.monotonic() + deadline
            while (line := self._line(limit)) != END:
                output = line
        finally:
            with contextlib.suppress(ProcessLookupError):  # all are gone, as they should be
                os.killpg(runner, signal.SIGKILL)
        return output

    def _line(self, limit: float) -> str:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], max(0.0, limit - time.monotonic()))[0]:
                self._end()
                raise TimeoutError("a scenario has not come to its end")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            assert data, "the process that starts the scenarios has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def _end(self) -> None:
        """The next run has a new one."""
        _server.cache_clear()
        self._process.kill()
        self._process.communicate()


@functools.cache
def _server() -> _Server:
    return _Server()


def run(
    scenario: str, size: int, *, lost: tuple[int, ...] = (), deadline: float = 40.0, **arguments: Any
) -> list[Any]:
    """Results of `module:function(place, **arguments)` by process; those in `lost` are not waited for."""
    request = json.dumps([scenario, size, lost, deadline, arguments])
    results: list[Any] = json.loads(_server().ask(request, deadline + 20))
    failed = {
        index: result and result["error"]
        for index, result in enumerate(results)
        if index not in lost and (result is None or "error" in result)
    }
    if failed:  # of all: the first one's may only follow from another's
        raise AssertionError("\n".join(f"process {i} of {scenario}: {text}" for i, text in failed.items()))
    return results


def _child(scenario: str, index: int, size: int, ports: int, out: int, arguments: dict[str, Any]) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    code = 1
    try:
        port = int(os.read(ports, 16))
        module, _, name = scenario.partition(":")
        place = Place(index, size, port)
        result = getattr(importlib.import_module(f"{ROOM}.{module}"), name)(place, **arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - it is told to the parent
        result = {"error": traceback.format_exc()}
    os.write(out, json.dumps(result).encode() + b"\n")
    os._exit(code)


def _main(scenario: str, size: int, lost: list[int], deadline: float, arguments: dict[str, Any]) -> None:
    import torch.distributed as dist

    children: list[tuple[int, int, int]] = []
    for index in range(size):
        ports, tell = os.pipe()
        read, out = os.pipe()
        pid = os.fork()
        if pid == 0:
            _child(scenario, index, size, ports, out, arguments)
        os.close(out)
        children.append((pid, tell, read))
    tcp: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = tcp("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for _, tell, _ in children:
        os.write(tell, str(store.port).encode())
    texts = [b""] * size
    limit = time.monotonic() + deadline
    with selectors.DefaultSelector() as selector:
        for index, (_, _, read) in enumerate(children):
            selector.register(read, selectors.EVENT_READ, index)
        waited = {index for index in range(size) if index not in lost}
        while waited and (rest := limit - time.monotonic()) > 0:
            for key, _ in selector.select(rest):
                data = os.read(key.fd, 1 << 16)
                texts[key.data] += data
                if not data:
                    selector.unregister(key.fd)
                    waited.discard(key.data)
    for pid, _, _ in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(json.dumps([json.loads(text) if text else None for text in texts]), flush=True)
    os._exit(0)


def _serve() -> None:
    """A runner for each line, in a session of its own; its number, what it prints, and END."""
    for name in SCENARIOS:
        importlib.import_module(f"{ROOM}.{name}")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            print(os.getpid(), flush=True)
            _main(*json.loads(line))
        os.waitpid(pid, 0)
        print(END, flush=True)


if __name__ == "__main__":
    _serve()
